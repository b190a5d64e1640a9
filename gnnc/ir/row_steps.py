"""Translation of single fx nodes into instructions of a row program."""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import Node

from gnnc.ir.nodes import (
    all_ones,
    argument,
    arguments,
    is_float,
    is_number,
    operand,
    same_shape,
    shape_or_none,
    unpack,
)
from gnnc.torch_private import statically_known_true

Extent = Literal["row", "col", "full", "scalar"]


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction on the accumulator; ``kind`` is the row program's opcode in lower case.

    ``operands`` are fx nodes (None: absent, such as a batch norm without a bias), ``consts`` are
    plain numbers, in the order the instruction takes them.
    """

    kind: str
    operands: tuple[Node | None, ...] = ()
    consts: tuple[float, ...] = ()


_PLAIN = {
    "aten.relu.default": "relu",
    "aten.sigmoid.default": "sigmoid",
    "aten.tanh.default": "tanh",
    "aten.silu.default": "silu",
    "aten.exp.default": "exp",
    "aten.neg.default": "neg",
    "aten.abs.default": "abs",
    "aten.square.default": "square",
    "aten.sqrt.default": "sqrt",
    "aten.reciprocal.default": "recip",
    "aten.log.default": "log",
    "aten.rsqrt.default": "rsqrt",
}
_POWERS = {2.0: "square", 0.5: "sqrt", -1.0: "recip", -0.5: "rsqrt"}


def _leaky_relu(node: Node) -> tuple[Step, ...] | None:
    slope = argument(node, "negative_slope")
    return (Step("leaky_relu", consts=(float(slope),)),)


def _elu(node: Node) -> tuple[Step, ...] | None:
    alpha, scale, input_scale = (argument(node, name) for name in ("alpha", "scale", "input_scale"))
    if scale != 1 or input_scale != 1:
        return None
    return (Step("elu", consts=(float(alpha),)),)


def _gelu(node: Node) -> tuple[Step, ...] | None:
    tanh = argument(node, "approximate") == "tanh"
    return (Step("gelu_tanh" if tanh else "gelu"),)


def _softplus(node: Node) -> tuple[Step, ...] | None:
    usual = argument(node, "beta") == 1 and argument(node, "threshold") == 20
    return (Step("softplus"),) if usual else None


def _power(node: Node) -> tuple[Step, ...] | None:
    exponent = argument(node, "exponent")
    kind = _POWERS.get(float(exponent)) if is_number(exponent) else None
    return (Step(kind),) if kind else None


def _clamp(node: Node) -> tuple[Step, ...] | None:
    low, high = argument(node, "min"), argument(node, "max")
    bounds = [("clamp_min", low), ("clamp_max", high)]
    given = [(kind, bound) for kind, bound in bounds if bound is not None]
    if not all(is_number(bound) for _, bound in given):
        return None
    return tuple(Step(kind, consts=(float(bound),)) for kind, bound in given)


def _one_bound(kind: str, name: str) -> Callable[[Node], tuple[Step, ...] | None]:
    def match(node: Node) -> tuple[Step, ...] | None:
        bound = argument(node, name)
        return (Step(kind, consts=(float(bound),)),) if is_number(bound) else None

    return match


def _layer_norm(node: Node) -> tuple[Step, ...] | None:
    shape = shape_or_none(operand(node, "input"))
    sizes, weight, bias, eps = unpack(node, "normalized_shape", "weight", "bias", "eps")
    if shape is None or not same_shape(sizes, shape[1:]):
        return None
    return (Step("layer_norm", (weight, bias), (float(eps),)),)


def _row_softmax(kind: str) -> Callable[[Node], tuple[Step, ...] | None]:
    def match(node: Node) -> tuple[Step, ...] | None:
        shape = shape_or_none(operand(node, "self"))
        last = shape is not None and len(shape) == 2 and argument(node, "dim") in (-1, 1)
        plain = argument(node, "dtype", None) in (None, torch.float32)
        plain = plain and not argument(node, "half_to_float", False)
        return (Step(kind),) if last and plain else None

    return match


def _batch_norm(node: Node) -> tuple[Step, ...] | None:
    return None if argument(node, "training") else batch_norm_step(node)


def batch_norm_step(node: Node) -> tuple[Step, ...] | None:
    """Return the step of a batch norm of a matrix by running statistics, or None for any other.

    Args:
        node: a call of ``aten.batch_norm`` or ``aten._native_batch_norm_legit_no_training``.
    """
    weight, bias, mean, var, eps = unpack(node, "weight", "bias", "running_mean", "running_var", "eps")
    shape = shape_or_none(operand(node, "input"))
    if mean is None or var is None or shape is None or len(shape) != 2:
        return None
    return (Step("batch_norm", (mean, var, weight, bias), (float(eps),)),)


def _relu_backward(node: Node) -> tuple[Step, ...] | None:
    """Match the gradient of a ReLU of a matrix: a bit for each value."""
    is_matrix = len(shape_or_none(node) or ()) == 2
    return (Step("mask_bits", (argument(node, "mask"),)),) if is_matrix else None


def _elu_backward(node: Node) -> tuple[Step, ...] | None:
    names = ("alpha", "scale", "input_scale", "is_result", "self_or_result")
    alpha, scale, input_scale, is_result, value = (argument(node, name) for name in names)
    if scale != 1 or input_scale != 1 or not is_float(value, torch.float32, torch.bfloat16):
        return None
    return (Step("elu_backward", (value,), (float(alpha), float(is_result))),)


def _leaky_relu_backward(node: Node) -> tuple[Step, ...] | None:
    value, slope = argument(node, "self"), argument(node, "negative_slope")
    if not is_float(value, torch.float32, torch.bfloat16):
        return None
    return (Step("leaky_relu_backward", (value,), (float(slope),)),)


def _threshold_backward(node: Node) -> tuple[Step, ...] | None:
    value, threshold = argument(node, "self"), argument(node, "threshold")
    takes = is_float(value, torch.float32, torch.bfloat16) and threshold == 0
    return (Step("threshold_backward", (value,)),) if takes else None


_SPECIAL: dict[str, Callable[[Node], tuple[Step, ...] | None]] = {
    "aten.leaky_relu.default": _leaky_relu,
    "aten.elu.default": _elu,
    "aten.gelu.default": _gelu,
    "aten.softplus.default": _softplus,
    "aten.pow.Tensor_Scalar": _power,
    "aten.clamp.default": _clamp,
    "aten.clamp_min.default": _one_bound("clamp_min", "min"),
    "aten.clamp_max.default": _one_bound("clamp_max", "max"),
    "aten.hardtanh.default": lambda node: _hardtanh(node),
    "aten.layer_norm.default": _layer_norm,
    "aten.softmax.int": _row_softmax("softmax"),
    "aten._softmax.default": _row_softmax("softmax"),
    "aten.log_softmax.int": _row_softmax("log_softmax"),
    "aten._log_softmax.default": _row_softmax("log_softmax"),
    "aten.batch_norm.default": _batch_norm,
    "gnnc.relu_backward.default": _relu_backward,
    "aten.elu_backward.default": _elu_backward,
    "aten.leaky_relu_backward.default": _leaky_relu_backward,
    "aten.threshold_backward.default": _threshold_backward,
}

GRADIENT_STEPS = frozenset(
    "mask_bits elu_backward leaky_relu_backward threshold_backward store_bits col_sum div_tensor "
    "fp16_scale".split()
)
"""Kinds of the steps of gradients, which not every backend has."""


def _hardtanh(node: Node) -> tuple[Step, ...] | None:
    low, high = argument(node, "min_val"), argument(node, "max_val")
    return Step("clamp_min", consts=(float(low),)), Step("clamp_max", consts=(float(high),))


def extent_of(operand: tuple[Any, ...], acc: tuple[Any, ...]) -> Extent | None:
    """Return how an operand of shape ``operand`` broadcasts to an accumulator of shape ``acc``."""
    if len(operand) > len(acc):
        return None
    padded = (1,) * (len(acc) - len(operand)) + operand
    if all_ones(padded):
        return "scalar"
    if len(operand) == len(acc) and same_shape(padded, acc):
        return "full"
    if statically_known_true(padded[0] == 1):
        return "col" if same_shape(padded[1:], acc[1:]) else None
    if statically_known_true(padded[0] == acc[0]) and all_ones(padded[1:]):
        return "row"
    return None


_SUFFIX = {"row": "row", "col": "col", "full": "full", "scalar": "tensor"}
_NEG = Step("neg")


def _combine(verb: str, other: Any, extent: Extent | None) -> tuple[Step, ...]:
    if extent is None:
        return (Step(f"{verb}_const", consts=(float(other),)),)
    return (Step(f"{verb}_{_SUFFIX[extent]}", (other,)),)


def _subtract(acc_first: bool, other: Any, extent: Extent | None) -> tuple[Step, ...]:
    """Return ``acc - other`` as ``-((-acc) + other)``, or ``other - acc`` as ``(-acc) + other``: exact."""
    if acc_first and extent is None:
        return (Step("add_const", consts=(-float(other),)),)
    added = (_NEG, *_combine("add", other, extent))
    return (*added, _NEG) if acc_first else added


def _divide(acc_first: bool, other: Any, extent: Extent | None) -> tuple[Step, ...] | None:
    if not acc_first:
        return (Step("recip"),) if extent is None and other == 1 else None
    if extent is not None:
        return _combine("div", other, extent)
    exact = _is_power_of_two(float(other))
    return (Step("mul_const", consts=(1.0 / float(other),)),) if exact else None


def _is_power_of_two(value: float) -> bool:
    mantissa, _ = torch.frexp(torch.tensor(value, dtype=torch.float64))
    return abs(mantissa.item()) == 0.5


_BINARY = {
    f"aten.{verb}.{overload}": verb
    for verb in ("add", "sub", "rsub", "mul", "div")
    for overload in ("Tensor", "Scalar")
}


def _apply(verb: str, acc_first: bool, other: Any, extent: Extent | None) -> tuple[Step, ...] | None:
    match verb:
        case "add" | "mul":
            return _combine(verb, other, extent)
        case "sub":
            return _subtract(acc_first, other, extent)
        case "rsub":
            return _subtract(not acc_first, other, extent)
        case "div":
            return _divide(acc_first, other, extent)
        case _:
            return None


def binary_steps(node: Node, acc: Container[object]) -> tuple[Step, ...] | None:
    """Return the steps of an elementwise op of the accumulator and a number or tensor, or None."""
    verb = _BINARY.get(str(node.target))
    if verb is None or argument(node, "alpha", 1) != 1:
        return None
    left, right = unpack(node, "self", "other")
    acc_first = left in acc
    used, other = (left, right) if acc_first else (right, left)
    if used not in acc or other in acc:
        return None
    if is_number(other):
        return _apply(verb, acc_first, other, None)
    if not isinstance(other, Node) or not is_float(other, torch.float32, torch.bfloat16, torch.float16):
        return None
    extent = extent_of(shape_or_none(other) or (), shape_or_none(used) or ())
    if extent is None or (extent != "full" and not is_float(other)):
        return None
    return _apply(verb, acc_first, other, extent)


def folded_steps(node: Node, acc: Container[object]) -> Iterator[tuple[tuple[Step, ...], tuple[Node, ...]]]:
    """Yield steps that stand for an op and for ops on its other operand, with these ops, ``node`` last.

    They are ``acc * (t + c)`` and ``acc + (t + c) * matrix`` for a tensor ``t`` of one element and a number
    ``c``: the arithmetic of a model on its own weights, such as ``1 + eps``, needs no launch of its own.
    """
    plain = binary_steps(node, acc)
    if plain is None or len(plain) != 1 or len(plain[0].operands) != 1:
        return
    (other,) = plain[0].operands
    assert other is not None
    if plain[0].kind == "mul_tensor":
        factor = _shifted(other, node)
        if factor.covers:
            yield (Step("mul_shifted", (factor.tensor,), (factor.shift,)),), (*factor.covers, node)
    elif plain[0].kind == "add_full":
        yield from _add_scaled(node, other, acc)


class _Factor(NamedTuple):
    """A factor ``tensor + shift`` (``tensor`` may be absent), and the ops that compute it."""

    tensor: Node | None
    shift: float
    covers: tuple[Node, ...] = ()


def _shifted(value: Any, reader: Node) -> _Factor:
    """Return a factor as the sum of a tensor of one element and a number, if only ``reader`` reads it."""
    if is_number(value):
        return _Factor(None, float(value))
    verb = _BINARY.get(str(value.target))
    if verb != "add" or set(value.users) != {reader} or argument(value, "alpha", 1) != 1:
        return _Factor(value, 0.0)
    tensor, shift = unpack(value, "self", "other")
    if isinstance(shift, Node):
        tensor, shift = shift, tensor
    if not isinstance(tensor, Node) or not is_number(shift) or not _is_scalar(tensor):
        return _Factor(value, 0.0)
    return _Factor(tensor, float(shift), (value,))


def _add_scaled(
    node: Node, product: Node, acc: Container[object]
) -> Iterator[tuple[tuple[Step, ...], tuple[Node, ...]]]:
    if _BINARY.get(str(product.target)) != "mul" or set(product.users) != {node} or not is_float(product):
        return
    matrix, scalar = unpack(product, "self", "other")
    if not isinstance(matrix, Node) or _is_scalar(matrix):
        matrix, scalar = scalar, matrix
    if not isinstance(matrix, Node) or matrix in acc or not is_float(matrix, torch.float32, torch.bfloat16):
        return
    if not same_shape(shape_or_none(matrix) or (), shape_or_none(product) or ()):
        return
    if not is_number(scalar) and not _is_scalar(scalar):
        return
    for factor in dict.fromkeys((_shifted(scalar, product), _Factor(scalar, 0.0))):
        if factor.tensor is None or isinstance(factor.tensor, Node):
            step = Step("add_scaled", (matrix, factor.tensor), (factor.shift,))
            yield (step,), (*factor.covers, product, node)


def _is_scalar(node: Any) -> bool:
    """Return whether a node is one FP32 number."""
    shape = shape_or_none(node) if isinstance(node, Node) else None
    return shape is not None and is_float(node) and all_ones(shape)


def _dequantize(node: Node, acc: Container[object]) -> tuple[Step, ...] | None:
    named = arguments(node)
    shape, granularity, exponent = shape_or_none(named["q"]), named["granularity"], named["exponent"]
    if named["q"] not in acc or shape is None:
        return None
    if granularity == "column" and len(shape) != 2:
        return None
    kind = {"tensor": "mul_tensor", "row": "mul_row", "column": "mul_col"}[granularity]
    power = (Step("mul_const", consts=(2.0**exponent,)),) if exponent else ()
    return (*power, Step(kind, (named["scale"],)))


def single_steps(node: Node, acc: Container[object]) -> tuple[Step, ...] | None:
    """Return the instructions of a node that makes the next accumulator by itself, or None."""
    name = str(node.target)
    if name == "gnnc.dequantize.default":
        return _dequantize(node, acc)
    if name not in _PLAIN and name not in _SPECIAL:
        return binary_steps(node, acc)
    # The first parameter of all these ops is the tensor itself, called `self` or `input`.
    source, *others = arguments(node).values()
    if source not in acc or any(other in acc for other in others if isinstance(other, Node)):
        return None
    return (Step(_PLAIN[name]),) if name in _PLAIN else _SPECIAL[name](node)
