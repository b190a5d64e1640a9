"""Dense ops: matrix product with a weight, the product over nodes for its gradient, and both of integers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnc.ir.nodes import may_be_same_shape
from gnnc.ir.op import (
    Cost,
    ErrorInput,
    Gradient,
    Op,
    accumulate_dtype,
    check,
    define,
    nbytes,
    numel,
    size_expr,
)
from gnnc.ir.quantized import spread


def _check_widths(op: str, x: Tensor, w: Tensor, k: Any) -> None:
    check(
        w.dim() == 2 and x.dim() >= 1 and x.shape[-1] == k,
        op,
        lambda: f"x {tuple(x.shape)} and w {tuple(w.shape)} do not share their inner width",
    )


def gemm_reference(x: Tensor, w: Tensor, bias: Tensor | None = None, w_is_kn: bool = False) -> Tensor:
    """Return ``x @ w.T + bias``, or ``x @ w + bias`` with ``w_is_kn``.

    Args:
        x: ``[..., K]``, floating point.
        w: ``[O, K]`` (``torch.nn.Linear`` layout), or ``[K, O]`` with ``w_is_kn``.
        bias: ``[O]`` or None.
        w_is_kn: layout of ``w``.

    Returns:
        ``[..., O]``; 16-bit operands are multiplied and summed in FP32 and give FP32.
    """
    _check_widths("gemm", x, w, w.shape[0 if w_is_kn else -1])
    dtype = accumulate_dtype(x.dtype)
    out = x.to(dtype) @ (w if w_is_kn else w.t()).to(dtype)
    return out if bias is None else out + bias.to(dtype)


def _gemm_fake(x: Tensor, w: Tensor, bias: Tensor | None = None, w_is_kn: bool = False) -> Tensor:
    _check_widths("gemm", x, w, w.shape[0 if w_is_kn else -1])
    return x.new_empty((*x.shape[:-1], w.shape[1 if w_is_kn else 0]), dtype=accumulate_dtype(x.dtype))


def _gemm_cost(x: Tensor, w: Tensor, bias: Tensor | None = None, w_is_kn: bool = False) -> Cost:
    outputs = numel(x) / size_expr(x.shape[-1]) * size_expr(w.shape[1 if w_is_kn else 0])
    return Cost(bytes=nbytes(x, w, bias) + outputs * 4, flops=outputs * size_expr(x.shape[-1]) * 2)


def _gemm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, w_is_kn = inputs
    ctx.save_for_backward(x, w, bias)
    ctx.w_is_kn = w_is_kn


def _gemm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, w, bias = ctx.saved_tensors
    wants_x, wants_w = ctx.needs_input_grad[:2]
    gnnc = torch.ops.gnnc
    dx = gnnc.gemm(grad, w.to(grad.dtype), None, not ctx.w_is_kn).to(x.dtype) if wants_x else None
    dw = dbias = None
    if wants_w:
        left, right = (x, grad) if ctx.w_is_kn else (grad, x)
        dw = gnnc.gemm_tn(left, right).to(w.dtype)
    if bias is not None and ctx.needs_input_grad[2]:
        rows = list(range(grad.dim() - 1))
        dbias = (grad.sum(rows) if rows else grad).to(bias.dtype)
    return dx, dw, dbias, None


def _gemm_samples() -> Sequence[tuple[Any, ...]]:
    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))

    return [
        (rand(5, 7), rand(3, 7), rand(3), False),
        (rand(1, 1), rand(1, 1), None, False),
        (rand(0, 4), rand(4, 6), None, True),
        (rand(2, 3, 4), rand(5, 4), rand(5), False),
        (rand(5, 7).bfloat16(), rand(3, 7).bfloat16(), None, False),
    ]


GEMM = define(
    Op(
        name="gemm",
        schema="(Tensor x, Tensor w, Tensor? bias=None, bool w_is_kn=False) -> Tensor",
        kind="dense",
        features=("x", "w"),
        low_operands=("x", "w"),
        counted_as="gemm",
        label="h{n}",
        reference=gemm_reference,
        fake=_gemm_fake,
        cost=_gemm_cost,
        gradient=Gradient(_gemm_backward, _gemm_setup),
        quantized="qgemm",
        samples=_gemm_samples,
        error_inputs=lambda: [ErrorInput((torch.ones(2, 3), torch.ones(4, 5)), "inner width")],
    )
)


def gemm_tn_reference(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a.T @ b``, summed over all rows: the gradient of a weight that every row was multiplied with.

    Args:
        a: floating ``[..., K]``.
        b: floating ``[..., O]``, of as many rows.

    Returns:
        ``[K, O]``; 16-bit operands are multiplied and summed in FP32 and give FP32.
    """
    _check_rows(a, b)
    dtype = accumulate_dtype(torch.promote_types(a.dtype, b.dtype))
    left, right = (t.reshape(-1, t.shape[-1]) if t.numel() else t.reshape(0, t.shape[-1]) for t in (a, b))
    return left.t().to(dtype) @ right.to(dtype)


