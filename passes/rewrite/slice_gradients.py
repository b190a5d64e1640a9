"""Gradients of slices that fill a tensor: their sum is a concatenation.

Autograd spreads the gradient of each slice over zeros of the whole tensor and adds these up: the three slices
of a weight of an edge MLP, the states side by side in a row. Where the slices lie side by side and fill a
dimension, the sum is the concatenation of their gradients, which reads and writes each element once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import argument, aten_name, holds_tensor, operand, same_shape, shape_of, unpack
from gnnc.passes.rewrite.node_builder import NodeBuilder

_aten = torch.ops.aten
_SLICES = ("slice_backward.default", "select_backward.default")


@dataclass(frozen=True, slots=True)
class _Slice:
    """Gradient of a slice, in its place in the gradient of the tensor.

    Attributes:
        node: the node that puts it among zeros.
        dim: the dimension that was cut.
        start: index of the first element along that dimension.
        end: index behind the last.
        is_select: whether the slice has no such dimension.
    """

    node: Node
    dim: int
    start: int
    end: int
    is_select: bool

    @property
    def size(self) -> int:
        """Size of the dimension of the whole tensor."""
        return int(shape_of(self.node)[self.dim])


def join_slice_gradients(gm: fx.GraphModule) -> None:
    """Make concatenations of sums of gradients of slices that fill a tensor, in place."""
    builder = NodeBuilder(gm)
    for node in reversed(list(gm.graph.nodes)):
        if not _is_inner(node):
            _join(node, list(_terms(node)), builder)
    gm.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


def _join(node: Node, terms: list[Node], builder: NodeBuilder) -> None:
    """Replace a sum of some terms where slices among them fill the tensor."""
    slices = [found for term in terms if len(term.users) == 1 and (found := _slice(term)) is not None]
    rows = list(_rows(slices))
    if not rows:
        return
    layer = str(node.meta.get("layer", ""))
    joined = {part.node for row in rows for part in row}
    whole = [_concatenated(row, builder, layer) for row in rows]
    total, *others = [*(term for term in terms if term not in joined), *whole]
    for other in others:
        total = builder.call(_aten.add.Tensor, total, other, layer=layer)
    node.replace_all_uses_with(total)


def _rows(slices: list[_Slice]) -> Iterator[list[_Slice]]:
    """Yield lists of slices that lie side by side and fill a dimension."""
    left = list(slices)
    for dim in sorted({part.dim for part in slices}):
        while row := _filling([part for part in left if part.dim == dim]):
            yield row
            left = [part for part in left if part not in row]


def _filling(slices: list[_Slice]) -> list[_Slice]:
    """Return slices of one dimension, one behind the other, that fill it; none where some are missing."""
    row: list[_Slice] = []
    end = 0
    while following := [part for part in slices if part.start == end < part.end]:
        row.append(following[0])
        end = row[-1].end
    return row if row and end == row[0].size else []


def _concatenated(row: list[_Slice], builder: NodeBuilder, layer: str) -> Node:
    parts = [_with_dim(part, builder, layer) for part in row]
    return parts[0] if len(parts) == 1 else builder.call(_aten.cat.default, parts, row[0].dim, layer=layer)


def _with_dim(part: _Slice, builder: NodeBuilder, layer: str) -> Node:
    grad = operand(part.node, "grad_output")
    if not part.is_select:
        return grad
    return builder.call(_aten.unsqueeze.default, grad, part.dim, layer=layer)


def _slice(node: Node) -> _Slice | None:
    """Return the gradient of a slice of known place, without a step; None for any other node."""
    name = aten_name(node)
    if name not in _SLICES:
        return None
    shape = shape_of(node)
    dim = argument(node, "dim") % len(shape)
    is_select = name.startswith("select")
    size = shape[dim]
    start, end, step = (
        (argument(node, "index"), None, 1) if is_select else unpack(node, "start", "end", "step")
    )
    if not all(isinstance(value, int) for value in (size, start, step)) or step != 1:
        return None
    start = start + size if start < 0 else start
    end = start + 1 if is_select else end
    if not isinstance(end, int):
        return None
    return _Slice(node, dim, start, min(end + size if end < 0 else end, size), is_select)


def _terms(node: Node) -> Iterator[Node]:
    """Yield the terms of a sum of values of one shape, through sums that nothing else reads."""
    if not _is_sum(node):
        yield node
        return
    for term in unpack(node, "self", "other"):
        if _is_sum(term) and len(term.users) > 1:
            yield term
        else:
            yield from _terms(term)


def _is_inner(node: Node) -> bool:
    """Return whether a node is no sum and no slice, or is a term of a sum that reads it alone."""
    if not _is_sum(node) and aten_name(node) not in _SLICES:
        return True
    return len(node.users) == 1 and _is_sum(next(iter(node.users)))


def _is_sum(node: Node) -> bool:
    if aten_name(node) != "add.Tensor" or argument(node, "alpha") != 1:
        return False
    terms = unpack(node, "self", "other")
    if terms[0] is terms[1]:  # its slices would count once
        return False
    return all(
        isinstance(term, Node)
        and holds_tensor(term)
        and same_shape(shape_of(term), shape_of(node))
        and term.meta["val"].dtype == node.meta["val"].dtype
        for term in terms
    )
