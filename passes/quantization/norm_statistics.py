"""Which aggregations are the statistics of a norm: their own operand is centred by them, or divided."""

from collections.abc import Iterator

from torch import fx
from torch.fx import Node

from gnnc.ir.op import op_of
from gnnc.ir.source import source_of
from gnnc.passes.edges.rowwise import op_name
from gnnc.passes.quantization.number_formats import AGGREGATIONS, LOW_OPERANDS
from gnnc.passes.rewrite.emit import holds_tensor, value_of

_BENT = frozenset({"sqrt.default", "rsqrt.default", "reciprocal.default", "pow.Tensor_Scalar"})
"""What makes a deviation, or its inverse, of a variance."""


def statistics(graph: fx.Graph) -> set[Node]:
    """The aggregations that a norm takes of its own operand: mean, variance, or sum.

    What is left of a value without its mean may be nothing but the mean's rounding, which a division by
    the deviation then makes large. The way from an aggregation to the operand, and from both to what they
    are made of, goes through anything but primitives.
    """
    aggregations = [node for node in graph.nodes if (op := op_of(node)) and op.name in AGGREGATIONS]
    return {node for node in aggregations if any(_returns(node, _operand(node)))}


def _operand(aggregation: Node) -> Node:
    op = op_of(aggregation)
    assert op is not None
    return aggregation.args[LOW_OPERANDS[op.name][0]]  # pyright: ignore[reportReturnType]


def _returns(aggregation: Node, operand: Node) -> Iterator[bool]:
    """Whether each meeting of the result with another value is one with what the operand is made of."""
    sources = _sources(operand)
    pending, seen = [(aggregation, False)], set()
    while pending:
        node, bent = pending.pop()
        for user in node.users:
            if user.op != "call_function" or op_of(user) is not None or (user, bent) in seen:
                continue
            seen.add((user, bent))
            other = _norm_of(user, node, bent)
            if other is not None:
                yield not sources.isdisjoint(_sources(other))
            pending.append((user, bent or op_name(user) in _BENT))


def _norm_of(user: Node, result: Node, bent: bool) -> Node | None:
    """What ``user`` takes ``result`` from, or divides by it."""
    first, second = (*user.args, None, None)[:2]
    other = second if first is result else first
    name = op_name(user)
    norm = name == "sub.Tensor" or (name == "div.Tensor" and second is result)
    return other if (norm or (name == "mul.Tensor" and bent)) and isinstance(other, Node) else None


def _sources(value: Node) -> set[Node]:
    """The results of primitives and the inputs that a floating tensor is made of without primitives."""
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
