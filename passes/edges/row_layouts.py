"""Layouts that make rows of the entries of a dimension other than the first.

Kernels read and reduce rows, the slices along dimension 0. A tensor ``[batch, nodes, features]`` gets rows in
one of two ways: ``NodesInFront`` gives ``[nodes, batch, features]``, with the batch within a row, and
``BatchesAsRows`` gives ``[batch * nodes, features]``, as if the graph had a copy for each item of the batch.
"""

import math
import operator
from typing import Any, ClassVar, Protocol

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import all_ones, aten_name, holds_tensor, is_pointwise, same_size, shape_of, value_of
from gnnc.passes.edges.rowwise import as_gather, row_inputs
from gnnc.passes.rewrite.node_builder import NodeBuilder, Sizes

aten = torch.ops.aten


class Values(Protocol):
    """Interface of a rewrite that a layout inserts calls through."""

    builder: NodeBuilder
    sizes: Sizes

    def with_rows(self, node: Node, dim: int) -> Node:
        """Return a tensor with rows for its dimension ``dim``."""
        ...


class RowLayout(Protocol):
    """Order of the dimensions in which a tensor has rows for the entries of its dimension ``dim``.

    Attributes:
        merges_batch: whether the dimensions before ``dim`` become part of that of rows.
    """

    merges_batch: ClassVar[bool]

    def place(self, other: int, dim: int) -> int:
        """Return which dimension another one becomes."""
        ...

    def shape(self, sizes: list[Any], dim: int, values: Values) -> list[Any]:
        """Return the sizes of the result for those of a tensor."""
        ...

    def keeps(self, source: Node, own: int, node: Node, dim: int) -> bool:
        """Return whether an operand has the rows of ``node``, for its dimension ``own``."""
        ...

    def convert(self, node: Node, dim: int, values: Values) -> Node:
        """Insert the change of a tensor to this layout."""
        ...

    def back(self, value: Node, node: Node, dim: int, values: Values) -> Node:
        """Insert the change of ``value`` from this layout to the dimensions of ``node``."""
        ...

    def broadcast(self, operand: Node, node: Node, dim: int, values: Values) -> Node:
        """Return an operand of an elementwise op so that it broadcasts to the result in this layout."""
        ...

    def index(self, index: Node, table: Node, dim: int, values: Values) -> Node:
        """Return the rows that a vector of indices along dimension ``dim`` of a tensor reads or writes."""
        ...


class NodesInFront:
    """Layout ``[nodes, batch, features]``: the dimension moves to the front."""

    merges_batch: ClassVar[bool] = False

    def place(self, other: int, dim: int) -> int:
        """See ``RowLayout``."""
        return 0 if other == dim else other + (other < dim)

    def shape(self, sizes: list[Any], dim: int, values: Values) -> list[Any]:
        """See ``RowLayout``."""
        return _in_front(sizes, dim)

    def keeps(self, source: Node, own: int, node: Node, dim: int) -> bool:
        """See ``RowLayout``."""
        return True

    def convert(self, node: Node, dim: int, values: Values) -> Node:
        """See ``RowLayout``."""
        return _permuted(values, node, _in_front(list(range(len(shape_of(node)))), dim))

    def back(self, value: Node, node: Node, dim: int, values: Values) -> Node:
        """See ``RowLayout``."""
        others = list(range(1, len(shape_of(value))))
        return _permuted(values, value, [*others[:dim], 0, *others[dim:]])

    def broadcast(self, operand: Node, node: Node, dim: int, values: Values) -> Node:
        """See ``RowLayout``."""
        missing = len(shape_of(node)) - len(shape_of(operand))
        if missing > dim:
            return operand
        rows = values.with_rows(operand, dim - missing)
        if missing == 0:
            return rows
        first, *others = _sizes(rows, values)
        return _call(values, rows, aten.reshape.default, rows, [first, *[1] * missing, *others])

    def index(self, index: Node, table: Node, dim: int, values: Values) -> Node:
        """See ``RowLayout``."""
        return index


