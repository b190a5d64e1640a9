"""Matcher of the edge softmax, over the edges of each destination, in the spellings of models."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from gnnc.ir.nodes import (
    argument,
    aten_name,
    first_operand,
    holds_tensor,
    is_number,
    same_size,
    shape_of,
    unpack,
)
from gnnc.passes.edges.rowwise import Scatter, as_gather, as_scatter

_VERY_LOW = -1e30


@dataclass(frozen=True)
class Softmax:
    """Edge softmax ``exp(l - max) / (sum + eps)`` over the edges of each destination.

    Attributes:
        node: the division that ends it.
        logits: ``[E]``, ``[E, H]`` or ``[E, H, 1]``.
        total: the scatter that sums the exponentials, by the destinations.
        eps: the number that is added to the sum.
    """

    node: Node
    logits: Node
    total: Scatter
    eps: float


def as_softmax(node: Node) -> Softmax | None:
    """Read ``node`` as the division that ends an edge softmax, or None."""
    if node.op != "call_function" or aten_name(node) != "div.Tensor":
        return None
    weight, gathered = unpack(node, "self", "other")
    if not holds_tensor(weight) or not holds_tensor(gathered) or not _is_exp(weight):
        return None
    denominator = _denominator(gathered)
    if denominator is None or denominator.total.source is not weight:
        return None
    total, eps = denominator.total, denominator.eps
    shifted = first_operand(weight)
    logits, is_exact = _without_max(shifted, total) or (shifted, False)
    if not is_exact and eps != 0.0:
        return None  # with eps and not the maximum, small logits do not normalize to one
    least = 1.0 if is_exact else 0.0  # the exponential of the largest logit is 1
    if denominator.bound > least + min(eps, 0.0):
        return None
    return Softmax(node, logits, total, eps) if _is_narrow(logits) else None


def _is_exp(node: Node) -> bool:
    return aten_name(node) == "exp.default"


def _is_narrow(logits: Node) -> bool:
    """Return whether logits are ``[E]``, ``[E, H]`` or ``[E, H, 1]``."""
    shape = shape_of(logits)
    return len(shape) <= 2 or (len(shape) == 3 and same_size(shape[2], 1))


@dataclass(frozen=True)
class _Denominator:
    """Denominator ``(total + eps).clamp(min=bound)``, in either order."""

    total: Scatter
    eps: float
    bound: float


def _denominator(node: Node) -> _Denominator | None:
    """Read ``(sum + eps)[index]`` or ``sum[index] + eps``, with or without a bound."""
    node, outer_eps, outer_bound = _without_eps(node)
    gather = as_gather(node)
    if gather is None:
        return None
    table, inner_eps, inner_bound = _without_eps(gather.table)
    total = as_scatter(table)
    if not isinstance(total, Scatter) or total.reduce != "sum" or total.index is not gather.index:
        return None
    zero = aten_name(total.base) == "full.default" and argument(total.base, "fill_value") == 0
    return _Denominator(total, outer_eps + inner_eps, max(outer_bound, inner_bound)) if zero else None


def _without_eps(node: Node) -> tuple[Node, float, float]:
    """Return (x, eps, bound) of ``x + eps`` or ``x.clamp(min=bound)``; for another node, the node itself."""
    name = aten_name(node)
    if name in ("add.Tensor", "add.Scalar") and argument(node, "alpha") == 1:
        eps = argument(node, "other")
        return (first_operand(node), float(eps), -math.inf) if is_number(eps) else (node, 0.0, -math.inf)
    if name in ("clamp.default", "clamp_min.default") and argument(node, "max", None) is None:
        bound = argument(node, "min")
        return (first_operand(node), 0.0, float(bound)) if is_number(bound) else (node, 0.0, -math.inf)
    return node, 0.0, -math.inf


def _without_max(node: Node, total: Scatter) -> tuple[Node, bool] | None:
    """Return ``l`` of ``l - max(l)[index]``, and whether the maximum is exact where there are edges."""
    if aten_name(node) != "sub.Tensor" or argument(node, "alpha") != 1:
        return None
    logits, gathered = unpack(node, "self", "other")
    gather = as_gather(gathered) if holds_tensor(gathered) else None
    if gather is None or gather.index is not total.index:
        return None
    maximum, is_exact = _without_fixups(gather.table)
    top = as_scatter(maximum)
    if not isinstance(top, Scatter) or top.reduce != "max" or top.index is not total.index:
        return None
    neutral = not top.include_base or _is_very_low(top.base)
    return (logits, is_exact) if neutral and _undetached(top.source) is logits else None


def _undetached(node: Node) -> Node:
    """Return the operand of a ``detach``: a softmax has the same gradient with its maximum as without."""
    return first_operand(node) if aten_name(node) == "detach.default" else node


def readers(logits: Node) -> Iterator[Node]:
    """Yield the nodes that read logits, also detached."""
    for user in logits.users:
        yield from user.users if aten_name(user) == "detach.default" else (user,)


def _without_fixups(node: Node) -> tuple[Node, bool]:
    """Return the maxima before fixups, and whether fixups change nothing but rows without edges."""
    is_exact = True
    while (fixup := _fixed_up(node)) is not None:
        node, is_exact = fixup[0], is_exact and fixup[1]
    return node, is_exact


def _fixed_up(node: Node) -> tuple[Node, bool] | None:
    """Return the maxima that ``node`` changes, and whether it changes infinite ones only; or None."""
    name = aten_name(node)
    if name == "nan_to_num.default":
        return first_operand(node), True
    if name in ("clamp.default", "clamp_min.default"):
        return (first_operand(node), False) if argument(node, "max", None) is None else None
    if name == "masked_fill.Scalar":
        return first_operand(node), _is_infinite_mask(argument(node, "mask"), first_operand(node))
    if name not in ("where.self", "where.ScalarOther", "where.ScalarSelf"):
        return None
    condition, chosen, other = unpack(node, "condition", "self", "other")
    computed = [part for part in (chosen, other) if _is_computed(part)]
    if len(computed) != 1:
        return None
    (maxima,) = computed
    return maxima, (_is_finite_mask if maxima is chosen else _is_infinite_mask)(condition, maxima)


def _is_computed(part: Any) -> bool:
    return holds_tensor(part) and part.op == "call_function" and aten_name(part) != "full.default"


def _is_infinite_mask(mask: Any, top: Node) -> bool:
    """Return whether a mask marks infinite maxima: those of rows without edges, if logits are finite."""
    if aten_name(mask) in ("isinf.default", "isneginf.default"):
        return first_operand(mask) is top
    return aten_name(mask) == "eq.Scalar" and unpack(mask, "self", "other") == (top, -math.inf)


def _is_finite_mask(mask: Any, top: Node) -> bool:
    if aten_name(mask) in ("bitwise_not.default", "logical_not.default"):
        return _is_infinite_mask(first_operand(mask), top)
    if aten_name(mask) == "isfinite.default":
        return first_operand(mask) is top
    compares = aten_name(mask) in ("ne.Scalar", "gt.Scalar")
    return compares and unpack(mask, "self", "other") == (top, -math.inf)


def _is_very_low(node: Node) -> bool:
    return aten_name(node) == "full.default" and argument(node, "fill_value") <= _VERY_LOW
