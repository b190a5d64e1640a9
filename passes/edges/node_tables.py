"""Edge values that one end of the edge decides: they are computed on the nodes, and read from there."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import aten_name, same_size, shape_of
from gnnc.passes.edges.edge_products import EdgeProducts
from gnnc.passes.edges.orders import Csr, EdgeOrders, Order
from gnnc.passes.edges.rowwise import Gather, as_gather, row_inputs

gnnc = torch.ops.gnnc

_SIZED_RESHAPES = ("view", "reshape", "_unsafe_view", "expand")
_RESHAPES = (*_SIZED_RESHAPES, "flatten", "unsqueeze", "squeeze")


class NodeTables(EdgeOrders):
    """Tables on the nodes whose rows are edge values: ``f(x[src])`` is ``f(x)[src]``."""

    def __init__(self, gm: fx.GraphModule, products: EdgeProducts | None = None) -> None:
        super().__init__(gm, products)
        self._tables: dict[Gather, Node | None] = {}

    def gather_form(self, node: Node, order: Order) -> Gather | None:
        """Return (table, index) such that ``node`` equals ``table[index]``, or None."""
        indices = self.indices(node)
        if len(indices) != 1 or node in self.softmaxes:
            return None
        (index,) = indices
        if not order.prefers_nodes and not self._only_reshaped(node):
            return None
        table = self.table(node, index)
        if table is None or (index is order.dst and not _has_rows(table, order.num_dst)):
            return None
        return Gather(table, index)

    def _only_reshaped(self, node: Node) -> bool:
        while as_gather(node) is None:
            inputs = row_inputs(node) or ()
            if len(inputs) != 1 or not is_reshape(node):
                return False
            node = inputs[0]
        return True

    def table(self, node: Node, index: Node) -> Node | None:
        """Return the table whose rows at ``index`` are ``node``, or None."""
        key = Gather(node, index)
        if key not in self._tables:
            self._tables[key] = self._make_table(node, index)
        return self._tables[key]

    def _make_table(self, node: Node, index: Node) -> Node | None:
        gather = as_gather(node)
        if gather is not None:
            return gather.table
        inputs = row_inputs(node)
        if not inputs:
            return None
        tables = {arg: self.table(arg, index) for arg in inputs}
        if not same_rows(tables.values()):
            return None
        return self.repeat(node, tables)

    def repeat(self, node: Node, mapping: dict[Node, Any]) -> Node:
        """Insert the op of ``node`` on other rows: ``mapping`` holds the replacement of each argument."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: mapping.get(arg, arg))
        return self.builder.call(node.target, *free_rows(node, args), layer=node.meta["layer"], **kwargs)

    def read(self, gather: Gather, order: Order, layer: str) -> Node:
        """Insert ``table[index]`` in CSR order."""
        if gather.index is order.dst:
            return self.sddmm(self.csr(order), gather.table, None, "copy_dst", layer)
        return self.sddmm(self.csr(order, gather.index), None, gather.table, "copy_src", layer)

    def sddmm(self, csr: Csr, dst_rows: Node | None, src_rows: Node | None, op: str, layer: str) -> Node:
        """Insert an ``sddmm`` of the rows at the two ends of each edge."""
        return self.builder.call(gnnc.sddmm.default, csr.rowptr, csr.col, dst_rows, src_rows, op, layer=layer)


def free_rows(node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a reshape with -1 for the number of rows, so that it fits other rows too."""
    if aten_name(node).partition(".")[0] in _SIZED_RESHAPES:
        return (args[0], [-1, *shape_of(node)[1:]], *args[2:])
    return args


def is_reshape(node: Node) -> bool:
    """Return whether ``node`` gives its input another shape."""
    return aten_name(node).partition(".")[0] in _RESHAPES


def same_rows(tables: Iterable[Node | None]) -> bool:
    """Return whether all are tables of one number of rows: an index may read a longer one beside."""
    first, *others = [None if table is None else shape_of(table)[0] for table in tables]
    return first is not None and all(rows is not None and same_size(first, rows) for rows in others)


def _has_rows(table: Node, count: Node | int) -> bool:
    return same_size(shape_of(table)[0], count.meta["val"] if isinstance(count, Node) else count)
