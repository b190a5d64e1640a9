"""Arguments of a kernel for a row-local chain: the tensor that it begins with, and its program."""

from dataclasses import dataclass

from torch.fx import Node

from gnnc.ir.nodes import holds_tensor
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Inner, Refusal, RowProgram, planned


@dataclass(frozen=True, slots=True)
class Plan:
    """Operands and program of the kernel.

    Attributes:
        x: number of the operand that the chain begins with.
        width: columns of that operand.
        program: row program of the chain.
    """

    x: int
    width: int
    program: RowProgram


@planned
def plan(node: Node) -> Plan:
    """Find the operand from which every node of the chain follows."""
    inner = Inner(node)
    reasons = []
    for start, index in inner.operands.items():
        if not holds_tensor(start) or start.meta["val"].dtype not in build.ROW_DTYPES:
            continue  # a size, which a view reads, or other values
        try:
            width = build.fixed_width(start)
            program = build.build(inner, build.read_chain(inner, start), ())
            return Plan(index, width, program)
        except Refusal as refusal:
            reasons.append(f"from {start.name}: {refusal}")
    raise Refusal("; ".join(reasons) or "it reads no matrix of numbers")
