"""Maxima and minima of bodies, with the ops whose bodies compute the values again and compare them.

The gradient of a maximum goes to the edges whose value equals it. Two kernels add up a product in two orders,
so that no value that one computes need equal a maximum that the other has found.
"""

from collections.abc import Iterator

from torch.fx import Node

from gnnc.ir.body import COMPARISONS, body_operands, parse_body
from gnnc.ir.message import reductions
from gnnc.ir.nodes import argument, aten_name, is_view, op_name, outputs_of
from gnnc.ir.op import op_of
from gnnc.ir.parts import SAVED, Parts
from gnnc.ir.source import source_of

_COPIES = ("_to_copy.default", "clone.default", "index_select.default")


def compared_extrema(parts: Parts) -> Iterator[tuple[Node, Node]]:
    """Yield each maximum or minimum of a body, with each op whose body compares values with it."""
    for _, gm in parts.per_call():
        for node in gm.graph.nodes:
            for compared in _compared(node):
                found = _origin(compared, parts)
                if found is not None and found is not node:
                    yield found, node


def _compared(node: Node) -> Iterator[Node]:
    """Yield the operands with which a node's body compares values."""
    body = _body_of(node)
    if body is None:
        return
    operands = body_operands(node)
    for step in parse_body(body).graph.nodes:
        if step.op == "call_function" and op_name(step) in COMPARISONS:
            sides = map(_without_copies, step.all_input_nodes)
            yield from (operands[str(side.target)] for side in sides if side.op == "placeholder")


def _body_of(node: Node) -> str | None:
    return argument(node, "body", None) if op_of(node) is not None else None


def _without_copies(node: Node) -> Node:
    while node.op == "call_function" and _is_copy(node):
        node = node.all_input_nodes[0]
    return node


def _is_copy(node: Node) -> bool:
    return is_view(node) or aten_name(node) in _COPIES


def _origin(node: Node, parts: Parts) -> Node | None:
    """Return the message whose maximum or minimum a value is, if it is one."""
    node = _without_copies(node)
    source = source_of(node)
    if source is not None and source.kind == "saved":
        position = parts.forward.meta[SAVED][source.name]
        node = _without_copies(outputs_of(parts.forward.graph)[position])
    is_extremum = _body_of(node) is not None and {"max", "min"} & set(_reductions(node))
    return node if is_extremum else None


def _reductions(node: Node) -> tuple[str, ...]:
    reduce = argument(node, "reduce", None)
    return () if reduce is None else reductions(reduce)