def _check_rows(a: Tensor, b: Tensor) -> None:
    check(
        a.dim() == b.dim() >= 1 and may_be_same_shape(a.shape[:-1], b.shape[:-1]),
        "gemm_tn",
        lambda: f"a {tuple(a.shape)} and b {tuple(b.shape)} do not have the same rows",
    )


def _gemm_tn_fake(a: Tensor, b: Tensor) -> Tensor:
    _check_rows(a, b)
    dtype = accumulate_dtype(torch.promote_types(a.dtype, b.dtype))
    return a.new_empty((a.shape[-1], b.shape[-1]), dtype=dtype)


def _gemm_tn_cost(a: Tensor, b: Tensor, a_scale: Tensor | None = None, b_scale: Tensor | None = None) -> Cost:
    result = size_expr(a.shape[-1]) * size_expr(b.shape[-1])
    return Cost(nbytes(a, b, a_scale, b_scale) + result * 4, numel(a) * size_expr(b.shape[-1]) * 2)


def _gemm_tn_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gemm_tn_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    wants_a, wants_b = ctx.needs_input_grad
    gemm = torch.ops.gnnc.gemm
    da = gemm(b.to(grad.dtype), grad).to(a.dtype) if wants_a else None
    db = gemm(a.to(grad.dtype), grad, None, True).to(b.dtype) if wants_b else None
    return da, db


def _gemm_tn_samples() -> Sequence[tuple[Any, ...]]:
    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))

    return [
        (rand(9, 7), rand(9, 3)),
        (rand(2, 3, 4), rand(2, 3, 5)),
        (rand(0, 4), rand(0, 6)),
        (rand(5, 7).bfloat16(), rand(5, 3).bfloat16()),
    ]


GEMM_TN = define(
    Op(
        name="gemm_tn",
        schema="(Tensor a, Tensor b) -> Tensor",
        kind="dense",
        family="gemm",
        features=("a", "b"),
        low_operands=("a", "b"),
        counted_as="gemm",
        label="dw{n}",
        reference=gemm_tn_reference,
        fake=_gemm_tn_fake,
        cost=_gemm_tn_cost,
        gradient=Gradient(_gemm_tn_backward, _gemm_tn_setup),
        quantized="qgemm_tn",
        samples=_gemm_tn_samples,
        error_inputs=lambda: [ErrorInput((torch.ones(2, 3), torch.ones(4, 3)), "the same rows")],
    )
)


def qgemm_reference(x: Tensor, w: Tensor) -> Tensor:
    """Return the exact integer product ``x @ w.T``, rounded once to float32.

    Args:
        x: quantized ``[N, K]``.
        w: quantized ``[O, K]``.

    Returns:
        float32 ``[N, O]``: the integer sum; scales are applied by ``dequantize``.
    """
    _check_widths("qgemm", x, w, w.shape[-1])
    # float64 holds every sum of fewer than 2^38 products of bytes exactly.
    return (x.double() @ w.double().t()).float()


