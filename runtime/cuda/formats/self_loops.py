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
_GNNC = torch.ops.gnnc
_NOT = (_ATEN.bitwise_not.default, _ATEN.logical_not.default)


@dataclass(frozen=True, slots=True)
class SelfLoops:
    """A sort of ``cat([edge_index without self loops, one for every node])``.

    Attributes:
        sort: the node of ``gnnc.csr``.
        edge_index: the node of the edges, integer ``[2, E]``.
        rows: which row of it are the sources, and which the destinations.
        mask: the node of which edges are no self loops.
        nodes: how many nodes there are.
        values: nodes of ``cat([values without those of self loops, those of the new ones])``, the only ones
            that are read by the positions of sorted edges; None where those are read otherwise too.
    """

    sort: Node
    edge_index: Node
    rows: tuple[int, int]
    mask: Node
    nodes: Any
    values: tuple[Node, ...] | None

    def replace(self, target: Callable[..., Any]) -> None:
        """Have ``target`` sort the edges as they are; it takes both their ends, and the number of nodes.

        Positions that it returns are of all E edges, and behind them of the new ones. Sums over the edges
        that are no loops, which the caller has by another sort, are taken by this one.
        """
        graph, sums = self.sort.graph, list(self._sums_without_loops())
        replaced = {self.sort, *[each.sort for each in sums]}
        first = next(node for node in graph.nodes if node in replaced)
        with graph.inserting_before(first if self.values is not None else self.mask):
            ends = [next(end for end in self.mask.args if _row_of(end)[1] == row) for row in self.rows]
            sort = graph.call_function(target, (*ends, self.nodes))
        with graph.inserting_after(sort):
            rowptr, col, perm = (graph.call_function(getitem, (sort, part)) for part in range(3))
        for put in graph.find_nodes(op="call_function", target=_ATEN.index_put.default):
            self._take_values_of_loops(put)
        if self.values is None:
            perm = self._make_lists(col, perm)
        else:
            self._drop_lists(self.values)
        for each in sums:
            each.replace(rowptr, perm, in_lists=self.values is None)
        self.sort.replace_all_uses_with(sort)
        graph.eliminate_dead_code()

    def _sums_without_loops(self) -> Iterator["Sums"]:
        """Yield what is summed up over the edges to each node that are no loops."""
        for sort in self.sort.graph.find_nodes(op="call_function", target=_GNNC.csr.default):
            _, dst, _, num_dst = sort.args
            edges, row = _row_of(dst)
            edge_index, mask = _without_loops(edges)
            if (edge_index, mask, row, num_dst) == (self.edge_index, self.mask, self.rows[1], self.nodes):
                sums = _sums_of(sort, self.edge_index)
                if sums is not None:
                    yield sums

    def _take_values_of_loops(self, put: Node) -> None:
        """Have a node take values that loops have without a list of the loops, if that is what it does."""
        start, ids, values = _arguments(put, _ATEN.index_put.default, 3) or (None, (), None)
        id_ = _filtered(ids[0], self.edge_index) if len(ids) == 1 else None
        value = _filtered(values, self.edge_index)
        if value is not None and _row_of(id_)[0] is self.edge_index:
            put.target, put.args = values_of_loops, (start, self.edge_index, value)

    def _drop_lists(self, values: Sequence[Node]) -> None:
        """Have values be those of all edges, for they are read in the order of the sort alone."""
        for each in values:
            together: Any = each.args[0]
            kept, new = together
            each.update_arg(0, [kept.args[0], new])

    def _make_lists(self, col: Node, perm: Node) -> Node:
        """Make lists without loops, as long as the sort says; return positions in such lists."""
        graph = self.sort.graph
        with graph.inserting_after(self.mask):
            positions = graph.call_function(positions_without_loops, (self.mask, perm, self.nodes))
        for each in list(self.mask.users):
            values = _filtered(each, self.edge_index, loops=False)
            if values is not None:
                each.target, each.args = without_loops, (values, self.mask, col, self.nodes)
        for part in list(self.sort.users):
            if part.args[1] == 2:
                part.replace_all_uses_with(positions)
        return positions


@dataclass(frozen=True, slots=True)
class Sums:
    """A sort of edges without self loops, of which sums and degrees are taken and nothing else.

    Attributes:
        sort: the node of ``gnnc.csr``.
        degrees: nodes of ``gnnc.degree``.
        sums: nodes of ``gnnc.segment_reduce``, and of which edges' values each adds up those of no loop.
    """

    sort: Node
    degrees: tuple[Node, ...]
    sums: tuple[tuple[Node, Node], ...]

    def replace(self, rowptr: Node, perm: Node, *, in_lists: bool) -> None:
        """Take them of a sort that gives every node a loop, which is no degree and adds nothing to a sum.

        Args:
            rowptr: of that sort.
            perm: its positions among all edges, or in lists without loops.
            in_lists: which of both.
        """
        for each in self.degrees:
            each.target, each.args = degree_without_loops, (rowptr,)
        for each, values in self.sums:
            each.target, each.args = sums_without_loops, (rowptr, perm, each.args[2] if in_lists else values)


