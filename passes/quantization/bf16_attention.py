"""Bf16 for attention: rows that give the logits, too, take bf16 where int8 is no quicker.

A kernel of attention that computes logits from gathered rows spends its time on their elements: int8 rows
are half as many bytes, and a conversion and a scale more. The change applies only where int8 was asked for
the whole model, as for narrow rows (``bf16_narrow_rows``).
"""

from torch.fx import Node

from gnnc.ir.attention import match_attention, with_features
from gnnc.passes.base import Context
from gnnc.passes.quantization.number_formats import may_take_bf16
from gnnc.precision import BF16


def use_bf16_for_attention(node: Node, ctx: Context, *, trains: bool) -> None:
    """Give the weighted sum of an attention bf16 where int8 of its rows does not pay.

    Args:
        node: a primitive of low precision.
        ctx: takes a note of what changes.
        trains: whether the graph has gradients, too, whose kernels read the same rows.
    """
    if not may_take_bf16(node, ctx.target) or not ctx.target.attention_bodies:
        return
    found = match_attention(node, bodies=True)
    if found is None or found.kind not in ("dot", "body"):
        return
    pays = ctx.target.narrow_rows
    if trains and not pays.trained_attention:
        kind = "attention in training"
    elif found.kind == "body" and not pays.body_attention:
        kind = "attention whose logits are computed from the rows that it sums"
    elif with_features(found) is not None and not pays.body_attention:
        kind = "attention with features of edges"
    else:
        return
    asked, node.meta["precision"] = node.meta["precision"], BF16
    ctx.note(node, f"bf16, not {asked}: {asked} is no faster here for {kind}")
