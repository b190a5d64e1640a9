"""Split of linear layers over concatenations that hold a matrix several times, under factors of its rows.

``cat([x, A, a * A, b * A]) W = x W0 + A W1 + a * (A W2) + b * (A W3)``: the wide matrix is never written,
and A is rounded once. The products are as many operations as before, and in FP32 the same up to the order
of the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.aten import VIEWS
from gnnc.ir.nodes import (
    argument,
    as_node,
    aten_name,
    first_operand,
    holds_tensor,
    operand,
    same_shape,
    same_size,
    shape_of,
    unpack,
)
from gnnc.ir.op import op_of
from gnnc.passes.base import Context
from gnnc.passes.rewrite.node_builder import NodeBuilder, drop_dead

_aten = torch.ops.aten
_ops = torch.ops.gnnc


@dataclass(frozen=True, slots=True)
class _Part:
    """Columns ``start .. stop`` of a concatenation: a matrix, times a factor for each row or none."""

    matrix: Node
    scale: Node | None
    start: int
    stop: int

    @property
    def width(self) -> int:
        """Columns of the part."""
        return self.stop - self.start


def split_concatenated(gm: fx.GraphModule, ctx: Context) -> None:
    """Split the linear layers of ``gm`` that read scaled or repeated matrices side by side, in place."""
    builder = NodeBuilder(gm)
    for node in list(gm.graph.nodes):
        if not _is_gemm(node) or len(shape_of(node)) != 2:
            continue
        parts = _parts(operand(node, "x"))
        split = [part for part in parts if _is_worth(part, parts, int(shape_of(node)[1]))]
        if split:
            rest = [part for part in parts if part not in split]
            node.replace_all_uses_with(_Split(node, builder).total(rest, split))
            ctx.note(
                node, f"{len(split)} parts of its input are multiplied by themselves, and scaled after it"
            )
    drop_dead(gm)


def _is_gemm(node: Node) -> bool:
    op = op_of(node)
    return op is not None and op.name == "gemm"


def _is_worth(part: _Part, parts: Sequence[_Part], width: int) -> bool:
    """Return whether a product of a part moves fewer bytes than the part among the others.

    A scaled part is written and read by itself, and again side by side with the others.
    """
    same = [other for other in parts if other.matrix is part.matrix and other.scale is not None]
    return bool(same) and 2 * part.width >= width


class _Split:
    """The products that take the place of a linear layer."""

    def __init__(self, gemm: Node, builder: NodeBuilder) -> None:
        self.gemm, self.builder = gemm, builder

    def total(self, rest: Sequence[_Part], split: Sequence[_Part]) -> Node:
        """Return the sum of the product of ``rest`` and those of each part of ``split``, and of the bias.

        The one matrix that no other product reads comes first: its kernel adds the others.
        """
        total = self._joined(rest) if rest else None
        for part in split:
            product = self._product(part.matrix, self._columns(part))
            if part.scale is not None:
                product = self._call(_aten.mul.Tensor, product, self._flat(part.scale))
            total = product if total is None else self._call(_aten.add.Tensor, total, product)
        assert total is not None
        bias = argument(self.gemm, "bias")
        return total if bias is None else self._call(_aten.add.Tensor, total, bias)

    def _joined(self, rest: Sequence[_Part]) -> Node:
        weights = [self._columns(part) for part in rest]
        if len(rest) == 1:
            return self._product(rest[0].matrix, weights[0])
        matrix = self._call(_aten.cat.default, [self._flat(part.matrix) for part in rest], 1)
        along = 0 if argument(self.gemm, "w_is_kn") else 1
        return self._product(matrix, self._call(_aten.cat.default, weights, along))

    def _product(self, matrix: Node, weight: Node) -> Node:
        return self._call(_ops.gemm.default, self._flat(matrix), weight, None, argument(self.gemm, "w_is_kn"))

    def _columns(self, part: _Part) -> Node:
        weight, is_kn = unpack(self.gemm, "w", "w_is_kn")
        return self._call(_aten.slice.Tensor, weight, 0 if is_kn else 1, part.start, part.stop)

    def _flat(self, value: Node) -> Node:
        """Return a value as a matrix: dimensions of one element between its rows and its columns go."""
        while len(shape_of(value)) > 2:
            value = self._call(_aten.squeeze.dim, value, 1)
        return value

    def _call(self, target: Any, *args: Any) -> Node:
        return self.builder.call(target, *args, layer=self.gemm.meta.get("layer", ""))


def _parts(x: Node) -> list[_Part]:
    """Return the parts that a matrix is made of side by side; none where it is no concatenation."""
    if any(not _is_gemm(user) for user in x.users):
        return []
    parts, start = [], 0
    for node in _concatenated(x):
        stop = start + int(shape_of(node)[-1])
        matrix, scale = _scaled(node)
        parts.append(_Part(matrix, scale, start, stop))
        start = stop
    return parts


def _concatenated(node: Node) -> list[Node]:
    """Return the values side by side in ``node``, where no other op reads what is between."""
    source = _unflattened(node)
    if aten_name(source) != "cat.default" or argument(source, "dim") != len(shape_of(source)) - 1:
        return [node]
    listed: Sequence[Node] = argument(source, "tensors")
    if len(source.users) > 1 or any(len(shape_of(part)) != len(shape_of(source)) for part in listed):
        return [node]
    return [part for each in listed for part in (_concatenated(each) if len(each.users) == 1 else [each])]


def _unflattened(node: Node) -> Node:
    """Return the value of which ``node`` is a view with fewer dimensions of one element between."""
    while (before := _before_view(node)) is not None:
        node = before
    return node


def _before_view(node: Node) -> Node | None:
    if aten_name(node) == "select.int":
        source, dim, _ = unpack(node, "self", "dim", "index")
        is_view = dim != 0 and same_size(shape_of(source)[dim], 1)
    elif aten_name(node) in VIEWS:
        source = first_operand(node)
        is_view = True
    else:
        return None
    before, after = shape_of(source), shape_of(node)
    ends = (
        bool(before) and bool(after) and same_size(before[0], after[0]) and same_size(before[-1], after[-1])
    )
    between = [size for shape in (before, after) for size in shape[1:-1]]
    return as_node(source) if is_view and ends and all(same_size(size, 1) for size in between) else None


def _scaled(node: Node) -> tuple[Node, Node | None]:
    """Return the matrix and the factor of each row that a value is the product of."""
    source = _unflattened(node)
    if aten_name(source) != "mul.Tensor":
        return source, None
    for matrix, factor in (unpack(source, "self", "other"), unpack(source, "other", "self")):
        if (
            holds_tensor(matrix)
            and same_shape(shape_of(matrix), shape_of(source))
            and _is_row_factor(factor, source)
        ):
            return _unflattened(as_node(matrix)), as_node(factor)
    return source, None


def _is_row_factor(factor: Any, product: Node) -> bool:
    """Return whether a factor has one element for each row of a product of as many dimensions."""
    if not holds_tensor(factor) or len(shape_of(factor)) != len(shape_of(product)):
        return False
    return all(same_size(size, 1) for size in shape_of(factor)[1:])
