"""Bf16 for attention: an int8 model gathers rows in bf16 where int8 would be no faster.

A kernel that computes logits from the rows that it gathers spends its time on their elements, not on their
bytes. A row in int8 has half the bytes of one in bf16, but each element has to be converted, and each row
needs its scale. The change applies only where int8 was asked for the whole model, as for narrow rows
(``bf16_narrow_rows``).
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
