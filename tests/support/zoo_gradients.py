"""Gradients of a model of the zoo, by parameter and by argument."""

from typing import Any

import torch
from torch import Tensor, nn
from zoo import Arguments

from gnnc.torch_private import pytree


def gradients(
    call: Any, owner: nn.Module, arguments: Arguments, dtype: torch.dtype, *, of_inputs: bool = False
) -> dict[str, Tensor | None]:
    """Return the gradients of a fixed projection of the outputs, by parameter, in float64.

    Args:
        call: the model, compiled or not.
        owner: the model.
        arguments: its arguments.
        dtype: the dtype of the arguments that are floats.
        of_inputs: whether these want gradients, too, which are found by their place: ``input [0][1]``.
    """
    args, kwargs = pytree.tree_map(lambda leaf: _cast(leaf, dtype, of_inputs), arguments)
    found = [out for out in pytree.tree_leaves(call(*args, **kwargs)) if _is_differentiable(out)]
    generator = torch.Generator().manual_seed(5)
    tangents = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in found]
    torch.autograd.backward(found, tangents)
    leaves = dict(owner.named_parameters())
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        if _is_differentiable(leaf):
            leaves[f"input {pytree.keystr(path)}"] = leaf
    return {name: None if leaf.grad is None else leaf.grad.double() for name, leaf in leaves.items()}


def _cast(leaf: Any, dtype: torch.dtype, wants_gradient: bool) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.detach().to(dtype, copy=True).requires_grad_(wants_gradient)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def rms(value: Tensor) -> float:
    """Return the root of the mean square of a tensor's elements."""
    return float(value.norm()) / max(value.numel(), 1) ** 0.5
