"""Values in 4 or 2 bits, stochastically rounded, for what gradients read alone (EXACT, ICLR'22).

A row is cut into groups of 64 columns, each with a scale and an offset: a value is ``q * scale + offset``, q
from 0 to ``2^bits - 1``. Stochastic rounding leaves its mean unchanged. A byte holds the values of 8 / bits
columns, the first in the lowest bits.
"""

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from gnnc.ir.op import Cost, ErrorInput, Op, check, define, nbytes, numel
from gnnc.ir.philox import random_fractions

GROUP = 64
"""Columns that share a scale and an offset."""

GROUP_BITS = (4, 2)
"""Bits of a value."""

_ROUNDING = "rounding has no gradient; it is of what the backward graph reads"


def _check(op: str, x: Tensor, bits: int) -> None:
    check(bits in GROUP_BITS, op, lambda: f"bits must be one of {GROUP_BITS}, got {bits}")
    check(x.dim() == 2, op, lambda: f"rows must be [N, F], got {tuple(x.shape)}")


def _groups(width: int) -> int:
    return -(-width // GROUP)


def quantize_groups_reference(
    x: Tensor, bits: int, seed: Tensor, stream: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Round each value at random to one of the two nearest of ``2^bits`` steps of its group.

    Args:
        x: float32 ``[N, F]``.
        bits: 4 or 2.
        seed: int64 ``[]``, see ``gnnc.ir.philox``.
        stream: number that tells apart the values that one seed rounds.

    Returns:
        Packed values uint8 ``[N, ceil(F * bits / 8)]``; float32 ``[N, ceil(F / 64)]`` scales, and offsets.

    Raises:
        InputError: ``x`` is not a matrix, or there are no such bits.
    """
    _check("quantize_groups", x, bits)
    rows, width = x.shape
    count, top = _groups(width), 2**bits - 1
    filled = torch.cat([x, x[:, -1:].expand(rows, count * GROUP - width)], 1) if width else x
    grouped = filled.reshape(rows, count, GROUP)
    low, high = (grouped.amin(2), grouped.amax(2)) if grouped.numel() else (x.new_zeros(rows, count),) * 2
    scale = (high - low) / top
    inverse = torch.where(scale > 0, 1.0 / scale, scale)
    fractions = random_fractions(rows, count * GROUP, seed, stream).reshape(grouped.shape)
    steps = ((grouped - low[:, :, None]) * inverse[:, :, None] + fractions).floor().clamp(0, top)
    steps = steps.to(torch.uint8).reshape(rows, count * GROUP)[:, :width]
    return _pack(steps, bits), scale, low


def _pack(steps: Tensor, bits: int) -> Tensor:
    rows, width = steps.shape
    per_byte = 8 // bits
    columns = -(-width // per_byte)
    filled = torch.cat([steps, steps.new_zeros(rows, columns * per_byte - width)], 1)
    shifts = torch.arange(per_byte, device=steps.device) * bits
    return (filled.reshape(rows, columns, per_byte).int() << shifts).sum(2).to(torch.uint8)


def dequantize_groups_reference(
    packed: Tensor, scale: Tensor, offset: Tensor, bits: int, width: int
) -> Tensor:
    """Return the values that ``quantize_groups`` packed.

    Args:
        packed: uint8 ``[N, ceil(width * bits / 8)]``.
        scale: float32 ``[N, ceil(width / 64)]``.
        offset: float32 ``[N, ceil(width / 64)]``.
        bits: 4 or 2.
        width: columns of a row.

    Returns:
        float32 ``[N, width]``.

    Raises:
        InputError: ``packed`` is not a matrix, or there are no such bits.
    """
    _check("dequantize_groups", packed, bits)
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, device=packed.device) * bits
    steps = (packed[:, :, None].int() >> shifts) & (2**bits - 1)
    steps = steps.reshape(packed.shape[0], packed.shape[1] * per_byte)[:, :width].float()
    group = torch.arange(width, device=packed.device) // GROUP
    return steps * scale[:, group] + offset[:, group]


def quantize_groups_fake(x: Tensor, bits: int, seed: Tensor, stream: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return results of the shapes and dtypes of ``quantize_groups``; see its reference."""
    _check("quantize_groups", x, bits)
    rows, width = x.shape
    scale = x.new_empty((rows, _groups(width)), dtype=torch.float32)
    packed = x.new_empty((rows, -(-width * bits // 8)), dtype=torch.uint8)
    return packed, scale, torch.empty_like(scale)


def _dequantize_fake(packed: Tensor, scale: Tensor, offset: Tensor, bits: int, width: int) -> Tensor:
    _check("dequantize_groups", packed, bits)
    return packed.new_empty((packed.shape[0], width), dtype=torch.float32)


def _cost(x: Tensor, bits: int) -> Cost:
    elements = numel(x)
    return Cost(nbytes(x) + elements * sympy.Rational(bits + 1, 8), elements * 12)


def _samples() -> Sequence[tuple[Any, ...]]:
    seed = torch.tensor(2**40 + 1)
    shapes = ((5, 7), (3, 64), (4, 130), (0, 9))
    return [(torch.randn(shape), bits, seed, 3) for shape in shapes for bits in GROUP_BITS]


QUANTIZE_GROUPS = define(
    Op(
        name="quantize_groups",
        schema="(Tensor x, int bits, Tensor seed, int stream)"
        " -> (Tensor packed, Tensor scale, Tensor offset)",
        kind="precision",
        features=("x",),
        label="{x}_packed",
        reference=quantize_groups_reference,
        fake=quantize_groups_fake,
        cost=lambda x, bits, seed, stream: _cost(x, bits),
        samples=_samples,
        error_inputs=lambda: [
            ErrorInput((torch.ones(2, 3), 3, torch.tensor(1), 0), "bits must be one of"),
            ErrorInput((torch.ones(2), 4, torch.tensor(1), 0), r"\[N, F\]"),
        ],
        no_gradient=_ROUNDING,
    )
)

DEQUANTIZE_GROUPS = define(
    Op(
        name="dequantize_groups",
        schema="(Tensor packed, Tensor scale, Tensor offset, int bits, int width) -> Tensor",
        kind="precision",
        features=("packed",),
        result_dtype=torch.float32,
        label="h{n}",
        reference=dequantize_groups_reference,
        fake=_dequantize_fake,
        cost=lambda packed, scale, offset, bits, width: Cost(
            nbytes(packed, scale, offset) + numel(packed) * sympy.Rational(32, bits),
            numel(packed) * sympy.Rational(16, bits),
        ),
        samples=lambda: [
            (*quantize_groups_reference(*sample), sample[1], sample[0].shape[1]) for sample in _samples()
        ],
        error_inputs=lambda: [
            ErrorInput(
                (torch.ones(2, 3, dtype=torch.uint8), torch.ones(2, 1), torch.ones(2, 1), 8, 3), "one of"
            )
        ],
        no_gradient=_ROUNDING,
    )
)
