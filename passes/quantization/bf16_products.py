"""Bf16 for products of inputs whose rows take longer to quantize than to multiply: very wide or narrow ones.

The kernel of a product quantizes rows of FP32 as it loads them: it needs the largest magnitude of a row
before its first value. Rows that fit into shared memory are read once. Wider ones are read twice, where a
product in 16 bits reads them once; and most of the time of such a product is that read. Rows narrower than
the inner width of one integer instruction are padded to it, and their scales take longer than their products.
bf16 has the range of FP32.
"""

from torch.fx import Node

from gnnc.ir.aten import VIEWS
from gnnc.ir.nodes import argument, aten_name, first_operand, is_float
from gnnc.ir.op import op_of
from gnnc.ir.source import source_of
from gnnc.passes.base import Context
from gnnc.passes.quantization.number_formats import may_take_bf16, width_of
from gnnc.precision import BF16, Precision
from gnnc.target import Target


def use_bf16_for_product(node: Node, ctx: Context) -> None:
    """Give a product bf16 where its rows are given in FP32, and too wide to be quantized at once or narrow.

    Args:
        node: a primitive of low precision.
        ctx: says how wide and how narrow rows may be, and takes a note.
    """
    asked: Precision = node.meta["precision"]
    if not may_take_bf16(node, ctx.target):
        return
    op = op_of(node)
    if op is None or op.name != "gemm":
        return
    x = argument(node, "x")
    width = width_of(x)
    if width is None:
        return
    if reason := _why_bf16(x, width, ctx.target):
        node.meta["precision"] = BF16
        ctx.note(node, f"bf16, not {asked}: {reason}")


def _why_bf16(x: Node, width: int, target: Target) -> str | None:
    most, least = target.quantized_columns, target.least_quantized_columns
    if not _is_given(x):
        return None
    if most is not None and width > most:
        return f"rows of {width} columns are read twice where they are quantized"
    if width < least:
        return f"rows of {width} columns take longer to quantize than to multiply"
    return None


def _is_given(node: Node) -> bool:
    """Return whether a value is FP32 in memory before the call: an argument, or its rows by edge."""
    while aten_name(node) in VIEWS:
        node = first_operand(node)
    source = source_of(node)
    return source is not None and source.kind in ("input", "structure") and is_float(node)
