"""Maxima and minima of bodies, with the ops whose bodies compute the values again and compare them.

The gradient of a maximum goes to the edges whose value equals it. Two kernels may add up the terms of a
product in different orders, so that the value that one kernel computes again may differ, in its last bits,
from the maximum that the other kernel found. Both therefore have to run in the same arithmetic.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import Graph, Node

from gnnc.ir.body import COMPARISONS, body_operands, parse_body
from gnnc.ir.message import reductions
from gnnc.ir.nodes import (
    argument,
    as_node,
    aten_name,
    first_operand,
    is_result,
    is_view,
    op_name,
    outputs_of,
    result_index,
)
from gnnc.ir.op import op_of
from gnnc.ir.parts import SAVED, Parts
from gnnc.ir.source import source_of

_COPIES = ("_to_copy.default", "clone.default", "index_select.default")


def compared_extrema(parts: Parts) -> Iterator[tuple[Node, Node]]:
    """Yield each maximum or minimum of a body, with each op whose body compares values with it.

    Where an op is part of a submodule, the call of that stands for it.
    """
    calls = {
        inner: call
        for _, gm in parts.per_call()
        for call in gm.graph.find_nodes(op="call_module")
        for inner in _inner(call).nodes
    }
    for _, gm in parts.per_call():
        for node in gm.graph.nodes:
            for member in _inner(node).nodes if node.op == "call_module" else (node,):
                for compared in _compared(member):
                    found = _origin(compared, parts, calls)
                    if found is not None and (whole := calls.get(found, found)) is not node:
                        yield whole, node


def _inner(call: Node) -> Graph:
    owner = call.graph.owning_module
    assert owner is not None
    inner: Any = owner.get_submodule(str(call.target))
    return inner.graph


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


def _origin(node: Node, parts: Parts, calls: Mapping[Node, Node]) -> Node | None:
    """Return the message whose maximum or minimum a value is, if it is one."""
    node = _computed(node, calls)
    source = source_of(node)
    if source is not None and source.kind == "saved":
        position = parts.forward.meta[SAVED][source.name]
        node = _computed(outputs_of(parts.forward.graph)[position], calls)
    is_extremum = _body_of(node) is not None and {"max", "min"} & set(_reductions(node))
    return node if is_extremum else None


def _computed(node: Node, calls: Mapping[Node, Node]) -> Node:
    """Return the node that computes a value: behind copies, outside or inside of submodules."""
    while True:
        node = _without_copies(node)
        made = first_operand(node) if is_result(node) else node
        if made.op == "call_module":
            results = outputs_of(_inner(made))
            node = results if isinstance(results, Node) else results[result_index(node)]
        elif node.op == "placeholder" and node in calls:
            call = calls[node]
            node = as_node(call.args[list(_inner(call).find_nodes(op="placeholder")).index(node)])
        else:
            return node


def _reductions(node: Node) -> tuple[str, ...]:
    reduce = argument(node, "reduce", None)
    return () if reduce is None else reductions(reduce)
