"""Seed of the random bits of a call."""

import torch
from torch import Tensor

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1


def draw_seed(device: torch.device) -> Tensor:
    """Return an int64 ``[]`` on a device, drawn from torch's default generator of the CPU.

    The CPU and a GPU get the same number. While a CUDA graph of the caller records, the number is drawn on
    the GPU instead, whose generator gives each replay another one.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.randint(_LOWEST, _HIGHEST, (), dtype=torch.int64, device=device)
    seed = torch.randint(_LOWEST, _HIGHEST, (), dtype=torch.int64, device="cpu")
    return seed if device.type == "cpu" else torch.full((), int(seed), dtype=torch.int64, device=device)
