"""Translation of a body into the steps of ``gnnc_cpu.edge_body``, which work on tiles of edges."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from gnnc.ir.nodes import argument, aten_name, op_name, unpack
from gnnc.runtime.cpu.edge_opcodes import Binary, Steps, Unary
from gnnc.runtime.cpu.edge_steps import (
    Ids,
    Rows,
    Scales,
    Sums,
    Translator,
    Value,
    of_edges,
    register_of,
)
from gnnc.runtime.cpu.edge_tables import table_of
from gnnc.runtime.cpu.parts import Part
from gnnc.runtime.row_program.build import Refusal

_QUANTIZED = "int8/row"
_RIGHT = {"matmul": "other", "bmm": "mat2"}
"""Name of the right operand of a product of matrices."""
_POWERS = {2: Unary.SQUARE, 0.5: Unary.SQRT, -0.5: Unary.RSQRT, -1: Unary.RECIP}


def translate(text: str, operands: dict[str, Tensor], parts: Sequence[Part]) -> Steps:
    """Return the steps of a body.

    Args:
        text: the body.
        operands: a tensor of the shape and dtype of each operand, by name (``i0``, ``c0``); of all but
            constants the first size is not read.
        parts: the results, in the order of the body's values.

    Raises:
        Refusal: the body has something that the steps have not.
    """
    return Translator(text, operands, _SPECIAL).run(parts)


def _add(translator: Translator, node: Node) -> Value:
    left, right, alpha = unpack(node, "self", "other", "alpha")
    if alpha != 1:
        right = translator.binary(Binary.MUL, right, alpha) if isinstance(right, Node) else right * alpha
    return translator.binary(Binary.ADD if op_name(node) == "add" else Binary.SUB, left, right)


def _reversed(translator: Translator, node: Node) -> Value:
    if argument(node, "alpha") != 1:
        raise Refusal(f"{aten_name(node)} has a factor")
    return translator.binary(Binary.SUB, *unpack(node, "other", "self"))


def _divided(translator: Translator, node: Node) -> Value:
    if argument(node, "rounding_mode", None) is not None:
        raise Refusal(f"{aten_name(node)} rounds its quotient")
    return translator.binary(Binary.DIV, *unpack(node, "self", "other"))


def _power(translator: Translator, node: Node) -> Value:
    exponent = node.args[1]
    base = node.args[0]
    if exponent == 1:
        return translator.value_of(base)
    if exponent == 3:  # x * x * x, as in ATen
        return translator.binary(Binary.MUL, translator.unary(Unary.SQUARE, base), base)
    if isinstance(exponent, Node) or exponent not in _POWERS:
        raise Refusal(f"no step computes a power of {exponent}")
    return translator.unary(_POWERS[exponent], base)  # type: ignore[index]


def _leaky_relu(translator: Translator, node: Node) -> Value:
    return translator.unary(Unary.LEAKY_RELU, *unpack(node, "self", "negative_slope"))


def _elu(translator: Translator, node: Node) -> Value:
    x, alpha, *scales = unpack(node, "self", "alpha", "scale", "input_scale")
    if scales != [1, 1]:
        raise Refusal(f"{aten_name(node)} has scales")
    return translator.unary(Unary.ELU, x, alpha)


def _gelu(translator: Translator, node: Node) -> Value:
    x, approximate = unpack(node, "self", "approximate")
    return translator.unary(Unary.GELU if approximate == "none" else Unary.GELU_TANH, x)


def _softplus(translator: Translator, node: Node) -> Value:
    _plain_softplus(node)
    return translator.unary(Unary.SOFTPLUS, argument(node, "self"))


def _softplus_backward(translator: Translator, node: Node) -> Value:
    _plain_softplus(node)
    return translator.binary(Binary.SOFTPLUS_BACKWARD, *unpack(node, "grad_output", "self"))


def _plain_softplus(node: Node) -> None:
    if unpack(node, "beta", "threshold") != (1, 20):
        raise Refusal(f"{aten_name(node)} has another beta or threshold")


def _clamp(translator: Translator, node: Node) -> Value:
    x, low, high = (argument(node, name, None) for name in ("self", "min", "max"))
    if isinstance(low, Node) or isinstance(high, Node):
        raise Refusal(f"{aten_name(node)} has limits that are tensors")
    value = translator.value_of(x)
    if low is not None:
        value = translator.unary(Unary.CLAMP_MIN, value, low)
    return value if high is None else translator.unary(Unary.CLAMP_MAX, value, high)


def _threshold_backward(translator: Translator, node: Node) -> Value:
    grad, x, threshold = unpack(node, "grad_output", "self", "threshold")
    return translator.binary(Binary.THRESHOLD_BACKWARD, grad, x, threshold)


def _leaky_relu_backward(translator: Translator, node: Node) -> Value:
    grad, x, slope = unpack(node, "grad_output", "self", "negative_slope")
    return translator.binary(Binary.LEAKY_RELU_BACKWARD, grad, x, slope)


def _where(translator: Translator, node: Node) -> Value:
    return translator.where(*unpack(node, "condition", "self", "other"))


def _masked_fill(translator: Translator, node: Node) -> Value:
    x, mask, value = unpack(node, "self", "mask", "value")
    return translator.where(mask, value, x)


def _to_copy(translator: Translator, node: Node) -> Any:
    value, dtype = translator.value_of(argument(node, "self")), argument(node, "dtype", None)
    if isinstance(value, Ids):
        raise Refusal(f"{aten_name(node)} computes with integers of the edges")
    if dtype == torch.bool:
        return translator.binary(Binary.NE, of_edges(value), 0.0)
    return translator.narrowed(of_edges(value), dtype) if dtype == torch.bfloat16 else value


def _sum(translator: Translator, node: Node) -> Any:
    value, dims, keepdim = translator.value_of(argument(node, "self")), *_dims_of(node)
    if not isinstance(value, Value):
        raise Refusal("a sum over all edges is summed again")
    dims = list(range(value.table.dim())) if dims is None or list(dims) == [] else dims
    if not value.uniform and any(dim % value.table.dim() == 0 for dim in dims):
        return translator.total(value, dims, keepdim)
    return translator.fold(value, dims, keepdim)


def _dims_of(node: Node) -> tuple[Any, bool]:
    """Return the dimensions that are reduced (None or none: all), and whether they stay."""
    return argument(node, "dim", None), argument(node, "keepdim", False)


def _mean(translator: Translator, node: Node) -> Any:
    value, dims, keepdim = of_edges(translator.value_of(argument(node, "self"))), *_dims_of(node)
    if not dims or (not value.uniform and any(dim % value.table.dim() == 0 for dim in dims)):
        raise Refusal(f"{aten_name(node)} is taken over the edges")
    count = math.prod(value.table.shape[dim] for dim in dims)
    return translator.binary(Binary.DIV, translator.fold(value, dims, keepdim), float(count))


def _amax(translator: Translator, node: Node) -> Value:
    value, dims, keepdim = of_edges(translator.value_of(argument(node, "self"))), *_dims_of(node)
    if not dims or (not value.uniform and any(dim % value.table.dim() == 0 for dim in dims)):
        raise Refusal(f"{aten_name(node)} is taken over the edges")
    return translator.fold(value, dims, keepdim, largest=True)


def _layer_norm(translator: Translator, node: Node) -> Value:
    x, shape, weight, bias, eps = unpack(node, "input", "normalized_shape", "weight", "bias", "eps")
    value = of_edges(translator.value_of(x))
    dims, count = list(range(-len(shape), 0)), float(math.prod(shape))
    mean = translator.binary(Binary.DIV, translator.fold(value, dims, True), count)
    centered = translator.binary(Binary.SUB, value, mean)
    squares = translator.fold(translator.unary(Unary.SQUARE, centered), dims, True)
    variance = translator.binary(Binary.DIV, squares, count)
    inverse = translator.unary(Unary.RSQRT, translator.binary(Binary.ADD, variance, float(eps)))
    result = translator.binary(Binary.MUL, centered, inverse)
    if weight is not None:
        result = translator.binary(Binary.MUL, result, weight)
    return result if bias is None else translator.binary(Binary.ADD, result, bias)


def _linear(translator: Translator, node: Node) -> Any:
    x, weight, bias = unpack(node, "input", "weight", "bias")
    return translator.product(node, x, weight, bias, False)


def _mm(translator: Translator, node: Node) -> Any:
    x, weight = unpack(node, "self", "mat2")
    return translator.product(node, x, weight, None, True)


def _matmul(translator: Translator, node: Node) -> Any:
    x, weight = argument(node, "self"), argument(node, _RIGHT[op_name(node)])
    left, right = translator.value_of(x), translator.value_of(weight)
    if isinstance(right, Value) and right.uniform and right.table.dim() == 2:
        return translator.product(node, x, weight, None, True)
    return translator.matmul(of_edges(left), of_edges(right))


def _addmm(translator: Translator, node: Node) -> Any:
    if unpack(node, "beta", "alpha") != (1, 1):
        raise Refusal(f"{aten_name(node)} has factors")
    bias, x, weight = unpack(node, "self", "mat1", "mat2")
    return translator.product(node, x, weight, bias, True)


def _scale(translator: Translator, node: Node) -> Scales:
    x, qtype = unpack(node, "x", "qtype")
    if qtype != _QUANTIZED:
        raise Refusal(f"no step finds the scales of {qtype}")
    return Scales(of_edges(translator.value_of(x)))


def _are_of(scales: Any, rows: Value) -> bool:
    return isinstance(scales, Scales) and scales.rows is rows


def _quantize(translator: Translator, node: Node) -> Rows:
    x, scale, qtype, *rest = unpack(node, "x", "scale", "qtype", "shift", "seed")
    value, scales = of_edges(translator.value_of(x)), translator.value_of(scale)
    if qtype != _QUANTIZED or rest != [None, None] or not _are_of(scales, value):
        raise Refusal("no step quantizes with these scales")
    return translator.narrowed(value, torch.int8)


def _gemm(translator: Translator, node: Node) -> Value:
    x, weight, bias, is_kn = unpack(node, "x", "w", "bias", "w_is_kn")
    left, right = translator.value_of(x), translator.value_of(weight)
    if not isinstance(left, Rows) or bias is not None:
        raise Refusal("a product of matrices of 16 bits has another form")
    return translator.low_product(node, left, of_edges(right), is_kn)


def _qgemm(translator: Translator, node: Node) -> Sums:
    left, right = (translator.value_of(value) for value in unpack(node, "x", "w"))
    if not isinstance(left, Rows) or of_edges(right).const is None:
        raise Refusal("a product of integers has another form")
    return Sums(left, right)


def _dequantize(translator: Translator, node: Node) -> Any:
    x, scale, granularity, exponent = unpack(node, "q", "scale", "granularity", "exponent")
    sums, scales = translator.value_of(x), translator.value_of(scale)
    if not isinstance(sums, Sums) or exponent != 0 or sums.scaled != (granularity == "column"):
        raise Refusal("a product of integers is scaled by its rows, and then by its columns")
    if not sums.scaled and _are_of(scales, sums.left.rows):
        return Sums(sums.left, sums.weight, scaled=True)
    if sums.scaled and isinstance(scales, Value) and scales.const is not None and translator.is_whole(scales):
        return translator.low_product(node, sums.left, sums.weight, False, scales.const)
    raise Refusal("a product of integers has other scales than its operands")


def _index_select(translator: Translator, node: Node) -> Value:
    table, dim, ids = unpack(node, "self", "dim", "index")
    if dim != 0:
        raise Refusal(f"{aten_name(node)} selects columns")
    return translator.chosen(of_edges(translator.value_of(table)), translator.value_of(ids))


def _embedding(translator: Translator, node: Node) -> Value:
    table, ids = unpack(node, "weight", "indices")
    return translator.chosen(of_edges(translator.value_of(table)), translator.value_of(ids))


def _joined(translator: Translator, node: Node) -> Value:
    """Move the parts of a ``cat`` or a ``stack`` side by side."""
    if argument(node, "dim") % len(translator.shapes[node].shape) == 0:
        raise Refusal(f"{aten_name(node)} joins rows of edges")
    listed = list(node.args[0])  # type: ignore[arg-type]
    values = [of_edges(translator.value_of(part)) for part in listed]
    if len({value.uniform for value in values}) > 1:
        raise Refusal(f"{aten_name(node)} joins constants and values of edges")
    join = torch.cat if op_name(node) == "cat" else torch.stack
    starts = [sum(value.table.numel() for value in values[:number]) for number in range(len(values))]
    numbered = [table_of(v.table.shape) + start for v, start in zip(values, starts, strict=True)]
    order = join(numbered, argument(node, "dim"))
    place = torch.empty(order.numel(), dtype=torch.long)
    place[order.flatten()] = torch.arange(order.numel())
    result = translator.new(order.shape, values[0].uniform)
    for value, start in zip(values, starts, strict=True):
        places = place[start : start + value.table.numel()]
        register = translator.held(value)
        translator.move(register_of(result), register, places.tolist(), value.table.flatten().tolist())
    return result


_SPECIAL: dict[str, Callable[[Translator, Node], Any]] = {
    "add": _add,
    "sub": _add,
    "rsub": _reversed,
    "div": _divided,
    "pow": _power,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "gelu": _gelu,
    "softplus": _softplus,
    "softplus_backward": _softplus_backward,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "threshold_backward": _threshold_backward,
    "leaky_relu_backward": _leaky_relu_backward,
    "where": _where,
    "masked_fill": _masked_fill,
    "_to_copy": _to_copy,
    "sum": _sum,
    "mean": _mean,
    "amax": _amax,
    "layer_norm": _layer_norm,
    "scale": _scale,
    "quantize": _quantize,
    "gemm": _gemm,
    "qgemm": _qgemm,
    "dequantize": _dequantize,
    "linear": _linear,
    "mm": _mm,
    "addmm": _addmm,
    "matmul": _matmul,
    "bmm": _matmul,
    "index_select": _index_select,
    "embedding": _embedding,
    "cat": _joined,
    "stack": _joined,
}
