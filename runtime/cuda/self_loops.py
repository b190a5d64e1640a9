"""Finds graphs that get self loops in the place of their own, as GCN and GAT ask for, right before a sort.

To filter a list of edges, the host has to wait for how many are left, and to write the new list takes as long
as a pass of the sort. A sort can do both by itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from gnnc.ir.graph import clone

_ATEN = torch.ops.aten


_NOT = (_ATEN.bitwise_not.default, _ATEN.logical_not.default)


@dataclass(frozen=True, slots=True)
class SelfLoops:
    """A sort of ``cat([edge_index without self loops, one for every node])``.

    Attributes:
        sort: the node of ``gnnc.csr``.
        edge_index: the node of the edges, integer ``[2, E]``.
        rows: which row of it are the sources, and which the destinations.
        nodes: how many nodes there are.
        values: nodes of ``cat([values without those of self loops, those of the new ones])``, the only ones
            that are read by the positions of sorted edges.
    """

    sort: Node
    edge_index: Node
    rows: tuple[int, int]
    nodes: Any
    values: tuple[Node, ...]

    def replace(self, target: Callable[..., Any]) -> None:
        """Have ``target`` sort the edges as they are; it takes both their ends, and the number of nodes.

        Positions that it returns are of all E edges, and behind them of the new ones.
        """
        graph = self.sort.graph
        with graph.inserting_before(self.sort):
            ends = [graph.call_function(_ATEN.select.int, (self.edge_index, 0, row)) for row in self.rows]
            sort = graph.call_function(target, (*ends, self.nodes))
        for values in self.values:
            together: Any = values.args[0]
            kept, new = together
            with graph.inserting_before(values):
                values.update_arg(0, [kept.args[0], self._without_filter(graph, new)])
        self.sort.replace_all_uses_with(sort)
        graph.eliminate_dead_code()

    def _without_filter(self, graph: Graph, new: Node) -> Node:
        """Return values of the new loops, made without a list of the old ones where that is how they are."""
        start, ids, values = _arguments(new, _ATEN.index_put.default, 3) or (None, (), None)
        id_ = _filtered(ids[0], self.edge_index) if len(ids) == 1 else None
        value = _filtered(values, self.edge_index)
        if value is None or _row_of(id_)[0] is not self.edge_index:
            return new
        return graph.call_function(values_of_loops, (start, self.edge_index, value))


def values_of_loops(start: Tensor, edge_index: Tensor, values: Tensor) -> Tensor:
    """Return the values of a graph's self loops by node, ``start`` where it has none.

    As ``start.index_put([src[src == dst]], values[src == dst])``, but the host waits for no list of loops:
    the values of all other edges go to memory that is dropped, as many places.

    Args:
        start: ``[N, ...]``.
        edge_index: int64 ``[2, E]``; an id out of range does no harm, the sort says which it is.
        values: ``[E, ...]``.
    """
    nodes, (src, dst) = start.shape[0], edge_index
    if nodes == 0:
        return start
    places = src.clamp(0, nodes - 1) + (src != dst) * nodes
    return torch.cat([start, start]).index_put_((places,), values)[:nodes]


def take_loops(structure: GraphModule, target: Callable[..., Any]) -> GraphModule:
    """Return a structure graph in which ``target`` sorts, and gives graphs self loops, see ``SelfLoops``."""
    result = clone(structure)
    found = [loops.replace(target) for loops in self_loops(result.graph)]
    if not found:
        return structure
    result.recompile()
    return result


def self_loops(graph: Graph) -> Iterator[SelfLoops]:
    """Yield those of a graph; each may be replaced before the next."""
    for sort in graph.find_nodes(op="call_function", target=torch.ops.gnnc.csr.default):
        found = _match(sort)
        if found is not None:
            yield found


def _match(sort: Node) -> SelfLoops | None:
    src, dst, nodes, num_dst = sort.args
    (edges, src_row), (other, dst_row) = _row_of(src), _row_of(dst)
    if not _same(nodes, num_dst) or edges is None or edges is not other or {src_row, dst_row} != {0, 1}:
        return None
    together, dim = _arguments(edges, _ATEN.cat.default, 2) or ((), 0)
    if len(together) != 2 or dim not in (1, -1) or not _is_loops(together[1], nodes):
        return None
    edge_index, index = _arguments(together[0], _ATEN.index.Tensor, 2) or (None, ())
    if len(index) != 2 or index[0] is not None or not _is_no_loop(index[1], edge_index):
        return None
    values = _read_by_position(sort, edge_index)
    return None if values is None else SelfLoops(sort, edge_index, (src_row, dst_row), nodes, values)


def _read_by_position(sort: Node, edge_index: Any) -> tuple[Node, ...] | None:
    """Return what is read by the positions of sorted edges; None where not only values of edges and loops."""
    if any(user.target is not getitem for user in sort.users):
        return None
    positions = [user for user in sort.users if user.args[1] == 2]
    readers = {reader for each in positions for reader in each.users}
    values = list(dict.fromkeys(_values_read(reader, positions) for reader in readers))
    is_so = all(_is_of_edges_and_loops(each, edge_index) and set(each.users) <= readers for each in values)
    return tuple(values) if is_so else None


def _values_read(reader: Node, positions: Sequence[Node]) -> Any:
    """Return the values that an op takes in the order of sorted edges; None where it does something else."""
    if reader.target is _ATEN.index_select.default:
        values, dim, order = reader.args
        return values if dim == 0 and order in positions else None
    if reader.target is torch.ops.gnnc.segment_reduce.default:
        _, order, values, *_ = reader.args
        return values if order in positions else None
    return None


def _is_of_edges_and_loops(value: Any, edge_index: Any) -> bool:
    if not isinstance(value, Node) or value.target is not _ATEN.cat.default:
        return False
    together, *dim = value.args
    if len(together) != 2 or dim not in ([], [0]):
        return False
    return _filtered(together[0], edge_index, loops=False) is not None


def _filtered(value: Any, edge_index: Any, *, loops: bool = True) -> Node | None:
    """Return the tensor of which a node takes the elements of self loops, or of all other edges."""
    tensor, index = _arguments(value, _ATEN.index.Tensor, 2) or (None, ())
    mask = index[0] if len(index) == 1 else None
    if loops:
        mask = mask.args[0] if isinstance(mask, Node) and mask.target in _NOT else None
    return tensor if _is_no_loop(mask, edge_index) else None


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
