"""Rounding of operands to a low precision and back, in float32.

``op(rounded operands)`` equals the op's quantized form up to the rounding of FP32 sums, and runs as
fast as the op itself; a test holds the two together.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from gnnc.ir.nodes import argument
from gnnc.ir.op import op_of
from gnnc.ir.qtype import QType
from gnnc.ir.quantized import MAX_SHIFT
from gnnc.ir.source import source_of
from gnnc.passes.quantization.number_formats import FLOAT_DTYPES, Option
from gnnc.passes.quantization.observe import HEADROOM


def round_operands(
    node: Node,
    args: tuple[Any, ...],
    option: Option,
    growth: float = 1.0,
    gradients: Collection[Node] = (),
) -> tuple[Any, ...]:
    """Return the arguments of ``node`` with its feature operands rounded as ``option`` says.

    Args:
        node: a primitive with a low form.
        args: its arguments, tensors in place of nodes.
        option: the precision and granularity.
        growth: how much larger these values are than those that static scales were taken from.
        gradients: the nodes that are gradients, which fp16 takes times a power of two.
    """
    op = op_of(node)
    assert op is not None
    rounded = list(args)
    for position in map(op.parameters.index, op.low_operands):
        if op.name == "gemm_tn" and option.precision.is_quantized and _is_given(node.args[position]):
            continue
        if option.precision.name == "fp16" and node.args[position] in gradients:
            rounded[position] = _round_scaled(args[position], option)
        else:
            is_gradient = node.args[position] in gradients
            rounded[position] = _round(args[position], option, growth, is_gradient)
    if op.name == "gemm" and option.precision.is_quantized:
        rounded[0] = _round_matrix(args[0], _qtype(option, node.args[0] in gradients))
        rounded[1] = _round_weight(node, args[1], option.precision.weight_qtype())
    return tuple(rounded)


def _is_given(value: Any) -> bool:
    """Return whether a value is an argument of the model, which the product over nodes takes as it is."""
    source = source_of(value)
    return source is not None and source.kind == "input"


def _round_scaled(x: Tensor, option: Option) -> Tensor:
    scale = torch.ops.gnnc.fp16_scale(x)
    return _round(x * scale, option, 1.0, True) / scale


def _qtype(option: Option, is_gradient: bool) -> QType:
    precision, granularity = option.precision, option.granularity or "row"
    return precision.gradient_qtype(granularity) if is_gradient else precision.activation_qtype(granularity)


def _round(x: Tensor, option: Option, growth: float, is_gradient: bool) -> Tensor:
    if not option.precision.is_quantized:
        return x.to(FLOAT_DTYPES[option.precision.name]).to(x.dtype)
    qtype = _qtype(option, is_gradient)
    if qtype.granularity == "row":
        return round_rows(x, qtype)
    largest = x.abs().amax() * HEADROOM[qtype.granularity] / growth if x.numel() else x.new_zeros(())
    return round_static(x, largest / qtype.qmax, qtype)


def _round_matrix(x: Tensor, qtype: QType) -> Tensor:
    return round_rows(x.reshape(-1, x.shape[-1]), qtype).reshape(x.shape)


def _round_weight(node: Node, w: Tensor, qtype: QType) -> Tensor:
    """Round with a scale for each output channel, which is a row, or a column where ``w_is_kn``."""
    if argument(node, "w_is_kn"):
        return round_rows(w.t(), qtype).t()
    return round_rows(w, qtype)


def round_rows(x: Tensor, qtype: QType) -> Tensor:
    """Return ``x`` quantized with a scale for each row (index of dimension 0) and dequantized."""
    ops, text = torch.ops.gnnc, str(qtype)
    scale = ops.scale(x, text)
    return ops.dequantize(ops.quantize(x, scale, text), scale, "row")


def round_static(x: Tensor, base: Tensor, qtype: QType) -> Tensor:
    """Return ``x`` quantized with the scale ``base``, or ``base / 2^k`` for each row, and dequantized."""
    ops, text = torch.ops.gnnc, str(qtype)
    rows = x.reshape(x.shape[0], -1)
    if qtype.granularity == "tensor":
        return ops.dequantize(ops.quantize(rows, base, text), base, "tensor").reshape(x.shape)
    shift = ops.row_shift(rows, base, text)
    factor = torch.exp2((MAX_SHIFT - shift.float())[:, None])
    quantized = ops.quantize(rows, base, text, shift).float() * factor
    return ops.dequantize(quantized, base, "tensor", -MAX_SHIFT).reshape(x.shape)
