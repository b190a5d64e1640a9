"""Bf16 for narrow rows: rows so narrow that int8 is no quicker to gather take bf16 instead.

The change applies only where int8 was asked for the whole model: ops with an override and ops that ``auto``
weighed keep their precision. bf16 has the range of FP32, and at most half the error of 8 bits with a
scale a row.
"""

import math
from collections.abc import Collection

from torch.fx import Node

from gnnc.ir.nodes import argument, arguments
from gnnc.ir.op import op_of
from gnnc.ir.qtype import Granularity
from gnnc.passes.base import Context
from gnnc.passes.quantization.number_formats import may_take_bf16, width_of
from gnnc.passes.quantization.observe import Candidate, Observation
from gnnc.precision import BF16, Precision
from gnnc.target import NarrowRows


def use_bf16_for_narrow_rows(
    node: Node, ctx: Context, candidates: Collection[Candidate], observed: Observation | None, limit: float
) -> None:
    """Give ``node`` bf16, or the granularity that pays, where int8 of its rows does not pay.

    Args:
        node: a primitive of low precision.
        ctx: takes a note of what changes.
        candidates: the granularities that it may take, where it aggregates.
        observed: the observation of its rows on the examples, or None.
        limit: mean relative error of a row up to which a granularity is good enough.
    """
    asked: Precision = node.meta["precision"]
    if not may_take_bf16(node, ctx.target):
        return
    ways: list[Granularity] = ["row"] if _name(node) == "sddmm" else [c.granularity for c in candidates]
    paying = [way for way in ways if _pays(node, way, ctx.target.narrow_rows)]
    if len(paying) == len(ways):
        return
    errors = {} if observed is None else observed.errors
    good = [way for way in paying if errors.get(asked.activation_qtype(way), math.inf) <= limit]
    if good:
        node.meta["granularity"] = good[0]
        return
    node.meta["precision"] = BF16
    columns = _columns(node)
    ctx.note(node, f"bf16, not {asked}: {asked} makes gathering rows of {columns} columns no faster here")


def _pays(node: Node, granularity: str, narrow_rows: NarrowRows) -> bool:
    columns = _columns(node)
    if columns is None:
        return True
    head = columns // _heads(node)
    if _name(node) == "sddmm":
        return columns > narrow_rows.dot_columns and head > narrow_rows.columns
    return narrow_rows.pays(granularity, arguments(node)["reduce"], columns, head)


def _name(node: Node) -> str:
    op = op_of(node)
    assert op is not None
    return op.name


def _columns(node: Node) -> int | None:
    op = op_of(node)
    assert op is not None
    return width_of(argument(node, op.low_operands[-1]))


def _heads(node: Node) -> int:
    """Return the heads of an edge's values or dot products, or 1."""
    per_edge = node if _name(node) == "sddmm" else arguments(node).get("value")
    return width_of(per_edge) or 1
