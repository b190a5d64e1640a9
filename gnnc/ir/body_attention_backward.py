"""Gradient of attention whose logits a body computes from the rows at both ends of an edge.

A backend computes it as the backward pass of FlashAttention-2 does (Dao 2023, arXiv:2307.08691, algorithm
2), on the edges of a graph in place of blocks of a matrix: the logits S are computed again,
``P = exp(S - L)`` with one number ``L = m + log l`` for each row and head, ``dV = P^T dO``, ``dP = dO V^T``,
``dS = P * (dP - D)`` with ``D = rowsum(dO * O) = rowsum(P * dP)``, and the gradients of the two ends are sums
over rows and over columns of what the vector-Jacobian product of the body makes of dS. Nothing is stored for
an edge.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnc.ir.body import evaluate_body
from gnnc.ir.edge_gradients import GivenCotangent
from gnnc.ir.op import Cost, ErrorInput, Op, accumulate_dtype, check, define, nbytes, numel
from gnnc.ir.sparse import edge_softmax_backward_reference, reduce_edges, softmax_of_edges
from gnnc.ir.structure import csr_transpose_reference, edge_rows, random_csr
from gnnc.ir.vjp import body_gradients, operand_of

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def body_attention_backward_reference(
    rowptr: Tensor,
    col: Tensor,
    rowptr_t: Tensor,
    col_t: Tensor,
    logit: str,
    dst: Tensor,
    src: Tensor,
    x: Tensor,
    grad: Tensor,
    const: Sequence[Tensor],
    scale: float,
    eps: float,
    joined: bool,
) -> Gradients:
    """Return the gradients of ``y_i = sum_j softmax_j(scale * logit(dst_i, src_j, const)) * x_j``.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        col: int32 ``[E]``.
        rowptr_t: int64 ``[num_src + 1]``, of the transposed CSR.
        col_t: int32 ``[E]``, of the transposed CSR.
        logit: body of the logits, ``[H]`` of an edge.
        dst: floating ``[num_dst, H, D]``, seen by the body as ``i0``.
        src: floating ``[num_src, H, D]``, seen as ``j0``.
        x: floating ``[num_src, H, D]``.
        grad: the gradient of ``y``, floating ``[num_dst, H, D]``.
        const: floating operands of ``H * D`` values, seen as ``c0, ...``.
        scale: factor of the logits.
        eps: term that the softmax adds to its denominator.
        joined: whether ``src`` is ``x``, and its gradient is added to that of ``x``.

    Returns:
        The gradients of ``x``, of ``dst``, of ``src`` (no elements if ``joined``) and of the constants
        (``[len(const), H, D]``); at least FP32.
    """
    _check(dst, src, x, grad, const)
    dtype = accumulate_dtype(x.dtype)
    rows, num_dst, heads = edge_rows(rowptr, col.numel()), dst.shape[0], x.shape[1]
    wide = [dst.to(dtype).index_select(0, rows), src.to(dtype).index_select(0, col)]
    constants = [c.to(dtype).reshape(1, *x.shape[1:]) for c in const]
    logits = evaluate_body(logit, wide[:1], wide[1:], [], constants).reshape(-1, heads) * scale
    alpha = softmax_of_edges(logits, rows, num_dst, eps)
    received, sent = grad.to(dtype).index_select(0, rows), x.to(dtype).index_select(0, col)
    dlogit = edge_softmax_backward_reference(rowptr, alpha, (received * sent).sum(-1)) * scale
    names = ["i0", "j0", *(f"c{n}" for n in range(len(const)))]
    operands = (
        *(operand_of(name, value) for name, value in zip(names, [*wide, *constants], strict=True)),
        operand_of("e0", dlogit),
    )
    bodies = body_gradients(logit, GivenCotangent("e0"), operands, tuple(names))

    def gradient(name: str) -> Tensor:
        if name not in bodies:
            return torch.zeros((1,) if name[0] == "c" else (col.numel(), 1, 1), dtype=dtype, device=x.device)
        return evaluate_body(bodies[name], wide[:1], wide[1:], [dlogit], constants)

    shape = (col.numel(), *x.shape[1:])
    ddst = reduce_edges(gradient("i0").expand(shape), rows, num_dst, "sum")
    dsrc = torch.zeros_like(src, dtype=dtype).index_add(0, col, gradient("j0").expand(shape))
    dx = torch.zeros_like(x, dtype=dtype).index_add(0, col, alpha.unsqueeze(-1) * received)
    flat = [gradient(name).expand(1, *x.shape[1:])[0] for name in names[2:]]
    dconst = torch.stack(flat) if flat else dx.new_zeros(0, *x.shape[1:])
    return (dx + dsrc, ddst, dsrc.new_zeros(0), dconst) if joined else (dx, ddst, dsrc, dconst)


def _check(dst: Tensor, src: Tensor, x: Tensor, grad: Tensor, const: Sequence[Tensor]) -> None:
    op = "body_attention_backward"
    check(
        all(rows.dim() == 3 and rows.shape[1:] == x.shape[1:] for rows in (dst, src, x, grad)),
        op,
        lambda: "want dst and grad [num_dst, H, D], src and x [num_src, H, D]",
    )
    check(
        all(c.numel() == x.shape[1] * x.shape[2] for c in const),
        op,
        lambda: "want constants with a value for each head and column",
    )


def _fake(
    rowptr: Tensor,
    col: Tensor,
    rowptr_t: Tensor,
    col_t: Tensor,
    logit: str,
    dst: Tensor,
    src: Tensor,
    x: Tensor,
    grad: Tensor,
    const: Sequence[Tensor],
    scale: float,
    eps: float,
    joined: bool,
) -> Gradients:
    _check(dst, src, x, grad, const)
    dtype = accumulate_dtype(x.dtype)
    return (
        x.new_empty(x.shape, dtype=dtype),
        dst.new_empty(dst.shape, dtype=dtype),
        src.new_empty((0,) if joined else src.shape, dtype=dtype),
        x.new_empty((len(const), *x.shape[1:]), dtype=dtype),
    )


def _cost(rowptr: Tensor, col: Tensor, *others: Any) -> Cost:
    rowptr_t, col_t, _, dst, src, x, grad, const, _, _, joined = others
    edges, width, heads = numel(col), numel(x[:1]), x.shape[1]
    gathered = edges * (width * ((3 if joined else 4) * x.element_size()) + 8 * heads)
    moved = nbytes(rowptr, col, rowptr_t, col_t, dst, src, x, grad) + gathered + 3 * nbytes(x)
    return Cost(moved, edges * width * (20 + 8 * len(const)))


_DOT = "t0 = aten.mul.Tensor(i0, j0); t1 = aten.sum.dim_IntList(t0, [-1]); return t1"
_GATV2 = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.leaky_relu.default(t0, 0.2); t2 = aten.mul.Tensor(t1, c0); "
    "t3 = aten.sum.dim_IntList(t2, [2]); return t3"
)


def _samples() -> Sequence[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(3)

    def rand(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    def ends(num_src: int, num_dst: int, edges: int, *shape: int) -> tuple[Any, ...]:
        rowptr, col, _ = random_csr(num_src, num_dst, edges)
        csr = rowptr, col, *csr_transpose_reference(rowptr, col, num_src)[:2]
        return (
            csr,
            (rand(num_dst, *shape), rand(num_src, *shape), rand(num_src, *shape)),
            rand(num_dst, *shape),
        )

    csr, rows, grad = ends(6, 5, 14, 2, 3)
    empty, no_rows, no_grad = ends(4, 7, 0, 1, 3)
    return [
        (*csr, _DOT, *rows, grad, [], 0.5, 1e-16, False),
        (*csr, _GATV2, *rows, grad, [rand(1, 2, 3)], 1.0, 0.0, False),
        (*csr, _GATV2, rows[0], rows[1], rows[1], grad, [rand(1, 2, 3)], 1.0, 1e-16, True),
        (*empty, _DOT, *no_rows, no_grad, [], 1.0, 1e-16, False),
    ]


def _errors() -> Sequence[ErrorInput]:
    good = _samples()[1]
    return [
        ErrorInput((*good[:5], good[5][:, 0], *good[6:]), r"want dst and grad \[num_dst, H, D\]"),
        ErrorInput((*good[:9], [torch.ones(2)], *good[10:]), "a value for each head and column"),
    ]


BODY_ATTENTION_BACKWARD = define(
    Op(
        name="body_attention_backward",
        schema="(Tensor rowptr, Tensor col, Tensor rowptr_t, Tensor col_t, str logit, Tensor dst, Tensor src,"
        " Tensor x, Tensor grad, Tensor[] const, float scale, float eps, bool joined)"
        " -> (Tensor dx, Tensor ddst, Tensor dsrc, Tensor dconst)",
        kind="edge",
        features=("dst", "src", "x", "grad", "const"),
        gathered=("dst", "src", "x", "grad"),
        low_operands=("dst", "src", "x", "grad"),
        counted_as="spmm",
        label="h{n}",
        reference=body_attention_backward_reference,
        fake=_fake,
        cost=_cost,
        no_gradient="second gradients are those of the ops that attention consists of",
        samples=_samples,
        error_inputs=_errors,
    )
)
