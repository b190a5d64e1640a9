"""The softmax over the edges of each destination, in the spellings that models use for it."""

import math
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from gnnc.ir.nodes import argument, aten_name, first_operand, holds_tensor, same_size, shape_of
from gnnc.passes.edges.rowwise import Scatter, as_gather, as_scatter

_VERY_LOW = -1e30


@dataclass(frozen=True)
class Softmax:
    """``exp(l - max) / (sum + eps)`` over the edges of each destination.

    Attributes:
        node: the division that ends it.
        logits: ``[E]``, ``[E, H]`` or ``[E, H, 1]``.
        total: the scatter that sums the exponentials: it has the index and the rows' number.
        eps: what is added to the sum.
    """

    node: Node
    logits: Node
    total: Scatter
    eps: float


def as_softmax(node: Node) -> Softmax | None:
    """Read ``node`` as the division that ends an edge softmax, or None."""
    if node.op != "call_function" or aten_name(node) != "div.Tensor":
        return None
    weight, gathered = node.args[:2]
    if not holds_tensor(weight) or not holds_tensor(gathered) or not _is_exp(weight):
        return None
    found = _denominator(gathered)
    if found is None or found.total.source is not weight:
        return None
    total, eps = found.total, found.eps
    shifted = first_operand(weight)
    logits, is_exact = _without_max(shifted, total) or (shifted, False)
    if not is_exact and eps != 0.0:
        return None  # with eps and not the maximum, small logits do not normalize to one
    least = 1.0 if is_exact else 0.0  # the exponential of the largest logit is 1
    if found.bound > least + min(eps, 0.0):
        return None
    return _of_rank(Softmax(node, logits, total, eps))


def _is_exp(node: Node) -> bool:
    return aten_name(node) == "exp.default"


def _of_rank(found: Softmax) -> Softmax | None:
    shape = shape_of(found.logits)
    narrow = len(shape) <= 2 or (len(shape) == 3 and same_size(shape[2], 1))
    return found if narrow else None


@dataclass(frozen=True)
class _Denominator:
    """``(total + eps).clamp(min=bound)``, in either order."""

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
    zero = aten_name(total.base) == "full.default" and total.base.args[1] == 0
    return _Denominator(total, outer_eps + inner_eps, max(outer_bound, inner_bound)) if zero else None


def _without_eps(node: Node) -> tuple[Node, float, float]:
    """What a number is added to, or what is not to be less than one; the first number, and the second."""
    name = aten_name(node)
    if len(node.args) != 2 or not isinstance(node.args[1], int | float):
        return node, 0.0, -math.inf
    if name in ("add.Tensor", "add.Scalar") and node.kwargs.get("alpha", 1) == 1:
        return first_operand(node), float(node.args[1]), -math.inf
    if name in ("clamp.default", "clamp_min.default"):
        return first_operand(node), 0.0, float(node.args[1])
    return node, 0.0, -math.inf


def _without_max(node: Node, total: Scatter) -> tuple[Node, bool] | None:
    """``l`` of ``l - max(l)[index]``, and whether that is the maximum in all rows with edges."""
    if aten_name(node) != "sub.Tensor" or argument(node, "alpha") != 1:
        return None
    logits, gathered = node.args[:2]
    gather = as_gather(gathered) if holds_tensor(gathered) else None
    if gather is None or gather.index is not total.index:
        return None
    maximum, is_exact = _without_fixups(gather.table)
    top = as_scatter(maximum)
    if not isinstance(top, Scatter) or top.reduce != "max" or top.index is not total.index:
        return None
    neutral = not top.include_base or _is_very_low(top.base)
    return (logits, is_exact) if neutral and top.source is logits else None


def _without_fixups(node: Node) -> tuple[Node, bool]:
    """Skip what replaces maxima; whether it does so only in rows without edges, which nobody reads."""
    is_exact = True
    while (found := _fixed_up(node)) is not None:
        node, is_exact = found[0], is_exact and found[1]
    return node, is_exact


def _fixed_up(node: Node) -> tuple[Node, bool] | None:
    """What ``node`` replaces values of, and whether they are all infinite."""
    name = aten_name(node)
    if name == "nan_to_num.default":
        return first_operand(node), True
    if name in ("clamp.default", "clamp_min.default"):
        return (first_operand(node), False) if len(node.args) == 2 else None
    if name == "masked_fill.Scalar":
        return first_operand(node), _says_infinite(node.args[1], first_operand(node))
    if name not in ("where.self", "where.ScalarOther", "where.ScalarSelf"):
        return None
    condition, chosen, other = node.args
    computed = [part for part in (chosen, other) if _is_computed(part)]
    if len(computed) != 1:
        return None
    (kept,) = computed
    return kept, (_says_finite if kept is chosen else _says_infinite)(condition, kept)


def _is_computed(part: Any) -> bool:
    return holds_tensor(part) and part.op == "call_function" and aten_name(part) != "full.default"


def _says_infinite(mask: Any, top: Node) -> bool:
    """Whether a mask is of infinite maxima: those of rows without edges, if all is well."""
    if aten_name(mask) in ("isinf.default", "isneginf.default"):
        return mask.args[0] is top
    return aten_name(mask) == "eq.Scalar" and mask.args == (top, -math.inf)


def _says_finite(mask: Any, top: Node) -> bool:
    if aten_name(mask) in ("bitwise_not.default", "logical_not.default"):
        return _says_infinite(mask.args[0], top)
    if aten_name(mask) == "isfinite.default":
        return mask.args[0] is top
    return aten_name(mask) in ("ne.Scalar", "gt.Scalar") and mask.args == (top, -math.inf)


def _is_very_low(node: Node) -> bool:
    return aten_name(node) == "full.default" and node.args[1] <= _VERY_LOW
