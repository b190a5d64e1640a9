"""Factors of a product of edge values: ``alpha.unsqueeze(-1) * x_j`` has the factors ``[alpha, x_j]``."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, aten_name, first_operand, holds_tensor, same_shape, same_size, shape_of
from gnnc.passes.edges.orders import EdgeOrders
from gnnc.passes.edges.rowwise import row_inputs, rows_of

aten = torch.ops.aten

_RESHAPES = ("view.default", "reshape.default", "unsqueeze.default", "_unsafe_view.default")


@dataclass(frozen=True)
class Factor:
    """Factor of a product, or divisor: a node or a number.

    Attributes:
        value: the factor.
        inverted: whether the product is divided by it.
        rows: number of edges.
    """

    value: Any
    inverted: bool
    rows: Any

    @property
    def on_edges(self) -> bool:
        """Return whether the value has a row for every edge; other values are numbers and parameters."""
        return isinstance(self.value, Node) and same_size(rows_of(self.value), self.rows)


def factors_of(node: Node, orders: EdgeOrders, inverted: bool = False) -> list[Factor]:
    """Return the factors of ``node``, or ``node`` as one factor if it is no product of edge values."""
    leaf = [Factor(node, inverted, rows_of(node))]
    name = aten_name(node)
    if name not in ("mul.Tensor", "div.Tensor") or node in orders.softmaxes:
        return leaf
    if not orders.indices(node):
        return leaf
    result: list[Factor] = []
    for side in ("self", "other"):
        arg = argument(node, side)
        flipped = inverted != (name == "div.Tensor" and side == "other")
        if isinstance(arg, Node) and holds_tensor(arg) and row_inputs_of(node, arg):
            result += factors_of(arg, orders, flipped)
        else:
            result.append(Factor(arg, flipped, rows_of(node)))
    return result


def row_inputs_of(node: Node, arg: Node) -> bool:
    """Return whether ``arg`` has a row for every row of ``node``."""
    return arg in (row_inputs(node) or ())


def squeezed(factor: Factor, rank: int, orders: EdgeOrders) -> list[Factor]:
    """Return the factors of a ``[E, ..., 1]`` factor of a rank-``rank`` product, without the last dimension.

    A vector stays a vector; ``[E, 1, 1]`` loses both dimensions, unless it is computed as ``[E, 1]``.
    """
    value = factor.value
    if rank == 1:
        return factors_of(value, orders, factor.inverted)
    heads = shape_of(value)[:-1]
    single = len(heads) == 2 and same_size(heads[1], 1)
    wanted = heads[:1] if single else heads
    inner = _before_reshapes(value, wanted)
    if inner is None and single:
        inner = _before_reshapes(value, heads)
    if inner is None:
        inner = value
        for dim in range(len(shape_of(value)) - 1, len(wanted) - 1, -1):
            inner = _squeeze(inner, dim, orders)
    return factors_of(inner, orders, factor.inverted)


def of_one_rank(factors: list[Factor], orders: EdgeOrders) -> list[Factor]:
    """Return squeezed factors with one rank: vectors ``[E]`` become columns beside factors ``[E, H]``."""
    vectors = [factor for factor in factors if factor.on_edges and len(shape_of(factor.value)) == 1]
    if len(vectors) == sum(factor.on_edges for factor in factors):
        return factors
    return [_column(factor, orders) if factor in vectors else factor for factor in factors]


def _column(factor: Factor, orders: EdgeOrders) -> Factor:
    layer = factor.value.meta["layer"]
    return replace(factor, value=orders.builder.call(aten.unsqueeze.default, factor.value, 1, layer=layer))


def _before_reshapes(node: Node, wanted: tuple[Any, ...]) -> Node | None:
    while not same_shape(shape_of(node), wanted):
        if aten_name(node) not in _RESHAPES or not row_inputs(node):
            return None
        node = first_operand(node)
    return node


def _squeeze(node: Node, dim: int, orders: EdgeOrders) -> Node:
    return orders.builder.call(aten.squeeze.dim, node, dim, layer=node.meta["layer"])
