"""Sums of values of bodies: what both summands do last is done once, to the sum of what they do it to."""

from collections.abc import Mapping

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.body import body_shapes, body_text, body_values, parse_body
from gnnc.ir.nodes import op_name, same_shape

_LINEAR: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("t", "view", "reshape", "_unsafe_view", "expand", "unsqueeze", "squeeze"), (0,)),
    **dict.fromkeys(("select", "slice", "permute", "transpose", "clone", "sum", "mean", "neg"), (0,)),
    **dict.fromkeys(("silu_backward", "sigmoid_backward", "tanh_backward", "gelu_backward"), (0,)),
    **dict.fromkeys(("threshold_backward", "leaky_relu_backward", "softplus_backward"), (0,)),
    **dict.fromkeys(("mul", "mm", "bmm"), (0, 1)),
    "div": (0,),
}
"""Ops with the arguments in each of which they are linear, the others being fixed."""

aten = torch.ops.aten


def sum_of_values(text: str, operands: Mapping[str, torch.Tensor]) -> str:
    """Return the body of the sum of the values of a body.

    A gradient that comes to a value in two ways is so added up before it goes on, as in autograd:
    ``mm(g, w) + mm(h, w)`` becomes ``mm(g + h, w)``.

    Args:
        text: a body that returns several values of one shape.
        operands: a tensor of the shape and dtype of each operand, by name.
    """
    given = body_shapes(text, operands)
    graph, copies = fx.Graph(), dict[Node, Node]()
    graph.graph_copy(parse_body(text).graph, copies)
    shapes = {copies[node]: value for node, value in given.items() if node in copies}
    first, *others = (copies[value] for value in body_values(parse_body(text).graph))
    for value in others:
        first = _add(graph, shapes, first, value)
    graph.output(first)
    graph.eliminate_dead_code()
    return body_text(graph)


def _add(graph: fx.Graph, shapes: dict[Node, torch.Tensor], left: Node, right: Node) -> Node:
    place = _common(shapes, left, right)
    if place is None:
        total = graph.call_function(aten.add.Tensor, (left, right))
    else:
        inner = _add(graph, shapes, left.args[place], right.args[place])  # type: ignore[arg-type]
        args = (*left.args[:place], inner, *left.args[place + 1 :])
        total = graph.call_function(left.target, args, left.kwargs)  # type: ignore[arg-type]
    shapes[total] = shapes[left]
    return total


def _common(shapes: Mapping[Node, torch.Tensor], left: Node, right: Node) -> int | None:
    """Return the argument in which two calls of one linear op differ; None: they are no such calls."""
    if left.op != "call_function" or left.target != right.target or left.kwargs != right.kwargs:
        return None
    differing = [
        place for place, pair in enumerate(zip(left.args, right.args, strict=False)) if _differ(*pair)
    ]
    if len(left.args) != len(right.args) or len(differing) != 1:
        return None
    place = differing[0]
    first, second = left.args[place], right.args[place]
    if (
        place not in _LINEAR.get(op_name(left), ())
        or not isinstance(first, Node)
        or not isinstance(second, Node)
    ):
        return None
    alike = (
        same_shape(shapes[first].shape, shapes[second].shape) and shapes[first].dtype == shapes[second].dtype
    )
    return place if alike else None


def _differ(left: object, right: object) -> bool:
    return left is not right if isinstance(left, Node) or isinstance(right, Node) else left != right
