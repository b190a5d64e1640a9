"""Gradient rules of the sparse ops: each gradient is a sparse op again, on the CSR or on its transpose.

A sum over the edges of a source is a sum over the rows of the transpose, so that no rule makes a row of
features for every edge.
"""

from typing import Any

import torch
from torch import Tensor

from gnnc.ir.edge_gradients import EXTREMA, Edges, divide_by_degree, message_gradients
from gnnc.ir.nodes import may_be_same_shape


def spmm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the operands of ``spmm``, and of an extremum its result."""
    rowptr, col, value, x, reduce, _ = inputs
    ctx.save_for_backward(rowptr, col, value, x, output if reduce in EXTREMA else None)
    ctx.reduce = reduce


def spmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of ``value``, by ``sddmm``, and of ``x``, by ``spmm`` on the transpose."""
    rowptr, col, value, x, out = ctx.saved_tensors
    _, _, wants_value, wants_x, _, _ = ctx.needs_input_grad
    if out is not None:
        edges = Edges(rowptr, col, ([], [x], [] if value is None else [value], []))
        body = _message_body(value, x, out.dtype)
        wanted = ([], [wants_x], [] if value is None else [wants_value], [])
        _, (dx,), dvalue, _ = message_gradients(edges, body, ctx.reduce, out, grad, wanted)
        return None, None, dvalue[0] if dvalue else None, dx, None, None
    if ctx.reduce == "mean":
        grad = divide_by_degree(grad, rowptr)
    dx = _sum_on_transpose(rowptr, col, value, grad, x).to(x.dtype) if wants_x else None
    dvalue = _value_gradient(rowptr, col, value, grad, x) if wants_value else None
    return None, None, dvalue, dx, None, None


def _message_body(value: Tensor | None, x: Tensor, dtype: torch.dtype) -> str:
    """Return the body of a message of ``spmm``: a row of ``x``, times its edge value, in ``dtype``."""
    steps: list[str] = []

    def add(step: str) -> str:
        steps.append(f"t{len(steps)} = {step}; ")
        return f"t{len(steps) - 1}"

    row = "j0" if x.dtype == dtype else add(f"aten._to_copy.default(j0, dtype={dtype})")
    if value is not None:
        weight = "e0" if value.dtype == dtype else add(f"aten._to_copy.default(e0, dtype={dtype})")
        for _ in range(x.dim() - value.dim()):
            weight = add(f"aten.unsqueeze.default({weight}, -1)")
        row = add(f"aten.mul.Tensor({row}, {weight})")
    return f"{''.join(steps)}return {row}"


def _sum_on_transpose(rowptr: Tensor, col: Tensor, value: Tensor | None, rows: Tensor, x: Tensor) -> Tensor:
    """Return, for each row of ``x``, the sum of ``rows`` over the edges that start there."""
    rowptr_t, col_t, perm_t = torch.ops.gnnc.csr_transpose(rowptr, col, x.shape[0])
    value_t = None if value is None else value.index_select(0, perm_t)
    return torch.ops.gnnc.spmm(rowptr_t, col_t, value_t, rows, "sum", x.shape[0])


