"""ReLU in training: the forward keeps one bit for each value, and the backward reads the bits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnc.ir.nodes import may_be_same_shape
from gnnc.ir.op import Cost, ErrorInput, Gradient, Op, check, define, nbytes, numel


def relu_mask_reference(x: Tensor) -> Tensor:
    """Return the bits of the values whose gradient passes a ReLU: all but those that are at most 0.

    Args:
        x: floating ``[..., F]``, the operand or the result of the ReLU; NaN counts as above 0.

    Returns:
        uint8 ``[..., ceil(F / 8)]``; bit ``c % 8`` of byte ``c // 8`` belongs to column ``c``.
    """
    check(x.dim() >= 1, "relu_mask", lambda: "x has no columns; want [..., F]")
    passes = torch.nn.functional.pad(~(x <= 0), (0, -x.shape[-1] % 8))
    groups = passes.reshape(*x.shape[:-1], passes.shape[-1] // 8, 8)
    weights = (1 << torch.arange(8, device=x.device)).to(torch.int32)
    return (groups * weights).sum(-1).to(torch.uint8)


def _relu_mask_fake(x: Tensor) -> Tensor:
    check(x.dim() >= 1, "relu_mask", lambda: "x has no columns; want [..., F]")
    return x.new_empty((*x.shape[:-1], (x.shape[-1] + 7) // 8), dtype=torch.uint8)


def _rand(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


RELU_MASK = define(
    Op(
        name="relu_mask",
        schema="(Tensor x) -> Tensor",
        kind="precision",
        features=("x",),
        result_dtype=torch.uint8,
        label="{x}_mask",
        reference=relu_mask_reference,
        fake=_relu_mask_fake,
        cost=lambda x: Cost(nbytes(x) + numel(x) / 8, numel(x)),
        no_gradient="bits have no gradient",
        samples=lambda: [(_rand(5, 7),), (_rand(2, 3, 16),), (_rand(0, 9),)],
        error_inputs=lambda: [ErrorInput((torch.tensor(1.0),), r"want \[\.\.\., F\]")],
    )
)


def relu_backward_reference(grad: Tensor, mask: Tensor) -> Tensor:
    """Return the gradient of a ReLU: ``grad`` where the bit of ``mask`` is set, else 0.

    Args:
        grad: floating ``[..., F]``.
        mask: uint8 ``[..., ceil(F / 8)]`` from ``relu_mask``.
    """
    _check_mask(grad, mask)
    shifts = torch.arange(8, device=mask.device, dtype=torch.uint8)
    bits = ((mask.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., : grad.shape[-1]]
    return grad.masked_fill(bits == 0, 0.0)


def _check_mask(grad: Tensor, mask: Tensor) -> None:
    check(
        grad.dim() >= 1 and may_be_same_shape(mask.shape, (*grad.shape[:-1], (grad.shape[-1] + 7) // 8)),
        "relu_backward",
        lambda: f"mask {tuple(mask.shape)} does not have one bit for each value of grad {tuple(grad.shape)}",
    )


def _relu_backward_fake(grad: Tensor, mask: Tensor) -> Tensor:
    _check_mask(grad, mask)
    return grad.new_empty(grad.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.gnnc.relu_backward(grad, *ctx.saved_tensors), None


def _samples() -> Sequence[tuple[Any, ...]]:
    return [
        (_rand(*sizes).flip(0), relu_mask_reference(_rand(*sizes))) for sizes in ((5, 7), (2, 3, 16), (0, 9))
    ]


RELU_BACKWARD = define(
    Op(
        name="relu_backward",
        schema="(Tensor grad, Tensor mask) -> Tensor",
        kind="dense",
        features=("grad",),
        label="h{n}",
        reference=relu_backward_reference,
        fake=_relu_backward_fake,
        cost=lambda grad, mask: Cost(nbytes(grad, mask) + nbytes(grad), numel(grad)),
        gradient=Gradient(_backward, _setup),
        samples=_samples,
        error_inputs=lambda: [
            ErrorInput((torch.ones(2, 9), torch.zeros(2, 1, dtype=torch.uint8)), "one bit for each value")
        ],
    )
)
