"""Plan of an attention kernel: its operands, its constants, and the row program."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.attention import Attention, match_attention, with_features
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
        feature_own, features: rows and edge features whose dot products the logits have, too.
        feature_sum: number of the result that holds the weighted sums of the features.
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
    feature_own: int | None
    features: int | None
    feature_sum: int | None
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
    extended = with_features(match)
    is_inside = extended is not None and extended.feature_sum in inner.nodes
    return _plan(inner, anchor, extended if extended is not None and is_inside else match)


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
        feature_own=inner.optional(match.feature_own, "the rows of the edge features"),
        features=inner.optional(match.features, "the edge features"),
        feature_sum=None if match.feature_sum is None else inner.results[match.feature_sum],
        alpha=inner.results.get(match.softmax),
        program=_program(inner, anchor, match, () if a_src is None else a_src.conversions),
    )


def _program(inner: Inner, anchor: Node, match: Attention, conversions: tuple[Node, ...]) -> RowProgram:
    """Return the row program, without what the kernel itself writes: attention weights, sums of features."""
    own = (match.softmax, match.feature_sum)
    others = {node: index for node, index in inner.results.items() if node not in own}
    inner.results, results = others, inner.results
    program = build.build(inner, build.read_chain(inner, anchor), {*match.covers, *conversions})
    inner.results = results
    return program


def _check(match: Attention, x: Node, width: int, heads: int) -> None:
    if width % heads:
        raise Refusal(f"{heads} heads do not divide a width of {width}")
    dtypes: list[Any] = [n.meta["val"].dtype for n in _logit_operands(match) if n is not None]
    if any(dtype != torch.float32 for dtype in dtypes):
        raise Refusal("the logits are not made from float32")
    if x.meta["val"].dtype not in build.ROW_DTYPES:
        raise Refusal(f"x is {x.meta['val'].dtype}")


def _logit_operands(match: Attention) -> tuple[Node | None, ...]:
    return match.a_src, match.a_dst, match.edge, match.feature_own, match.features
