"""Plan of an attention kernel: its operands, its constants, and the row program."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.attention import Attention, match_attention
from gnnc.ir.nodes import argument, unpack
from gnnc.runtime.plans.converted_rows import read_rows
from gnnc.runtime.plans.spmm import heads_of
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Inner, Refusal, RowProgram, planned

ADDITIVE = 0
BODY = 3
_KINDS = {"add": ADDITIVE, "dot": 1, "logits": 2, "body": BODY}


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of the kernel's operands and its constants; None where absent.

    Attributes:
        rowptr, col, x, x_scale: operands of the weighted sum.
        kind: number of the formula of the logits: ``add``, ``dot``, ``logits`` or ``body`` of `Attention`.
        a_src, a_dst, edge: operands of the logits; ``a_src`` before conversions to FP32 that the group holds.
        a_src_scale: scales of quantized rows of ``a_src``.
        body, constants: text of a body and the constants that it reads.
        scale, slope, eps: constants of the logits and of the softmax.
        heads: number of softmaxes a row.
        width: columns of the result.
        alpha: number of the result that holds the attention weights; None where no node reads them.
        program: row program of the result.
    """

    rowptr: int
    col: int
    x: int
    x_scale: int | None
    kind: int
    a_src: int | None
    a_dst: int | None
    edge: int | None
    a_src_scale: int | None
    body: str
    constants: tuple[int, ...]
    scale: float
    slope: float
    eps: float
    heads: int
    width: int
    alpha: int | None
    program: RowProgram


@planned
def plan(node: Node) -> Plan:
    """Read the parts of the attention and the row program behind it."""
    inner = Inner(node)
    anchor = inner.only("gnnc.spmm.default", "gnnc.qspmm.default")
    match = match_attention(anchor, bodies=True)
    if match is None:
        raise Refusal("the fused graph is not an attention")
    return _plan(inner, anchor, match)


def _plan(inner: Inner, anchor: Node, match: Attention) -> Plan:
    rowptr, col, x = unpack(anchor, "rowptr", "col", "x")
    x_scale = argument(anchor, "x_scale", None)
    width = build.fixed_width(anchor)
    heads = heads_of(match.softmax)
    _check(match, x, width, heads)
    a_src = None if match.a_src is None else read_rows(inner, match.a_src)
    return Plan(
        rowptr=inner.operand(rowptr, "rowptr"),
        col=inner.operand(col, "col"),
        x=inner.operand(x, "x"),
        x_scale=inner.optional(x_scale, "the scale of x"),
        kind=_KINDS[match.kind],
        a_src=None if a_src is None else inner.operand(a_src.values, "the source part"),
        a_dst=inner.optional(match.a_dst, "the destination part"),
        edge=inner.optional(match.edge, "the edge part"),
        a_src_scale=None if a_src is None else inner.optional(a_src.scale, "a scale of rows"),
        body=match.body,
        constants=tuple(inner.operand(constant, "a constant") for constant in match.constants),
        scale=float(match.scale),
        slope=float(match.slope),
        eps=float(match.eps),
        heads=heads,
        width=width,
        alpha=inner.results.get(match.softmax),
        program=_program(inner, anchor, match, () if a_src is None else a_src.conversions),
    )


def _program(inner: Inner, anchor: Node, match: Attention, conversions: tuple[Node, ...]) -> RowProgram:
    """Return the row program, without the attention weights: the kernel itself writes them."""
    others = {node: index for node, index in inner.results.items() if node is not match.softmax}
    inner.results, results = others, inner.results
    program = build.build(inner, build.read_chain(inner, anchor), {*match.covers, *conversions})
    inner.results = results
    return program


def _check(match: Attention, x: Node, width: int, heads: int) -> None:
    if width % heads:
        raise Refusal(f"{heads} heads do not divide a width of {width}")
    dtypes: list[Any] = [n.meta["val"].dtype for n in (match.a_src, match.a_dst, match.edge) if n is not None]
    if any(dtype != torch.float32 for dtype in dtypes):
        raise Refusal("the logits are not made from float32")
    if x.meta["val"].dtype not in build.ROW_DTYPES:
        raise Refusal(f"x is {x.meta['val'].dtype}")