def _value_gradient(rowptr: Tensor, col: Tensor, value: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Return the products of the gradient's rows and those of ``x``, summed where they share a value."""
    x, dims = x.to(grad.dtype), value.dim()
    if dims == x.dim():
        return _unbroadcast(torch.ops.gnnc.sddmm(rowptr, col, grad, x, "mul"), value)
    left, right = (t if t.dim() == dims + 1 else t.flatten(dims) for t in (grad, x))
    return _unbroadcast(torch.ops.gnnc.sddmm(rowptr, col, left, right, "dot"), value)


def _unbroadcast(grad: Tensor, like: Tensor) -> Tensor:
    """Return ``grad``, summed over the dimensions in which ``like`` was broadcast, in its dtype."""
    return (grad if may_be_same_shape(grad.shape, like.shape) else grad.sum_to_size(like.shape)).to(
        like.dtype
    )


def sddmm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the operands of ``sddmm``."""
    rowptr, col, a, b, op = inputs
    ctx.save_for_backward(rowptr, col, a, b)
    ctx.edge_op = op


def sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of both sides: sums over rows of the CSR, and of the transpose."""
    rowptr, col, a, b = ctx.saved_tensors
    op, (_, _, wants_a, wants_b, _) = ctx.edge_op, ctx.needs_input_grad
    da = db = None
    if a is not None and wants_a and op != "copy_src":
        other = b if op in ("dot", "mul") else None
        da = _unbroadcast(_sum_of_rows(rowptr, col, grad, other, op, a), a)
    if b is not None and wants_b and op != "copy_dst":
        rowptr_t, col_t, perm_t = torch.ops.gnnc.csr_transpose(rowptr, col, b.shape[0])
        if op in ("dot", "mul"):
            total = _sum_of_rows(rowptr_t, col_t, grad.index_select(0, perm_t), a, op, b)
        else:
            total = torch.ops.gnnc.segment_reduce(rowptr_t, perm_t, grad.contiguous(), "sum", b.shape[0])
        db = _unbroadcast(-total if op == "sub" else total, b)
    return None, None, da, db, None


def _sum_of_rows(
    rowptr: Tensor, col: Tensor, grad: Tensor, other: Tensor | None, op: str, side: Tensor
) -> Tensor:
    """Return the sums by row of the edges' gradients, each times the row of ``other`` at the other end."""
    gnnc, rows = torch.ops.gnnc, side.shape[0]
    if other is None:
        return gnnc.segment_reduce(rowptr, None, grad.contiguous(), "sum", rows)
    other = other.to(grad.dtype)
    if op == "dot":
        wide = torch.broadcast_shapes(side.shape[1:], other.shape[1:])
        return gnnc.spmm(rowptr, col, grad, _broadcast_rows(other, wide), "sum", rows)
    if grad.dim() == 1:
        return gnnc.spmm(rowptr, col, grad, other, "sum", rows)
    body = "t0 = aten.mul.Tensor(e0, j0); return t0"
    return gnnc.message(rowptr, col, body, "sum", [], [other], [grad], [], rows)


def _broadcast_rows(rows: Tensor, sizes: Any) -> Tensor:
    """Return ``rows``, each broadcast to ``sizes``."""
    if may_be_same_shape(rows.shape[1:], sizes):
        return rows
    missing = [1] * (len(sizes) + 1 - rows.dim())
    return rows.reshape(rows.shape[0], *missing, *rows.shape[1:]).expand(rows.shape[0], *sizes)


def segment_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the operands of ``segment_reduce``, and of an extremum its result."""
    rowptr, perm, x, reduce, _ = inputs
    ctx.save_for_backward(rowptr, perm, x, output if reduce in EXTREMA else None)
    ctx.reduce = reduce


def segment_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradient of ``x``: a row for each row of ``x``, which is read at its segment."""
    rowptr, perm, x, out = ctx.saved_tensors
    return None, None, _segment_gradient(rowptr, perm, x, out, grad, ctx.reduce).to(x.dtype), None, None


def _segment_gradient(
    rowptr: Tensor, perm: Tensor | None, x: Tensor, out: Tensor | None, grad: Tensor, reduce: str
) -> Tensor:
    """Take ``x`` for sources, whose edges are ``perm``, or for an edge operand where rows are in order."""
    col = rows_in_order(x) if perm is None else perm.to(torch.int32)
    if out is not None:
        edges = Edges(rowptr, col, ([], [], [x], []) if perm is None else ([], [x], [], []))
        body = _message_body(None, x, out.dtype)
        body = body.replace("j0", "e0") if perm is None else body
        wanted = ([], [], [True], []) if perm is None else ([], [True], [], [])
        found = message_gradients(edges, body, reduce, out, grad, wanted)
        dx = found[2][0] if perm is None else found[1][0]
        assert dx is not None
        return dx
    if reduce == "mean":
        grad = divide_by_degree(grad, rowptr)
    if perm is None:
        return torch.ops.gnnc.sddmm(rowptr, col, grad, None, "copy_dst")
    return _sum_on_transpose(rowptr, col, None, grad, x)


def rows_in_order(x: Tensor) -> Tensor:
    """Return the ids of the rows of ``x``, int32."""
    return torch.arange(x.shape[0], device=x.device, dtype=torch.int32)


def edge_softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the bounds of the rows and the result of ``edge_softmax``."""
    ctx.save_for_backward(inputs[0], output)
    ctx.dtype = inputs[1].dtype


def edge_softmax_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradient of the logits."""
    rowptr, alpha = ctx.saved_tensors
    return None, torch.ops.gnnc.edge_softmax_backward(rowptr, alpha, grad).to(ctx.dtype), None


def softmax_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the operands of ``edge_softmax_backward``."""
    ctx.save_for_backward(*inputs)


_OF_ALPHA = (
    "t0 = aten.sub.Tensor(e1, i0); t1 = aten.mul.Tensor(e0, t0); "
    "t2 = aten.mul.Tensor(e1, i1); t3 = aten.sub.Tensor(t1, t2); return t3"
)


def softmax_backward_backward(ctx: Any, second: Tensor) -> tuple[Any, ...]:
    """Return the gradients of ``alpha`` and ``grad``: the op is symmetric in ``grad``."""
    rowptr, alpha, grad = ctx.saved_tensors
    gnnc, rows = torch.ops.gnnc, rowptr.shape[0] - 1
    _, wants_alpha, wants_grad = ctx.needs_input_grad
    dalpha = dgrad = None
    if wants_grad:
        dgrad = gnnc.edge_softmax_backward(rowptr, alpha, second).to(grad.dtype)
    if wants_alpha:
        sums = [gnnc.segment_reduce(rowptr, None, alpha * t, "sum", rows) for t in (grad, second)]
        col = rows_in_order(alpha)
        dalpha = gnnc.edge_map(rowptr, col, _OF_ALPHA, sums, [], [second, grad], [])
    return None, dalpha, dgrad
