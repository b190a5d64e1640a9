"""Bf16 partial results: a value that one kernel writes only for another to add is stored in bf16.

A residual, SAGE's root term and GIN's self term are written by one kernel and read once, by the
epilogue of another. In a low-precision program they are added to terms with the error of 8 bits, so
bf16 (a relative error of at most 2^-9) adds no visible error and halves the traffic.
"""

from collections.abc import Iterator

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.exact_reads import EXACT
from gnnc.ir.nodes import same_shape, shape_or_none
from gnnc.ir.row_local import classify
from gnnc.passes.base import Context

_ADD = "aten.add.Tensor"
MIN_WIDTH = 16
"""Elements a row from which on the traffic matters."""


def round_partials_to_bf16(graph: fx.Graph, low: frozenset[Node], ctx: Context) -> None:
    """Round the earlier operand of a sum of two kernels' results to bf16, unless the sum must be exact.

    Args:
        graph: a graph before its primitives are replaced.
        low: the primitives that will take low precision.
        ctx: takes a note for each sum.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    casts: dict[Node, Node] = {}
    for node in [node for node in graph.nodes if str(node.target) == _ADD]:
        sides = [(maker, side) for side in _sides(node) if (maker := producer(side, low))]
        if len(sides) < 2 or sides[0][0] is sides[1][0] or EXACT in node.meta:
            continue
        partial = min(sides, key=lambda pair: position[pair[0]])[1]
        if partial in casts or _only_added(partial, low):
            cast = casts[partial] = casts.get(partial) or _cast(graph, partial)
            node.replace_input_with(partial, cast)
            ctx.note(node, "the earlier term waits for this sum in bf16")


def _sides(add: Node) -> Iterator[Node]:
    """Yield the operands that have the shape of the sum, where it adds them without a factor."""
    if len(add.args) != 2 or add.kwargs:
        return
    shape = shape_or_none(add) or ()
    for side in add.args:
        if isinstance(side, Node) and same_shape(shape_or_none(side) or (), shape) and _is_wide(shape):
            yield side


def _is_wide(shape: tuple[object, ...]) -> bool:
    width = 1
    for size in shape[1:]:
        if not isinstance(size, int):
            return False
        width *= size
    return len(shape) > 1 and width >= MIN_WIDTH


def producer(node: Node, low: frozenset[Node]) -> Node | None:
    """Return the low-precision primitive whose epilogue computes ``node``, or None."""
    while node not in low:
        rows = [arg for arg in node.all_input_nodes if (op := classify(node, arg)) and op.role != "store"]
        if not rows:
            return None
        node = rows[0]
    return node


def _only_added(node: Node, low: frozenset[Node]) -> bool:
    """Return whether only sums read ``node`` in FP32: low-precision primitives read quantized values."""
    return all(user in low or str(user.target) == _ADD for user in node.users)


def _cast(graph: fx.Graph, value: Node) -> Node:
    with graph.inserting_after(value):
        cast = graph.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": torch.bfloat16})
    layer = value.meta.get("layer", "")
    cast.meta = {"layer": layer, "val": value.meta["val"].to(torch.bfloat16)}
    return cast
