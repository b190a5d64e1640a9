"""Dense op: matrix product with a weight, and its integer form."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
    ctx.save_for_backward(x, w)
    ctx.has_bias, ctx.w_is_kn = bias is not None, w_is_kn


def _gemm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    gemm = torch.ops.gnnc.gemm
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    dx = gemm(grad, w, None, not ctx.w_is_kn).to(x.dtype) if ctx.needs_input_grad[0] else None
    dw = None
    if ctx.needs_input_grad[1]:
        left, right = (rows, grads) if ctx.w_is_kn else (grads, rows)
        dw = gemm(left.t(), right, None, True).to(w.dtype)
    return dx, dw, grads.sum(0) if ctx.has_bias else None, None


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
