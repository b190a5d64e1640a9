"""Plan of the kernels of the gradient of attention whose logits a body computes."""

from dataclasses import dataclass

from torch.fx import Node

from gnnc.ir.nodes import argument, operand
from gnnc.runtime.plans.attention_backward import found_results, read_edges, read_results
from gnnc.runtime.plans.converted_rows import read_rows
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Inner, Refusal, RowProgram, planned

_ENDS = ("dst", "src", "x", "grad")
_OTHERS = (1, 2, 3)
"""Results other than the gradient of x."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of the kernels' operands and results, and their constants; None where absent.

    Attributes:
        edges: rowptr and col, of the CSR and of its transpose.
        ends: dst, src, x and grad, as they are before conversions to FP32 that the group holds.
        logit: body of the logits.
        constants: its constants.
        scale, eps: constants of the logits and of the softmax.
        heads: number of softmaxes a row.
        width: columns of x.
        joined: whether the gradient of src, which is x, is added to that of x.
        results: ddst, dsrc and dconst.
        divisors: operands that these are divided by.
        program: row program of the gradient of x.
    """

    edges: tuple[int, ...]
    ends: tuple[int, ...]
    logit: str
    constants: tuple[int, ...]
    scale: float
    eps: float
    heads: int
    width: int
    joined: bool
    results: tuple[int | None, ...]
    divisors: tuple[int | None, ...]
    program: RowProgram


@planned
def plan(node: Node) -> Plan:
    """Read the operands, the results that are read, and the row program behind the first."""
    inner = Inner(node)
    anchor = inner.only("gnnc.body_attention_backward.default")
    ends = [read_rows(inner, operand(anchor, name)) for name in _ENDS]
    if len({end.dtype for end in ends}) > 1 or any(end.scale is not None for end in ends):
        raise Refusal(f"rows of both ends are {', '.join(str(end.dtype) for end in ends)}")
    found = found_results(anchor)
    quotients = [
        build.read_division(inner, found[index]) if index in found else (None, None) for index in _OTHERS
    ]
    parts = [quotient for quotient, _ in quotients]
    numbers, program = read_results(inner, found, parts, ends)
    x = operand(anchor, "x").meta["val"]
    return Plan(
        edges=read_edges(inner, anchor),
        ends=tuple(inner.operand(end.values, "an end of the edges") for end in ends),
        logit=str(argument(anchor, "logit")),
        constants=tuple(inner.operand(n, "a constant of the body") for n in argument(anchor, "const")),
        scale=float(argument(anchor, "scale")),
        eps=float(argument(anchor, "eps")),
        heads=int(x.shape[1]),
        width=build.fixed_width(operand(anchor, "x")),
        joined=bool(argument(anchor, "joined")),
        results=numbers,
        divisors=tuple(divisor for _, divisor in quotients),
        program=program,
    )
