"""Row scales: factors of whole rows, which commute with a linear layer on the columns."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.nodes import first_operand, holds_tensor, same_size, shape_of

_aten = torch.ops.aten
_SPREADS = (_aten.expand.default, _aten.unsqueeze.default, _aten.view.default, _aten.reshape.default)


@dataclass(frozen=True, slots=True)
class RowScale:
    """Factor with one number for each row, or one number for all rows.

    Attributes:
        value: the factor, of a shape that broadcasts to any number of columns.
        vector: the tensor that ``value`` is a reshape of.
    """

    value: Any
    vector: Any


def row_scale(operand: Any) -> RowScale | None:
    """Return ``operand`` of an elementwise product with ``[N, F]`` as a row scale, or None."""
    if isinstance(operand, int | float):
        return RowScale(operand, operand)
    if not holds_tensor(operand):
        return None
    if operand.target is _aten.expand.default and not _is_narrow(operand):
        operand = first_operand(operand)
    return RowScale(operand, _before_reshapes(operand)) if _is_narrow(operand) else None


def _is_narrow(node: Any) -> bool:
    """Return whether a tensor broadcasts along columns: no dimensions, or a last one of size 1."""
    shape = shape_of(node)
    return len(shape) <= 2 and (not shape or same_size(shape[-1], 1))


def _before_reshapes(node: Node) -> Node:
    while node.target in _SPREADS:
        before = first_operand(node)
        if not shape_of(before) or not same_size(shape_of(before)[0], shape_of(node)[0]):
            return node
        node = before
    return node
