"""Regions: the values that are computed once an edge, emitted as primitives over a CSR.

An *edge value* is a node that depends, row by row, on gathers: ``x[src]``, ``a[src] + a[dst]``,
``softmax(...)``. ``Regions.emit`` computes it in CSR order:

* a value that depends on one end only is computed on the nodes and read from there;
* the forms ``a_i op b_j`` and ``<a_i, b_j>`` are ``sddmm``, a softmax is ``edge_softmax``;
* other values with few columns (logits, edge weights) stay ATen ops on ``[E]`` or ``[E, H]``;
* the rest is the body of an ``edge_map``.

``gnnc.passes.edges.aggregate`` reduces edge values to the nodes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import argument, aten_name, first_operand, holds_tensor, same_shape, shape_of, unpack
from gnnc.passes.edges.bodies import BodyBuilder, UnfitError
from gnnc.passes.edges.edge_products import EdgeProducts, fold
from gnnc.passes.edges.factors import Factor, factors_of
from gnnc.passes.edges.node_tables import NodeTables, is_reshape, same_rows
from gnnc.passes.edges.orders import Order
from gnnc.passes.edges.rowwise import Gather, as_gather, is_narrow, row_inputs
from gnnc.passes.edges.softmax import Softmax

aten, gnnc = torch.ops.aten, torch.ops.gnnc

_PAIR_OPS = {"add.Tensor": "add", "sub.Tensor": "sub", "mul.Tensor": "mul"}


@dataclass(frozen=True)
class _Ends:
    """The two operands of a binary op, read by destination and by source.

    Attributes:
        dst: the operand that is read by destination.
        src: the operand that is read by another index.
        is_reversed: whether the source is the left operand.
    """

    dst: Gather
    src: Gather
    is_reversed: bool


class Regions(NodeTables):
    """Emission of edge values into one graph, in CSR order.

    Attributes:
        unfit: edge values that no body can hold, and why.
    """

    def __init__(self, gm: fx.GraphModule, products: EdgeProducts) -> None:
        super().__init__(gm, products)
        self.unfit: dict[Node, str] = {}

    def emit(self, node: Node, order: Order) -> Node:
        """Return the edge value ``node`` in the CSR order of ``order``, computed there once."""
        if node not in order.values:
            order.values[node] = self._make(node, order)
        return order.values[node]

    def _make(self, node: Node, order: Order) -> Node:
        if not self.indices(node):
            narrowed = None if node in self.in_callers_order else self._narrowed(node, order)
            return narrowed or self._permuted(node, order)
        if node in self.softmaxes:
            return self._softmax_in(self.softmaxes[node], order)
        gather = self.gather_form(node, order)
        if gather is not None:
            return self.read(gather, order, node.meta["layer"])
        if as_gather(node) is not None or self.is_computed_otherwise(node):
            return self._permuted(node, order)
        pair = self._pair(node, order)
        if pair is not None:
            return pair
        if not is_narrow(node) or not self.all_narrow(node):
            body = self.body(node, order)
            if body is not None:
                return self._edge_map(body, node, order)
        if aten_name(node) == "mul.Tensor" and len(node.all_input_nodes) > 1:
            return self.product(factors_of(node, self), order, node.meta["layer"])
        return self.repeat(node, {arg: self.emit(arg, order) for arg in row_inputs(node) or ()})

    def all_narrow(self, node: Node) -> bool:
        """Return whether everything that ``node`` reads by rows is narrow."""
        return all(is_narrow(arg) for arg in row_inputs(node) or ())

    def _narrowed(self, leaf: Node, order: Order) -> Node | None:
        """Emit a few columns that are computed from wide rows: the wide rows stay in a body."""
        if self.products is None or not is_narrow(leaf) or not self.products.has_wide_steps(leaf):
            return None
        folded = fold(leaf, self.builder)
        if folded is not None:
            self.edge_notes[folded.product] = "its columns are summed in its weight: no edge holds them"
            x = self.emit(folded.x, order)
            layer = folded.product.meta["layer"]
            return self.builder.call(aten.linear.default, x, folded.weight, folded.bias, layer=layer)
        body = self.body(leaf, order) if self.is_inside(leaf) else None
        return None if body is None else self._edge_map(body, leaf, order)

    def _permuted(self, leaf: Node, order: Order) -> Node:
        if aten_name(leaf) == "full.default":
            return leaf
        if is_reshape(leaf) and row_inputs(leaf):
            source = first_operand(leaf)
            return self.repeat(leaf, {source: self.emit(source, order)})
        return self._rows_at(self.csr(order).perm, leaf, leaf.meta["layer"])

    def _rows_at(self, permutation: Node, value: Node, layer: str) -> Node:
        return self.builder.call(aten.index_select.default, value, 0, permutation, layer=layer)

    # softmaxes

    def _softmax_in(self, softmax: Softmax, order: Order) -> Node:
        """Emit a softmax in ``order``, which may sort the edges by another end than the softmax sums over."""
        sum_order = self.order_of(softmax)
        if sum_order is order:
            return self._softmax(softmax, order)
        layer = softmax.node.meta["layer"]
        value = self.emit(softmax.node, sum_order)
        value = self._rows_at(self.inverse(sum_order), value, layer)
        return self._rows_at(self.csr(order).perm, value, layer)

    def _softmax(self, softmax: Softmax, order: Order) -> Node:
        logits = self.emit(softmax.logits, order)
        layer = softmax.node.meta["layer"]
        has_column = len(shape_of(logits)) == 3
        if has_column:
            logits = self.builder.call(aten.squeeze.dim, logits, 2, layer=layer)
        rowptr = self.csr(order).rowptr
        weight = self.builder.call(gnnc.edge_softmax.default, rowptr, logits, softmax.eps, layer=layer)
        weight = self.cast(weight, softmax.node)
        return self.builder.call(aten.unsqueeze.default, weight, 2, layer=layer) if has_column else weight

    # pairs of ends

    def _pair(self, node: Node, order: Order) -> Node | None:
        """Emit ``a_i op b_j`` or ``<a_i, b_j>`` as an sddmm."""
        if aten_name(node) == "sum.dim_IntList":
            return self._dot(node, order)
        op = _PAIR_OPS.get(aten_name(node))
        if op is None or argument(node, "alpha", 1) != 1:
            return None
        ends = self._ends(node, order)
        if ends is None:
            return None
        layer = node.meta["layer"]
        result = self._sddmm_of(ends, op, order, layer)
        if op == "sub" and ends.is_reversed:
            # not neg: of two equal rows the difference is positive zero
            result = self.builder.call(aten.rsub.Scalar, result, 0, layer=layer)
        return self.cast(result, node)

    def _dot(self, node: Node, order: Order) -> Node | None:
        product, dims = unpack(node, "self", "dim")
        rank = len(shape_of(product))
        if aten_name(product) != "mul.Tensor" or list(dims) != [rank - 1] or rank not in (2, 3):
            return None
        ends = self._ends(product, order)
        if ends is None:
            return None
        layer = node.meta["layer"]
        result = self.cast(self._sddmm_of(ends, "dot", order, layer), node)
        if argument(node, "keepdim"):
            return self.builder.call(aten.unsqueeze.default, result, rank - 1, layer=layer)
        return result

    def _sddmm_of(self, ends: _Ends, op: str, order: Order, layer: str) -> Node:
        csr = self.csr(order, ends.src.index)
        return self.sddmm(csr, ends.dst.table, ends.src.table, op, layer)

    def _ends(self, node: Node, order: Order) -> _Ends | None:
        """Return the two operands of a binary op as gathers by destination and by source, or None."""
        left, right = unpack(node, "self", "other")
        if not holds_tensor(left) or not holds_tensor(right):
            return None
        if not same_shape(shape_of(left), shape_of(right)):
            return None
        first, second = self.gather_form(left, order), self.gather_form(right, order)
        if first is None or second is None or first.index is second.index:
            return None
        if first.index is order.dst:
            return _Ends(first, second, is_reversed=False)
        return _Ends(second, first, is_reversed=True) if second.index is order.dst else None

    # products

    def product(self, factors: Iterable[Factor], order: Order, layer: str) -> Node:
        """Return the product of edge values of one rank, the two ends first: ``(a_i b_j) w_e``."""
        tables: dict[Node, Node] = {}
        rest: list[Factor] = []
        for factor in factors:
            gather = None if factor.inverted else self._gather_of(factor, order)
            table = None if gather is None else tables.get(gather.index)
            if gather is None or (table is not None and not same_rows((table, gather.table))):
                rest.append(factor)
                continue
            tables[gather.index] = gather.table if table is None else self.times(table, gather.table, layer)
        value = self._product_of_ends(tables, order, layer)
        for factor in rest:
            operand = factor.value
            if factor.on_edges:
                operand = self.emit(operand, order)
            value = self._combined(value, operand, factor.inverted, layer)
        return value

    def _gather_of(self, factor: Factor, order: Order) -> Gather | None:
        if not isinstance(factor.value, Node) or not self.indices(factor.value):
            return None
        return self.gather_form(factor.value, order)

    def _product_of_ends(self, tables: dict[Node, Node], order: Order, layer: str) -> Any:
        """Emit the product of the tables' rows; ``tables`` has them by the index that reads them."""
        sources = [index for index in tables if index is not order.dst]
        dst_table = tables.get(order.dst)
        value: Any = None
        if dst_table is not None and sources and _same_columns(dst_table, tables[sources[0]]):
            index = sources.pop(0)
            value = self.sddmm(self.csr(order, index), dst_table, tables[index], "mul", layer)
        elif dst_table is not None:
            value = self.read(Gather(dst_table, order.dst), order, layer)
        for index in sources:
            operand = self.read(Gather(tables[index], index), order, layer)
            value = self._combined(value, operand, False, layer)
        return value

    def _combined(self, value: Any, operand: Any, inverted: bool, layer: str) -> Any:
        if value is None:
            if not inverted:
                return operand
            return self.builder.call(aten.reciprocal.default, operand, layer=layer)
        target = aten.div.Tensor if inverted else aten.mul.Tensor
        return self.builder.call(target, value, operand, layer=layer)

    def times(self, a: Any, b: Any, layer: str) -> Any:
        """Insert ``a * b``."""
        return self.builder.call(aten.mul.Tensor, a, b, layer=layer)

    # bodies

    def body(self, node: Node, order: Order, values: Sequence[Node] | None = None) -> BodyBuilder | None:
        """Return the body that computes ``node``, or the ``values`` that ``node`` combines.

        None where no body can hold them; ``unfit`` then has the reason.
        """
        try:
            return BodyBuilder(self, order, self.emit, node, values)
        except UnfitError as error:
            self.unfit[node] = str(error)
            return None

    def _edge_map(self, body: BodyBuilder, node: Node, order: Order) -> Node:
        csr = self.csr(order, body.source)
        return self.builder.call(
            gnnc.edge_map.default,
            csr.rowptr,
            csr.col,
            body.text,
            *body.operands,
            layer=node.meta["layer"],
        )


def _same_columns(a: Node, b: Node) -> bool:
    return same_shape(shape_of(a)[1:], shape_of(b)[1:])
