"""What the CUDA tests share."""

from typing import Any

import torch
from torch.utils import _pytree as pytree


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 error in float64."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm().clamp(min=1e-30)) if want.numel() else 0.0


def on_device(value: Any) -> Any:
    """The same nest of values with its tensors on the CUDA device."""
    return pytree.tree_map(lambda v: v.cuda() if isinstance(v, torch.Tensor) else v, value)


def on_host(value: Any) -> Any:
    """The same nest of values with its tensors in the host's memory."""
    return pytree.tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, value)
