"""Values of edges that a body sums over all edges: rows of a sum, or both sides of a product ``a^T b``."""

from torch.fx import Node

from gnnc.ir.nodes import argument, first_operand, unpack

_RESHAPES = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.squeeze.dim")


def summed_rows(value: Node) -> tuple[Node, ...]:
    """Return the rows of edges whose sum a body gives, in that shape or another; ``a, b`` of ``a^T b``.

    Args:
        value: the value of the body of an ``edge_sum``.

    Returns:
        One value or two; none where the body ends in something else.
    """
    while str(value.target) in _RESHAPES:
        value = first_operand(value)
    transposed = False
    while str(value.target) == "aten.t.default":
        value, transposed = first_operand(value), not transposed
    if str(value.target) == "aten.mm.default":
        left, right = unpack(value, "self", "mat2")
        if str(left.target) == "aten.t.default":
            sides = first_operand(left), right
            return sides[::-1] if transposed else sides
    if transposed or str(value.target) != "aten.sum.dim_IntList" or list(argument(value, "dim")) != [0]:
        return ()
    return (first_operand(value),)
