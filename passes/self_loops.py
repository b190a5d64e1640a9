"""Self loops: a sort drops the self loops of an edge list and gives every node one, as GCN and GAT ask.

To filter an edge list, the host has to wait for the number of edges that are left, and writing the new list
takes as long as a pass of the sort. ``gnnc.csr_with_loops`` does both in the sort.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from gnnc.ir.parts import Parts
from gnnc.passes.base import Context
from gnnc.passes.rewrite.structure_edit import replacing_results

_ATEN = torch.ops.aten
_GNNC = torch.ops.gnnc
_NOT = (_ATEN.bitwise_not.default, _ATEN.logical_not.default)


@dataclass(frozen=True, slots=True)
class SelfLoops:
    """Replace sorts of ``cat([edge_index without self loops, one for every node])`` in the structure graph.

    Only a backend whose sort adds loops asks for this pass.
    """

    name: ClassVar[str] = "self_loops"

    def applies(self, parts: Parts, ctx: Context) -> bool:
        """Return whether the backend has a sort that adds loops, and the program a structure graph."""
        return parts.structure is not None and ctx.target.sorts_with_loops

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with its structure graph rewritten."""
        with replacing_results(parts) as structure:
            for loops in sorts_with_loops(structure.graph):
                ctx.note(loops.sort, "the sort drops self loops and adds one for every node")
                loops.replace()
        return parts


@dataclass(frozen=True, slots=True)
class SortWithLoops:
    """A sort of ``cat([edge_index without self loops, one for every node])``.

    Attributes:
        sort: the ``gnnc.csr`` node.
        edge_index: the node of the edge list, integer ``[2, E]``.
        rows: the rows of ``edge_index`` that are the sources and the destinations.
        mask: the node of the mask of the edges that are no self loops.
        nodes: the number of nodes.
        values: the nodes ``cat([edge values without those of loops, values of the new loops])``, if positions
            of sorted edges read nothing else; None if they do.
    """

    sort: Node
    edge_index: Node
    rows: tuple[int, int]
    mask: Node
    nodes: Any
    values: tuple[Node, ...] | None

    def replace(self) -> None:
        """Sort the unfiltered edges with ``gnnc.csr_with_loops``.

        Positions of the new sort count all E edges and, behind them, the new loops. Sums over the edges that
        are no loops, for which the graph has a second sort, are read off the new one.
        """
        graph, sums = self.sort.graph, list(self._sums_without_loops())
        replaced = {self.sort, *[found.sort for found in sums]}
        first = next(node for node in graph.nodes if node in replaced)
        with graph.inserting_before(first if self.values is not None else self.mask):
            ends = [next(end for end in self.mask.args if _row_of(end)[1] == row) for row in self.rows]
            sort = graph.call_function(_GNNC.csr_with_loops.default, (*ends, self.nodes))
        sort.meta = dict(self.sort.meta)
        with graph.inserting_after(sort):
            rowptr, col, perm = (graph.call_function(getitem, (sort, part)) for part in range(3))
        for node in graph.find_nodes(op="call_function", target=_ATEN.index_put.default):
            self._replace_values_of_loops(node)
        if self.values is None:
            perm = self._filter_by_length(col, perm)
        else:
            _take_unfiltered(self.values)
        for found in sums:
            found.replace(rowptr, perm, filtered=self.values is None)
        self.sort.replace_all_uses_with(sort)
        graph.eliminate_dead_code()

    def _sums_without_loops(self) -> Iterator["SumsWithoutLoops"]:
        """Yield the sorts whose only use are sums to each node over the edges that are no loops."""
        for sort in self.sort.graph.find_nodes(op="call_function", target=_GNNC.csr.default):
            _, dst, _, num_dst = sort.args
            edges, row = _row_of(dst)
            edge_index, mask = _without_loops(edges)
            if (edge_index, mask, row, num_dst) == (self.edge_index, self.mask, self.rows[1], self.nodes):
                sums = _sums_of(sort, self.edge_index)
                if sums is not None:
                    yield sums

    def _replace_values_of_loops(self, node: Node) -> None:
        """Replace an ``index_put`` of the values of loops, which reads a list of the loops."""
        start, ids, values = _arguments(node, _ATEN.index_put.default, 3) or (None, (), None)
        id_ = _filtered(ids[0], self.edge_index) if len(ids) == 1 else None
        value = _filtered(values, self.edge_index)
        if value is not None and _row_of(id_)[0] is self.edge_index:
            node.target, node.args = _GNNC.values_of_loops.default, (start, self.edge_index, value)

    def _filter_by_length(self, col: Node, perm: Node) -> Node:
        """Filter lists of edges without a wait, as the sort gives their length; return positions in them."""
        graph = self.sort.graph
        with graph.inserting_after(self.mask):
            arguments = (self.mask, perm, self.nodes)
            positions = graph.call_function(_GNNC.positions_without_loops.default, arguments)
        for node in list(self.mask.users):
            values = _filtered(node, self.edge_index, loops=False)
            if values is not None:
                node.target, node.args = (
                    _GNNC.without_loops.default,
                    (values, self.mask, col, self.nodes),
                )
        for part in list(self.sort.users):
            if part.args[1] == 2:
                part.replace_all_uses_with(positions)
        return positions


