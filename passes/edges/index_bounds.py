"""What the integer inputs index into: the bound that each must stay under."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import aten_name, holds_tensor, shape_of
from gnnc.ir.source import source_of
from gnnc.passes.edges.origins import Origins, Part
from gnnc.passes.edges.rowwise import as_gather


@dataclass(frozen=True)
class IndexBound:
    """Every value of an integer input must be at least 0 and below ``bound``.

    Attributes:
        input: name of the input.
        row: which row of the input (``edge_index[0]``), or None for all of it.
        bound: an int, or (input name, dimension) whose size it is.
        text: the bound as a size expression, where it is neither.
        is_pointer: the input is the offsets of a compressed matrix instead, [rows + 1]: from 0, never
            falling, to ``bound``, the number of entries.
        dim: the dimension that ``row`` counts along: 1 for ``pairs[:, 0]``.
    """

    input: str
    row: int | None
    bound: int | tuple[str, int] | None
    text: str = ""
    is_pointer: bool = False
    dim: int = 0


def index_bounds(gm: fx.GraphModule, uses: Iterable[tuple[Node, Any]] = ()) -> list[IndexBound]:
    """The bounds on integer inputs that the raised graph's structure and lookups imply.

    Args:
        gm: the raised graph.
        uses: further indices, each with the size that it must stay under.
    """
    sizes, origins = _input_sizes(gm), Origins(gm.graph)
    found: dict[IndexBound, None] = {}
    for index, size in chain(uses, *(_uses(node) for node in gm.graph.nodes)):
        for part in origins.of(index):
            found[_bound(part, size, sizes)] = None
    for node in gm.graph.nodes:
        for name in _pointers(node, origins):
            bound = _bound(Part(name), node.kwargs["output_size"], sizes)
            found[replace(bound, is_pointer=True)] = None
    return list(found)


def _uses(node: Node) -> Iterator[tuple[Node, Any]]:
    """(index, size it must stay under) of every use of an index in ``node``."""
    if str(node.target) == "gnnc.csr.default":
        src, dst, num_src, num_dst = node.args
        yield src, num_src
        yield dst, num_dst
    gather = as_gather(node) if node.op == "call_function" else None
    if gather is not None:
        yield gather.index, shape_of(gather.table)[0]


def _pointers(node: Node, origins: Origins) -> list[str]:
    """The inputs whose differences ``node`` repeats rows by; with wrong ones it would write out of bounds."""
    if str(node.target) != "aten.repeat_interleave.Tensor" or node.kwargs.get("output_size") is None:
        return []
    counts: Any = node.args[0]
    if aten_name(counts) != "sub.Tensor":
        return []
    ends = [[part.input for part in origins.of(end)] for end in counts.args[:2] if isinstance(end, Node)]
    return ends[0] if len(ends) == 2 and ends[0] == ends[1] else []


def _bound(part: Part, size: Any, sizes: dict[Any, tuple[str, int]]) -> IndexBound:
    value = size.meta["val"] if isinstance(size, Node) else size
    if not isinstance(value, torch.SymInt):
        return IndexBound(part.input, part.row, int(value), dim=part.dim)
    expression = value.node.expr
    return IndexBound(part.input, part.row, sizes.get(expression), str(expression), dim=part.dim)


def _input_sizes(gm: fx.GraphModule) -> dict[Any, tuple[str, int]]:
    """Which input's dimension each symbol is."""
    sizes: dict[Any, tuple[str, int]] = {}
    for node in gm.graph.nodes:
        source = source_of(node)
        if source is None or source.kind != "input" or not holds_tensor(node):
            continue
        for dim, size in enumerate(shape_of(node)):
            if isinstance(size, torch.SymInt):
                sizes.setdefault(size.node.expr, (source.name, dim))
    return sizes
