"""Rows to be rounded stochastically, and functions that round them, for tests of kernels."""

from collections.abc import Callable

import torch
from torch import Tensor

GNNC = torch.ops.gnnc
SEEDS = (0, -1, 2**63 - 1, 1234567890123456789)
WIDTHS = (1, 7, 8, 20, 47, 64, 130, 602)


def rows_of(count: int, width: int, seed: int = 0) -> Tensor:
    """Return rows of many magnitudes: zeros, subnormal values, exact multiples of a scale, and both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator) * torch.logspace(-3, 1, count)[:, None]
    if count > 3:
        x[1], x[2], x[3] = 0, x[2] * 1e-39, torch.arange(width) % 5
    return x


def by_rows(x: Tensor, factor: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    """Return rows times a factor, quantized under their own scales, and the scales."""
    scaled = x * factor
    scale = GNNC.scale(scaled, "int8/row")
    return GNNC.quantize(scaled, scale, "int8/row", None, seed, 3), scale


def as_whole(x: Tensor, factor: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    """Return rows times a factor, quantized under the scale of all, and the scale."""
    scaled = x * factor
    scale = GNNC.scale(scaled, "int8/tensor")
    return GNNC.quantize(scaled, scale, "int8/tensor", None, seed, 0), scale, scaled


def by_fractions(x: Tensor, factor: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    """Return rows times a factor, quantized under fractions of a scale, with these and each row's scale."""
    scaled = x * factor
    base = GNNC.scale(scaled, "int8/row_pow2")
    shift = GNNC.row_shift(scaled, base, "int8/row_pow2")
    quantized = GNNC.quantize(scaled, base, "int8/row_pow2", shift, seed, 2**31 - 1)
    return quantized, base, shift, GNNC.row_scale(base, shift), scaled


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "row": by_rows,
    "tensor": as_whole,
    "row_pow2": by_fractions,
}
