"""The state of a tensor: a key that shows whether it was written, moved or replaced."""

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_steps = 0
"""Number of steps that optimizers of this process have taken: fused optimizers bump no version counter."""


def _count_step(*_: Any) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)


def state(tensor: Tensor) -> tuple[Hashable, ...]:
    """Return a key that changes when a tensor changes: version counter, address, layout and dtype.

    The version is None for an inference tensor, which counts no writes: compare its content instead.
    """
    try:
        version = tensor._version
    except RuntimeError:
        version = None
    steps = _steps if tensor.is_floating_point() else 0
    return tensor.data_ptr(), version, steps, tensor.shape, tensor.stride(), tensor.dtype
