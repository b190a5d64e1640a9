"""What the integer inputs index into: the bound that each must stay under."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.source import source_of
from gnnc.passes.emit import holds_tensor, shape_of, value_of
from gnnc.passes.rowwise import as_gather, op_name

_SAME_VALUES = (
    "slice.Tensor",
    "_to_copy.default",
    "to.dtype",
    "view.default",
    "reshape.default",
    "_unsafe_view.default",
    "unsqueeze.default",
    "squeeze.dim",
    "squeeze.default",
    "expand.default",
    "repeat.default",
    "index_select.default",
    "transpose.int",
    "permute.default",
    "t.default",
    "flip.default",
    "clone.default",
    "unbind.int",
)


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
    """

    input: str
    row: int | None
    bound: int | tuple[str, int] | None
    text: str = ""
    is_pointer: bool = False


def index_bounds(gm: fx.GraphModule, uses: Iterable[tuple[Node, Any]] = ()) -> list[IndexBound]:
    """The bounds on integer inputs that the raised graph's structure and lookups imply.

    Args:
        gm: the raised graph.
        uses: further indices, each with the size that it must stay under.
    """
    sizes = _input_sizes(gm)
    found: dict[IndexBound, None] = {}
    for index, size in chain(uses, *(_uses(node) for node in gm.graph.nodes)):
        for name, row in _origins(index, None):
            found[_bound(name, row, size, sizes)] = None
    for node in gm.graph.nodes:
        for name in _pointers(node):
            found[replace(_bound(name, None, node.kwargs["output_size"], sizes), is_pointer=True)] = None
    return list(found)


def inputs_of(index: Node) -> list[str]:
    """The integer inputs whose values ``index`` passes on; empty for one that is computed."""
    return [name for name, _ in _origins(index, None)]


def _uses(node: Node) -> Iterator[tuple[Node, Any]]:
    """(index, size it must stay under) of every use of an index in ``node``."""
    if str(node.target) == "gnnc.csr.default":
        src, dst, num_src, num_dst = node.args
        yield src, num_src
        yield dst, num_dst
    gather = as_gather(node) if node.op == "call_function" else None
    if gather is not None:
        yield gather.index, shape_of(gather.table)[0]


def _pointers(node: Node) -> list[str]:
    """The inputs whose differences ``node`` repeats rows by; with wrong ones it would write out of bounds."""
    if str(node.target) != "aten.repeat_interleave.Tensor" or node.kwargs.get("output_size") is None:
        return []
    counts: Any = node.args[0]
    if op_name(counts) != "sub.Tensor":
        return []
    ends = [inputs_of(end) for end in counts.args[:2] if isinstance(end, Node)]
    return ends[0] if len(ends) == 2 and ends[0] == ends[1] else []


def _origins(node: Node, row: int | None) -> Iterator[tuple[str, int | None]]:
    """The inputs whose values ``node`` passes on, and the row it takes of each."""
    source = source_of(node)
    if source is not None:
        if source.kind == "input" and not node.meta["val"].is_floating_point():
            yield source.name, row
        return
    name = op_name(node)
    if name == "select.int":
        first = node.args[1] == 0 and len(shape_of(node.args[0])) == 2
        yield from _origins(node.args[0], node.args[2] if first else row)
    elif name in ("cat.default", "stack.default"):
        for part in node.args[0]:
            yield from _origins(part, row)
    elif name in _SAME_VALUES or (name == "index.Tensor" and _drops_self_loops(node)):
        yield from _origins(node.args[0], row)


def _drops_self_loops(node: Node) -> bool:
    """``edge_index[:, src != dst]``. Any other mask may be there to drop ids that are no nodes."""
    (index,) = [index for index in node.args[1] if index is not None][:1] or [None]
    if index is None or value_of(index).dtype != torch.bool:
        return index is not None
    return op_name(index) in ("ne.Tensor", "eq.Tensor") and all(
        any(True for _ in _origins(side, None)) for side in index.args[:2]
    )


def _bound(name: str, row: int | None, size: Any, sizes: dict[Any, tuple[str, int]]) -> IndexBound:
    value = size.meta["val"] if isinstance(size, Node) else size
    if not isinstance(value, torch.SymInt):
        return IndexBound(name, row, int(value))
    expression = value.node.expr
    return IndexBound(name, row, sizes.get(expression), str(expression))


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
