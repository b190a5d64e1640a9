"""Rows that are moved several times by indices of the graph: one gather, by an index computed once a graph.

PyG gives self loops a weight by picking the other edges, writing a row for each loop, concatenating both and
picking again; layers with a weight for each degree pick the rows of each degree and write them back. Rows are
only moved there, by indices that depend on the graph alone. The same moves on the numbers of the rows give an
index, which ``hoist`` computes once for each graph; what is left of a call is one ``index_select``.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import argument, arguments, first_operand, op_name, shape_of
from gnnc.ir.source import wants_gradient
from gnnc.passes.base import Context
from gnnc.passes.rewrite.node_builder import NodeBuilder, Sizes, aten

_CONSTANTS = {"full": "fill_value", "zeros": None, "new_zeros": None, "new_empty": None}
"""Ops whose rows are all equal, and the argument that holds the number; None: 0, or any."""


@dataclass(frozen=True, slots=True)
class _Moved:
    """Rows of other tensors.

    Attributes:
        parts: the tensors, one below the other.
        count: number of their rows, a size.
        index: number of each row among them; None: they are all rows, in order.
        moves: number of writes and of picks by a mask, which have no kernel.
    """

    parts: tuple[Node, ...]
    count: Node | int
    index: Node | None = None
    moves: int = 0


@dataclass(slots=True)
class _Composer:
    """Finder of moved rows.

    Attributes:
        builder: inserts the indices.
        sizes: the sizes of the graph.
        structural: nodes that depend on the graph alone.
        found: moves of each node that has been read; None where it is the result of none.
    """

    builder: NodeBuilder
    sizes: Sizes
    structural: set[Node]
    found: dict[Node, _Moved | None] = field(default_factory=dict)

    def moved(self, node: Node) -> _Moved | None:
        """Return the moves that a node is the result of; None where it is none."""
        if node not in self.found:
            self.found[node] = self._read(node)
        return self.found[node]

    def _read(self, node: Node) -> _Moved | None:
        reader = _READERS.get(op_name(node)) if node.op == "call_function" else None
        if reader is None or node in self.structural or not node.meta["val"].is_floating_point():
            return None
        return reader(self, node)

    def rows(self, node: Node, count: Node | int | None = None) -> _Moved | None:
        """Return the moves of a node, or the node itself as a part of ``count`` rows."""
        if (known := self.moved(node)) is not None:
            return known
        if op_name(node) in _CONSTANTS and len(shape_of(node)):
            return self._constant(node)
        if count is None:
            size = shape_of(node)[0]
            if isinstance(size, torch.SymInt) and size.node.expr not in self.sizes.inputs:
                return None
            count = self.sizes.of(node, 0)
        return _Moved((node,), count)

    def index_of(self, rows: _Moved, first: Node | int) -> Node:
        """Return the index of rows whose parts begin at row ``first`` of all parts."""
        call = self.builder.call
        device = rows.parts[0].meta["val"].device
        if rows.index is None:
            end = self.plus(first, rows.count)
            return call(aten.arange.start, first, end, dtype=torch.int64, device=device)
        return rows.index if _is_zero(first) else call(aten.add.Tensor, rows.index, first)

    def plus(self, a: Node | int, b: Node | int) -> Node | int:
        """Return the sum of two sizes."""
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        return b if _is_zero(a) else a if _is_zero(b) else self.builder.call(operator.add, a, b)

    def positions(self, index: Node) -> Node | None:
        """Return an index as the numbers of rows; None where it is not one of the graph."""
        value = index.meta["val"]
        if index not in self.structural or value.dim() != 1:
            return None
        if value.dtype == torch.bool:
            rows = self.builder.call(aten.nonzero.default, index)
            index = self.builder.call(aten.reshape.default, rows, [-1])
            self.structural.update((rows, index))
        return index if index.meta["val"].dtype == torch.int64 else None

    def _constant(self, node: Node) -> _Moved:
        name, value = _CONSTANTS[op_name(node)], node.meta["val"]
        fill = 0.0 if name is None else argument(node, name)
        sizes = [1, *shape_of(node)[1:]]
        part = self.builder.call(
            aten.full.default, sizes, fill, dtype=value.dtype, device=value.device, layer=node.meta["layer"]
        )
        zeros = self.builder.call(
            aten.full.default, [self.sizes.of(node, 0)], 0, dtype=torch.int64, device=value.device
        )
        return _Moved((part,), 1, zeros)


def compose_moves(
    gm: fx.GraphModule, builder: NodeBuilder, sizes: Sizes, structural: set[Node], ctx: Context
) -> None:
    """Replace values whose rows are only moved by structural indices by one gather each.

    Args:
        gm: the graph, whose messages are raised.
        builder: inserts nodes.
        sizes: the sizes of the graph.
        structural: nodes that depend on the graph alone.
        ctx: takes a note for each replaced value.
    """
    if any(map(wants_gradient, placeholders(gm))):
        return  # the gradient of a gather is a scatter, which costs more than those of its moves
    composer, before = _Composer(builder, sizes, structural), set(gm.graph.nodes)
    for node in list(gm.graph.nodes):
        moved = composer.moved(node)
        if moved is None or not moved.moves or moved.index is None:
            continue
        if all(composer.moved(user) is not None for user in node.users):
            continue
        parts = moved.parts
        layer = node.meta["layer"]
        whole = parts[0] if len(parts) == 1 else builder.call(aten.cat.default, [*parts], 0, layer=layer)
        gathered = builder.call(aten.index_select.default, whole, 0, moved.index, layer=layer)
        if not builder.bring_before(next(iter(sorted(node.users))), gathered):
            continue
        ctx.note(gathered, f"the moves of rows before {node.name} are one gather")
        node.replace_all_uses_with(gathered)
    for node in reversed(list(gm.graph.nodes)):  # indices of moves that stay may precede their operands
        if node not in before and not node.users:
            gm.graph.erase_node(node)


def _is_zero(size: Node | int) -> bool:
    return isinstance(size, int) and size == 0


def _select(composer: _Composer, node: Node) -> _Moved | None:
    given = arguments(node)
    return _gather(composer, node, given["index"]) if given["dim"] == 0 else None


def _index(composer: _Composer, node: Node) -> _Moved | None:
    indices = argument(node, "indices")
    if len(indices) != 1 or indices[0] is None or indices[0].meta["val"].dtype != torch.bool:
        return None  # numbers may be negative, and count from the end
    return _gather(composer, node, indices[0])


def _gather(composer: _Composer, node: Node, index: Node) -> _Moved | None:
    rows, places = composer.rows(first_operand(node)), composer.positions(index)
    if rows is None or places is None:
        return None
    moves = rows.moves + (index.meta["val"].dtype == torch.bool)
    if rows.index is not None:
        places = composer.builder.call(aten.index_select.default, rows.index, 0, places)
    return _Moved(rows.parts, rows.count, places, moves)


def _copy(composer: _Composer, node: Node) -> _Moved | None:
    given = arguments(node)
    return _write(composer, node, given["index"], given["source"]) if given["dim"] == 0 else None


def _put(composer: _Composer, node: Node) -> _Moved | None:
    given = arguments(node)
    if len(given["indices"]) != 1 or given["indices"][0] is None or given["accumulate"]:
        return None
    return _write(composer, node, given["indices"][0], given["values"])


def _write(composer: _Composer, node: Node, index: Node, values: Node) -> _Moved | None:
    places = composer.positions(index)
    if places is None or len(shape_of(values)) != len(shape_of(node)):
        return None
    if list(shape_of(values)[1:]) != list(shape_of(node)[1:]) or values in composer.structural:
        return None
    base = composer.rows(first_operand(node))
    rows = composer.rows(values, composer.builder.call(aten.sym_size.int, places, 0))
    if base is None or rows is None:
        return None
    call = composer.builder.call
    numbers = composer.index_of(rows, base.count)
    written = call(aten.index_put.default, composer.index_of(base, 0), [places], numbers)
    return _joined(composer, [base, rows], written, 1)


def _cat(composer: _Composer, node: Node) -> _Moved | None:
    if arguments(node)["dim"] != 0:
        return None
    rows = [composer.rows(value) for value in argument(node, "tensors")]
    present = [value for value in rows if value is not None]
    if len(present) < len(rows) or not any(value.moves for value in present):
        return None
    first, indices = 0, []
    for value in present:
        indices.append(composer.index_of(value, first))
        first = composer.plus(first, value.count)  # type: ignore[assignment]
    return _joined(composer, present, composer.builder.call(aten.cat.default, indices), 0)


def _joined(composer: _Composer, rows: Iterable[_Moved], index: Node, moves: int) -> _Moved:
    """Return rows of the parts of several, one below the other."""
    parts: tuple[Node, ...] = ()
    count: Node | int = 0
    for value in rows:
        parts, moves = parts + value.parts, moves + value.moves
        count = composer.plus(count, value.count)
    return _Moved(parts, count, index, moves)


_READERS = {
    "index_select": _select,
    "index": _index,
    "index_copy": _copy,
    "index_put": _put,
    "cat": _cat,
}
"""The function that reads the moves of each op."""
