"""Values that are never positive, such as the logits of a softmax minus their largest.

The exponential of such a value is at most 1, and changes by at most 0.4 times that value's relative error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from gnnc.ir.aten import CASTS, NONNEGATIVE, VIEWS
from gnnc.ir.body import parse_body
from gnnc.ir.nodes import argument, arguments, aten_name, is_number, is_result, op_name, outputs_of
from gnnc.ir.op import op_of

BODY_OPERANDS = {"i": "dst", "j": "src", "e": "edge", "c": "const"}
"""The operand of ``message`` and ``edge_map`` that holds the inputs of a body, by the first letter."""

_KEEPS_SIGN = frozenset(
    "expand index_select gather select slice sum mean amax amin transpose permute t".split()
)
_MAXIMA = frozenset("amax max maximum logsumexp".split())


@dataclass(frozen=True, slots=True)
class Operands:
    """The nodes that the inputs of a body stand for, and the operands of the body that those are in."""

    values: Mapping[str, Node] = field(default_factory=dict)
    outer: "Operands | None" = None

    @staticmethod
    def of(node: Node, outer: "Operands | None" = None) -> "Operands":
        """Return the operands of a ``message`` or ``edge_map``."""
        named = arguments(node)
        values = {
            f"{letter}{i}": value
            for letter, name in BODY_OPERANDS.items()
            for i, value in enumerate(named[name])
        }
        return Operands(values, outer)


def is_never_positive(value: Any, inside: Operands | None = None) -> bool:
    """Return whether a value is at most 0 for all values of its inputs.

    Args:
        value: a node, or a number.
        inside: the operands of the body that holds the node; None where it is in a graph.
    """
    if is_number(value):
        return value <= 0
    found = _looked_up(value, inside)
    if found is None:
        return False
    node, inside = found
    name, args = op_name(node), node.args
    if _has_factor(node):
        return False
    match name:
        case "neg":
            return _is_never_negative(args[0], inside)
        case "log_softmax" | "_log_softmax" | "log_sigmoid" | "log_sigmoid_forward":
            return True
        case "clamp" | "clamp_max":
            bound = argument(node, "max")
            return is_number(bound) and bound <= 0
        case "rsub":
            return is_never_positive(args[1], inside) and _is_never_negative(args[0], inside)
        case "sub":
            return (
                is_never_positive(args[0], inside)
                and _is_never_negative(args[1], inside)
                or _is_maximum(args[1], inside)
            )
        case "mul" | "div":
            first, second = args[:2]
            if name == "mul" and (_is_negative_of(first, second) or _are_signed(second, first, inside)):
                return True
            return _are_signed(first, second, inside)
        case "add":
            return all(is_never_positive(side, inside) for side in args[:2])
    return _keeps_sign(node) and is_never_positive(args[0], inside)


def _has_factor(node: Node) -> bool:
    """Return whether a sum or a difference multiplies its second operand by a factor, of any sign."""
    return op_name(node) in ("add", "sub", "rsub") and argument(node, "alpha", 1) != 1


def _is_negative_of(first: Any, second: Any) -> bool:
    """Return whether one of two values is the other with the other sign."""
    pairs = ((first, second), (second, first))
    return any(isinstance(a, Node) and op_name(a) == "neg" and a.args[0] is b for a, b in pairs)


def _are_signed(first: Any, second: Any, inside: Operands | None) -> bool:
    return is_never_positive(first, inside) and _is_never_negative(second, inside)


def _is_never_negative(value: Any, inside: Operands | None) -> bool:
    if is_number(value):
        return value >= 0
    found = _looked_up(value, inside)
    if found is None:
        return False
    node, inside = found
    name, args = op_name(node), node.args
    if _has_factor(node):
        return False
    match name:
        case "clamp" | "clamp_min":
            bound = argument(node, "min")
            return is_number(bound) and bound >= 0
        case "pow":
            return is_number(args[1]) and args[1] % 2 == 0
        case "neg":
            return is_never_positive(args[0], inside)
        case "mul" | "add" | "div":
            is_square = name == "mul" and args[0] is args[1]
            return is_square or all(_is_never_negative(side, inside) for side in args[:2])
    return name in NONNEGATIVE or (_keeps_sign(node) and _is_never_negative(args[0], inside))


def _is_maximum(value: Any, inside: Operands | None) -> bool:
    """Return whether a value is a maximum of something, as a softmax subtracts one."""
    found = _looked_up(value, inside)
    if found is None:
        return False
    node, inside = found
    if op_name(node) in _MAXIMA:
        return True
    if op_of(node) is not None:
        return arguments(node).get("reduce") == "max"
    return (_keeps_sign(node) or op_name(node).startswith("clamp")) and _is_maximum(node.args[0], inside)


def _keeps_sign(node: Node) -> bool:
    name = op_name(node)
    return (
        is_result(node) or aten_name(node) in VIEWS or name in _KEEPS_SIGN or name in CASTS or name == "max"
    )


def _looked_up(value: Any, inside: Operands | None) -> tuple[Node, Operands | None] | None:
    """Return the node that computes a value, and the operands of the body that it is in, or None.

    An input of a body stands for a node outside, and an op with a body for the result of its body.
    """
    while isinstance(value, Node):
        if value.op == "placeholder":
            if inside is None or str(value.target) not in inside.values:
                return None
            value, inside = inside.values[str(value.target)], inside.outer
            continue
        op = op_of(value)
        if (
            op is None
            or "body" not in op.parameters
            or arguments(value).get("reduce", "sum") not in ("sum", "mean")
        ):
            return value, inside
        value, inside = outputs_of(parse_body(arguments(value)["body"]).graph), Operands.of(value, inside)
    return None