class BatchesAsRows:
    """Layout ``[batch * nodes, features]``: a row for each node of each item."""

    merges_batch: ClassVar[bool] = True

    def place(self, other: int, dim: int) -> int:
        """See ``RowLayout``."""
        return max(other - dim, 0)

    def shape(self, sizes: list[Any], dim: int, values: Values) -> list[Any]:
        """See ``RowLayout``."""
        return [_product(sizes[: dim + 1], values), *sizes[dim + 1 :]]

    def keeps(self, source: Node, own: int, node: Node, dim: int) -> bool:
        """See ``RowLayout``."""
        leading = zip(shape_of(source)[:dim], shape_of(node)[:dim], strict=False)
        return own == dim and all(same_size(a, b) for a, b in leading)

    def convert(self, node: Node, dim: int, values: Values) -> Node:
        """See ``RowLayout``."""
        sizes = self.shape(_sizes(node, values), dim, values)
        return _call(values, node, aten.reshape.default, node, sizes)

    def back(self, value: Node, node: Node, dim: int, values: Values) -> Node:
        """See ``RowLayout``."""
        return _call(values, node, aten.reshape.default, value, _sizes(node, values))

    def broadcast(self, operand: Node, node: Node, dim: int, values: Values) -> Node:
        """See ``RowLayout``."""
        missing = len(shape_of(node)) - len(shape_of(operand))
        own = dim - missing
        if own < 0:
            return operand
        if missing == 0 and self.keeps(operand, own, node, dim) and _same(operand, node, dim):
            return values.with_rows(operand, dim)
        if all_ones(shape_of(operand)[: own + 1]):
            trailing = _sizes(operand, values)[own + 1 :]
            return _call(values, operand, aten.reshape.default, operand, [1, *trailing])
        batch = _sizes(node, values)[:dim]
        return _repeated(operand, batch, values) if own == 0 else _expanded(operand, own, batch, values)

    def index(self, index: Node, table: Node, dim: int, values: Values) -> Node:
        """See ``RowLayout``."""
        *batch, rows = _sizes(table, values)[: dim + 1]
        return _repeated_index(index, batch, rows, values)


def _repeated(operand: Node, batch: list[Any], values: Values) -> Node:
    """Return the rows of an operand once for each item of a batch.

    Gathers read repeated tables, so that ``raise`` still finds what an edge value has of either end.
    """
    gather, name = as_gather(operand), aten_name(operand)
    if gather is not None:
        index = _repeated_index(gather.index, batch, values.sizes.of(gather.table, 0), values)
        table = _repeated(gather.table, batch, values)
        return _call(values, operand, aten.index_select.default, table, 0, index)
    inputs = row_inputs(operand) or ()
    if name in ("reshape.default", "unsqueeze.default") and inputs:
        _, *trailing = _sizes(operand, values)
        rows = _repeated(inputs[0], batch, values)
        return _call(values, operand, aten.reshape.default, rows, [values.sizes.of(rows, 0), *trailing])
    if is_pointwise(operand) and len(inputs) == sum(map(holds_tensor, operand.all_input_nodes)):
        repeated = {arg: _repeated(arg, batch, values) for arg in inputs}
        args, kwargs = fx.map_arg((operand.args, operand.kwargs), lambda arg: repeated.get(arg, arg))
        return _call(values, operand, operand.target, *args, **kwargs)
    return _expanded(operand, 0, batch, values)


def _expanded(operand: Node, own: int, batch: list[Any], values: Values) -> Node:
    """Return rows ``[batch * n, ...]`` of an operand whose dimension ``own`` has size n, by an expansion."""
    sizes = _sizes(operand, values)
    repeated = _call(values, operand, aten.expand.default, operand, [*batch, *sizes[own:]])
    rows = _product([*batch, sizes[own]], values)
    return _call(values, operand, aten.reshape.default, repeated, [rows, *sizes[own + 1 :]])


def _repeated_index(index: Node, batch: list[Any], rows: Any, values: Values) -> Node:
    """Return a vector of indices of rows once for each item of a batch, into ``[batch * rows, ...]``."""
    options = {"device": value_of(index).device}
    items = _call(values, index, aten.arange.default, _product(batch, values), **options)
    begins = _call(values, index, aten.mul.Tensor, items, rows)
    column = _call(values, index, aten.reshape.default, begins, [-1, 1])
    together = _call(values, index, aten.add.Tensor, column, index)
    return _call(values, index, aten.reshape.default, together, [-1])


def _in_front(items: list[Any], dim: int) -> list[Any]:
    return [items[dim], *items[:dim], *items[dim + 1 :]]


def _same(operand: Node, node: Node, dim: int) -> bool:
    return same_size(shape_of(operand)[dim], shape_of(node)[dim])


def _permuted(values: Values, node: Node, order: list[int]) -> Node:
    return _call(values, node, aten.permute.default, node, order)


def _sizes(node: Node, values: Values) -> list[Any]:
    return [values.sizes.of(node, dim) for dim in range(len(shape_of(node)))]


def _product(sizes: list[Any], values: Values) -> Any:
    """Return the product of sizes: an int, or a node."""
    number = math.prod(size for size in sizes if isinstance(size, int))
    nodes = [size for size in sizes if isinstance(size, Node)]
    factors = nodes if nodes and number == 1 else [*nodes, number]
    result: Any = factors[0]
    for factor in factors[1:]:
        result = values.sizes.add(values.builder.call(operator.mul, result, factor))
    return result


def _call(values: Values, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    return values.builder.call(target, *args, layer=like.meta["layer"], **kwargs)
