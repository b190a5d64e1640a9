"""Search for variances: the mean of squares minus the square of a mean, two values that nearly cancel.

Both are computed from one matrix. Where each rounds it by itself, or rounds its square, the difference of
equal values is not zero but half a percent of their square, of which a deviation takes the root.
"""

from collections.abc import Iterator

from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import aten_name
from gnnc.ir.op import op_of
from gnnc.passes.quantization.norm_statistics import sources_of
from gnnc.passes.quantization.number_formats import aggregated_rows, is_low_aggregation


def variances(graph: fx.Graph) -> set[Node]:
    """Return the primitives between a matrix and a difference that squares an aggregation of it."""
    found: set[Node] = set()
    for node in filter(is_low_aggregation, graph.nodes):
        sources = sources_of(aggregated_rows(node))
        for difference in _differences(node):
            found |= _between(sources, difference)
    return found


def _differences(aggregation: Node) -> Iterator[Node]:
    """Yield the subtractions that the square of an aggregation reaches, also through a product."""
    pending, seen = [(aggregation, False)], set()
    while pending:
        node, squared = pending.pop()
        for user in node.users:
            square = squared or _is_square(user)
            if user.op != "call_function" or (user, square) in seen:
                continue
            seen.add((user, square))
            if squared and aten_name(user) == "sub.Tensor":
                yield user
            elif op_of(user) is None or (squared and _is_product(user)):
                pending.append((user, square))


def _is_square(node: Node) -> bool:
    name, operands = aten_name(node), (*node.args, None, None)[:2]
    return (name == "mul.Tensor" and operands[0] is operands[1]) or (
        name == "pow.Tensor_Scalar" and operands[1] == 2
    )


def _is_product(node: Node) -> bool:
    op = op_of(node)
    return op is not None and op.kind == "dense"


def _between(sources: set[Node], difference: Node) -> set[Node]:
    """Return the primitives on the paths from sources to a difference; none where an operand has no path."""
    reached: dict[Node, bool] = {}
    primitives = set()

    def reaches(node: Node) -> bool:
        if node in sources:
            return True
        if node not in reached:
            reached[node] = False
            reached[node] = any([reaches(operand) for operand in node.all_input_nodes])
            if reached[node] and op_of(node) is not None:
                primitives.add(node)
        return reached[node]

    operands = difference.all_input_nodes
    return primitives if len(operands) == 2 and all([reaches(operand) for operand in operands]) else set()
