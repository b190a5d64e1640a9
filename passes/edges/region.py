"""Regions: what is computed per edge, emitted as primitives over a CSR.

An *edge value* is a node that depends, row by row, on gathers: ``x[src]``, ``a[src] + a[dst]``,
``softmax(...)``. ``Regions.emit`` computes it in CSR order:

* what depends on one end only is computed on the nodes and read from there;
* the forms ``a_i op b_j`` and ``<a_i, b_j>`` are ``sddmm``, a softmax is ``edge_softmax``;
* other values with few columns (logits, edge weights) stay ATen ops on ``[E]`` or ``[E, H]``;
* the rest is the body of an ``edge_map``.

``gnnc.passes.edges.aggregate`` reduces edge values to the nodes.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import node_arg
from gnnc.passes.edges.bodies import BodyBuilder, UnfitError
from gnnc.passes.edges.edge_products import EdgeProducts, fold
from gnnc.passes.edges.factors import Factor, factors_of
from gnnc.passes.edges.rowwise import Gather, as_gather, is_narrow, op_name, row_inputs
from gnnc.passes.edges.softmax import Softmax
from gnnc.passes.rewrite.emit import (
    Emitter,
    Sizes,
    argument,
    holds_tensor,
    is_of_model,
    same_shape,
    same_size,
    shape_of,
)

aten, gnnc = torch.ops.aten, torch.ops.gnnc

_RESHAPES = ("view", "reshape", "_unsafe_view", "expand", "flatten", "unsqueeze", "squeeze")
_PAIR_OPS = {"add.Tensor": "add", "sub.Tensor": "sub", "mul.Tensor": "mul"}


@dataclass(frozen=True)
class Csr:
    """The nodes of one CSR."""

    rowptr: Node
    col: Node
    perm: Node


@dataclass(eq=False)
class Order:
    """The edges sorted by one destination index: every CSR of it has the same rows and order.

    Attributes:
        dst: the index ``[E]``.
        num_dst: number of destinations.
        reader: the first node of the graph that is made from values in this order.
        sources: number of source nodes of each source index that is used with it.
        on_nodes: whether to compute on nodes what depends on one end only. Not so where edges
            are likely few: a decoder that scores some pairs.
    """

    dst: Node
    num_dst: Node | int
    reader: Node
    sources: dict[Node, Node | int] = field(default_factory=dict)
    on_nodes: bool = True
    csrs: dict[Node, Csr] = field(default_factory=dict)
    inverse: Node | None = None


class Regions:
    """Emission of edge values into one graph, in CSR order.

    Attributes:
        softmaxes: the edge softmaxes, by the node that ends them.
        unfit: edge values that no body can hold, and why.
        on_edges: what is computed for every edge, and what becomes of it.
        joint: whether one kernel reduces several values of a body.
    """

    def __init__(self, gm: fx.GraphModule, products: EdgeProducts | None, joint: bool = False) -> None:
        self.products, self.joint = products, joint
        self.emitter = Emitter(gm)
        self.sizes = Sizes(self.emitter)
        for node in gm.graph.nodes:
            if isinstance(node.meta.get("val"), torch.SymInt):
                self.sizes.add(node)
        self.orders: dict[tuple[Node, Node | int], Order] = {}
        self.softmaxes: dict[Node, Softmax] = {}
        self.unfit: dict[Node, str] = {}
        self.on_edges: dict[Node, str] = {}
        self._indices: dict[Node, frozenset[Node]] = {}
        self._emitted: dict[tuple[Order, Node], Node] = {}
        self._on_nodes: dict[tuple[Node, Node], Node | None] = {}

    # what a node depends on

    def indices(self, node: Node) -> frozenset[Node]:
        """The indices of the gathers that ``node`` depends on row by row; empty for a leaf."""
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

    def gathers(self, node: Node) -> dict[Node, Node | int]:
        """Every index that ``node`` depends on, with the number of rows of its table."""
        found: dict[Node, Node | int] = {}
        for gather in self._gathers(node):
            found.setdefault(gather.index, self.sizes.of(gather.table, 0))
        return found

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

    def is_lookup(self, table: Node) -> bool:
        """Whether bodies hold ``table`` whole: a weight of fixed size, such as an embedding of types."""
        fixed = all(isinstance(size, int) for size in shape_of(table))
        return self.products is not None and fixed and is_of_model(table)

    def looked_up(self, node: Node) -> set[Node]:
        """The indices of ``gathers`` that choose among rows of the model and nothing else."""
        tables = [(gather.index, self.is_lookup(gather.table)) for gather in self._gathers(node)]
        return {index for index, _ in tables} - {index for index, whole in tables if not whole}

    # structure

    def order(self, dst: Node, num_dst: Node | int, reader: Node) -> Order:
        """The order of the edges by ``dst``, for ``num_dst`` rows, of which ``reader`` is made."""
        order = self.orders.setdefault((dst, num_dst), Order(dst, num_dst, reader))
        order.reader = min(order.reader, reader)
        return order

    def csr(self, order: Order, src: Node | None = None) -> Csr:
        """The CSR of ``order`` from ``src``; if none is asked for, from one that its readers can wait for."""
        if src is None:
            known = (*order.csrs, *order.sources)
            src = next((s for s in known if self._comes_before_readers(s, order)), order.dst)
        if src not in order.csrs:
            num_src = order.sources.get(src, order.num_dst)
            made = self._structure(gnnc.csr.default, src, order.dst, num_src, order.num_dst)
            order.csrs[src] = Csr(*(self._structure(operator.getitem, made, k) for k in range(3)))
        return order.csrs[src]

    def _comes_before_readers(self, src: Node, order: Order) -> bool:
        """Whether a source stands before whatever is made from an order, maybe after it was moved there."""
        size = order.sources.get(src, order.num_dst)
        return self.emitter.bring_before(order.reader, src, *([size] if isinstance(size, Node) else []))

    def inverse(self, order: Order) -> Node:
        """The permutation ``[E]`` from CSR order back to the caller's."""
        if order.inverse is None:
            order.inverse = self._structure(aten.argsort.default, self.csr(order).perm)
        return order.inverse

    def _structure(self, target: Any, *args: Any) -> Node:
        return self.emitter.call(target, *args)

    # values on nodes

    def on_nodes(self, node: Node, order: Order) -> tuple[Node, Node] | None:
        """(index, table) such that ``node`` equals ``table[index]``, or None."""
        indices = self.indices(node)
        if len(indices) != 1 or node in self.softmaxes:
            return None
        (index,) = indices
        if not order.on_nodes and not self._only_reshaped(node):
            return None
        table = self.node_form(node, index)
        if table is None or (index is order.dst and not _has_rows(table, order.num_dst)):
            return None
        return index, table

    def _only_reshaped(self, node: Node) -> bool:
        while as_gather(node) is None:
            inputs = row_inputs(node) or ()
            if len(inputs) != 1 or not _is_reshape(node):
                return False
            node = inputs[0]
        return True

    def node_form(self, node: Node, index: Node) -> Node | None:
        """The table whose rows ``index`` reads to make ``node``, or None."""
        key = (node, index)
        if key not in self._on_nodes:
            self._on_nodes[key] = self._make_node_form(node, index)
        return self._on_nodes[key]

    def _make_node_form(self, node: Node, index: Node) -> Node | None:
        gather = as_gather(node)
        if gather is not None:
            return gather.table
        inputs = row_inputs(node)
        if not inputs:
            return None
        tables = {arg: self.node_form(arg, index) for arg in inputs}
        if any(table is None for table in tables.values()):
            return None
        return self.repeat(node, tables)

    def repeat(self, node: Node, mapping: dict[Node, Any]) -> Node:
        """The op of ``node`` on other rows: ``mapping`` says what replaces each argument."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: mapping.get(arg, arg))
        return self.emitter.call(node.target, *self.free_rows(node, args), layer=node.meta["layer"], **kwargs)

    @staticmethod
    def free_rows(node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of a reshape without the number of rows: -1 takes what there is."""
        if _has_sizes(node):
            return (args[0], [-1, *shape_of(node)[1:]], *args[2:])
        return args

    # values on edges, in CSR order

    def emit(self, node: Node, order: Order) -> Node:
        """The edge value ``node`` in the CSR order of ``order``."""
        key = (order, node)
        if key not in self._emitted:
            self._emitted[key] = self._make(node, order)
        return self._emitted[key]

    def is_emitted(self, node: Node, order: Order) -> bool:
        """Whether ``emit`` has computed ``node`` already."""
        return (order, node) in self._emitted

    def _make(self, node: Node, order: Order) -> Node:
        if not self.indices(node):
            return self._narrowed(node, order) or self._permuted(node, order)
        if node in self.softmaxes:
            return self._softmax_in(self.softmaxes[node], order)
        one_end = self.on_nodes(node, order)
        if one_end is not None:
            return self.read(*one_end, order, node.meta["layer"])
        if as_gather(node) is not None:
            return self._permuted(node, order)
        pair = self._pair(node, order)
        if pair is not None:
            return pair
        if not is_narrow(node) or not self.all_narrow(node):
            body = self.body(node, order)
            if body is not None:
                return self._edge_map(body, node, order)
        if op_name(node) == "mul.Tensor" and len(node.all_input_nodes) > 1:
            return self.product(factors_of(node, self), order, node.meta["layer"])
        return self.repeat(node, {arg: self.emit(arg, order) for arg in row_inputs(node) or ()})

    def all_narrow(self, node: Node) -> bool:
        """Whether everything that ``node`` reads by rows is narrow."""
        return all(is_narrow(arg) for arg in row_inputs(node) or ())

    def is_inside(self, leaf: Node) -> bool:
        """Whether bodies compute ``leaf``, a value of edges alone, instead of reading it."""
        verdict = self.products.verdict(leaf) if self.products else None
        if self.products is None or verdict is None:
            return False
        for product in self.products.products(leaf):
            self.on_edges.setdefault(product, verdict.reason)
        return verdict.inside

    def _narrowed(self, leaf: Node, order: Order) -> Node | None:
        """A few columns that are computed from wide rows: the wide ones stay in a body."""
        if self.products is None or not is_narrow(leaf) or not self.products.has_wide_steps(leaf):
            return None
        folded = fold(leaf, self.emitter)
        if folded is not None:
            self.on_edges[folded.product] = "its columns are summed in its weight: no edge holds them"
            x = self.emit(folded.x, order)
            layer = folded.product.meta["layer"]
            return self.emitter.call(aten.linear.default, x, folded.weight, folded.bias, layer=layer)
        body = self.body(leaf, order) if self.is_inside(leaf) else None
        return None if body is None else self._edge_map(body, leaf, order)

    def _permuted(self, leaf: Node, order: Order) -> Node:
        if op_name(leaf) == "full.default":
            return leaf
        if _is_reshape(leaf) and row_inputs(leaf):
            source = node_arg(leaf)
            return self.repeat(leaf, {source: self.emit(source, order)})
        layer = leaf.meta["layer"]
        return self.emitter.call(aten.index_select.default, leaf, 0, self.csr(order).perm, layer=layer)

    def _softmax_in(self, found: Softmax, order: Order) -> Node:
        """A softmax in ``order``, which may sort the edges by another end than the softmax sums over."""
        total = found.total
        own = self.order(total.index, self.sizes.of(total.base, 0), total.node)
        if own is order:
            return self._softmax(found, order)
        layer = found.node.meta["layer"]
        value = self.emit(found.node, own)
        value = self.emitter.call(aten.index_select.default, value, 0, self.inverse(own), layer=layer)
        return self.emitter.call(aten.index_select.default, value, 0, self.csr(order).perm, layer=layer)

    def _softmax(self, found: Softmax, order: Order) -> Node:
        logits = self.emit(found.logits, order)
        layer = found.node.meta["layer"]
        deep = len(shape_of(logits)) == 3
        if deep:
            logits = self.emitter.call(aten.squeeze.dim, logits, 2, layer=layer)
        rowptr = self.csr(order).rowptr
        weight = self.emitter.call(gnnc.edge_softmax.default, rowptr, logits, found.eps, layer=layer)
        weight = self.cast(weight, found.node)
        return self.emitter.call(aten.unsqueeze.default, weight, 2, layer=layer) if deep else weight

    def read(self, index: Node, table: Node, order: Order, layer: str) -> Node:
        """``table[index]`` in CSR order."""
        if index is order.dst:
            csr = self.csr(order)
            return self._sddmm(csr, table, None, "copy_dst", layer)
        return self._sddmm(self.csr(order, index), None, table, "copy_src", layer)

    def _sddmm(self, csr: Csr, a: Node | None, b: Node | None, op: str, layer: str) -> Node:
        return self.emitter.call(gnnc.sddmm.default, csr.rowptr, csr.col, a, b, op, layer=layer)

    def _pair(self, node: Node, order: Order) -> Node | None:
        """``a_i op b_j`` or ``<a_i, b_j>`` as an sddmm."""
        if op_name(node) == "sum.dim_IntList":
            return self._dot(node, order)
        op = _PAIR_OPS.get(op_name(node))
        if op is None or argument(node, 2, "alpha", 1) != 1:
            return None
        sides = self._sides(node, order)
        if sides is None:
            return None
        layer = node.meta["layer"]
        index, dst, src, is_reversed = sides
        result = self._sddmm(self.csr(order, index), dst, src, op, layer)
        if op == "sub" and is_reversed:
            result = self.emitter.call(aten.neg.default, result, layer=layer)
        return self.cast(result, node)

    def _dot(self, node: Node, order: Order) -> Node | None:
        product, dims = node.args[:2]
        rank = len(shape_of(product))
        if op_name(product) != "mul.Tensor" or list(dims) != [rank - 1] or rank not in (2, 3):
            return None
        sides = self._sides(product, order)
        if sides is None:
            return None
        layer = node.meta["layer"]
        index, dst, src, _ = sides
        result = self.cast(self._sddmm(self.csr(order, index), dst, src, "dot", layer), node)
        if argument(node, 2, "keepdim", False):
            return self.emitter.call(aten.unsqueeze.default, result, rank - 1, layer=layer)
        return result

    def _sides(self, node: Node, order: Order) -> tuple[Node, Node, Node, bool] | None:
        """(source index, destination table, source table, reversed) of a binary op."""
        left, right = node.args[:2]
        if not holds_tensor(left) or not holds_tensor(right):
            return None
        if not same_shape(shape_of(left), shape_of(right)):
            return None
        first, second = self.on_nodes(left, order), self.on_nodes(right, order)
        if first is None or second is None or first[0] is second[0]:
            return None
        if first[0] is order.dst:
            return second[0], first[1], second[1], False
        return (first[0], second[1], first[1], True) if second[0] is order.dst else None

    def product(self, factors: Iterable[Factor], order: Order, layer: str) -> Node:
        """The product of edge values of one rank, the two ends first: ``(a_i b_j) w_e``."""
        ends: dict[Node, Node] = {}
        rest: list[Factor] = []
        for factor in factors:
            found = None if factor.inverted else self._end(factor, order)
            if found is None:
                rest.append(factor)
                continue
            index, table = found
            ends[index] = self.times(ends[index], table, layer) if index in ends else table
        value = self._product_of_ends(ends, order, layer)
        for factor in rest:
            operand = factor.value
            if factor.on_edges:
                operand = self.emit(operand, order)
            value = self._combined(value, operand, factor.inverted, layer)
        return value

    def _end(self, factor: Factor, order: Order) -> tuple[Node, Node] | None:
        if not isinstance(factor.value, Node) or not self.indices(factor.value):
            return None
        return self.on_nodes(factor.value, order)

    def _product_of_ends(self, ends: dict[Node, Node], order: Order, layer: str) -> Any:
        sources = [index for index in ends if index is not order.dst]
        if order.dst in ends and sources and _same_columns(ends[order.dst], ends[sources[0]]):
            index = sources.pop(0)
            csr = self.csr(order, index)
            value: Any = self._sddmm(csr, ends[order.dst], ends[index], "mul", layer)
        else:
            value = None
            if order.dst in ends:
                value = self.read(order.dst, ends[order.dst], order, layer)
        for index in sources:
            operand = self.read(index, ends[index], order, layer)
            value = self._combined(value, operand, False, layer)
        return value

    def _combined(self, value: Any, operand: Any, inverted: bool, layer: str) -> Any:
        if value is None:
            if not inverted:
                return operand
            return self.emitter.call(aten.reciprocal.default, operand, layer=layer)
        target = aten.div.Tensor if inverted else aten.mul.Tensor
        return self.emitter.call(target, value, operand, layer=layer)

    def times(self, a: Any, b: Any, layer: str) -> Any:
        """``a * b`` as a node."""
        return self.emitter.call(aten.mul.Tensor, a, b, layer=layer)

    def cast(self, node: Node, like: Node) -> Node:
        """``node`` in the dtype of ``like``: primitives return at least FP32."""
        dtype = like.meta["val"].dtype
        if node.meta["val"].dtype == dtype:
            return node
        return self.emitter.call(aten._to_copy.default, node, layer=node.meta["layer"], dtype=dtype)

    # bodies

    def body(self, node: Node, order: Order, values: Sequence[Node] | None = None) -> BodyBuilder | None:
        """The body of an edge value, or of the ``values`` that it is made of.

        None where none can hold it, which ``unfit`` remembers.
        """
        try:
            return BodyBuilder(self, order, node, values)
        except UnfitError as error:
            self.unfit[node] = str(error)
            return None

    def _edge_map(self, body: BodyBuilder, node: Node, order: Order) -> Node:
        csr = self.csr(order, body.source)
        return self.emitter.call(
            gnnc.edge_map.default,
            csr.rowptr,
            csr.col,
            body.text,
            *body.operands,
            layer=node.meta["layer"],
        )


def _has_rows(table: Node, count: Node | int) -> bool:
    return same_size(shape_of(table)[0], count.meta["val"] if isinstance(count, Node) else count)


def _is_reshape(node: Node) -> bool:
    return op_name(node).partition(".")[0] in _RESHAPES


def _has_sizes(node: Node) -> bool:
    return op_name(node).partition(".")[0] in _RESHAPES[:4]


def _same_columns(a: Node, b: Node) -> bool:
    return same_shape(shape_of(a)[1:], shape_of(b)[1:])
