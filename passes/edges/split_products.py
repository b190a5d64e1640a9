"""Split of linear layers on edges into a linear layer on the nodes for each end of the edge.

``linear(cat([x_i, x_j - x_i, e]), W)`` is ``linear(x, W1 - W2)[i] + linear(x, W2)[j] + linear(e, W3)``:
the first two are computed once per node and not once per edge. Differences of few columns are not split: they
are coordinates, whose common offset (a map has 1e6 meters) cancels in ``x_j - x_i``, and not in products of
each end.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import (
    argument,
    as_node,
    aten_name,
    first_operand,
    operand,
    same_shape,
    shape_of,
    unpack,
)
from gnnc.ir.op import size_expr
from gnnc.passes.base import Context
from gnnc.passes.edges.node_tables import NodeTables
from gnnc.passes.rewrite.assumed_sizes import EDGES_PER_NODE, FLOAT_BYTES, FLOPS_A_BYTE, AssumedSizes
from gnnc.passes.rewrite.node_builder import drop_dead, is_of_model

aten = torch.ops.aten
_MOST_COORDINATES = 8
"""Columns up to which a difference of the ends is taken for one of coordinates."""


@dataclass(frozen=True)
class Part:
    """Columns ``start .. stop`` of a layer's input: ``values``, each added (True) or subtracted."""

    node: Node
    values: tuple[tuple[Node, bool], ...]
    start: int
    stop: int


def split_products(gm: fx.GraphModule, ctx: Context) -> None:
    """Split the linear layers on edges of ``gm``, in place, where the split costs less."""
    tables = NodeTables(gm)
    for node in list(gm.graph.nodes):
        if (
            aten_name(node) == "linear.default"
            and tables.indices(node)
            and is_of_model(operand(node, "weight"))
        ):
            _split(node, tables, gm, ctx)
    drop_dead(gm)


def _split(node: Node, tables: NodeTables, gm: fx.GraphModule, ctx: Context) -> None:
    parts = _parts(first_operand(node), tables)
    if len(parts) == 1 and len(parts[0].values) == 1:
        return
    lifted = [part for part in parts if _is_worth(part, node, tables, gm, ctx)]
    if not lifted:
        return
    split = _Split(node, tables)
    for part in lifted:
        for value, is_added in part.values:
            split.add(value, part, is_added)
    node.replace_all_uses_with(split.total([part for part in parts if part not in lifted]))
    moved = len(split.weights)
    products, verb = moved + (len(lifted) < len(parts)), "runs" if moved == 1 else "run"
    ctx.note(
        node, f"{moved} of {products} products {verb} on the nodes that the edges read, not on the edges"
    )


class _Split:
    """Products that a layer is split into.

    Attributes:
        weights: the weight of each value on the nodes.
    """

    def __init__(self, node: Node, tables: NodeTables) -> None:
        self.node, self.builder = node, tables.builder
        self.weights: dict[Node, Node] = {}

    def add(self, value: Node, part: Part, is_added: bool) -> None:
        """Add the product of a value with the weight of a part, or with its negative."""
        weight, total = self._columns(part), self.weights.get(value)
        if total is None:
            self.weights[value] = weight if is_added else self._call(aten.neg.default, weight)
        else:
            target = aten.add.Tensor if is_added else aten.sub.Tensor
            self.weights[value] = self._call(target, total, weight)

    def total(self, rest: list[Part]) -> Node:
        """Return the sum of the products, those of ``rest`` joined into one."""
        terms = list(self.weights.items())
        if rest:
            x, weight = [part.node for part in rest], [self._columns(part) for part in rest]
            last = len(shape_of(x[0])) - 1
            joined = len(rest) > 1
            terms.append(
                (
                    self._call(aten.cat.default, x, last) if joined else x[0],
                    self._call(aten.cat.default, weight, 1) if joined else weight[0],
                )
            )
        bias = argument(self.node, "bias")
        total: Node | None = None
        for value, weight in terms:
            product = self._call(aten.linear.default, value, weight, bias if total is None else None)
            total = product if total is None else self._call(aten.add.Tensor, total, product)
        assert total is not None
        return total

    def _columns(self, part: Part) -> Node:
        return self._call(aten.slice.Tensor, argument(self.node, "weight"), 1, part.start, part.stop)

    def _call(self, target: Any, *args: Any) -> Node:
        return self.builder.call(target, *args, layer=self.node.meta["layer"])


def _parts(x: Node, tables: NodeTables) -> list[Part]:
    """Return the parts that ``x`` is a concatenation of, by columns."""
    parts, start = [], 0
    for part in _concatenated(x, tables):
        stop = start + int(shape_of(part)[-1])
        whole = _table(part, tables) is not None
        parts.append(Part(part, ((part, True),) if whole else _summands(part), start, stop))
        start = stop
    return parts


def _concatenated(x: Node, tables: NodeTables) -> list[Node]:
    last = len(shape_of(x)) - 1
    if aten_name(x) == "cat.default" and argument(x, "dim") == last:
        return list(argument(x, "tensors"))
    if aten_name(x) != "select.int":
        return [x]
    whole, dim, place = unpack(x, "self", "dim", "index")
    inner = _concatenated(as_node(whole), tables)
    if len(inner) == 1 or dim in (0, last + 1):
        return [x]
    return [tables.builder.call(aten.select.int, part, dim, place, layer=x.meta["layer"]) for part in inner]


def _summands(part: Node) -> tuple[tuple[Node, bool], ...]:
    if aten_name(part) not in ("add.Tensor", "sub.Tensor") or argument(part, "alpha") != 1:
        return ((part, True),)
    left, right = unpack(part, "self", "other")
    if not isinstance(left, Node) or not isinstance(right, Node) or not same_shape(
        shape_of(left), shape_of(right)
    ):  # fmt: skip
        return ((part, True),)
    return (left, True), (right, aten_name(part) == "add.Tensor")


def _is_worth(part: Part, node: Node, tables: NodeTables, gm: fx.GraphModule, ctx: Context) -> bool:
    """Return whether products on the nodes save more time than reading their wider rows costs."""
    lifted = [_table(value, tables) for value, _ in part.values]
    if any(table is None for table in lifted) or _is_of_coordinates(part):
        return False
    edges = size_expr(shape_of(node)[0])
    rows = [size_expr(shape_of(as_node(table))[0]) for table in lifted]
    symbols = edges.free_symbols - set().union(*(row.free_symbols for row in rows))
    assumed_sizes = AssumedSizes(gm, ctx.examples, EDGES_PER_NODE, symbols)
    nodes = sum(map(assumed_sizes.value, rows)) / max(assumed_sizes.value(edges), 1.0)
    columns, width = part.stop - part.start, int(shape_of(node)[-1])
    saved = (1 - nodes) * 2 * columns * width / FLOPS_A_BYTE
    return saved > FLOAT_BYTES * len(lifted) * (width - columns)


def _is_of_coordinates(part: Part) -> bool:
    """Return whether a part is a difference of few columns, whose product on the edges costs little."""
    return not all(is_added for _, is_added in part.values) and part.stop - part.start <= _MOST_COORDINATES


def _table(value: Node, tables: NodeTables) -> Node | None:
    indices = tables.indices(value)
    return tables.table(value, *indices) if len(indices) == 1 else None
