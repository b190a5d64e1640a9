"""Random bits of stochastic rounding: Philox4x32-10 (Salmon et al., SC'11) of seed, stream, element.

The counter of a block of eight columns is ``row * ceil(width / 8) + column // 8`` (64 bits) and the stream;
its key is the seed. Each of its four words has the 16 bits of two columns, the lower half first. Kernels of
every backend compute the same function (``csrc/cpu/philox.isa.h``, ``csrc/cuda/common/philox.cuh``), so that
a value is rounded alike wherever, and in whatever order, rows are computed.
"""

import torch
from torch import Tensor

BLOCK = 8
"""Columns that share a counter."""

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, ...]:
    """Return the four words of each counter.

    Args:
        counter: int64 tensors of 32-bit words.
        seed: int64 ``[]``, the key.

    Returns:
        Four int64 tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _product(factor: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower word of a product of two words: int64 cannot hold its 64 bits."""
    low, high = factor * (words & 0xFFFF), factor * (words >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def random_fractions(rows: int, width: int, seed: Tensor, stream: int) -> Tensor:
    """Return float32 ``[rows, width]`` of odd multiples of 2^-17 between 0 and 1, each as likely.

    Args:
        rows: number of rows.
        width: columns of a row.
        seed: int64 ``[]``.
        stream: number of the value that is rounded, below 2^31.
    """
    blocks = -(-width // BLOCK)
    index = torch.arange(rows * blocks, device=seed.device, dtype=torch.int64)
    zero = torch.zeros_like(index)
    words = torch.stack(philox((index & _MASK, index >> 32, zero + stream, zero), seed), 1)
    halves = torch.stack([words & 0xFFFF, words >> 16], 2).reshape(rows, blocks * BLOCK)
    return (halves[:, :width].float() + 0.5) * 2.0**-16
