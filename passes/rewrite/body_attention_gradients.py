"""Gradients of attention whose logits are computed from the rows at both ends, as one op.

``gnnc.body_attention_backward`` stores nothing for an edge; the ops that it replaces store logits, weights
and their gradients of each edge and head.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.attention import Attention, match_attention
from gnnc.ir.nodes import argument, first_operand, operand, same_shape, shape_of, unpack
from gnnc.passes.base import Context
from gnnc.passes.rewrite.attention_gradients import is_of_transpose, sums_on_transpose
from gnnc.passes.rewrite.node_builder import NodeBuilder, drop_dead

_aten = torch.ops.aten
_DOT = "t0 = aten.mul.Tensor(i0, j0); t1 = aten.sum.dim_IntList(t0, [-1]); return t1"
_SCALES = ("aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar")
_OF_LOGITS = ("gnnc.edge_map.default", "gnnc.sddmm.default")


class _Unfit(Exception):
    """Gradients of an attention that stay apart; the message says why."""


@dataclass(frozen=True, slots=True)
class _Match:
    """An attention, and the nodes that are its gradients.

    Attributes:
        attention: the forward pass.
        logit: body of the logits.
        csr: rowptr and col, of the CSR and of its transpose.
        x: rows that are summed.
        grad: the gradient of the sum.
        dx, ddst, dsrc: gradients of the rows; None where nothing reads them.
        total: the sum of dx and dsrc, where both are of the same rows and nothing else reads them.
        dconst: the gradient of the constant, if any.
    """

    attention: Attention
    logit: str
    csr: tuple[Node, ...]
    x: Node
    grad: Node
    dx: Node
    ddst: Node | None
    dsrc: Node | None
    total: Node | None
    dconst: Node | None


def join_body_attention_gradients(gm: fx.GraphModule, most: int, ctx: Context) -> None:
    """Replace the gradients of attention with logits of both ends by ``gnnc.body_attention_backward``.

    Args:
        gm: the joint graph.
        most: columns of a head, at most, that the backend's kernel takes.
        ctx: takes a note of the gradients that stay apart.
    """
    if not most:
        return
    builder = NodeBuilder(gm)
    for node in list(gm.graph.nodes):
        if str(node.target) != "gnnc.edge_softmax_backward.default" or not _has_body_logits(node):
            continue
        try:
            match = _match(node, most)
        except _Unfit as unfit:
            ctx.note(node, f"its gradients store values of each edge: {unfit}")
            continue
        builder.bring_before(node, *match.csr, match.grad)
        _replace(match, builder)
    drop_dead(gm)


def _has_body_logits(softmax: Node) -> bool:
    """Return whether the logits of a softmax come from an op that reads rows at the ends of edges."""
    alpha = operand(softmax, "alpha")
    if str(alpha.target) != "gnnc.edge_softmax.default":
        return False
    logits = operand(alpha, "logits")
    while str(logits.target) in _SCALES:
        logits = first_operand(logits)
    return str(logits.target) in _OF_LOGITS and (
        str(logits.target) != "gnnc.sddmm.default" or argument(logits, "op") == "dot"
    )


def _match(softmax: Node, most: int) -> _Match:
    rowptr, alpha, dalpha = unpack(softmax, "rowptr", "alpha", "grad")
    attention = _attention(alpha)
    aggregate = attention.aggregate
    col, x = operand(aggregate, "col"), operand(aggregate, "x")
    if str(dalpha.target) != "gnnc.sddmm.default" or set(dalpha.users) != {softmax}:
        raise _Unfit("the weights have another gradient, too")
    if unpack(dalpha, "rowptr", "col", "op") != (rowptr, col, "dot") or operand(dalpha, "b") is not x:
        raise _Unfit("the gradient of the weights is no dot product of rows")
    assert attention.a_dst is not None and attention.a_src is not None
    rows, grad = (attention.a_dst, attention.a_src, x), operand(dalpha, "a")
    shape = shape_of(x)[1:]
    if len(shape) != 2 or any(shape_of(each)[1:] != shape for each in (*rows, grad)):
        raise _Unfit("rows have other columns than the sum, or no heads")
    if not all(isinstance(size, int) for size in shape) or shape[1] > most:
        raise _Unfit(f"heads of {shape[1]} columns, the kernel takes {most}")
    if any(each.meta["val"].dtype != torch.float32 for each in (*rows, grad, *attention.constants)):
        raise _Unfit("rows are not float32")
    totals = list(sums_on_transpose(alpha, grad, rowptr, col))
    if len(totals) != 1:
        raise _Unfit("the gradient of the summed rows is no sum over the transpose")
    logit_gradient = _behind_scales(softmax)
    found = _gradients_of_rows(logit_gradient, attention, rowptr, col)
    csr = (rowptr, col, *unpack(totals[0], "rowptr", "col"))
    total = _total(totals[0], found.get("src"), attention.a_src is x)
    logit = attention.body if attention.kind == "body" else _DOT
    return _Match(
        attention,
        logit,
        csr,
        x,
        grad,
        totals[0],
        found.get("dst"),
        found.get("src"),
        total,
        found.get("const"),
    )


def _attention(alpha: Node) -> Attention:
    """Return the attention with these weights."""
    for user in alpha.users:
        found = match_attention(user, bodies=True)
        if found is None or found.softmax is not alpha:
            continue
        if found.kind not in ("dot", "body"):
            raise _Unfit("its logits are no sum over the columns of both ends")
        if found.edge is not None:
            raise _Unfit("its logits read a value of the edge")
        if len(found.constants) > 1:
            raise _Unfit(f"its logits read {len(found.constants)} constants")
        width = shape_of(found.a_dst)[1:] if found.a_dst is not None else ()
        for constant in found.constants:
            if shape_of(constant)[-2:] != width or constant.meta["val"].dim() > 3:
                raise _Unfit("a constant of its logits has no value for each head and column")
        return found
    raise _Unfit("its weights are changed before the sum, as by dropout, or sum no rows")


def _behind_scales(softmax: Node) -> Node:
    """Return the gradient of the logits before their scale."""
    node = softmax
    while len(node.users) == 1 and str(next(iter(node.users)).target) in _SCALES:
        node = next(iter(node.users))
    return node


def _gradients_of_rows(dlogit: Node, attention: Attention, rowptr: Node, col: Node) -> dict[str, Node]:
    """Return the gradients of the operands of the logits: ``dst``, ``src`` and ``const``.

    All that reads the gradient of logits is a gradient of what computed them.
    """
    found: dict[str, Node] = {}

    def add(kind: str, node: Node) -> None:
        if kind in found:
            raise _Unfit(f"its logits have two gradients of {kind}")
        found[kind] = node

    for user in dlogit.users:
        if str(user.target) == "aten.index_select.default":
            for reader in user.users:
                parts = (*unpack(reader, "rowptr", "col"), argument(user, "index")) if _sums(reader) else ()
                if len(parts) != 3 or not is_of_transpose(parts, (0, 1, 2), rowptr, col):
                    raise _Unfit("the gradient of its logits is read in another order")
                add("src", reader)
        elif str(user.target) == "gnnc.edge_sum.default" and unpack(user, "rowptr", "col") == (rowptr, col):
            add("const", user)
        elif _sums(user) and unpack(user, "rowptr", "col") == (rowptr, col):
            add("dst", user)
        else:
            raise _Unfit(f"the gradient of its logits is read by {user.target}")
    if "const" in found and not attention.constants:
        raise _Unfit("its logits have a gradient of a constant that they do not read")
    return found


def _sums(node: Node) -> bool:
    return (
        str(node.target) in ("gnnc.spmm.default", "gnnc.message.default")
        and argument(node, "reduce") == "sum"
    )


def _total(dx: Node, dsrc: Node | None, is_same: bool) -> Node | None:
    """Return the sum of the gradients of the same rows, where nothing else reads these."""
    if dsrc is None or not is_same or len(dx.users) != 1 or len(dsrc.users) != 1:
        return None
    (total,) = dx.users
    if set(dsrc.users) != {total} or str(total.target) != "aten.add.Tensor":
        return None
    return total if argument(total, "alpha") == 1 and same_shape(shape_of(total), shape_of(dx)) else None


def _replace(match: _Match, builder: NodeBuilder) -> None:
    attention = match.attention
    layer = str(match.dx.meta.get("layer", ""))
    made = builder.call(
        torch.ops.gnnc.body_attention_backward.default,
        *match.csr,
        match.logit,
        attention.a_dst,
        attention.a_src,
        match.x,
        match.grad,
        list(attention.constants),
        attention.scale,
        attention.eps,
        match.total is not None,
        layer=layer,
    )
    replaced = [match.total or match.dx, match.ddst, None if match.total else match.dsrc, match.dconst]
    for index, node in _present(replaced):
        result = builder.call(operator.getitem, made, index, layer=layer)
        if index == len(replaced) - 1:
            result = builder.call(_aten.reshape.default, result, list(shape_of(node)), layer=layer)
        node.replace_all_uses_with(result)


def _present(nodes: list[Node | None]) -> Iterator[tuple[int, Node]]:
    return ((index, node) for index, node in enumerate(nodes) if node is not None)
