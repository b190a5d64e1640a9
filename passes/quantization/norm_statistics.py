"""Search for aggregations that are the statistics of a norm, which subtracts or divides by them."""

from collections.abc import Iterator

from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import aten_name, holds_tensor, value_of
from gnnc.ir.op import has_body, op_of
from gnnc.ir.source import source_of
from gnnc.passes.quantization.number_formats import aggregated_rows, is_low_aggregation

_BENT = frozenset({"sqrt.default", "rsqrt.default", "reciprocal.default", "pow.Tensor_Scalar"})
"""Ops that turn a variance into a deviation or its inverse."""


def statistics(graph: fx.Graph) -> set[Node]:
    """Return the aggregations that a norm computes of its operand: mean, variance, or sum.

    They must not be rounded: where all values are nearly equal, a value minus its rounded mean is nothing but
    the rounding error, and the division by the small deviation makes that error large. The search follows
    ops that are no primitives, from an aggregation to the norm, and from both to their sources.
    """
    aggregations = list(filter(is_low_aggregation, graph.nodes))
    return {node for node in aggregations if any(_returns(node, aggregated_rows(node)))}


def _returns(aggregation: Node, operand: Node) -> Iterator[bool]:
    """Yield for each norm of a value by the result whether that value has a source of the operand."""
    sources = sources_of(operand)
    pending, seen = [(aggregation, False)], set()
    while pending:
        node, bent = pending.pop()
        for user in node.users:
            if user.op != "call_function" or (user, bent) in seen:
                continue
            seen.add((user, bent))
            if op_of(user) is not None:
                yield has_body(user) and any(
                    not sources.isdisjoint(sources_of(other))
                    for other in user.all_input_nodes
                    if other is not node and holds_tensor(other)
                )
                continue
            other = _norm_of(user, node, bent)
            if other is not None:
                yield not sources.isdisjoint(sources_of(other))
            pending.append((user, bent or aten_name(user) in _BENT))


def _norm_of(user: Node, result: Node, bent: bool) -> Node | None:
    """Return the value that ``user`` subtracts ``result`` from, or divides by it, or None."""
    first, second = (*user.args, None, None)[:2]
    other = second if first is result else first
    name = aten_name(user)
    norm = name == "sub.Tensor" or (name == "div.Tensor" and second is result)
    return other if (norm or (name == "mul.Tensor" and bent)) and isinstance(other, Node) else None


def sources_of(value: Node) -> set[Node]:
    """Return the primitives and inputs that a floating tensor depends on through ATen ops only."""
    found: set[Node] = set()
    pending, seen = [value], set()
    while pending:
        node = pending.pop()
        if node in seen or not holds_tensor(node) or not value_of(node).is_floating_point():
            continue
        seen.add(node)
        source = source_of(node)
        if op_of(node) is not None or (source is not None and source.kind == "input"):
            found.add(node)
        else:
            pending += node.all_input_nodes
    return found
