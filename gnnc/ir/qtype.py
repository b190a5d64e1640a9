"""The type of a quantized tensor."""

from dataclasses import dataclass
from typing import Literal

Granularity = Literal["tensor", "row", "column", "row_pow2"]
Signedness = Literal["signed", "unsigned", "plus_minus_one"]

ROW_ALIGNMENT = 64
"""Rows of quantized tensors start on this many bytes (a cache line, one AVX-512 register)."""


@dataclass(frozen=True, slots=True)
class QType:
    """How the integers of a tensor stand for real numbers: ``real = (q - zero_point) * scale``.

    Attributes:
        bits: bits of one element.
        signedness: ``signed`` (symmetric, -qmax..qmax), ``unsigned`` (0..2^bits-1, after ReLU or
            QGTC's offset codes) or ``plus_minus_one`` (BitGNN: bit 1 is +1, bit 0 is -1).
        granularity: which elements share a scale. ``row_pow2``: row scale = base / 2^k with
            k in 0..7, so that rows of different magnitude can still be added as integers.
        zero_point: the code of real zero, or None where zero is code 0.
        row_stride: elements from one row to the next once packed, or None for "as wide as
            needed": ``row_stride_for`` gives it for a width.
    """

    bits: int = 8
    signedness: Signedness = "signed"
    granularity: Granularity = "row"
    zero_point: int | None = None
    row_stride: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(f"QType.bits must be in 1..16, got {self.bits}")
        if self.signedness == "plus_minus_one" and self.bits != 1:
            raise ValueError("a ±1 type has one bit")

    @property
    def qmin(self) -> int:
        """The least code."""
        return -self.qmax if self.signedness == "signed" else 0

    @property
    def qmax(self) -> int:
        """The largest code."""
        if self.signedness == "signed" and self.bits > 1:
            return 2 ** (self.bits - 1) - 1
        return 2**self.bits - 1

    def row_stride_for(self, width: int) -> int:
        """Bytes from one row of ``width`` elements to the next, on ``ROW_ALIGNMENT`` bytes."""
        if self.row_stride is not None:
            return self.row_stride
        used = -(-width * self.bits // 8)
        return -(-used // ROW_ALIGNMENT) * ROW_ALIGNMENT

    def __str__(self) -> str:
        prefix = {"signed": "int", "unsigned": "uint", "plus_minus_one": "±"}[self.signedness]
        return f"{prefix}{self.bits}/{self.granularity}"


INT8_ROW = QType()
