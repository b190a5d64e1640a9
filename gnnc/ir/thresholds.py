"""Comparisons and exponentials whose readers make no more of a small change than it is.

Such comparisons select between two values that are nearly equal where the comparison changes, as a ReLU by
hand does. Such exponentials are those of a sigmoid or a softplus by hand.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Node

from gnnc.ir.aten import CASTS
from gnnc.ir.nodes import argument, aten_name, is_number, is_view, op_name

LARGEST_JUMP = 2.0**-8
"""Largest jump of a function that counts as continuous: that of bf16 at 1."""

_LARGEST_EXPONENT = 80.0
_NEGATIONS = frozenset("logical_not bitwise_not".split())
_ZEROS = frozenset("zeros zeros_like new_zeros".split())
_FILLED = {"scalar_tensor": 0, "full": 1, "full_like": 1}
"""The position of the number that an op fills a tensor with."""


def is_continuous(comparison: Node) -> bool:
    """Return whether all that is made of a comparison changes no more than the compared value does.

    Such are a ReLU by hand, ``where(x > 0, x, 0)`` or ``x * (x > 0)``, ``x.masked_fill(x <= c, 0)`` with a
    small ``c``, and ``where(a > b, a, b)``.

    Args:
        comparison: a call of ``eq``, ``gt`` and so on.
    """
    if op_name(comparison) in ("eq", "ne"):
        return False
    compared, threshold = comparison.args[:2]
    users = list(comparison.users)
    if not isinstance(compared, Node) or not users:
        return False
    if isinstance(threshold, Node):
        return all(_picks_between(user, comparison, {compared, threshold}) for user in users)
    if not isinstance(threshold, int | float):
        return False
    return all(_keeps(user, comparison, compared, float(threshold)) for user in users)


def is_saturated(exponential: Node) -> bool:
    """Return whether only sigmoids, ``1 / (1 + e)``, and softplus, ``log(1 + e)``, read an exponential."""
    return bool(exponential.users) and all(_saturates(user, exponential) for user in exponential.users)


def _saturates(user: Node, exponential: Node) -> bool:
    name = op_name(user)
    if name == "log1p":
        return True
    other = next((side for side in user.args[:2] if side is not exponential), None)
    if name != "add" or not isinstance(other, int | float) or other <= 0 or not user.users:
        return False
    return all(
        op_name(reader) in ("reciprocal", "log") or (op_name(reader) == "div" and reader.args[1] is user)
        for reader in user.users
    )


def _picks_between(user: Node, mask: Node, values: set[Node]) -> bool:
    return op_name(user) == "where" and user.args[0] is mask and set(user.args[1:]) == values


def _keeps(user: Node, mask: Node, compared: Node, threshold: float) -> bool:
    """Return whether a reader of a mask is continuous in the compared value."""
    name = op_name(user)
    if name in _NEGATIONS or _keeps_values(user):
        return bool(user.users) and all(_keeps(next_, user, compared, threshold) for next_ in user.users)
    if name == "masked_fill":
        sides = [argument(user, "self"), argument(user, "value")]
        return argument(user, "mask") is mask and _meet(sides, compared, threshold)
    if name == "where":
        return len(user.args) == 3 and user.args[0] is mask and _meet(user.args[1:], compared, threshold)
    if aten_name(user) == "mul.Tensor":
        other = next((side for side in user.args if side is not mask), None)
        return abs(threshold) <= LARGEST_JUMP and other is compared
    return False


def _meet(sides: Sequence[Any], compared: Node, threshold: float) -> bool:
    """Return whether both sides of a selection are nearly equal where the compared value is the threshold."""
    first, second = (_value_at(side, compared, threshold) for side in sides)
    return first is not None and second is not None and abs(first - second) <= LARGEST_JUMP


def _value_at(side: Any, compared: Node, threshold: float) -> float | None:
    """Return the value of a number, or of a multiple of the compared value, at the threshold; else None."""
    if is_number(side):
        return float(side)
    if not isinstance(side, Node):
        return None
    if side is compared:
        return threshold
    name, args = op_name(side), side.args
    if name in _ZEROS:
        return 0.0
    if name in _FILLED:
        return float(args[_FILLED[name]]) if is_number(args[_FILLED[name]]) else None  # type: ignore[arg-type]
    if name == "neg" or (name == "mul" and is_number(args[1])):
        value, factor = _value_at(args[0], compared, threshold), args[1] if name == "mul" else -1
        return None if value is None else value * factor  # type: ignore[operator]
    value = _value_at(args[0], compared, threshold) if name in _FUNCTIONS or _keeps_values(side) else None
    return value if value is None or name not in _FUNCTIONS else _FUNCTIONS[name](side, value)


def _clamped(node: Node, value: float) -> float | None:
    low, high = argument(node, "min", None), argument(node, "max", None)
    if not all(bound is None or is_number(bound) for bound in (low, high)):
        return None
    return min(max(value, -math.inf if low is None else low), math.inf if high is None else high)


def _shifted(node: Node, value: float) -> float | None:
    shift = node.args[1]
    if not isinstance(shift, int | float) or node.kwargs:
        return None
    return value + shift if op_name(node) == "add" else value - shift


_FUNCTIONS: Mapping[str, Callable[[Node, float], float | None]] = {
    "exp": lambda _, value: math.exp(value) if value < _LARGEST_EXPONENT else None,
    "expm1": lambda _, value: math.expm1(value) if value < _LARGEST_EXPONENT else None,
    "add": _shifted,
    "sub": _shifted,
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamped),
}
"""The values of the branches of an ELU by hand at a threshold, from those of their first operand."""


def _keeps_values(node: Node) -> bool:
    return is_view(node) or op_name(node) == "expand" or op_name(node) in CASTS