@dataclass(frozen=True, slots=True)
class SumsWithoutLoops:
    """A sort of edges without self loops that only sums and degrees read.

    Attributes:
        sort: the ``gnnc.csr`` node.
        degrees: its ``gnnc.degree`` nodes.
        sums: its ``gnnc.segment_reduce`` nodes, each with the unfiltered values of edges that it adds up.
    """

    sort: Node
    degrees: tuple[Node, ...]
    sums: tuple[tuple[Node, Node], ...]

    def replace(self, rowptr: Node, perm: Node, *, filtered: bool) -> None:
        """Read sums and degrees off a sort in which every node has a loop.

        The loop counts as an edge, which is taken off the degree, and has the value 0 in a sum.

        Args:
            rowptr: of that sort.
            perm: its positions.
            filtered: whether positions are those in lists without loops, or in lists of all edges.
        """
        for node in self.degrees:
            with node.graph.inserting_before(node):
                with_loops = node.graph.call_function(_GNNC.degree.default, (rowptr,))
            node.target, node.args = _ATEN.sub.Tensor, (with_loops, 1)
        for node, values in self.sums:
            _, _, filtered_values, reduce, nodes = node.args
            values = filtered_values if filtered else values
            with node.graph.inserting_before(node):
                padded = node.graph.call_function(
                    _ATEN.constant_pad_nd.default, (values, _rows_behind(values, nodes))
                )
            node.args = (rowptr, perm, padded, reduce, nodes)


def _rows_behind(values: Node, nodes: Any) -> list[Any]:
    """Return the padding that puts rows behind those of a tensor."""
    return [0] * (2 * values.meta["val"].dim() - 1) + [nodes]


def _take_unfiltered(values: Sequence[Node]) -> None:
    """Take the values of all edges in place of the filtered ones: the order of the sort picks its own."""
    for node in values:
        together: Any = node.args[0]
        filtered, new = together
        node.update_arg(0, [filtered.args[0], new])
        node.meta.pop("val", None)


def sorts_with_loops(graph: Graph) -> Iterator[SortWithLoops]:
    """Yield the sorts of a graph that may drop and add self loops; each may be replaced before the next."""
    for sort in graph.find_nodes(op="call_function", target=_GNNC.csr.default):
        found = _match(sort)
        if found is not None:
            yield found


def _match(sort: Node) -> SortWithLoops | None:
    src, dst, nodes, num_dst = sort.args
    (edges, src_row), (other, dst_row) = _row_of(src), _row_of(dst)
    if nodes != num_dst or edges is None or edges is not other or {src_row, dst_row} != {0, 1}:
        return None
    together, dim = _arguments(edges, _ATEN.cat.default, 2) or ((), 0)
    if len(together) != 2 or dim not in (1, -1) or not _is_loops(together[1], nodes):
        return None
    edge_index, mask = _without_loops(together[0])
    if edge_index is None or edge_index.meta["val"].dtype not in (torch.int64, torch.int32):
        return None  # ids of other types become int64 where the loops are appended
    if mask is None or any(user.target is not getitem for user in sort.users):
        return None
    values = _read_by_position(sort, edge_index)
    if values is None and isinstance(nodes, Node) and nodes.op != "placeholder":
        return None  # the sort comes before the filtered lists, and the number of nodes before the sort
    return SortWithLoops(sort, edge_index, (src_row, dst_row), mask, nodes, values)


def _without_loops(edges: Any) -> tuple[Node | None, Node | None]:
    """If ``edges`` is ``edge_index[:, no_loop_mask]``, return ``(edge_index, mask)``, else a pair of None."""
    edge_index, index = _arguments(edges, _ATEN.index.Tensor, 2) or (None, ())
    if len(index) != 2 or index[0] is not None or not _is_no_loop(index[1], edge_index):
        return None, None
    return edge_index, index[1]


