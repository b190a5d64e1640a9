"""Plan of an aggregation kernel: its operands, its constants, and the row program."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, unpack
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Inner, Refusal, RowProgram, planned

REDUCTIONS = {"sum": 0, "mean": 1, "max": 2, "min": 3}
_SEGMENTS = "gnnc.segment_reduce.default"
_TARGETS = ("gnnc.spmm.default", "gnnc.qspmm.default", _SEGMENTS)


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of the kernel's operands and its constants; None where absent.

    Attributes:
        rowptr, col, value, x, x_scale, shift: as in ``gnnc.qspmm``.
        reduce: number of the reduction.
        heads: heads of ``value``; rows of x are ``heads`` equal parts.
        width: columns of the result.
        program: row program of the result.
    """

    rowptr: int
    col: int | None
    value: int | None
    x: int
    x_scale: int | None
    shift: int | None
    reduce: int
    heads: int
    width: int
    program: RowProgram

    @property
    def is_sum(self) -> bool:
        """Return whether rows are added, not compared."""
        return self.reduce in (REDUCTIONS["sum"], REDUCTIONS["mean"])

    @property
    def is_plain_sum(self) -> bool:
        """Return whether rows are added unweighted, gathered by ``col``."""
        return self.is_sum and self.value is None and self.col is not None


@planned
def plan(node: Node) -> Plan:
    """Read operands and row program off an aggregation and the ops fused behind it."""
    inner = Inner(node)
    anchor = inner.only(*_TARGETS)
    rowptr, col, value, x, x_scale, shift, reduce = _arguments(anchor)
    _check(x, value)
    return Plan(
        rowptr=inner.operand(rowptr, "rowptr"),
        col=inner.optional(col, "col"),
        value=inner.optional(value, "value"),
        x=inner.operand(x, "x"),
        x_scale=inner.optional(x_scale, "the scale of x"),
        shift=inner.optional(shift, "the shift of x"),
        reduce=REDUCTIONS[reduce],
        heads=heads_of(value),
        width=build.fixed_width(anchor),
        program=build.build(inner, build.read_chain(inner, anchor), {anchor}),
    )


def heads_of(value: Any) -> int:
    """Return the number of heads of edge values, 1 where there are none."""
    if value is None or value.meta["val"].dim() == 1:
        return 1
    return build.fixed_width(value)


def _arguments(anchor: Node) -> tuple[Any, ...]:
    rowptr, x, reduce = unpack(anchor, "rowptr", "x", "reduce")
    col = argument(anchor, "perm" if str(anchor.target) == _SEGMENTS else "col")
    value, x_scale, shift = (argument(anchor, name, None) for name in ("value", "x_scale", "shift"))
    return rowptr, col, value, x, x_scale, shift, reduce


def _check(x: Node, value: Any) -> None:
    if x.meta["val"].dtype not in build.ROW_DTYPES:
        raise Refusal(f"x is {x.meta['val'].dtype}")
    build.fixed_width(x)
    if value is not None and value.meta["val"].dtype not in (torch.float32, torch.int8):
        raise Refusal(f"the edge values are {value.meta['val'].dtype}")
