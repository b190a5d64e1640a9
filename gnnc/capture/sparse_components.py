"""Dense component tensors of torch.sparse matrices, cached on each matrix."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gnnc.tensor_state import state
from gnnc.torch_private import raw_indices, raw_values

_COMPRESSED = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices, ("crow", "col")),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices, ("ccol", "row")),
}


SPARSE_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)


@dataclass(frozen=True, eq=False)
class _Components:
    """Components of a sparse matrix, cached on it.

    Attributes:
        parts: its ``components``.
        seen: the state of the matrix when it was split.
        copies: copies of its tensors, where no version counter shows writes into them.
    """

    parts: dict[str, torch.Tensor]
    seen: tuple[Hashable, ...]
    copies: tuple[torch.Tensor, ...]


_CACHE: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def is_sparse(value: Any) -> bool:
    """Return whether ``value`` is a CSR, CSC or COO tensor of torch.sparse."""
    return isinstance(value, torch.Tensor) and value.layout in SPARSE_LAYOUTS


def components(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the dense tensors that represent ``matrix`` [rows, columns] in a captured graph.

    CSR: crow [rows + 1], col [E], values [E], columns [columns, 0]; CSC: ccol, row, values,
    rows [rows, 0]; COO: indices [2, E], values [E], shape [rows, columns, 0]. The empty tensors
    carry a size. Each is the same object for as long as it holds for the matrix, so that a cache
    keyed by the identity of its inputs knows it again.
    """
    cached = _CACHE.get(matrix)
    sources, seen = _sources(matrix)
    if cached is not None and cached.seen == seen and all(map(torch.equal, cached.copies, sources)):
        return cached.parts
    copies = _copies(matrix, sources)
    parts = _split(matrix)
    if cached is not None:
        parts = _reused(cached.parts, parts)
    _CACHE[matrix] = _Components(parts, seen, copies)
    return parts


def forget_components() -> None:
    """Forget the components of every matrix, after writes that no version counter shows."""
    _CACHE.clear()


def _sources(matrix: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[Hashable, ...]]:
    """Return the tensors of a matrix, and the state that shows whether they change."""
    if matrix.layout == torch.sparse_coo:
        sources = raw_indices(matrix), raw_values(matrix)
        return sources, (matrix.is_coalesced(), *map(state, sources))
    pointer, plain, _ = _COMPRESSED[matrix.layout]
    sources = pointer(matrix), plain(matrix), matrix.values()
    return sources, tuple(map(state, sources))


def _copies(matrix: torch.Tensor, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return copies of the parts of an uncoalesced matrix; other parts show writes by themselves."""
    raw = matrix.layout == torch.sparse_coo and not matrix.is_coalesced()
    return tuple(source.clone() for source in sources) if raw and matrix.is_inference() else ()


def _reused(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the new parts; parts whose storage is unchanged keep their old tensor object."""
    return {name: old[name] if state(old[name]) == state(part) else part for name, part in new.items()}


def _split(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = matrix.shape
    with torch.no_grad():
        if matrix.layout == torch.sparse_coo:
            matrix = matrix.coalesce()
            shape = matrix.values().new_empty((rows, columns, 0))
            return {"indices": matrix.indices(), "values": matrix.values(), "shape": shape}
        pointer, plain, names = _COMPRESSED[matrix.layout]
        csr = matrix.layout == torch.sparse_csr
        other = matrix.values().new_empty((columns if csr else rows, 0))
        return {
            names[0]: pointer(matrix),
            names[1]: plain(matrix),
            "values": matrix.values(),
            "columns" if csr else "rows": other,
        }
