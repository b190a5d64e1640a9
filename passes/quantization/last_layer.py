"""The ops next to the outputs of a model that trains: the last product and the last aggregation before each.

Tango (Chen et al., SC'23, section 3.2) keeps the layer before the softmax in FP32, forward and backward: no
later layer averages its rounding errors.
"""

from collections.abc import Callable, Iterable

from torch import fx
from torch.fx import Node

from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import outputs_of
from gnnc.ir.op import op_of
from gnnc.ir.parts import DIFFERENTIABLE, GRADIENTS
from gnnc.ir.source import source_of


def last_layer(gm: fx.GraphModule) -> frozenset[Node]:
    """Return the ops of a joint graph that are next to its outputs, and those next to their gradients.

    On each path from an output back to the inputs these are the first product (of a matrix, or for each edge)
    and the first aggregation; likewise on each path from the gradient of an output onwards. A graph without
    gradients has none.
    """
    if GRADIENTS not in gm.meta:
        return frozenset()
    outputs = outputs_of(gm.graph)
    results = [outputs[i] for i in gm.meta[DIFFERENTIABLE]]
    tangents = [node for node in placeholders(gm) if _is_tangent(node)]
    before = _nearest((node for node in results if isinstance(node, Node)), lambda node: node.all_input_nodes)
    after = _nearest(tangents, lambda node: node.users)
    return frozenset(before | after)


def _is_tangent(node: Node) -> bool:
    source = source_of(node)
    return source is not None and source.kind == "tangent"


def _nearest(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return the first op of each kind on every path from the starts."""
    found: set[Node] = set()
    pending = [(node, frozenset[str]()) for node in starts]
    seen = set(pending)
    while pending:
        node, passed = pending.pop()
        kind = _kind(node)
        if kind in passed:
            continue
        if kind is not None:
            found.add(node)
            passed |= {kind}
        reached = {(other, passed) for other in following(node)} - seen
        seen |= reached
        pending += reached
    return found


def _kind(node: Node) -> str | None:
    op = op_of(node)
    if op is None or not op.low_operands:
        return None
    return "aggregation" if op.kind == "aggregate" or op.counted_as == "spmm" else "product"
