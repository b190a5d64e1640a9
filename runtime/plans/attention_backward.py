"""Plan of the kernel of attention's gradient: its operands, its constants, and the row program."""

from dataclasses import dataclass

import torch
from torch.fx import Node

from gnnc.ir.attention_backward import ATTENTION_VECTORS
from gnnc.ir.nodes import argument, operand, result_index, unpack
from gnnc.ir.qtype import BYTE_DTYPES
from gnnc.runtime.plans.converted_rows import read_rows
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Inner, Refusal, RowProgram, planned


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of the kernel's operands and results, and its constants; None where absent.

    Attributes:
        edges: rowptr and col, of the CSR and of its transpose.
        ends: a_dst, a_src, x and grad, as they are before conversions to FP32 that the group holds.
        scales: scales of the rows of x, and of grad; None where rows are not quantized.
        att: att_dst and att_src.
        slope, eps: constants of the logits and of the softmax.
        heads: number of softmaxes a row.
        width: columns of x.
        results: da_dst, da_src, datt_dst and datt_src.
        divisors: operands that datt_dst and datt_src are divided by.
        program: row program of the gradient of x.
    """

    edges: tuple[int, ...]
    ends: tuple[int, ...]
    scales: tuple[int | None, ...]
    att: tuple[int | None, ...]
    slope: float
    eps: float
    heads: int
    width: int
    results: tuple[int | None, ...]
    divisors: tuple[int | None, ...]
    program: RowProgram


@planned
def plan(node: Node) -> Plan:
    """Read the operands, the results that are read, and the row program behind the first."""
    inner = Inner(node)
    anchor = inner.only("gnnc.attention_backward.default")
    ends = [read_rows(inner, operand(anchor, name)) for name in ("a_dst", "a_src", "x", "grad")]
    dtypes = [end.dtype for end in ends]
    if dtypes[0] != dtypes[1] or dtypes[0] not in (torch.float32, torch.bfloat16):
        raise Refusal(f"halves of the logits are {dtypes[0]} and {dtypes[1]}")
    if set(dtypes[2:]).isdisjoint(BYTE_DTYPES) and dtypes[2] != dtypes[3]:
        raise Refusal(f"x is {dtypes[2]} and grad {dtypes[3]}")
    found = {result_index(user): user for user in anchor.users}
    if 0 not in found:
        raise Refusal("the gradient of x is not read")
    quotients = [
        (None, None) if i not in found else build.read_division(inner, found[i]) for i in ATTENTION_VECTORS
    ]
    parts = [found.get(1), found.get(2), *(quotient for quotient, _ in quotients)]
    numbers = tuple(None if part is None else inner.results.get(part) for part in parts)
    inner.results = {value: index for value, index in inner.results.items() if value not in parts}
    covered = {anchor, *found.values(), *(part for part in parts if part is not None)}
    covered |= {node for end in ends for node in end.conversions}
    program = build.build(inner, build.read_chain(inner, found[0]), covered)
    return Plan(
        edges=tuple(
            inner.operand(n, "the CSR") for n in unpack(anchor, "rowptr", "col", "rowptr_t", "col_t")
        ),
        ends=tuple(inner.operand(end.values, "an end of the edges") for end in ends),
        scales=tuple(inner.optional(end.scale, "a scale of rows") for end in ends[2:]),
        att=tuple(inner.optional(n, "an attention vector") for n in unpack(anchor, "att_dst", "att_src")),
        slope=float(argument(anchor, "slope")),
        eps=float(argument(anchor, "eps")),
        heads=build.fixed_width(operand(anchor, "a_src")),
        width=build.fixed_width(operand(anchor, "x")),
        results=numbers,
        divisors=tuple(divisor for _, divisor in quotients),
        program=program,
    )
