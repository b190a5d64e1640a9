"""Scales of whole rows: what commutes with a linear layer that acts on the columns."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.nodes import holds_tensor, same_size, shape_of

_aten = torch.ops.aten
_SPREADS = (_aten.expand.default, _aten.unsqueeze.default, _aten.view.default, _aten.reshape.default)


@dataclass(frozen=True, slots=True)
class RowScale:
    """A factor with one number for each row, or one for all.

    Attributes:
        value: what to multiply with, of a shape that broadcasts to any number of columns.
        vector: the tensor behind its reshapes.
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
        operand = operand.args[0]
    return RowScale(operand, _behind(operand)) if _is_narrow(operand) else None


def _is_narrow(node: Any) -> bool:
    """Whether a tensor broadcasts along columns: no dimensions, or a last one of size 1."""
    shape = shape_of(node)
    return len(shape) <= 2 and (not shape or same_size(shape[-1], 1))


def _behind(node: Node) -> Node:
    while node.target in _SPREADS and holds_tensor(node.args[0]):
        before = node.args[0]
        assert isinstance(before, Node)
        if not shape_of(before) or not same_size(shape_of(before)[0], shape_of(node)[0]):
            return node
        node = before
    return node
