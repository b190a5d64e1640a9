"""Origins of an index: the parts of the integer inputs that its values come from.

The ops between an input and an index move values and compute none: ``edge_index.flip(0)[1]``,
``cat([edge_index, loops], 1)[0]``. They are run on labels, one for each element of the inputs, at the
sizes of the trace; the labels in the result are the elements that were read.
"""

import math
import operator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx import Node

from gnnc.ir.nodes import (
    argument,
    aten_name,
    first_operand,
    holds_tensor,
    result_index,
    shape_of,
    unpack,
    value_of,
)
from gnnc.ir.op import size_expr
from gnnc.ir.source import source_of

_MOVES = frozenset(
    (
        "select.int slice.Tensor reshape.default flatten.using_ints "
        "unsqueeze.default squeeze.dim squeeze.dims squeeze.default expand.default repeat.default "
        "transpose.int permute.default t.default flip.default roll.default unbind.int chunk.default "
        "split.Tensor split_with_sizes.default"
    ).split()
)
_CUTS = frozenset("select.int slice.Tensor chunk.default split.Tensor split_with_sizes.default".split())
"""Moves that take a part of a dimension."""
COPIES = frozenset(
    ("_to_copy.default to.dtype clone.default detach.default alias.default lift_fresh_copy.default").split()
)
"""Ops whose result has the values of their operand."""
_NO_END = 2**62
"""Ends of slices from here on are those of all dimensions."""
_COMPUTED = -1
"""Label of a value that is in no input."""


class _UnknownError(Exception):
    """Error for values that are computed, or moved to places that depend on the data."""


@dataclass(frozen=True)
class Part:
    """Part of an integer input.

    Attributes:
        input: name of the input.
        row: a position along ``dim``, or None for all of the input.
        dim: a dimension of fixed size.
    """

    input: str
    row: int | None = None
    dim: int = 0


