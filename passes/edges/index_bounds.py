"""Bounds on the values of integer inputs, from the tensors that they index."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import argument, aten_name, first_operand, holds_tensor, shape_of, unpack
from gnnc.ir.source import source_of
from gnnc.passes.edges.origins import COPIES, Origins, Part
from gnnc.passes.edges.rowwise import as_gather


@dataclass(frozen=True)
class IndexBound:
    """Bound of an integer input: every value must be at least 0 and below ``bound``.

    Attributes:
        input: name of the input.
        row: the row of the input that is bounded (``edge_index[0]``), or None for all of it.
        bound: an int, or the (input name, dimension) whose size it is.
        text: the bound as a size expression, where it is neither.
        is_pointer: whether the input is the row pointer of a compressed matrix, ``[rows + 1]``: it must start
            at 0, never fall, and end at ``bound``, the number of entries.
        dim: the dimension that ``row`` counts along: 1 for ``pairs[:, 0]``.
    """

    input: str
    row: int | None
    bound: int | tuple[str, int] | None
    text: str = ""
    is_pointer: bool = False
    dim: int = 0


def index_bounds(gm: fx.GraphModule, uses: Iterable[tuple[Node, Any]] = ()) -> list[IndexBound]:
    """Return the bounds on integer inputs that the raised graph's structure and lookups imply.

    Args:
        gm: the raised graph.
        uses: further indices, each with the size that it must stay under.
    """
    sizes, origins = _input_sizes(gm), Origins(gm.graph)
    bounds: dict[IndexBound, None] = {}
    for index, size in chain(uses, *(_uses(node) for node in gm.graph.nodes)):
        for part in origins.of(index):
            bounds[_bound(part, size, sizes)] = None
    for node in gm.graph.nodes:
        for name in _pointers(node, origins):
            bound = _bound(Part(name), argument(node, "output_size"), sizes)
            bounds[replace(bound, is_pointer=True)] = None
    return list(bounds)


def _uses(node: Node) -> Iterator[tuple[Node, Any]]:
    """Yield (index, upper bound) of every use of an index in ``node``."""
    if str(node.target) == "gnnc.csr.default":
        src, dst, num_src, num_dst = unpack(node, "src", "dst", "num_src", "num_dst")
        yield src, num_src
        yield dst, num_dst
    if aten_name(node) == "embedding.default":
        weight, indices = unpack(node, "weight", "indices")
        if len(shape_of(indices)) == 1:
            yield indices, shape_of(weight)[0]
        return
    if aten_name(node) == "one_hot.default":
        classes = argument(node, "num_classes")
        if isinstance(classes, int) and classes > 0:
            yield first_operand(node), classes
        return
    gather = as_gather(node) if node.op == "call_function" else None
    if gather is not None:
        yield gather.index, shape_of(gather.table)[0]


def _pointers(node: Node, origins: Origins) -> list[str]:
    """Return the row pointers that ``node`` repeats rows by; with wrong ones it would write out of bounds."""
    if str(node.target) != "aten.repeat_interleave.Tensor" or argument(node, "output_size") is None:
        return []
    counts = first_operand(node)
    if aten_name(counts) != "sub.Tensor":
        return []
    ends = [
        [part.input for part in origins.of(_whole(end))]
        for end in unpack(counts, "self", "other")
        if isinstance(end, Node)
    ]
    return ends[0] if len(ends) == 2 and ends[0] == ends[1] else []


def _whole(end: Node) -> Node:
    """Return the offsets that a node has all but the first, or all but the last, of."""
    while aten_name(end) == "slice.Tensor" or aten_name(end) in COPIES:
        end = first_operand(end)
    return end


def _bound(part: Part, size: Any, sizes: dict[Any, tuple[str, int]]) -> IndexBound:
    value = size.meta["val"] if isinstance(size, Node) else size
    if not isinstance(value, torch.SymInt):
        return IndexBound(part.input, part.row, int(value), dim=part.dim)
    expression = value.node.expr
    return IndexBound(part.input, part.row, sizes.get(expression), str(expression), dim=part.dim)


def _input_sizes(gm: fx.GraphModule) -> dict[Any, tuple[str, int]]:
    """Return the (input name, dimension) that each symbolic size comes from."""
    sizes: dict[Any, tuple[str, int]] = {}
    for node in gm.graph.nodes:
        source = source_of(node)
        if source is None or source.kind != "input" or not holds_tensor(node):
            continue
        for dim, size in enumerate(shape_of(node)):
            if isinstance(size, torch.SymInt):
                sizes.setdefault(size.node.expr, (source.name, dim))
    return sizes
