"""Plan of the kernel of attention's gradient: its operands, its constants, and the row program."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from gnnc.ir.attention_backward import ATTENTION_VECTORS
from gnnc.ir.nodes import argument, first_operand, operand, result_index, unpack
from gnnc.ir.qtype import BYTE_DTYPES
from gnnc.runtime.plans.converted_rows import ConvertedRows, read_rows
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
    found = found_results(anchor)
    quotients = [
        (None, None) if i not in found else build.read_division(inner, found[i]) for i in ATTENTION_VECTORS
    ]
    parts = [found.get(1), found.get(2), *(quotient for quotient, _ in quotients)]
    numbers, program = read_results(inner, found, parts, ends)
    return Plan(
        edges=read_edges(inner, anchor),
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


def found_results(anchor: Node) -> dict[int | None, Node]:
    """Return the results of a gradient of attention that are read, by number; that of x must be."""
    found = {result_index(user): user for user in anchor.users}
    if 0 not in found:
        raise Refusal("the gradient of x is not read")
    return found


def read_edges(inner: Inner, anchor: Node) -> tuple[int, ...]:
    """Return the numbers of rowptr and col, of the CSR and of its transpose."""
    return tuple(inner.operand(n, "the CSR") for n in unpack(anchor, "rowptr", "col", "rowptr_t", "col_t"))


def read_results(
    inner: Inner,
    found: dict[int | None, Node],
    parts: Sequence[Node | None],
    ends: Sequence[ConvertedRows],
) -> tuple[tuple[int | None, ...], RowProgram]:
    """Return the numbers of results beside the gradient of x, and the row program of that gradient.

    Args:
        inner: the group.
        found: the results that are read, by number.
        parts: the other results, divided where the group divides them; None where one is not read.
        ends: rows that the group reads, with the conversions that it holds.
    """
    numbers = tuple(None if part is None else inner.results.get(part) for part in parts)
    inner.results = {value: index for value, index in inner.results.items() if value not in parts}
    covered = {first_operand(found[0]), *found.values(), *(part for part in parts if part is not None)}
    covered |= {node for end in ends for node in end.conversions}
    return numbers, build.build(inner, build.read_chain(inner, found[0]), covered)