class Origins:
    """Origins of the indices of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._sizes = _traced_sizes(graph)
        self._labels: dict[Node, Any] = {}
        self._inputs: dict[Node, Tensor] = {}

    def of(self, index: Node) -> list[Part]:
        """Return the parts of inputs that ``index`` has its values from; none for a computed index."""
        try:
            labels = self._labels_of(index)
        except _UnknownError:
            return []
        return [
            part
            for node, input_labels in self._inputs.items()
            for part in _parts(node, torch.isin(input_labels, labels))
        ]

    def _labels_of(self, node: Node) -> Any:
        """Return ``node`` computed on labels: a tensor, or a tuple of tensors."""
        if node not in self._labels:
            self._labels[node] = self._find(node)
        return self._labels[node]

    def _find(self, node: Node) -> Any:
        name = aten_name(node)
        if node.op == "placeholder":
            return self._numbered(node)
        if node.target is operator.getitem:
            return self._labels_of(first_operand(node))[result_index(node)]
        if name in COPIES:
            return self._labels_of(first_operand(node))
        if name in ("cat.default", "stack.default"):
            return self._joined(node)
        if name in ("index.Tensor", "index_select.default"):
            return self._taken(node)
        if name in _CUTS and _cuts_open_size(node):
            raise _UnknownError  # what is cut off, such as padding, may hold anything
        if name in _MOVES:
            return self._moved(node, self._labels_of(first_operand(node)), node.args[1:])
        raise _UnknownError

    def _numbered(self, node: Node) -> Tensor:
        source = source_of(node)
        if source is None or source.kind != "input" or value_of(node).is_floating_point():
            raise _UnknownError
        first = sum(labels.numel() for labels in self._inputs.values())
        shape = self._shape(node)
        self._inputs[node] = torch.arange(first, first + math.prod(shape)).view(shape)
        return self._inputs[node]

    def _joined(self, node: Node) -> Any:
        parts = argument(node, "tensors")
        return self._moved(node, [self._labels_or_computed(part) for part in parts], node.args[1:])

    def _labels_or_computed(self, node: Node) -> Tensor:
        """Return the labels of ``node``, or ``_COMPUTED`` everywhere for a computed value."""
        try:
            return self._labels_of(node)
        except _UnknownError:
            return torch.full(self._shape(node), _COMPUTED)

    def _taken(self, node: Node) -> Any:
        table = first_operand(node)
        labels = self._labels_of(table)
        if aten_name(node) == "index_select.default":
            dim, index = unpack(node, "dim", "index")
            return self._moved(node, labels, (dim, self._places(index, table, dim)))
        indices = argument(node, "indices")
        places = [None if i is None else self._places(i, table, dim) for dim, i in enumerate(indices)]
        return self._moved(node, labels, (places,))

    def _places(self, index: Node, table: Node, dim: Any) -> Tensor:
        """Return the positions that ``index`` takes along a dimension of the labels.

        A constant is taken as it is. A mask that drops self loops counts as one that takes all; any other
        mask may drop ids that are no nodes. Where the size is not fixed, position 0 stands for any other.
        """
        constant = _constant(index)
        if constant is not None:
            return constant
        is_mask = value_of(index).dtype == torch.bool
        if is_mask and self._drops_self_loops(index):
            return torch.arange(self._labels_of(table).shape[dim])
        if is_mask or isinstance(shape_of(table)[dim], int):
            raise _UnknownError
        return torch.zeros(self._shape(index), dtype=torch.int64)

    def _drops_self_loops(self, mask: Node) -> bool:
        """Return whether a mask is ``src != dst``."""
        compares = aten_name(mask) in ("ne.Tensor", "eq.Tensor") and value_of(mask).dim() == 1
        return compares and all(self.of(side) for side in mask.all_input_nodes)

    def _moved(self, node: Node, values: Any, operands: Any) -> Any:
        """Return the op of ``node`` on labels; data-dependent sizes take the value that they have there."""
        assert callable(node.target)
        moved = node.target(values, *fx.map_arg(operands, lambda arg: self._size(arg.meta["val"])))
        if holds_tensor(node):
            for size, of_labels in zip(shape_of(node), moved.shape, strict=True):
                self._sizes.setdefault(size_expr(size), sympy.Integer(of_labels))
        return moved

    def _shape(self, node: Node) -> list[int]:
        return [self._size(size) for size in shape_of(node)]

    def _size(self, size: Any) -> int:
        expr, one = size_expr(size), sympy.Integer(1)
        return int(expr.xreplace({symbol: self._sizes.get(symbol, one) for symbol in expr.free_symbols}))


def _parts(node: Node, read: Tensor) -> list[Part]:
    """Return the parts of an input that are read as a whole, as positions along one dimension of fixed size.

    A part of which only some elements are read has no bound: the others may be padding.
    """
    source = source_of(node)
    assert source is not None
    if not read.any():
        return []
    fixed = [dim for dim, size in enumerate(shape_of(node)) if isinstance(size, int)]
    for dim in range(read.dim()):
        if dim not in fixed:  # what is read there stands for all of it
            read = read.any(dim, keepdim=True)
    rows = {dim: read.unsqueeze(-1).movedim(dim, 0).flatten(1) for dim in fixed}
    dim = min(fixed, key=lambda dim: float(rows[dim].any(1).float().mean()), default=None)
    if dim is None or rows[dim].any(1).all():
        return [Part(source.name)] * bool(read.all())
    return [Part(source.name, row, dim) for row in rows[dim].all(1).nonzero().flatten().tolist()]


def _cuts_open_size(node: Node) -> bool:
    """Return whether a node takes a part of a dimension whose size is not fixed."""
    size = shape_of(first_operand(node))[argument(node, "dim") or 0]
    if isinstance(size, int):
        return False
    if aten_name(node) != "slice.Tensor":
        return True
    start, end, step = unpack(node, "start", "end", "step")
    is_end = end is None or (isinstance(end, int) and end >= _NO_END)
    return not (start in (None, 0) and is_end and step in (None, 1))


def _constant(index: Node) -> Tensor | None:
    """Return the values of an index that is a constant of the model, or None."""
    while aten_name(index) in COPIES:
        index = first_operand(index)
    source = source_of(index)
    return index.meta["value"].cpu() if source is not None and source.kind == "constant" else None


def _traced_sizes(graph: fx.Graph) -> dict[sympy.Basic, sympy.Integer]:
    """Return the value in the trace of each symbol in the inputs' sizes."""
    sizes = [
        size for node in graph.find_nodes(op="placeholder") if holds_tensor(node) for size in shape_of(node)
    ]
    return {
        size.node.expr: sympy.Integer(size.node.hint)
        for size in sizes
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol)
    }