def _qgemm_fake(x: Tensor, w: Tensor) -> Tensor:
    _check_widths("qgemm", x, w, w.shape[-1])
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=torch.float32)


def _qgemm_samples() -> Sequence[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)

    def int8(*shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)

    return [(int8(5, 7), int8(3, 7)), (int8(1, 1), int8(1, 1)), (int8(0, 4), int8(6, 4))]


QGEMM = define(
    Op(
        name="qgemm",
        schema="(Tensor x, Tensor w) -> Tensor",
        kind="dense",
        family="gemm",
        features=("x", "w"),
        integer_operands=("x", "w"),
        result_dtype=torch.float32,
        counted_as="gemm",
        label="acc{n}",
        reference=qgemm_reference,
        fake=_qgemm_fake,
        cost=lambda x, w: _gemm_cost(x, w),
        no_gradient="integers have no gradient; the straight-through rule belongs to the joint graph",
        samples=_qgemm_samples,
        error_inputs=lambda: [
            ErrorInput(
                (torch.ones(2, 3, dtype=torch.int8), torch.ones(4, 5, dtype=torch.int8)),
                "inner width",
            )
        ],
    )
)


def qgemm_tn_reference(
    a: Tensor, b: Tensor, a_scale: Tensor | None = None, b_scale: Tensor | None = None
) -> Tensor:
    """Return ``a.T @ b``, summed over all rows, of which one matrix or both are quantized by rows.

    Args:
        a: quantized or floating ``[N, .., K]``.
        b: quantized or floating ``[N, .., O]``.
        a_scale: float32 ``[N]``, scales along the first dimension of a quantized ``a``; None: it is floating.
        b_scale: float32 ``[N]``, scales along the first dimension of a quantized ``b``; None: it is floating.

    Returns:
        float32 ``[K, O]``: the sums of products of ``float(q) * scale``.

    Raises:
        InputError: the matrices do not have the same rows.
    """
    left, right = (
        rows.float() if scale is None else rows.float() * spread(scale, "row", rows)
        for rows, scale in ((a, a_scale), (b, b_scale))
    )
    return gemm_tn_reference(left, right)


def _qgemm_tn_fake(
    a: Tensor, b: Tensor, a_scale: Tensor | None = None, b_scale: Tensor | None = None
) -> Tensor:
    _check_rows(a, b)
    return a.new_empty((a.shape[-1], b.shape[-1]), dtype=torch.float32)


def _qgemm_tn_samples() -> Sequence[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)

    def int8(*shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)

    scale = torch.rand(9, generator=generator) / 100
    return [
        (int8(9, 7), int8(9, 3), scale, scale.flip(0)),
        (torch.randn(9, 7, generator=generator), int8(9, 3), None, scale),
        (int8(9, 7), torch.randn(9, 3, generator=generator), scale, None),
        (int8(0, 4), int8(0, 6), torch.empty(0), torch.empty(0)),
        (int8(9, 2, 7), int8(9, 2, 3), scale, scale.flip(0)),
    ]


QGEMM_TN = define(
    Op(
        name="qgemm_tn",
        schema="(Tensor a, Tensor b, Tensor? a_scale=None, Tensor? b_scale=None) -> Tensor",
        kind="dense",
        family="gemm",
        features=("a", "b"),
        result_dtype=torch.float32,
        counted_as="gemm",
        label="dw{n}",
        reference=qgemm_tn_reference,
        fake=_qgemm_tn_fake,
        cost=_gemm_tn_cost,
        no_gradient="integers have no gradient; the straight-through rule belongs to the joint graph",
        samples=_qgemm_tn_samples,
        error_inputs=lambda: [
            ErrorInput(
                (torch.ones(2, 3), torch.ones(4, 3, dtype=torch.int8), None, torch.ones(4)), "the same rows"
            )
        ],
    )
)
