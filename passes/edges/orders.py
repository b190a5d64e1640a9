"""Sorted orders of the edges: the gathers that an edge value depends on, and the CSRs."""

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import shape_of
from gnnc.passes.edges.edge_products import READ_OTHERWISE, EdgeProducts
from gnnc.passes.edges.rowwise import Gather, as_gather, row_inputs
from gnnc.passes.edges.softmax import Softmax
from gnnc.passes.rewrite.node_builder import NodeBuilder, Sizes, is_of_model

aten, gnnc = torch.ops.aten, torch.ops.gnnc


@dataclass(frozen=True)
class Csr:
    """The three result nodes of one ``csr`` op."""

    rowptr: Node
    col: Node
    perm: Node


@dataclass(eq=False)
class Order:
    """The edges sorted by one destination index: all CSRs by that index share their rows and their order.

    Attributes:
        dst: the destination index, ``[E]``.
        num_dst: number of destination nodes.
        first_reader: the first node of the graph that is computed from values in this order.
        sources: number of source nodes, for each source index that is used with ``dst``.
        prefers_nodes: whether a value that depends on one end of the edges is computed on the nodes.
            False where there are likely few edges: a decoder that scores some pairs of nodes.
        csrs: the CSRs made so far, by source index.
        inverse: the permutation back to the caller's order, once it is made.
        values: the edge values emitted in this order, by the node of the captured graph.
    """

    dst: Node
    num_dst: Node | int
    first_reader: Node
    sources: dict[Node, Node | int] = field(default_factory=dict)
    prefers_nodes: bool = True
    csrs: dict[Node, Csr] = field(default_factory=dict)
    inverse: Node | None = None
    values: dict[Node, Node] = field(default_factory=dict)