def _sums_of(sort: Node, edge_index: Node) -> SumsWithoutLoops | None:
    """Return the sums and degrees that a sort of edges without loops is for; None if it has other readers."""
    users = dict.fromkeys(user for part in sort.users for user in part.users)
    degrees = [user for user in users if _parts(_arguments(user, _GNNC.degree.default, 1)) == [(sort, 0)]]
    sums = [(user, value) for user in users if (value := _summed(user, sort, edge_index)) is not None]
    if any(part.target is not getitem for part in sort.users) or len(degrees) + len(sums) < len(users):
        return None
    return SumsWithoutLoops(sort, tuple(degrees), tuple(sums))


def _summed(node: Node, sort: Node, edge_index: Node) -> Node | None:
    """If ``node`` sums filtered edge values by destination, return the values before the filter."""
    *csr, values, reduce, _ = _arguments(node, _GNNC.segment_reduce.default, 5) or (None,) * 5
    if reduce != "sum" or _parts(csr) != [(sort, 0), (sort, 2)]:
        return None
    return _filtered(values, edge_index, loops=False)


def _parts(values: Sequence[Any] | None) -> list[Any]:
    """Return for each value the node that it is a part of, and which part."""
    return [_arguments(value, getitem, 2) for value in values or ()]


def _read_by_position(sort: Node, edge_index: Any) -> tuple[Node, ...] | None:
    """Return the values that positions of sorted edges read; None if not all are of edges and new loops."""
    positions = [user for user in sort.users if user.args[1] == 2]
    readers = {reader for position in positions for reader in position.users}
    values = list(dict.fromkeys(_values_read(reader, positions) for reader in readers))
    is_so = all(_is_of_edges_and_loops(value, edge_index) and set(value.users) <= readers for value in values)
    return tuple(values) if is_so else None


def _values_read(reader: Node, positions: Sequence[Node]) -> Any:
    """Return the values that a node reads in the order of sorted edges; None if it does something else."""
    if reader.target is _ATEN.index_select.default:
        values, dim, order = reader.args
        return values if dim == 0 and order in positions else None
    if reader.target is _GNNC.segment_reduce.default:
        _, order, values, *_ = reader.args
        return values if order in positions else None
    return None


def _is_of_edges_and_loops(value: Any, edge_index: Any) -> bool:
    """Return whether a value is ``cat([values of edges that are no loops, values of new loops])``."""
    if not isinstance(value, Node) or value.target is not _ATEN.cat.default:
        return False
    together, *dim = value.args
    if len(together) != 2 or dim not in ([], [0]):
        return False
    return _filtered(together[0], edge_index, loops=False) is not None


def _filtered(value: Any, edge_index: Any, *, loops: bool = True) -> Node | None:
    """Return the tensor whose elements of self loops, or of all other edges, a node takes."""
    if not loops and isinstance(value, Node) and value.target is _GNNC.without_loops.default:
        values, mask, *_ = value.args
        return values if _is_no_loop(mask, edge_index) else None
    tensor, index = _arguments(value, _ATEN.index.Tensor, 2) or (None, ())
    mask = index[0] if len(index) == 1 else None
    if loops:
        mask = mask.args[0] if isinstance(mask, Node) and mask.target in _NOT else None
    return tensor if _is_no_loop(mask, edge_index) else None


def _arguments(value: Any, target: Any, count: int) -> tuple[Any, ...] | None:
    """Return the arguments of a call of ``target`` with ``count`` of them, or None for another value."""
    is_such = isinstance(value, Node) and value.target is target and len(value.args) == count
    return value.args if is_such else None


def _row_of(value: Any) -> tuple[Any, int]:
    """Return the tensor that a node selects a row of, and the row."""
    tensor, dim, row = _arguments(value, _ATEN.select.int, 3) or (None, 0, 0)
    return (tensor, row) if dim == 0 else (None, 0)


def _is_no_loop(mask: Any, edge_index: Any) -> bool:
    """Return whether a mask holds for the edges that join two nodes."""
    (one, row), (other, other_row) = map(_row_of, _arguments(mask, _ATEN.ne.Tensor, 2) or (None, None))
    return one is edge_index and other is edge_index and {row, other_row} == {0, 1}


def _is_loops(value: Any, nodes: Any) -> bool:
    """Return whether edges are one from every node to itself."""
    row, times = _arguments(value, _ATEN.repeat.default, 2) or (None, ())
    ids, shape = _arguments(row, _ATEN.reshape.default, 2) or (None, ())
    begin, end = _arguments(ids, _ATEN.arange.start, 2) or (0, None)
    return list(times) == [2, 1] and list(shape) == [1, -1] and begin == 0 and end == nodes
