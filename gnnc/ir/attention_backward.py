"""Gradient of additive attention as a backend computes it: a pass over the edges by rows, one by columns.

Attention weights and their gradients are computed again for each edge, so that no tensor of edges times heads
is stored.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnc.ir.op import Cost, ErrorInput, Op, accumulate_dtype, check, define, nbytes, numel
from gnnc.ir.sparse import edge_softmax_backward_reference, reduce_edges, softmax_of_edges
from gnnc.ir.structure import csr_transpose_reference, edge_rows, random_csr

ATTENTION_VECTORS = (3, 4)
"""Results that are gradients of attention vectors, which have few values."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def attention_backward_reference(
    rowptr: Tensor,
    col: Tensor,
    rowptr_t: Tensor,
    col_t: Tensor,
    a_dst: Tensor,
    a_src: Tensor,
    x: Tensor,
    grad: Tensor,
    att_dst: Tensor | None,
    att_src: Tensor | None,
    slope: float,
    eps: float,
) -> Gradients:
    """Return the gradients of ``y_i = sum_j softmax_j(leaky_relu(a_dst_i + a_src_j)) * x_j``.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        col: int32 ``[E]``.
        rowptr_t: int64 ``[num_src + 1]``, of the transposed CSR.
        col_t: int32 ``[E]``, of the transposed CSR.
        a_dst: FP32 ``[num_dst, H]``.
        a_src: FP32 ``[num_src, H]``.
        x: floating ``[num_src, H, D]``.
        grad: the gradient of ``y``, floating ``[num_dst, H, D]``.
        att_dst: FP32 ``[H, D]`` where ``a_dst`` is ``(x * att_dst).sum(-1)``; None: it comes from elsewhere.
        att_src: FP32 ``[H, D]`` where ``a_src`` is ``(x * att_src).sum(-1)``; None: it comes from elsewhere.
        slope: negative slope of the leaky ReLU.
        eps: term that the softmax adds to its denominator.

    Returns:
        The gradients of ``x``, with what comes through ``a_dst`` and ``a_src`` where ``att_dst`` and
        ``att_src`` are given, of ``a_dst``, of ``a_src``, of ``att_dst`` and of ``att_src`` (0 where these
        are absent); at least FP32.
    """
    _check("attention_backward", a_dst, a_src, x, grad, att_dst)
    dtype = accumulate_dtype(x.dtype)
    rows, num_dst = edge_rows(rowptr, col.numel()), a_dst.shape[0]
    ends = a_dst.index_select(0, rows) + a_src.index_select(0, col)
    alpha = softmax_of_edges(torch.nn.functional.leaky_relu(ends, slope), rows, num_dst, eps)
    received, sent = grad.to(dtype).index_select(0, rows), x.to(dtype).index_select(0, col)
    dlogit = edge_softmax_backward_reference(rowptr, alpha, (received * sent).sum(-1))
    dlogit = torch.where(ends > 0, dlogit, dlogit * slope)
    dx = torch.zeros_like(x, dtype=dtype).index_add(0, col, alpha.unsqueeze(-1) * received)
    da_dst = reduce_edges(dlogit, rows, num_dst, "sum")
    da_src = torch.zeros_like(a_src).index_add(0, col, dlogit)
    through = []
    for att, da in ((att_dst, da_dst), (att_src, da_src)):
        if att is None:
            through.append(torch.zeros(x.shape[1:], dtype=dtype, device=x.device))
            continue
        dx = dx + da.unsqueeze(-1) * att
        through.append((da.unsqueeze(-1) * x.to(dtype)).sum(0))
    return dx, da_dst, da_src, through[0], through[1]


