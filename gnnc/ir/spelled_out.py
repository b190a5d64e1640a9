"""Ops of bodies that are written as others before a body is differentiated.

The gradient of each is one op of several results in ATen, which kernels of bodies do not compute.
"""

from typing import Any

import torch
from torch import Tensor


class _NormalizedRows(torch.autograd.Function):
    """Rows minus their mean, over their deviation, and the reciprocals of these deviations.

    The gradient is written in closed form: that of each step by itself takes four times as many.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor]:
        """Return the normalized rows and the factors; the variance is that of the centered rows."""
        centered = x - x.mean(dims, keepdim=True)
        scale = (centered.square().mean(dims, keepdim=True) + eps).rsqrt()
        normed = centered * scale
        ctx.save_for_backward(normed, scale)
        ctx.set_materialize_grads(False)
        ctx.dims = dims
        return normed, scale

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, None, None]:
        """Return the gradient of x; that of the factors is there in second gradients alone."""
        grad, scale_grad = grad_outputs
        normed, scale = ctx.saved_tensors
        found = None
        if grad is not None:
            along = (grad * normed).mean(ctx.dims, keepdim=True)
            found = (grad - grad.mean(ctx.dims, keepdim=True) - normed * along) * scale
        if scale_grad is not None:
            count = normed.numel() // scale.numel()
            of_scale = normed * (scale_grad * scale.square() / count)
            found = -of_scale if found is None else found - of_scale
        return found, None, None


def _layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return the layer norm of x; that of ATen keeps the statistics as further results."""
    normed, _ = _NormalizedRows.apply(x, list(range(-len(shape), 0)), eps)
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    """Return x where it is positive, else its product with the weight of its channel."""
    if weight.dim() == 1 and x.dim() > 1:
        weight = weight.reshape(-1, *[1] * (x.dim() - 2))
    return torch.where(x > 0, x, weight * x)


def _log_sigmoid(x: Tensor) -> Tensor:
    return -torch.nn.functional.softplus(-x)


SPELLED_OUT = {
    torch.ops.aten.layer_norm.default: (
        _layer_norm,
        ("input", "normalized_shape", "weight", "bias", "eps"),
    ),
    torch.ops.aten.prelu.default: (_prelu, ("self", "weight")),
    torch.ops.aten._prelu_kernel.default: (_prelu, ("self", "weight")),
    torch.ops.aten.log_sigmoid.default: (_log_sigmoid, ("self",)),
}
"""Each such op with the function that writes it, and the names of its arguments."""
