"""Bf16 for wide inputs: products of input rows that are read twice to be quantized take bf16 instead.

The kernel of a product quantizes rows of FP32 as it loads them: it needs the largest magnitude of a row
before its first value. Rows that fit into shared memory are read once. Wider ones are read twice, where a
product in 16 bits reads them once; and most of the time of such a product is that read. bf16 has the range
of FP32.
"""

from torch.fx import Node

from gnnc.ir.aten import VIEWS
from gnnc.ir.nodes import argument, aten_name, first_operand, is_float
from gnnc.ir.op import op_of
from gnnc.ir.source import source_of
from gnnc.passes.base import Context
from gnnc.passes.quantization.number_formats import may_take_bf16, width_of
from gnnc.precision import BF16, Precision


def use_bf16_for_wide_input(node: Node, ctx: Context) -> None:
    """Give a product of an argument of the model bf16 where its rows are too wide to be quantized at once.

    Args:
        node: a primitive of low precision.
        ctx: says how wide a row may be, and takes a note.
    """
    asked: Precision = node.meta["precision"]
    if not may_take_bf16(node, ctx.target):
        return
    op, most = op_of(node), ctx.target.quantized_columns
    if op is None or op.name != "gemm" or most is None:
        return
    x = argument(node, "x")
    width = width_of(x)
    if width is None or width <= most or not _is_input(x):
        return
    node.meta["precision"] = BF16
    ctx.note(node, f"bf16, not {asked}: rows of {width} columns are read twice where they are quantized")


def _is_input(node: Node) -> bool:
    """Return whether a value is an FP32 argument of the call, under any view."""
    while aten_name(node) in VIEWS:
        node = first_operand(node)
    source = source_of(node)
    return source is not None and source.kind == "input" and is_float(node)