class EdgeOrders:
    """Orders of the edges of one graph, and what decides about them: the gathers of each edge value.

    Attributes:
        builder: inserts nodes into the graph.
        sizes: the node that stands for each symbolic size.
        products: decides which products of edge features bodies compute; None while they move to the nodes.
        orders: the orders by (destination index, number of destinations).
        softmaxes: the edge softmaxes, by the node that ends them.
        in_callers_order: values that are computed in the order of the caller, too, for other readers.
        shared: values that are stored because several bodies read them.
        edge_notes: remarks about values that are computed once an edge, by node.
    """

    def __init__(self, gm: fx.GraphModule, products: EdgeProducts | None = None) -> None:
        self.products = products
        self.builder = NodeBuilder(gm)
        self.sizes = Sizes(self.builder)
        for node in gm.graph.nodes:
            if isinstance(node.meta.get("val"), torch.SymInt):
                self.sizes.add(node)
        self.orders: dict[tuple[Node, Node | int], Order] = {}
        self.softmaxes: dict[Node, Softmax] = {}
        self.in_callers_order: set[Node] = set()
        self.shared: Collection[Node] = ()
        self.edge_notes: dict[Node, str] = {}
        self._indices: dict[Node, frozenset[Node]] = {}

    # dependencies on gathers

    def indices(self, node: Node) -> frozenset[Node]:
        """Return the indices of the gathers that ``node`` depends on row by row; empty for a leaf."""
        if node not in self._indices:
            self._indices[node] = self._find_indices(node)
        return self._indices[node]

    def _find_indices(self, node: Node) -> frozenset[Node]:
        gather = as_gather(node)
        if gather is not None:
            return frozenset([gather.index])
        softmax = self.softmaxes.get(node)
        if softmax is not None:
            return self.indices(softmax.logits) | {softmax.total.index}
        inputs = row_inputs(node) or ()
        return frozenset().union(*(self.indices(arg) for arg in inputs))

    def table_sizes(self, node: Node) -> dict[Node, Node | int]:
        """Return the number of rows of the table that each index of ``node`` reads."""
        sizes: dict[Node, Node | int] = {}
        for gather in self._gathers(node):
            sizes.setdefault(gather.index, self.sizes.of(gather.table, 0))
        return sizes

    def _gathers(self, node: Node) -> Iterator[Gather]:
        pending, seen = [node], set()
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            gather = as_gather(current)
            if gather is not None:
                yield gather
            elif current in self.softmaxes:
                pending.append(self.softmaxes[current].logits)
            else:
                pending += reversed(row_inputs(current) or ())

    # values that bodies hold

    def is_lookup(self, table: Node) -> bool:
        """Return whether bodies hold ``table`` whole: a weight of fixed size, as an embedding of types is."""
        fixed = all(isinstance(size, int) for size in shape_of(table))
        return self.products is not None and fixed and is_of_model(table)

    def lookup_indices(self, node: Node) -> set[Node]:
        """Return the indices of ``node`` that choose among rows of weights and of no other table."""
        tables = [(gather.index, self.is_lookup(gather.table)) for gather in self._gathers(node)]
        return {index for index, _ in tables} - {index for index, whole in tables if not whole}

    def is_inside(self, leaf: Node) -> bool:
        """Return whether bodies compute ``leaf``, a value of edges alone, instead of reading it."""
        verdict = self.products.verdict(leaf) if self.products else None
        if self.products is None or verdict is None:
            return False
        if leaf in self.in_callers_order:
            verdict = READ_OTHERWISE
        for product in self.products.products(leaf):
            self.edge_notes.setdefault(product, verdict.reason)
        return verdict.inside

    def is_computed_otherwise(self, node: Node) -> bool:
        """Return whether an edge value of one index is computed in the caller's order, where it is left."""
        return node in self.in_callers_order and len(self.indices(node)) == 1 and node not in self.softmaxes

    # orders and CSRs

    def order(self, dst: Node, num_dst: Node | int, reader: Node) -> Order:
        """Return the order of the edges by ``dst``, ``num_dst`` rows; ``reader`` will be computed in it."""
        order = self.orders.setdefault((dst, num_dst), Order(dst, num_dst, reader))
        order.first_reader = min(order.first_reader, reader)
        return order

    def order_of(self, softmax: Softmax) -> Order:
        """Return the order by the destinations that a softmax sums over."""
        total = softmax.total
        return self.order(total.index, self.sizes.of(total.base, 0), total.node)

    def csr(self, order: Order, src: Node | None = None) -> Csr:
        """Return the CSR of ``order`` from ``src``; without one, any CSR that the readers can wait for."""
        if src is None:
            candidates = (*order.csrs, *order.sources)
            src = next((s for s in candidates if self._comes_before_readers(s, order)), order.dst)
        if src not in order.csrs:
            num_src = order.sources.get(src, order.num_dst)
            made = self._structure(gnnc.csr.default, src, order.dst, num_src, order.num_dst)
            order.csrs[src] = Csr(*(self._structure(operator.getitem, made, k) for k in range(3)))
        return order.csrs[src]

    def _comes_before_readers(self, src: Node, order: Order) -> bool:
        """Return whether a source stands before the readers of an order, perhaps after it was moved there."""
        size = order.sources.get(src, order.num_dst)
        sizes = [size] if isinstance(size, Node) else []
        return self.builder.bring_before(order.first_reader, src, *sizes)

    def inverse(self, order: Order) -> Node:
        """Return the permutation ``[E]`` from CSR order back to the caller's order."""
        if order.inverse is None:
            order.inverse = self._structure(aten.argsort.default, self.csr(order).perm)
        return order.inverse

    def _structure(self, target: Any, *args: Any) -> Node:
        return self.builder.call(target, *args)

    def cast(self, node: Node, like: Node) -> Node:
        """Return ``node`` in the dtype of ``like``: primitives return at least FP32."""
        dtype = like.meta["val"].dtype
        if node.meta["val"].dtype == dtype:
            return node
        return self.builder.call(aten._to_copy.default, node, layer=node.meta["layer"], dtype=dtype)
