"""Functions of PyG in a form that traces: no write into a part of a tensor, no branch on values.

Models and other functions of PyG hold these functions under names of their own, so the code of the
functions is replaced. The threads that do not trace run the code as it was.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnc.capture.sparse_operand import unique_keys
from gnnc.capture.thread_patches import in_this_thread, replaced

ROUTES: dict[str, Callable[..., Any]] = {}
"""The functions that the replaced code calls, by name."""
_ABSENT = "absent"
"""Told from None, which asks for a pair as the result."""


@contextlib.contextmanager
def traceable_functions() -> Iterator[None]:
    """Replace the code of some functions of PyG within the block, for the thread that traces."""
    with contextlib.ExitStack() as stack:
        for name, (owner, new, code_of) in _NEW.items():
            function = getattr(importlib.import_module(owner), name)  # imports that capture alone needs
            ROUTES[name] = in_this_thread(new, _copy(function))
            stack.enter_context(replaced(function, "__code__", code_of.__code__))
        yield


def _copy(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__, sys.modules[function.__module__].__dict__, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def coalesce(
    edge_index: Any,
    edge_attr: Any = _ABSENT,
    num_nodes: int | None = None,
    reduce: str = "sum",
    is_sorted: bool = False,
    sort_by_row: bool = True,
) -> Any:
    """Sort edges and merge duplicates, as PyG's function does, whatever their values are."""
    from torch_geometric.utils import scatter

    first, second = (0, 1) if sort_by_row else (1, 0)
    count = _node_count(edge_index) if num_nodes is None else num_nodes
    keys, place = unique_keys(edge_index[first] * count + edge_index[second])
    ends = keys // count, keys % count
    pair = ends[first], ends[second]
    merged = torch.stack(pair) if isinstance(edge_index, Tensor) else pair
    if isinstance(edge_attr, str):
        return merged
    if isinstance(edge_attr, Tensor):
        return merged, scatter(edge_attr, place, 0, keys.shape[0], reduce)
    if edge_attr is None:
        return merged, None
    return merged, [scatter(attr, place, 0, keys.shape[0], reduce) for attr in edge_attr]


def _node_count(edge_index: Any) -> Tensor:
    """Return one more than the largest id, at least 1, as a tensor: keys need no number."""
    zero = edge_index[0].new_zeros(1)
    return torch.cat([edge_index[0], edge_index[1], zero]).max() + 1


def cumsum(x: Tensor, dim: int = 0) -> Tensor:
    """Return the sums of the elements before each place of ``dim``, and the sum of all at its end."""
    dim = dim % x.dim()
    first = x.new_zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    return torch.cat([first, x.cumsum(dim, dtype=x.dtype)], dim)


def get_latest_k_edge_attr(
    k: int,
    edge_index: Tensor,
    edge_attr: Tensor,
    edge_time: Tensor,
    num_nodes: int,
    is_sorted: bool = False,
) -> Tensor:
    """Return the features of the latest k edges into each node, ``[num_nodes, k, F]``."""
    from torch_geometric.utils import to_dense_batch

    dst = edge_index[1]
    if not is_sorted:
        latest = torch.argsort(-edge_time, stable=True)
        order = latest[torch.argsort(dst[latest], stable=True)]
        dst, edge_attr = dst[order], edge_attr[order]
    return to_dense_batch(edge_attr, dst, max_num_nodes=k, batch_size=num_nodes)[0]


def _call_coalesce(*args: Any, **kwargs: Any) -> Any:
    from gnnc.capture.pyg_functions import ROUTES

    return ROUTES["coalesce"](*args, **kwargs)


def _call_cumsum(*args: Any, **kwargs: Any) -> Any:
    from gnnc.capture.pyg_functions import ROUTES

    return ROUTES["cumsum"](*args, **kwargs)


def _call_latest(*args: Any, **kwargs: Any) -> Any:
    from gnnc.capture.pyg_functions import ROUTES

    return ROUTES["get_latest_k_edge_attr"](*args, **kwargs)


_NEW: dict[str, tuple[str, Callable[..., Any], Any]] = {
    "coalesce": ("torch_geometric.utils", coalesce, _call_coalesce),
    "cumsum": ("torch_geometric.utils", cumsum, _call_cumsum),
    "get_latest_k_edge_attr": (
        "torch_geometric.nn.models.graph_mixer",
        get_latest_k_edge_attr,
        _call_latest,
    ),
}
"""Module, new function, and the code that calls it, which runs with the names of a module of PyG."""
