"""Gradients of additive attention as one op, which stores nothing for each edge and head."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import (
    argument,
    first_operand,
    is_result,
    operand,
    result_index,
    same_shape,
    shape_of,
    unpack,
)
from gnnc.passes.rewrite.node_builder import NodeBuilder, drop_dead

_aten = torch.ops.aten
_SEGMENTS = "gnnc.segment_reduce.default"


@dataclass(slots=True)
class _Match:
    """The ops of the gradients of ``sum_j softmax_j(leaky_relu(a_dst_i + a_src_j)) * x_j``.

    Attributes:
        dx: the sum over the transpose, later with what has been added to it.
        da_dst, da_src: the sums of the logits' gradients, by destination and by source.
        operands: arguments of ``gnnc.attention_backward`` up to ``grad``.
        constants: its slope and eps.
        att: the vector, and the gradient of it, that ``a_dst`` (0) and ``a_src`` (1) are products with.
    """

    dx: Node
    da_dst: Node
    da_src: Node
    operands: tuple[Node, ...]
    constants: tuple[float, float]
    att: dict[int, tuple[Node, Node | None]] = field(default_factory=dict)


def join_attention_gradients(gm: fx.GraphModule, most: int) -> None:
    """Replace the gradients of each additive attention of a joint graph by ``gnnc.attention_backward``.

    Args:
        gm: the joint graph.
        most: columns of a head, at most, that the backend's kernel takes.
    """
    if not most:
        return
    builder = NodeBuilder(gm)
    for node in list(gm.graph.nodes):
        if str(node.target) == "gnnc.edge_softmax_backward.default" and (match := _match(node, most)):
            builder.bring_before(node, *match.operands)
            _take_products(match)
            _replace(match, builder)
    drop_dead(gm)


def _match(softmax: Node, most: int) -> _Match | None:
    rowptr, alpha, dalpha = unpack(softmax, "rowptr", "alpha", "grad")
    if str(alpha.target) != "gnnc.edge_softmax.default" or not _is_only_reader(softmax, dalpha):
        return None
    if operand(alpha, "rowptr") is not rowptr:
        return None
    logits = operand(alpha, "logits")
    if str(logits.target) != "aten.leaky_relu.default":
        return None
    ends = operand(logits, "self")
    if str(ends.target) != "gnnc.sddmm.default" or argument(ends, "op") != "add":
        return None
    if str(dalpha.target) != "gnnc.sddmm.default" or argument(dalpha, "op") != "dot":
        return None
    edges = unpack(ends, "rowptr", "col")
    if edges[0] is not rowptr or edges != unpack(dalpha, "rowptr", "col"):
        return None
    halves, rows = unpack(ends, "a", "b"), unpack(dalpha, "a", "b")
    if any(len(shape_of(half)) != 2 for half in halves) or any(len(shape_of(row)) != 3 for row in rows):
        return None
    width = shape_of(rows[0])[-1]
    if not isinstance(width, int) or width > most:
        return None
    if shape_of(halves[0])[1:] != shape_of(alpha)[1:] or shape_of(halves[1])[1:] != shape_of(alpha)[1:]:
        return None
    return _sums(softmax, alpha, ends, (*halves, *reversed(rows)))


def _sums(softmax: Node, alpha: Node, ends: Node, operands: tuple[Node, ...]) -> _Match | None:
    """Complete a match by the three sums that read what it has for each edge."""
    rowptr, col = unpack(ends, "rowptr", "col")
    slope = argument(operand(alpha, "logits"), "negative_slope")
    dlogits = list(softmax.users)
    if len(dlogits) != 1 or str(dlogits[0].target) != "aten.leaky_relu_backward.default":
        return None
    if unpack(dlogits[0], "self", "negative_slope", "self_is_result") != (ends, slope, False):
        return None
    sums = [
        node
        for node in dlogits[0].users
        if str(node.target) == _SEGMENTS and argument(node, "reduce") == "sum"
    ]
    by_row = [node for node in sums if unpack(node, "rowptr", "perm") == (rowptr, None)]
    by_column = [
        node for node in sums if is_of_transpose(unpack(node, "rowptr", "perm"), (0, 2), rowptr, col)
    ]
    totals = list(sums_on_transpose(alpha, operands[3], rowptr, col))
    if len(dlogits[0].users) != 2 or not (len(by_row) == len(by_column) == len(totals) == 1):
        return None
    transpose = unpack(totals[0], "rowptr", "col")
    constants = float(slope), float(argument(alpha, "eps"))
    return _Match(totals[0], by_row[0], by_column[0], (rowptr, col, *transpose, *operands), constants)


def sums_on_transpose(alpha: Node, grad: Node, rowptr: Node, col: Node) -> Iterator[Node]:
    """Yield the sums of the gradient's rows over the transpose, weighted by ``alpha`` in its order."""
    for moved in alpha.users:
        if str(moved.target) != "aten.index_select.default" or argument(moved, "dim") != 0:
            continue
        for node in moved.users:
            if str(node.target) != "gnnc.spmm.default":
                continue
            rowptr_t, col_t, value, x, reduce = unpack(node, "rowptr", "col", "value", "x", "reduce")
            parts = (rowptr_t, col_t, argument(moved, "index"))
            if (
                value is moved
                and x is grad
                and reduce == "sum"
                and is_of_transpose(parts, (0, 1, 2), rowptr, col)
            ):
                yield node


