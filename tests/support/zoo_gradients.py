"""Gradients of a model of the zoo, by parameter."""

from typing import Any

import torch
from torch import Tensor, nn
from zoo import Arguments

from gnnc.torch_private import pytree


def gradients(
    call: Any, owner: nn.Module, arguments: Arguments, dtype: torch.dtype
) -> dict[str, Tensor | None]:
    """Return the gradients of a fixed projection of the outputs, by parameter, in float64."""
    args, kwargs = pytree.tree_map(lambda leaf: _cast(leaf, dtype), arguments)
    found = [out for out in pytree.tree_leaves(call(*args, **kwargs)) if _is_differentiable(out)]
    generator = torch.Generator().manual_seed(5)
    tangents = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in found]
    torch.autograd.backward(found, tangents)
    return {n: None if p.grad is None else p.grad.double() for n, p in owner.named_parameters()}


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def rms(value: Tensor) -> float:
    """Return the root of the mean square of a tensor's elements."""
    return float(value.norm()) / max(value.numel(), 1) ** 0.5
