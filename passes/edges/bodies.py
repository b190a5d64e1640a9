"""Bodies of ``message`` and ``edge_map``: the part of an edge value that runs per edge."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir import body_text
from gnnc.ir.body import KINDS
from gnnc.ir.nodes import (
    argument,
    aten_name,
    first_operand,
    holds_tensor,
    is_pointwise,
    reached,
    shape_of,
)
from gnnc.passes.edges.node_tables import NodeTables, free_rows
from gnnc.passes.edges.orders import Order
from gnnc.passes.edges.rowwise import NARROW, Gather, as_gather, is_narrow, row_inputs

aten = torch.ops.aten

_FAR_LESS = 4
"""Columns that a body computes, at least, for each column that is stored for it at every edge."""
_PLACES = ("device", "layout", "pin_memory", "memory_format", "non_blocking")


class UnfitError(Exception):
    """An edge value computes something that a body cannot hold; the message says what."""


def _width(node: Node) -> Any:
    return math.prod(shape_of(node)[1:])


def _joins_rows(node: Node) -> bool:
    """Return whether an op, such as ``cat``, takes a row of each operand for every edge: it repeats none."""
    return len(row_inputs(node) or ()) > 1 and not is_pointwise(node)


class BodyBuilder:
    """Builder of the body that computes ``root``, or several ``values`` that ``root`` combines.

    It reaches back from the root to rows of the two ends, to edge tensors, to rows of a weight that a
    type chooses, and to values that are cheap to store for every edge, such as attention weights.

    Attributes:
        tables: the gathers that edge values depend on.
        order: the order of the edges that the body runs in.
        emit: computes an edge value in an order, outside the body.
        root: the edge value.
        widest: columns of the widest edge value on the way to the root.
        source: the source index that the ``j`` operands are read by, or None.
        text: the body.
        operands: the operands by destination, by source, by edge, and the constants.
    """

    def __init__(
        self,
        tables: NodeTables,
        order: Order,
        emit: Callable[[Node, Order], Node],
        root: Node,
        values: Sequence[Node] | None = None,
    ) -> None:
        self.tables, self.order, self.emit, self.root = tables, order, emit, root
        self.source = self._choose_source()
        self.widest = max(_width(value) for value in self._edge_values(root))
        self.graph = fx.Graph()
        self.operands: tuple[list[Node], ...] = ([], [], [], [])
        self._names: dict[tuple[str, Node], Node] = {}
        self._built: dict[Node, Node] = {}
        self.graph.output(self._visit(root) if values is None else [self._visit(value) for value in values])
        self.text = body_text(self.graph)

    def _choose_source(self) -> Node | None:
        """Return the first index of the root other than the destinations: one of a known CSR if there is one.

        Indices of nothing but lookups in weights come last.
        """
        sizes = self.tables.table_sizes(self.root)
        sources = [index for index in sizes if index is not self.order.dst]
        for index in sources:
            self.order.sources.setdefault(index, sizes[index])
        lookups = self.tables.lookup_indices(self.root)
        sources = [index for index in sources if index not in lookups] or sources
        with_csr = [index for index in sources if index in self.order.csrs]
        return next(iter(with_csr or sources), None)

    def _edge_values(self, node: Node) -> set[Node]:
        """Return the edge values that ``node`` is computed from, row by row, and itself."""

        def inputs(value: Node) -> list[Node]:
            rows = () if as_gather(value) is not None else row_inputs(value) or ()
            return [arg for arg in rows if self.tables.indices(arg)]

        return reached([node], inputs)

    def _visit(self, node: Node) -> Node:
        if node not in self._built:
            self._built[node] = self._build(node)
        return self._built[node]

    def _build(self, node: Node) -> Node:
        if not self.tables.indices(node):
            return self._leaf(node)
        gather = self.tables.gather_form(node, self.order)
        if gather is not None:
            return self._end(gather, node.meta["layer"])
        if as_gather(node) is not None or (node is not self.root and self._is_stored(node)):
            return self._emitted(node)
        return self._call(node)

    def _leaf(self, node: Node) -> Node:
        if self.tables.is_inside(node) and (node is self.root or not is_narrow(node)):
            return self._call(node)
        if aten_name(node) != "full.default" or any(map(_joins_rows, node.users)):
            return self._emitted(node)
        value = node.meta["val"]
        constant = self.tables.builder.call(
            aten.full.default,
            [1] * value.dim(),
            argument(node, "fill_value"),
            dtype=value.dtype,
            device=value.device,
        )
        return self._operand("c", constant)

    def _emitted(self, node: Node) -> Node:
        return self._operand("e", self.emit(node, self.order))

    def _end(self, gather: Gather, layer: str) -> Node:
        """Return the operand for the rows of a table that one end of the edge reads."""
        table = gather.table
        if gather.index is self.order.dst:
            return self._operand("i", table)
        if gather.index is self.source:
            return self._operand("j", table)
        if self.tables.is_lookup(table) and math.prod(shape_of(table)[1:]) > NARROW:
            rows = self._emitted(gather.index)
            return self.graph.call_function(aten.index_select.default, (self._operand("c", table), 0, rows))
        return self._operand("e", self.tables.read(gather, self.order, layer))

    def _is_stored(self, node: Node) -> bool:
        if node in self.tables.softmaxes or node in self.order.values or self._is_cheap(node):
            return True
        return node in self.tables.shared or self.tables.is_computed_otherwise(node)

    def _is_cheap(self, node: Node) -> bool:
        """Return whether a value takes far less room than what the body computes."""
        return is_narrow(node) and _width(node) * _FAR_LESS <= self.widest

    def _call(self, node: Node) -> Node:
        if node.target is operator.getitem:  # normalize writes the parts of a split as slices
            raise UnfitError(f"{first_operand(node).target} returns several tensors")
        rows = set(row_inputs(node) or ())

        def mapped(arg: Node) -> Any:
            if not holds_tensor(arg):
                raise UnfitError(f"{node.target} of a size or a tuple")
            return self._visit(arg) if arg in rows else self._operand("c", arg)

        args, kwargs = fx.map_arg((free_rows(node, node.args), node.kwargs), mapped)
        kwargs = {key: value for key, value in kwargs.items() if key not in _PLACES}
        return self.graph.call_function(node.target, args, kwargs)

    def _operand(self, kind: str, node: Node) -> Node:
        key = (kind, node)
        if key not in self._names:
            group = self.operands[KINDS.index(kind)]
            self._names[key] = self._placeholder(f"{kind}{len(group)}")
            group.append(node)
        return self._names[key]

    def _placeholder(self, name: str) -> Node:
        first = next(iter(self.graph.nodes), None)
        if first is None or first.op == "root":
            return self.graph.placeholder(name)
        with self.graph.inserting_before(first):
            return self.graph.placeholder(name)