def is_of_transpose(parts: tuple[object, ...], results: tuple[int, ...], rowptr: Node, col: Node) -> bool:
    """Return whether nodes are these results of one transpose of a CSR."""
    found = [part for part in parts if isinstance(part, Node) and is_result(part)]
    if tuple(map(result_index, found)) != results or len(set(map(first_operand, found))) != 1:
        return False
    made = first_operand(found[0])
    return str(made.target) == "gnnc.csr_transpose.default" and unpack(made, "rowptr", "col") == (rowptr, col)


def _is_only_reader(reader: Node, node: Node) -> bool:
    return set(node.users) == {reader}


def _take_products(match: _Match) -> None:
    """Let a match have what is added to ``dx`` by the products that made the logits, and their gradients."""
    x = match.operands[6]
    while len(match.dx.users) == 1:
        (total,) = match.dx.users
        if str(total.target) != "aten.add.Tensor" or argument(total, "alpha") != 1:
            return
        left, right = unpack(total, "self", "other")
        term = right if left is match.dx else left
        found = [(i, att) for i in (0, 1) if (att := _other_factor(term, _half(match, i))) is not None]
        if len(found) != 1 or found[0][0] in match.att or not same_shape(shape_of(total), shape_of(x)):
            return
        side, att = found[0]
        if len(term.users) != 1 or not _is_vector_of(att, x):
            return
        match.dx = total
        match.att[side] = att, _gradient(_half(match, side), x)


def _is_vector_of(att: Node, x: Node) -> bool:
    """Return whether a node is one vector for each head of ``x``, the same for all rows."""
    sizes = shape_of(att)
    return sizes[-2:] == shape_of(x)[1:] and (len(sizes) == 2 or (len(sizes) == 3 and sizes[0] == 1))


def _half(match: _Match, side: int) -> Node:
    return match.da_src if side else match.da_dst


def _spread(half: Node) -> list[Node]:
    """Return the views of ``[N, H]`` that repeat each value over the columns of its head."""
    columns = [user for user in half.users if str(user.target) == "aten.unsqueeze.default"]
    columns = [user for user in columns if argument(user, "dim") in (2, -1)]
    return columns + [
        user for view in columns for user in view.users if str(user.target) == "aten.expand.default"
    ]


def _other_factor(product: object, half: Node) -> Node | None:
    """Return what a product multiplies a value of each head with, or None if it is no such product."""
    if not isinstance(product, Node) or str(product.target) != "aten.mul.Tensor":
        return None
    left, right = unpack(product, "self", "other")
    views = _spread(half)
    other = right if left in views else left if right in views else None
    return other if isinstance(other, Node) else None


def _gradient(half: Node, x: Node) -> Node | None:
    """Return the sum over all rows of ``x``, each head times its value of ``half``."""
    products = [user for view in _spread(half) for user in view.users if _other_factor(user, half) is x]
    sums = [
        user for product in products for user in product.users if str(user.target) == "aten.sum.dim_IntList"
    ]
    return next((user for user in sums if list(argument(user, "dim") or ()) == [0]), None)


def _replace(match: _Match, builder: NodeBuilder) -> None:
    layer = str(match.dx.meta.get("layer", ""))
    sizes = list(shape_of(match.operands[6])[1:])
    vectors = [match.att[i][0] if i in match.att else None for i in (0, 1)]
    flat = [
        None if v is None else builder.call(_aten.reshape.default, v, sizes, layer=layer) for v in vectors
    ]
    made = builder.call(
        torch.ops.gnnc.attention_backward.default, *match.operands, *flat, *match.constants, layer=layer
    )
    results = [builder.call(operator.getitem, made, i, layer=layer) for i in range(5)]
    for node, result in zip((match.dx, match.da_dst, match.da_src), results, strict=False):
        node.replace_all_uses_with(result)
    for side, (_, gradient) in match.att.items():
        if gradient is not None:
            shape = list(shape_of(gradient))
            view = builder.call(_aten.reshape.default, results[3 + side], shape, layer=layer)
            gradient.replace_all_uses_with(view)
