"""Finds graphs that get self loops in the place of their own, as GCN and GAT ask for, right before a sort.

To filter a list of edges, the host has to wait for how many are left, and to write the new list takes as long
as a pass of the sort. A sort can do both by itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SelfLoops:
    """A sort of ``cat([edge_index without self loops, one for every node])``.

    Attributes:
        sort: the node of ``gnnc.csr``; nobody asks for the positions of edges.
        edge_index: the node of the edges, integer ``[2, E]``.
        rows: which row of it are the sources, and which the destinations.
        nodes: how many nodes there are.
    """

    sort: Node
    edge_index: Node
    rows: tuple[int, int]
    nodes: Any

    def replace(self, target: Callable[..., Any]) -> tuple[Node, ...]:
        """Have ``target`` sort the edges as they are; it takes both their ends, and the number of nodes.

        Returns:
            The nodes of both ends.
        """
        graph = self.sort.graph
        with graph.inserting_before(self.sort):
            ends = [graph.call_function(_ATEN.select.int, (self.edge_index, 0, row)) for row in self.rows]
            sort = graph.call_function(target, (*ends, self.nodes))
        self.sort.replace_all_uses_with(sort)
        graph.eliminate_dead_code()
        return tuple(ends)


def self_loops(graph: Graph) -> Iterator[SelfLoops]:
    """Yield those of a graph; each may be replaced before the next."""
    for sort in graph.find_nodes(op="call_function", target=torch.ops.gnnc.csr.default):
        found = _match(sort)
        if found is not None:
            yield found


def _match(sort: Node) -> SelfLoops | None:
    src, dst, nodes, num_dst = sort.args
    (edges, src_row), (other, dst_row) = _row_of(src), _row_of(dst)
    is_asked = _same(nodes, num_dst) and edges is not None and edges is other and {src_row, dst_row} == {0, 1}
    if not is_asked or any(user.target is not getitem or user.args[1] == 2 for user in sort.users):
        return None
    together, dim = _arguments(edges, _ATEN.cat.default, 2) or ((), 0)
    if len(together) != 2 or dim not in (1, -1) or not _is_loops(together[1], nodes):
        return None
    edge_index, index = _arguments(together[0], _ATEN.index.Tensor, 2) or (None, ())
    if len(index) != 2 or index[0] is not None or not _is_no_loop(index[1], edge_index):
        return None
    return SelfLoops(sort, edge_index, (src_row, dst_row), nodes)


def _arguments(value: Any, target: Any, count: int) -> tuple[Any, ...] | None:
    is_such = isinstance(value, Node) and value.target is target and len(value.args) == count
    return value.args if is_such else None


def _row_of(value: Any) -> tuple[Any, int]:
    """Return the tensor that a node selects a row of, and the row."""
    tensor, dim, row = _arguments(value, _ATEN.select.int, 3) or (None, 0, 0)
    return (tensor, row) if dim == 0 else (None, 0)


def _is_no_loop(mask: Any, edge_index: Any) -> bool:
    """Whether a mask says which edges join two nodes."""
    (one, row), (other, other_row) = map(_row_of, _arguments(mask, _ATEN.ne.Tensor, 2) or (None, None))
    return one is edge_index and other is edge_index and {row, other_row} == {0, 1}


def _is_loops(value: Any, nodes: Any) -> bool:
    """Whether edges are one from every node to itself."""
    row, times = _arguments(value, _ATEN.repeat.default, 2) or (None, ())
    ids, shape = _arguments(row, _ATEN.reshape.default, 2) or (None, ())
    begin, end = _arguments(ids, _ATEN.arange.start, 2) or (0, None)
    return list(times) == [2, 1] and list(shape) == [1, -1] and begin == 0 and _same(end, nodes)


def _same(one: Any, other: Any) -> bool:
    """Whether two sizes are one: a node, or equal numbers."""
    return one is other if isinstance(one, Node) or isinstance(other, Node) else one == other
