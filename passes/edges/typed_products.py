"""Lift of typed products ``x[src] @ weight[type]``, as in relational layers, from edges to nodes.

``weight[type]`` would be a matrix for every edge. Instead all rows are multiplied by all weights on the
nodes: ``(x @ weight_r)[src * R + type]`` reads a row of ``[N * R, O]``.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import argument, aten_name, first_operand, operand, same_size, shape_of
from gnnc.ir.op import Cost, size_expr
from gnnc.passes.base import Context
from gnnc.passes.edges.node_tables import NodeTables
from gnnc.passes.edges.origins import Origins
from gnnc.passes.edges.rowwise import Gather, as_gather
from gnnc.passes.rewrite.assumed_sizes import EDGES_PER_NODE, FLOAT_BYTES, AssumedSizes
from gnnc.passes.rewrite.node_builder import drop_dead, is_of_model

aten = torch.ops.aten

_PRODUCTS = ("bmm.default", "matmul.default")
_RESHAPES = ("view.default", "reshape.default", "_unsafe_view.default")

IndexUse = tuple[Node, Any]
"""An index, and the upper bound of its values."""


@dataclass(frozen=True)
class Typed:
    """Typed product ``x[src] @ weight[type]`` of each edge.

    Attributes:
        node: the products, with a row for each edge.
        x: the left factor, an edge value.
        lookup: the gather by type of the weights ``[R, K, O]``, or ``[R, B, K, O]`` for diagonal blocks.
    """

    node: Node
    x: Node
    lookup: Gather


def lift_typed_products(gm: fx.GraphModule, ctx: Context) -> list[IndexUse]:
    """Move the typed products of ``gm`` to the nodes where that costs less; return the uses of indices."""
    tables = NodeTables(gm)
    uses: list[IndexUse] = []
    for node in list(gm.graph.nodes):
        product = _match(node)
        if product is not None:
            uses += _lift(product, tables, gm, ctx)
    drop_dead(gm)
    return uses


def _match(node: Node) -> Typed | None:
    if aten_name(node) in _RESHAPES:
        return _match_blocks(node)
    if aten_name(node) not in _PRODUCTS or len(shape_of(node)) != 3:
        return None
    x, weight = _factors(node)
    lookup = _weights(weight, 3)
    if lookup is None or not same_size(shape_of(node)[1], 1) or len(shape_of(x)) != 3:
        return None
    return Typed(node, x, lookup)


def _factors(product: Node) -> tuple[Node, Node]:
    other = "mat2" if aten_name(product) == "bmm.default" else "other"
    return first_operand(product), operand(product, other)


def _match_blocks(node: Node) -> Typed | None:
    """Match ``[E, B * O]``, a reshape of the products ``[E * B, 1, K] @ [E * B, K, O]``."""
    product = first_operand(node)
    if aten_name(product) not in _PRODUCTS or len(shape_of(product)) != 3 or len(shape_of(node)) != 2:
        return None
    x, weight = _factors(product)
    if aten_name(x) not in _RESHAPES or aten_name(weight) not in _RESHAPES or len(shape_of(weight)) != 3:
        return None
    rows = first_operand(x)
    lookup = _weights(first_operand(weight), 4)
    if lookup is None:
        return None
    _, blocks, inner, outer = shape_of(lookup.table)
    of_blocks = tuple(shape_of(weight)[1:]) == (inner, outer) and same_size(shape_of(x)[1], 1)
    widths = (shape_of(rows)[1:], shape_of(node)[1:]) == ((blocks * inner,), (blocks * outer,))
    return Typed(node, rows, lookup) if of_blocks and widths else None


def _weights(node: Node, rank: int) -> Gather | None:
    """Return the gather of a weight by an integer input, whose range can be checked; or None."""
    lookup = as_gather(node)
    if lookup is None or len(shape_of(lookup.table)) != rank or not is_of_model(lookup.table):
        return None
    fixed = all(isinstance(size, int) for size in shape_of(lookup.table))
    return lookup if fixed and Origins(node.graph).of(lookup.index) else None


def _lift(product: Typed, tables: NodeTables, gm: fx.GraphModule, ctx: Context) -> list[IndexUse]:
    ends = tables.indices(product.x)
    table = tables.table(product.x, *ends) if len(ends) == 1 else None
    if table is None:
        ctx.note(product.node, "a weight for every edge is gathered: its factor does not come from one node")
        return []
    (index,) = ends
    if not _is_worth(product, table, gm, ctx):
        return []
    call, layer = tables.builder.call, product.node.meta["layer"]
    weight, types = product.lookup.table, product.lookup.index
    products = _all_products(tables, table, weight, layer)
    count = tables.sizes.of(table, 0)
    relations = int(shape_of(weight)[0])
    if isinstance(count, Node):
        tables.sizes.add(call(operator.mul, count, relations))
    place = call(aten.add.Tensor, call(aten.mul.Tensor, index, relations), types)
    rows = call(aten.index_select.default, products, 0, place, layer=layer)
    for reader in [user for user in product.node.users if _drops_dim(user, product.node)]:
        reader.replace_all_uses_with(rows)
    if len(shape_of(product.node)) == 3:
        rows = call(aten.unsqueeze.default, rows, 1, layer=layer)
    product.node.replace_all_uses_with(rows)
    ctx.note(product.node, f"products with the weights of {relations} types are computed on the nodes")
    return [(index, shape_of(table)[0]), (types, relations)]


def _drops_dim(reader: Node, product: Node) -> bool:
    """Return whether ``reader`` squeezes products ``[E, 1, O]`` to ``[E, O]``."""
    return (
        len(shape_of(product)) == 3
        and aten_name(reader) == "squeeze.dim"
        and argument(reader, "dim") in (1, -2)
    )


def _all_products(tables: NodeTables, table: Node, weight: Node, layer: str) -> Node:
    """Return ``[N * R, O]``, the product of each row of the table with each weight."""

    def call(target: Any, *args: Any) -> Node:
        return tables.builder.call(target, *args, layer=layer)

    if len(shape_of(weight)) == 3:
        relations, inner, outer = shape_of(weight)
        x = call(aten.reshape.default, table, [-1, inner])
        side_by_side = call(aten.permute.default, weight, [1, 0, 2])
        side_by_side = call(aten.reshape.default, side_by_side, [inner, relations * outer])
        return call(aten.reshape.default, call(aten.mm.default, x, side_by_side), [-1, outer])
    relations, blocks, inner, outer = shape_of(weight)
    x = call(aten.permute.default, call(aten.reshape.default, table, [-1, blocks, inner]), [1, 0, 2])
    side_by_side = call(aten.permute.default, weight, [1, 2, 0, 3])
    side_by_side = call(aten.reshape.default, side_by_side, [blocks, inner, relations * outer])
    products = call(
        aten.reshape.default, call(aten.bmm.default, x, side_by_side), [blocks, -1, relations, outer]
    )
    return call(
        aten.reshape.default, call(aten.permute.default, products, [1, 2, 0, 3]), [-1, blocks * outer]
    )


def _is_worth(product: Typed, table: Node, gm: fx.GraphModule, ctx: Context) -> bool:
    """Return whether all products on the nodes cost less than a weight for every edge."""
    edges, nodes = (size_expr(shape_of(node)[0]) for node in (product.lookup.index, table))
    relations, *rest = (int(size) for size in shape_of(product.lookup.table))
    inner, outer = rest[-2], rest[-1] * (rest[0] if len(rest) == 3 else 1)
    assumed_sizes = AssumedSizes(gm, ctx.examples, EDGES_PER_NODE, edges.free_symbols - nodes.free_symbols)
    flops = 2 * inner * outer
    on_nodes = Cost(FLOAT_BYTES * outer * (2 * nodes * relations + edges), nodes * relations * flops)
    on_edges = Cost(FLOAT_BYTES * edges * inner * (2 * outer + 1), edges * flops)
    if assumed_sizes.time(on_nodes) <= assumed_sizes.time(on_edges):
        return True
    products = f"{assumed_sizes.value(nodes) * relations:.0f} products on the nodes"
    numbers = f"{products}, {assumed_sizes.value(edges):.0f} edges"
    ctx.note(product.node, f"a weight for every edge of a block is gathered: {numbers}")
    return False
