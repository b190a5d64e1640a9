"""C++ of the elementwise ops of a body: their texts, by the name of the ATen op."""

from collections.abc import Mapping
from typing import Any

from gnnc.runtime.cuda.kernels.body_places import number_of
from gnnc.runtime.row_program.build import Refusal

UNARY = {
    "relu": "larger_or_nan({0}, 0.0f)",
    "sigmoid": "__fdividef(1.0f, 1.0f + expf(-{0}))",
    "tanh": "tanhf({0})",
    "exp": "expf({0})",
    "log": "logf({0})",
    "neg": "(-{0})",
    "abs": "fabsf({0})",
    "sqrt": "sqrtf({0})",
    "rsqrt": "(1.0f / sqrtf({0}))",
    "reciprocal": "(1.0f / {0})",
    "square": "({0} * {0})",
    "silu": "__fdividef({0}, 1.0f + expf(-{0}))",
    "sin": "sinf({0})",
    "cos": "cosf({0})",
    "floor": "floorf({0})",
    "sign": "(({0} > 0.0f) - ({0} < 0.0f))",
    "logical_not": "({0} == 0.0f ? 1.0f : 0.0f)",
    "clone": "{0}",
    "alias": "{0}",
    "detach": "{0}",
}
BINARY = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "rsub": "({1} - {0})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "maximum": "step::larger({0}, {1})",
    "minimum": "step::smaller({0}, {1})",
    "eq": "({0} == {1} ? 1.0f : 0.0f)",
    "ne": "({0} != {1} ? 1.0f : 0.0f)",
    "gt": "({0} > {1} ? 1.0f : 0.0f)",
    "ge": "({0} >= {1} ? 1.0f : 0.0f)",
    "lt": "({0} < {1} ? 1.0f : 0.0f)",
    "le": "({0} <= {1} ? 1.0f : 0.0f)",
    "pow": "powf({0}, {1})",
    "clamp_min": "step::larger({0}, {1})",
    "clamp_max": "step::smaller({0}, {1})",
    "logical_and": "({0} != 0.0f && {1} != 0.0f ? 1.0f : 0.0f)",
    "logical_or": "({0} != 0.0f || {1} != 0.0f ? 1.0f : 0.0f)",
}
SECOND = {"pow": "exponent", "clamp_min": "min", "clamp_max": "max"}
"""Schema name of the second operand of a binary op, where it is not ``other``."""
POWERS = {
    2.0: "({0} * {0})",
    3.0: "({0} * {0} * {0})",
    0.5: "sqrtf({0})",
    -0.5: "(1.0f / sqrtf({0}))",
    -1.0: "(1.0f / {0})",
}
GRADIENTS = {
    "threshold_backward": ("self", "({x} <= {threshold} ? 0.0f : {grad})"),
    "leaky_relu_backward": ("self", "({x} > 0.0f ? {grad} : {grad} * {negative_slope})"),
    "sigmoid_backward": ("output", "({grad} * ((1.0f - {x}) * {x}))"),
    "tanh_backward": ("output", "({grad} * (1.0f - {x} * {x}))"),
    "silu_backward": ("self", "({grad} * {sigmoid} * (1.0f + {x} * (1.0f - {sigmoid})))"),
    "softplus_backward": ("self", "({x} > {threshold} ? {grad} : {grad} * {sigmoid})"),
    "gelu_backward": ("self", "({grad} * ({normal} + {x} * 0.39894228040143268f * expf(-0.5f * {x} * {x})))"),
    "elu_backward": ("self_or_result", "({x} > 0.0f ? {grad} : {grad} * {alpha} * expf({x}))"),
}
"""Gradients of activations: the schema name of their second operand, and the text."""
_OF_RESULT = {"elu_backward": "({x} > 0.0f ? {grad} : {grad} * ({x} + {alpha}))"}
"""Text of the gradients that read the activation's result in place of its operand."""
_PLAIN_OPTIONS = {"beta": 1, "scale": 1, "input_scale": 1, "approximate": "none"}
"""Options of activations that a body has one value of."""


def gradient(name: str, given: Mapping[str, Any], grad: str, x: str) -> str:
    """Return the C++ of the gradient of an activation.

    Args:
        name: the op.
        given: its arguments, by name.
        grad: the gradient of the activation's result.
        x: the value that the op reads beside it.

    Raises:
        Refusal: an option of the activation is not the plain one.
    """
    if any(given.get(option, plain) != plain for option, plain in _PLAIN_OPTIONS.items()):
        raise Refusal(f"the body has a {name} with options")
    numbers = {key: number_of(value) for key, value in given.items() if isinstance(value, int | float)}
    sigmoid = f"(1.0f / (1.0f + expf(-{x})))"
    normal = f"(0.5f * (1.0f + erff({x} * 0.70710678118654752f)))"
    text = GRADIENTS[name][1]
    text = _OF_RESULT.get(name, text) if given.get("is_result") else text
    return text.format(**numbers, grad=grad, x=x, sigmoid=sigmoid, normal=normal)
