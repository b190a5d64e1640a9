"""Search for values that must not be rounded: operands of comparisons, selections, sines and conversions.

``gnnc.ir.aten`` lists the ops. A value that one of them reads must be exact, and so must all values that it
is computed from. In ``m == max[dst]``, no element equals the maximum if one side is rounded; a different
element equals it if a common input is rounded.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.aten import CASTS, EXACT_READS, EXPONENTIALS, SHAPE_ONLY, TO_INTEGER, ExactReads
from gnnc.ir.body import parse_body
from gnnc.ir.describe import layer_of, shown_layer
from gnnc.ir.nodes import argument, aten_name, is_result, op_name, result_index
from gnnc.ir.op import has_body
from gnnc.ir.parts import BACKWARD_LAYER
from gnnc.ir.signs import Operands, is_never_positive
from gnnc.ir.thresholds import is_continuous, is_saturated

EXACT = "exact"
"""Key in the meta of nodes whose values must not be rounded: the reason, for people."""


class Reader(NamedTuple):
    """An op that reads exact values.

    Attributes:
        op: its name.
        outcome: the kind of its outcome, for people.
        layer: path of its module; of an op in a body, that of the node with the body.
    """

    op: str
    outcome: str
    layer: str

    def __str__(self) -> str:
        path, is_backward, _ = self.layer.rpartition(BACKWARD_LAYER)
        where = f" in the gradient of {shown_layer(path.strip())}" if is_backward else ""
        return f"{self.op}, {self.outcome}{where}"


def exact_values(graph: fx.Graph) -> dict[Node, Reader]:
    """Return the nodes whose values must not be rounded, each with the first op that is the reason.

    Args:
        graph: a graph with meta values.
    """
    roots = {
        operand: reader
        for node in graph.nodes
        for operand, reader in _exact_operands(node, node)
        if _is_float(operand)
    }
    return _with_sources(roots, lambda node: filter(_is_float, node.all_input_nodes))


def _exact_operands(node: Node, whole: Node, inside: Operands | None = None) -> Iterator[tuple[Node, Reader]]:
    """Yield the operands that a node reads exactly.

    Args:
        node: a node of a graph, or of the body of one.
        whole: the node of the graph.
        inside: the operands of the body.
    """
    if has_body(node):
        operands = Operands.of(node)
        yield from ((operands.values[name], reader) for name, reader in _inputs_of_body(node, operands))
        return
    reads = _reads_of(node)
    if reads is None or _is_harmless(node, reads, inside):
        return
    for operand in [argument(node, name) for name in reads.operands] or node.all_input_nodes:
        if isinstance(operand, Node):
            yield operand, Reader(op_name(node), reads.outcome, layer_of(whole))


def _inputs_of_body(node: Node, operands: Operands) -> Iterator[tuple[str, Reader]]:
    """Yield the inputs that the body of a ``message`` or ``edge_map`` reads exactly."""
    for inner, reader in _exact_in_body(node, operands).items():
        if inner.op == "placeholder":
            yield str(inner.target), reader


def reads_exactly(node: Node) -> bool:
    """Return whether a step of a body reads values that must not be rounded."""
    return _reads_of(node) is not None


def exact_in_body(node: Node) -> dict[Node, Reader]:
    """Return the nodes of a body (of ``parse_body``) whose values must not be rounded, with the first reader.

    Args:
        node: an op with a body, in a graph with meta values.
    """
    return _exact_in_body(node, Operands.of(node))


def _exact_in_body(node: Node, operands: Operands) -> dict[Node, Reader]:
    graph = parse_body(argument(node, "body")).graph
    roots = {
        operand: reader for inner in graph.nodes for operand, reader in _exact_operands(inner, node, operands)
    }
    return _with_sources(roots, lambda inner: inner.all_input_nodes)


def _with_sources(
    roots: Mapping[Node, Reader], sources: Callable[[Node], Iterable[Node]]
) -> dict[Node, Reader]:
    """Return the roots and all nodes that their values are computed from."""
    found: dict[Node, Reader] = {}
    pending = list(roots.items())
    while pending:
        node, reader = pending.pop()
        if node in found:
            continue
        found[node] = reader
        if op_name(node) not in SHAPE_ONLY:
            pending += [(source, reader) for source in sources(node)]
    return found


def _reads_of(node: Node) -> ExactReads | None:
    if node.op != "call_function" or not aten_name(node):
        return None
    if op_name(node) in CASTS:
        return TO_INTEGER if _is_cast_to_integers(node) else None
    return EXACT_READS.get(aten_name(node)) or EXACT_READS.get(op_name(node))


def _is_cast_to_integers(node: Node) -> bool:
    dtype = argument(node, "dtype", None)
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def _is_harmless(node: Node, reads: ExactReads, inside: Operands | None) -> bool:
    """Return whether what a node makes of its operands changes no more than they do."""
    if reads.result is not None:
        taken = [user for user in node.users if is_result(user) and result_index(user) == reads.result]
        return not any(user.users for user in taken)
    name, (first, second) = op_name(node), (*node.args, None, None)[:2]
    if name in EXPONENTIALS:
        return is_never_positive(first, inside) or is_saturated(node)
    if name not in _ORDERS:
        return False
    return first is second or _is_infinite(second) or is_continuous(node)


_ORDERS = frozenset("eq ne lt le gt ge".split())


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_float(node: Node) -> bool:
    """Return whether a node holds a floating tensor, or several tensors, of which some may be."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, tuple | list)
