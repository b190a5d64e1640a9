"""PyG's ``EdgeIndex``: an edge list that may know its order.

gnnc works on the tensor that an EdgeIndex wraps. The order that the EdgeIndex holds is stored beside that
tensor, for code that needs the edges sorted.
"""

import sys
import weakref
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_OWNERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The edge list that an EdgeIndex wraps, to a weak reference to the EdgeIndex."""

Order = tuple[Tensor, Tensor | None]
"""``rowptr [num_dst + 1]``, and the position in the list of each edge in that order ``[E]``; None: the
list is in that order."""


def plain(value: Tensor) -> Tensor:
    """Return the tensor that an EdgeIndex wraps, always the same object; return any other tensor itself."""
    module = sys.modules.get("torch_geometric.edge_index")
    if module is None or not isinstance(value, module.EdgeIndex):
        return value
    wrapped: Tensor = value._data  # pyright: ignore[reportAttributeAccessIssue]
    _OWNERS[wrapped] = weakref.ref(value)
    return wrapped


def cached_order(edge_index: Tensor, row: int) -> Order | None:
    """Return the order of the edges by ``edge_index[row]``, if the EdgeIndex around the tensor holds it.

    The order is a claim: an EdgeIndex does not notice edits of the tensor that it wraps.
    """
    reference = _OWNERS.get(edge_index) if _OWNERS.data else None
    owner: Any = None if reference is None else reference()
    if owner is None or not owner.is_sorted:
        return None
    if owner.is_sorted_by_col == (row == 1):
        return None if owner._indptr is None else (owner._indptr, None)
    rowptr = owner._indptr if owner._T_indptr is None and owner.is_undirected else owner._T_indptr
    return None if rowptr is None or owner._T_perm is None else (rowptr, owner._T_perm)
