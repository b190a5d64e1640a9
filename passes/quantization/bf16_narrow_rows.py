"""Widen: rows so narrow that codes are no quicker to gather take bf16 instead of int8.

Only where int8 is what the whole model was asked for: an op that was named, and what ``auto`` weighed,
keep theirs. bf16 has the range of FP32, and at most half the error of 8 bits with a scale a row.
"""

from collections.abc import Collection
from typing import Any

from torch.fx import Node

from gnnc.ir.op import op_of
from gnnc.passes.base import Context
from gnnc.passes.quantization.number_formats import AGGREGATIONS, CHOSEN, LOW_OPERANDS, width_of
from gnnc.passes.quantization.observe import Candidate, Observation
from gnnc.precision import BF16
from gnnc.target import NarrowRows


def widen(
    node: Node, ctx: Context, candidates: Collection[Candidate], seen: Observation | None, limit: float
) -> None:
    """Give ``node`` bf16, or the granularity that pays, where int8 of its rows does not pay.

    Args:
        node: a primitive of low precision.
        ctx: takes a note of what changes.
        candidates: the granularities that it may take, where it aggregates.
        seen: what the examples say of its rows.
        limit: mean relative error of a row up to which a granularity is good enough.
    """
    asked = node.meta["precision"]
    if node.meta.get(CHOSEN, True) or not asked.is_integer or BF16.name not in ctx.target.precisions:
        return
    ways = ["row"] if _name(node) == "sddmm" else [c.granularity for c in candidates]
    paying = [way for way in ways if _pays(node, way, ctx.target.narrow_rows)]
    if len(paying) == len(ways):
        return
    good = [way for way in paying if seen is not None and seen.errors[way] <= limit]
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
    return narrow_rows.pays(granularity, _reduce(node), columns, head)


def _name(node: Node) -> str:
    op = op_of(node)
    assert op is not None
    return op.name


def _columns(node: Node) -> int | None:
    return width_of(node.args[LOW_OPERANDS[_name(node)][-1]])


def _heads(node: Node) -> int:
    """Heads of an edge's values, of its dot products, or 1."""
    each: Any = {"spmm": node.args[2], "sddmm": node}.get(_name(node))
    return (width_of(each) or 1) if isinstance(each, Node) else 1


def _reduce(node: Node) -> Any:
    assert _name(node) in AGGREGATIONS
    return node.args[4 if _name(node) == "spmm" else 3]
