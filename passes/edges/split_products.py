"""Linear layers on what an edge reads from its ends: a layer on the nodes for each end.

``linear(cat([x_i, x_j - x_i, e]), W)`` is ``linear(x, W1 - W2)[i] + linear(x, W2)[j] + linear(e, W3)``:
the first two are computed once a node and not once an edge.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import argument, as_node, aten_name, operand, same_shape, shape_of
from gnnc.ir.op import size_expr
from gnnc.passes.base import Context
from gnnc.passes.edges.node_tables import NodeTables
from gnnc.passes.rewrite.assumed_sizes import EDGES_PER_NODE, FLOAT_BYTES, FLOPS_A_BYTE, Typical
from gnnc.passes.rewrite.emit import drop_dead, is_of_model

aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """Columns ``start .. stop`` of a layer's input: ``+ value`` or ``- value`` for each of ``values``."""

    node: Node
    values: tuple[tuple[Node, bool], ...]
    start: int
    stop: int


def split_products(gm: fx.GraphModule, ctx: Context) -> None:
    """Split the linear layers on edges of ``gm``, in place, where that costs less."""
    tables = NodeTables(gm)
    for node in list(gm.graph.nodes):
        is_linear = aten_name(node) == "linear.default"
        if is_linear and tables.indices(node) and is_of_model(operand(node, "weight")):
            _split(node, tables, gm, ctx)
    drop_dead(gm)


def _split(node: Node, tables: NodeTables, gm: fx.GraphModule, ctx: Context) -> None:
    parts = _parts(as_node(node.args[0]), tables)
    if len(parts) == 1 and len(parts[0].values) == 1:
        return
    lifted = [part for part in parts if _is_worth(part, node, tables, gm, ctx)]
    if not lifted:
        return
    made = _Split(node, tables)
    for part in lifted:
        for value, is_added in part.values:
            made.add(value, part, is_added)
    node.replace_all_uses_with(made.total([part for part in parts if part not in lifted]))
    ctx.note(node, f"{len(made.weights)} of its products are computed on the nodes that the edges read")


class _Split:
    """The products that a layer is split into.

    Attributes:
        weights: the weight that each value is multiplied by.
    """

    def __init__(self, node: Node, tables: NodeTables) -> None:
        self.node, self.emitter = node, tables.emitter
        self.weights: dict[Node, Node] = {}

    def add(self, value: Node, part: Part, is_added: bool) -> None:
        """Multiply a value by the weight of a part, or by its negative."""
        weight, known = self._columns(part), self.weights.get(value)
        if known is None:
            self.weights[value] = weight if is_added else self._call(aten.neg.default, weight)
        else:
            target = aten.add.Tensor if is_added else aten.sub.Tensor
            self.weights[value] = self._call(target, known, weight)

    def total(self, rest: list[Part]) -> Node:
        """The sum of the products, with those of ``rest`` in one."""
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
        return self._call(aten.slice.Tensor, self.node.args[1], 1, part.start, part.stop)

    def _call(self, target: Any, *args: Any) -> Node:
        return self.emitter.call(target, *args, layer=self.node.meta["layer"])


def _parts(x: Node, tables: NodeTables) -> list[Part]:
    """What stands side by side in ``x``."""
    parts, start = [], 0
    for part in _side_by_side(x, tables):
        stop = start + int(shape_of(part)[-1])
        whole = _table(part, tables) is not None
        parts.append(Part(part, ((part, True),) if whole else _summands(part), start, stop))
        start = stop
    return parts


def _side_by_side(x: Node, tables: NodeTables) -> list[Node]:
    last = len(shape_of(x)) - 1
    if aten_name(x) == "cat.default" and argument(x, "dim") == last:
        return [as_node(part) for part in x.args[0]]  # type: ignore[union-attr]
    if aten_name(x) != "select.int":
        return [x]
    whole, dim, place = x.args
    inner = _side_by_side(as_node(whole), tables)
    if len(inner) == 1 or dim in (0, last + 1):
        return [x]
    return [tables.emitter.call(aten.select.int, part, dim, place, layer=x.meta["layer"]) for part in inner]


def _summands(part: Node) -> tuple[tuple[Node, bool], ...]:
    if aten_name(part) not in ("add.Tensor", "sub.Tensor") or argument(part, "alpha") != 1:
        return ((part, True),)
    left, right = part.args[:2]
    if not isinstance(left, Node) or not isinstance(right, Node) or not same_shape(
        shape_of(left), shape_of(right)
    ):  # fmt: skip
        return ((part, True),)
    return (left, True), (right, aten_name(part) == "add.Tensor")


def _is_worth(part: Part, node: Node, tables: NodeTables, gm: fx.GraphModule, ctx: Context) -> bool:
    """Whether products on the nodes save more than reading their wider rows costs."""
    lifted = [_table(value, tables) for value, _ in part.values]
    if any(table is None for table in lifted):
        return False
    edges = size_expr(shape_of(node)[0])
    rows = [size_expr(shape_of(as_node(table))[0]) for table in lifted]
    symbols = edges.free_symbols - set().union(*(row.free_symbols for row in rows))
    typical = Typical(gm, ctx.examples, EDGES_PER_NODE, symbols)
    nodes = sum(map(typical.value, rows)) / max(typical.value(edges), 1.0)
    columns, width = part.stop - part.start, int(shape_of(node)[-1])
    saved = (1 - nodes) * 2 * columns * width / FLOPS_A_BYTE
    return saved > FLOAT_BYTES * len(lifted) * (width - columns)


def _table(value: Node, tables: NodeTables) -> Node | None:
    indices = tables.indices(value)
    return tables.table(value, *indices) if len(indices) == 1 else None
