"""Plan of a product over all rows, which is the gradient of a weight."""

from dataclasses import dataclass

import torch
from torch.fx import Node

from gnnc.ir.nodes import operand, unpack
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Inner, Refusal, planned


@dataclass(frozen=True, slots=True)
class Plan:
    """Operands of a product over all rows.

    Attributes:
        sides: numbers of the operands.
        widths: columns of both.
        dtype: the type that their elements are multiplied in.
        divisor: number of the operand that the result is divided by; None: it is not.
    """

    sides: tuple[int, int]
    widths: tuple[int, int]
    dtype: torch.dtype
    divisor: int | None = None


@planned
def plan(node: Node) -> Plan:
    """Read the operands, the casts of them, and the division behind the product."""
    inner = Inner(node)
    anchor = inner.only("gnnc.gemm_tn.default")
    factors = unpack(anchor, "a", "b")
    values = [factor.meta["val"] for factor in factors]
    if any(value.dim() != 2 for value in values):
        raise Refusal("an operand is not a matrix")
    if values[0].dtype != values[1].dtype:
        raise Refusal(f"the operands are {values[0].dtype} and {values[1].dtype}")
    _, divisor = build.read_division(inner, anchor)
    first, second = (inner.operand(_unrounded(inner, factor), "an operand") for factor in factors)
    widths = build.fixed_width(values[0]), build.fixed_width(values[1])
    return Plan((first, second), widths, values[0].dtype, divisor)


def _unrounded(inner: Inner, factor: Node) -> Node:
    """Step over a cast that the kernel does as it loads."""
    return factor if factor in inner.operands else operand(factor, "self")