def _check(op: str, a_dst: Tensor, a_src: Tensor, x: Tensor, grad: Tensor, att_dst: Tensor | None) -> None:
    check(
        a_dst.dim() == a_src.dim() == 2 and x.dim() == grad.dim() == 3,
        op,
        lambda: "want a_dst [num_dst, H], a_src [num_src, H], x [num_src, H, D] and grad [num_dst, H, D]",
    )
    check(
        att_dst is None or isinstance(x.shape[0], torch.SymInt) or x.shape[0] == grad.shape[0],
        op,
        lambda: f"att_dst belongs to destinations that are the sources, not {grad.shape[0]} of {x.shape[0]}",
    )


def _fake(
    rowptr: Tensor,
    col: Tensor,
    rowptr_t: Tensor,
    col_t: Tensor,
    a_dst: Tensor,
    a_src: Tensor,
    x: Tensor,
    grad: Tensor,
    att_dst: Tensor | None,
    att_src: Tensor | None,
    slope: float,
    eps: float,
) -> Gradients:
    _check("attention_backward", a_dst, a_src, x, grad, att_dst)
    dtype = accumulate_dtype(x.dtype)
    dx, weight = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[1:], dtype=dtype)
    return (
        dx,
        a_dst.new_empty(a_dst.shape),
        a_src.new_empty(a_src.shape),
        weight,
        weight.new_empty(x.shape[1:]),
    )


def _cost(rowptr: Tensor, col: Tensor, *others: Any) -> Cost:
    rowptr_t, col_t, _, a_src, x = others[:5]
    edges, width, heads = numel(col), numel(x[:1]), numel(a_src[:1])
    gathered = edges * (2 * width * x.element_size() + 20 * heads)
    moved = nbytes(rowptr, col, rowptr_t, col_t) + gathered + 2 * nbytes(x)
    return Cost(moved, edges * (6 * width + 30 * heads))


def _samples() -> Sequence[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(3)

    def rand(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    def graph(num_src: int, num_dst: int, edges: int) -> tuple[Tensor, ...]:
        rowptr, col, _ = random_csr(num_src, num_dst, edges)
        return rowptr, col, *csr_transpose_reference(rowptr, col, num_src)[:2]

    def sample(sizes: tuple[int, int, int], heads: int, width: int) -> tuple[Any, ...]:
        num_src, num_dst, _ = sizes
        halves = rand(num_dst, heads), rand(num_src, heads)
        return *graph(*sizes), *halves, rand(num_src, heads, width), rand(num_dst, heads, width)

    return [
        (*sample((6, 5, 14), 2, 3), None, rand(2, 3), 0.2, 1e-16),
        (*sample((6, 6, 14), 1, 5), rand(1, 5), rand(1, 5), 0.1, 0.0),
        (*sample((4, 7, 0), 1, 3), None, None, 0.2, 1e-16),
    ]


def _errors() -> Sequence[ErrorInput]:
    good = _samples()[0]
    return [
        ErrorInput((*good[:4], good[4][:, 0], *good[5:]), r"want a_dst \[num_dst, H\]"),
        ErrorInput((*good[:8], good[9], *good[9:]), "att_dst belongs to"),
    ]


ATTENTION_BACKWARD = define(
    Op(
        name="attention_backward",
        schema="(Tensor rowptr, Tensor col, Tensor rowptr_t, Tensor col_t, Tensor a_dst, Tensor a_src,"
        " Tensor x, Tensor grad, Tensor? att_dst, Tensor? att_src, float slope, float eps)"
        " -> (Tensor dx, Tensor da_dst, Tensor da_src, Tensor datt_dst, Tensor datt_src)",
        kind="edge",
        features=("a_dst", "a_src", "x", "grad", "att_dst", "att_src"),
        gathered=("a_dst", "a_src", "x", "grad"),
        low_operands=("x", "grad"),
        counted_as="spmm",
        label="h{n}",
        reference=attention_backward_reference,
        fake=_fake,
        cost=_cost,
        no_gradient="second gradients are those of the ops that attention consists of",
        samples=_samples,
        error_inputs=_errors,
    )
)