def degree_without_loops(rowptr: Tensor) -> Tensor:
    """Return the number of edges of every row but one, float32 ``[N]``."""
    return (rowptr.diff() - 1).float()


def sums_without_loops(rowptr: Tensor, perm: Tensor, values: Tensor) -> Tensor:
    """Return the sums of edges' values to each node, of a graph where every node has a loop without a value.

    Args:
        rowptr: int64 ``[N + 1]``.
        perm: int64 ``[M]``, places of edges among the values; those from E on are of loops.
        values: ``[E, ...]``, of edges.
    """
    nodes = rowptr.shape[0] - 1
    padded = torch.cat([values, values.new_zeros(nodes, *values.shape[1:])])
    return torch.ops.gnnc.segment_reduce(rowptr, perm, padded, "sum", nodes)


def without_loops(values: Tensor, mask: Tensor, col: Tensor, nodes: int) -> Tensor:
    """Return ``values[mask]``, ``[M, ...]``; the host knows how many.

    Args:
        values: of edges, ``[E, ...]``.
        mask: bool ``[E]``, which edges are no loops.
        col: ``[M + N]``, the columns of the graph in which every node has a loop.
        nodes: N.
    """
    places = torch.nonzero_static(mask, size=col.shape[0] - nodes).squeeze(1)
    return values.index_select(0, places)


def positions_without_loops(mask: Tensor, perm: Tensor, nodes: int) -> Tensor:
    """Return where sorted edges stand in a list without loops, and behind it the new ones: int64 ``[M + N]``.

    Args:
        mask: bool ``[E]``, which edges are no loops.
        perm: int64 ``[M + N]``, where they stand among all E edges and, behind those, the new loops.
        nodes: N.
    """
    loops = torch.arange(perm.shape[0] - nodes, perm.shape[0], device=perm.device)
    return torch.cat([mask.cumsum(0) - 1, loops]).index_select(0, perm)


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
    for sort in graph.find_nodes(op="call_function", target=_GNNC.csr.default):
        found = _match(sort)
        if found is not None:
            yield found


def _match(sort: Node) -> SelfLoops | None:
    src, dst, nodes, num_dst = sort.args
    (edges, src_row), (other, dst_row) = _row_of(src), _row_of(dst)
    if nodes != num_dst or edges is None or edges is not other or {src_row, dst_row} != {0, 1}:
        return None
    together, dim = _arguments(edges, _ATEN.cat.default, 2) or ((), 0)
    if len(together) != 2 or dim not in (1, -1) or not _is_loops(together[1], nodes):
        return None
    edge_index, mask = _without_loops(together[0])
    if edge_index is None or mask is None or any(user.target is not getitem for user in sort.users):
        return None
    values = _read_by_position(sort, edge_index)
    if values is None and isinstance(nodes, Node) and nodes.op != "placeholder":
        return None  # to sort before lists are made, the number of nodes has to be there
    return SelfLoops(sort, edge_index, (src_row, dst_row), mask, nodes, values)


def _without_loops(edges: Any) -> tuple[Node | None, Node | None]:
    """Return the edges of which a node takes those that are no loops, and the node of which those are."""
    edge_index, index = _arguments(edges, _ATEN.index.Tensor, 2) or (None, ())
    if len(index) != 2 or index[0] is not None or not _is_no_loop(index[1], edge_index):
        return None, None
    return edge_index, index[1]


def _sums_of(sort: Node, edge_index: Node) -> Sums | None:
    """Return what a sort of edges without loops is for; None where that is not only sums and degrees."""
    users = dict.fromkeys(user for part in sort.users for user in part.users)
    degrees = [user for user in users if _parts(_arguments(user, _GNNC.degree.default, 1)) == [(sort, 0)]]
    sums = [(user, value) for user in users if (value := _summed(user, sort, edge_index)) is not None]
    if any(part.target is not getitem for part in sort.users) or len(degrees) + len(sums) < len(users):
        return None
    return Sums(sort, tuple(degrees), tuple(sums))


def _summed(node: Node, sort: Node, edge_index: Node) -> Node | None:
    """Return the values that a node adds up without those of loops, in the order of a sort."""
    *csr, values, reduce, _ = _arguments(node, _GNNC.segment_reduce.default, 5) or (None,) * 5
    if reduce != "sum" or _parts(csr) != [(sort, 0), (sort, 2)]:
        return None
    return _filtered(values, edge_index, loops=False)


def _parts(values: Sequence[Any] | None) -> list[Any]:
    """Return the node and the place in its result of each of several values."""
    return [_arguments(each, getitem, 2) for each in values or ()]


def _read_by_position(sort: Node, edge_index: Any) -> tuple[Node, ...] | None:
    """Return what is read by the positions of sorted edges; None where not only values of edges and loops."""
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
    if reader.target is _GNNC.segment_reduce.default:
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
    if not loops and isinstance(value, Node) and value.target is without_loops:
        values, mask, *_ = value.args
        return values if _is_no_loop(mask, edge_index) else None
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
    return list(times) == [2, 1] and list(shape) == [1, -1] and begin == 0 and end == nodes
