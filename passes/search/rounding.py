"""The values that an op sees once its operands are rounded: low precision in plain float32.

``op(rounded operands)`` equals the op's quantized form up to the rounding of FP32 sums, and runs as
fast as the op itself; a test holds the two together.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from gnnc.ir.nodes import argument
from gnnc.ir.op import op_of
from gnnc.ir.quantized import MAX_SHIFT, qmax_of
from gnnc.passes.quantization.number_formats import LOW_OPERANDS, Option
from gnnc.passes.quantization.observe import CANDIDATES

HEADROOM = {candidate.granularity: candidate.headroom for candidate in CANDIDATES}

_FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def round_operands(node: Node, args: tuple[Any, ...], option: Option, growth: float = 1.0) -> tuple[Any, ...]:
    """Return the arguments of ``node`` with its feature operands rounded as ``option`` says.

    Args:
        node: a primitive with a low form.
        args: its arguments, tensors in place of nodes.
        option: the precision and granularity.
        growth: how much larger these values are than those that static scales were taken from.
    """
    op = op_of(node)
    assert op is not None
    rounded = list(args)
    for position in LOW_OPERANDS[op.name]:
        rounded[position] = _round(args[position], option, growth)
    if op.name == "gemm" and option.precision.is_integer:
        rounded[0] = _round_matrix(args[0], option.precision.activation_bits)
        rounded[1] = _round_weight(node, args[1], option.precision.weight_bits)
    return tuple(rounded)


def _round(x: Tensor, option: Option, growth: float) -> Tensor:
    if not option.precision.is_integer:
        return x.to(_FLOATS[option.precision.name]).to(x.dtype)
    bits = option.precision.activation_bits
    if option.granularity in (None, "row"):
        return round_rows(x, bits)
    largest = x.abs().amax() * HEADROOM[option.granularity] / growth if x.numel() else x.new_zeros(())
    return round_static(x, largest / qmax_of(bits), bits, shifted=option.granularity == "row_pow2")


def _round_matrix(x: Tensor, bits: int) -> Tensor:
    return round_rows(x.reshape(-1, x.shape[-1]), bits).reshape(x.shape)


def _round_weight(node: Node, w: Tensor, bits: int) -> Tensor:
    """A scale for each output channel, which is a row, or a column where ``w_is_kn``."""
    if argument(node, 3, "w_is_kn", False):
        return round_rows(w.t(), bits).t()
    return round_rows(w, bits)


def round_rows(x: Tensor, bits: int) -> Tensor:
    """``x`` in ``bits`` bits and back, with a scale for each row (index of dimension 0)."""
    ops = torch.ops.gnnc
    scale = ops.scale(x, "row", bits)
    return ops.dequantize(ops.quantize(x, scale, "row", None, bits), scale, "row")


def round_static(x: Tensor, base: Tensor, bits: int, *, shifted: bool) -> Tensor:
    """``x`` in ``bits`` bits and back, under one scale, or under ``base / 2^k`` for each row."""
    ops = torch.ops.gnnc
    rows = x.reshape(x.shape[0], -1)
    if not shifted:
        return ops.dequantize(ops.quantize(rows, base, "tensor", None, bits), base, "tensor").reshape(x.shape)
    shift = ops.row_shift(rows, base, bits)
    codes = ops.quantize(rows, base, "tensor", shift, bits).float() * torch.exp2(
        (MAX_SHIFT - shift.float())[:, None]
    )
    return ops.dequantize(codes, base, "tensor", -MAX_SHIFT).reshape(x.shape)
