"""Stand-in inputs for tracing: the dtypes and widths of a call, with sizes chosen here.

An example does not tell which sizes are the same size (the nodes of ``x`` and of ``batch``) when
sizes coincide: 7 nodes with 7 edges, or a graph with one node and one edge. ``candidates`` returns
the readings to try, the likeliest first; a wrong reading does not trace.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from gnnc.capture.arguments import Call

_FIRST_COUNT = 5
_FIRST_NODE_SIZE = 37
_FIRST_EDGE_SIZE = 149
_POINTERS = ("crow", "ccol")
_EDGE_PARTS = ("col", "row", "values", "indices")
Dimension = tuple[str, int]
"""Name of a flat tensor, and a dimension of it."""


@dataclass(frozen=True)
class StandIns:
    """Stand-in inputs of one reading of the sizes.

    Attributes:
        tensors: one for each flat tensor of the call.
        dynamic: the dimensions of each tensor that may differ between calls.
        symbolic: whether every such dimension must stay symbolic, or may become fixed.
    """

    tensors: tuple[torch.Tensor, ...]
    dynamic: tuple[tuple[int, ...], ...]
    symbolic: bool


@dataclass(frozen=True)
class _Extent:
    """Dimension of a flat tensor that may vary; ``offset`` is 1 for CSR pointers (N + 1).

    ``count`` is the name of an int, or "".
    """

    tensor: int
    dim: int
    size: int
    offset: int
    edges: bool
    family: str
    count: str


def candidates(
    call: Call, fixed: Collection[Dimension] = (), varying: Collection[Dimension] = ()
) -> Iterator[StandIns]:
    """Yield the readings of the call's sizes, the likeliest first.

    Sizes are told apart by role and name; then ints that equal the size of a tensor are that size; then sizes
    are told apart by size alone; the last reading takes them exactly as they are.

    Args:
        call: the call.
        fixed: the dimensions whose size is a constant.
        varying: the dimensions that are known to vary, beside those that always may.
    """
    extents = [
        extent for extent in _extents(call, varying) if (call.names[extent.tensor], extent.dim) not in fixed
    ]
    sizes = {extent.size: extent for extent in reversed(extents) if not extent.count}

    def by_tensor(extent: _Extent) -> tuple[Any, ...]:
        return _by_role(sizes.get(extent.size, extent) if extent.count else extent)

    seen = set()
    for key in (_by_role, by_tensor, _by_kind, _by_size):
        groups = tuple(tuple(key(extent) == key(other) for other in extents) for extent in extents)
        if groups not in seen:
            seen.add(groups)
            yield _resized(call, extents, key)
    yield _exact(call, extents)


def _by_role(extent: _Extent) -> tuple[Any, ...]:
    return extent.count, extent.edges, extent.family, extent.size


def _by_kind(extent: _Extent) -> tuple[Any, ...]:
    return extent.edges, extent.size


def _by_size(extent: _Extent) -> tuple[Any, ...]:
    return (extent.size,)


def _extents(call: Call, varying: Collection[Dimension]) -> list[_Extent]:
    owners: dict[int, str] = {}
    parts = {f"{leaf.name}.{part}": part for leaf in call.leaves for part in leaf.parts}
    counts = call.ints
    extents = []
    for i, (name, tensor) in enumerate(zip(call.names, call.tensors, strict=True)):
        owner = name if name in counts else owners.setdefault(id(tensor), name)
        part, count = parts.get(name, ""), name if name in counts else ""
        always = () if count else _varying(tensor, part)
        for dim in sorted({*always, *(dim for other, dim in varying if other == name)}):
            offset = int(part in _POINTERS)
            edges = part in _EDGE_PARTS if part else _is_edge_index(tensor) or "edge" in name
            size = tensor.shape[dim] - offset
            extents.append(_Extent(i, dim, size, offset, edges and not count, _family(owner), count))
    return extents


def _varying(tensor: torch.Tensor, part: str) -> tuple[int, ...]:
    """Return the dimensions that may always vary: the first, or the last of an edge_index."""
    if tensor.dim() == 0:
        return ()
    if part == "shape":
        return (0, 1)
    return (1,) if _is_edge_index(tensor) else (0,)


def _is_edge_index(tensor: torch.Tensor) -> bool:
    whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return whole and tensor.dim() == 2 and tensor.shape[0] == 2


def _family(name: str) -> str:
    """Return the key in a path: ``'paper'`` of ``x_dict['paper']``, ``0`` of ``x[0]``, "" of ``x``."""
    keys = re.findall(r"\[(.+?)\](?=\[|\.|$)", name)
    return keys[-1] if keys else ""


def _resized(call: Call, extents: list[_Extent], key: Callable[[_Extent], tuple[Any, ...]]) -> StandIns:
    groups: dict[tuple[Any, ...], list[_Extent]] = {}
    for extent in extents:
        groups.setdefault(key(extent), []).append(extent)
    sizes = dict(zip(groups, _stand_in_sizes(list(groups.values())), strict=True))
    shapes = [list(tensor.shape) for tensor in call.tensors]
    for extent in extents:
        shapes[extent.tensor][extent.dim] = sizes[key(extent)] + extent.offset
    tensors = tuple(
        torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        for shape, tensor in zip(shapes, call.tensors, strict=True)
    )
    return StandIns(tensors, _dynamic(call, extents), symbolic=True)


def _stand_in_sizes(groups: list[list[_Extent]]) -> list[int]:
    """Return a prime for each group: ints get the least, so that slices by several are not empty."""
    count, node, edge = _FIRST_COUNT, _FIRST_NODE_SIZE, _FIRST_EDGE_SIZE
    sizes = {}
    for number, group in enumerate(groups):
        if all(extent.count for extent in group):
            sizes[number] = count
            count = sympy.nextprime(count)
    total = sum(sizes.values())
    node, edge = sympy.nextprime(node + total - 1), sympy.nextprime(edge + 2 * total - 1)
    for number, group in enumerate(groups):
        if number in sizes:
            continue
        is_edge = next(extent.edges for extent in group if not extent.count)
        sizes[number] = edge if is_edge else node
        if is_edge:
            edge = sympy.nextprime(edge)
        else:
            node = sympy.nextprime(node)
    return [sizes[number] for number in range(len(groups))]


def _exact(call: Call, extents: list[_Extent]) -> StandIns:
    tensors = tuple(tensor.detach().contiguous() for tensor in call.tensors)
    return StandIns(tensors, _dynamic(call, extents), symbolic=False)


def _dynamic(call: Call, extents: list[_Extent]) -> tuple[tuple[int, ...], ...]:
    dims: list[list[int]] = [[] for _ in call.tensors]
    for extent in extents:
        dims[extent.tensor].append(extent.dim)
    return tuple(map(tuple, dims))
