"""Comparisons with a number that select between the compared value and a number near the threshold."""

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from gnnc.ir.aten import CASTS
from gnnc.ir.nodes import argument, aten_name, is_number, is_view, op_name

LARGEST_JUMP = 2.0**-8
"""Largest jump of a function that counts as continuous: that of bf16 at 1."""

_NEGATIONS = frozenset("logical_not bitwise_not".split())
_ZEROS = frozenset("zeros zeros_like new_zeros".split())
_FILLED = {"scalar_tensor": 0, "full": 1, "full_like": 1}
"""The position of the number that an op fills a tensor with."""


def is_continuous(comparison: Node) -> bool:
    """Return whether all that is made of a comparison of x with a number changes no more than x does.

    Such are a ReLU by hand, ``where(x > 0, x, 0)`` or ``x * (x > 0)``, and ``x.masked_fill(x <= c, 0)`` with
    a small ``c``.

    Args:
        comparison: a call of ``eq``, ``gt`` and so on, whose second argument is a number.
    """
    if op_name(comparison) in ("eq", "ne"):
        return False
    compared, threshold = comparison.args[:2]
    if not isinstance(compared, Node) or not isinstance(threshold, int | float):
        return False
    pending = list(comparison.users)
    return bool(pending) and all(_keeps(user, comparison, compared, float(threshold)) for user in pending)


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
    return _value_at(args[0], compared, threshold) if _keeps_values(side) else None


def _keeps_values(node: Node) -> bool:
    return is_view(node) or op_name(node) == "expand" or op_name(node) in CASTS
