"""The type of quantized values: how the integers, or 8-bit floats, of a tensor stand for real numbers."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch

Granularity = Literal["tensor", "row", "column", "row_pow2"]
Signedness = Literal["signed", "unsigned", "plus_minus_one"]

GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)

_PREFIXES: dict[Signedness, str] = {"signed": "int", "unsigned": "uint", "plus_minus_one": "±"}
_SIGNEDNESS: dict[str, Signedness] = {prefix: signedness for signedness, prefix in _PREFIXES.items()}
_TEXT = re.compile(r"(?:(int|uint|±)(\d+)|e(\d)m(\d))/([a-z0-9_]+)(?:/zero=(\d+))?(?:/stride=(\d+))?")
_FLOATS = {4: (448, torch.float8_e4m3fn), 5: (57344, torch.float8_e5m2)}
"""The largest value and the dtype of each 8-bit float, by its exponent bits."""

FP8_DTYPES = tuple(dtype for _, dtype in _FLOATS.values())
"""Dtypes of quantized values that are floats."""

BYTE_DTYPES = (torch.int8, *FP8_DTYPES)
"""Dtypes of quantized values with a signed value in each byte."""


@dataclass(frozen=True, slots=True)
class QType:
    """The type of quantized values ``q``, where ``real = (q - zero_point) * scale``.

    Attributes:
        bits: bits of one value, 1 to 16.
        signedness: ``signed`` (symmetric, -qmax..qmax), ``unsigned`` (0..2^bits - 1) or
            ``plus_minus_one`` (bit 1 is +1, bit 0 is -1).
        granularity: which values share a scale. ``row_pow2``: all share one base scale, and the scale
            of a row is base / 2^k with k in 0..7, so that rows of different magnitude can still be
            added as integers.
        zero_point: the quantized value of real zero, or None where that is 0.
        row_stride: bytes from one row to the next, or None: as the backend aligns rows.
        exponent_bits: exponent bits of values that are 8-bit floats, 4 (``e4m3``) or 5 (``e5m2``); None:
            they are integers.
    """

    bits: int = 8
    signedness: Signedness = "signed"
    granularity: Granularity = "row"
    zero_point: int | None = None
    row_stride: int | None = None
    exponent_bits: int | None = None

    def __post_init__(self) -> None:
        """Refuse types that do not exist."""
        least = 2 if self.signedness == "signed" else 1
        if not least <= self.bits <= 16:
            raise ValueError(f"{self.signedness} quantized values have {least} to 16 bits, got {self.bits}")
        if self.signedness == "plus_minus_one" and self.bits != 1:
            raise ValueError(f"a ±1 type has one bit, got {self.bits}")
        if self.exponent_bits is not None and not self._is_known_float:
            raise ValueError(f"the 8-bit floats are e4m3 and e5m2, signed, got {self.element}")
        if self.granularity not in GRANULARITIES:
            listed = ", ".join(GRANULARITIES)
            raise ValueError(f"granularity must be one of {listed}, got {self.granularity!r}")

    @staticmethod
    def parse(text: str) -> "QType":
        """Return the type that ``str`` wrote, such as ``int8/row`` or ``uint4/tensor/zero=8``.

        Raises:
            ValueError: the text is not the name of a quantized type.
        """
        return _parse(text)

    @property
    def is_float(self) -> bool:
        """Return whether values are 8-bit floats, not integers."""
        return self.exponent_bits is not None

    @property
    def _is_known_float(self) -> bool:
        plain = self.bits == 8 and self.signedness == "signed" and self.zero_point is None
        return plain and self.exponent_bits in _FLOATS and self.granularity != "row_pow2"

    @property
    def element(self) -> str:
        """The name of the type of one value, such as ``int8``, ``uint4``, ``±1`` or ``e4m3``."""
        if self.exponent_bits is not None:
            return f"e{self.exponent_bits}m{self.bits - 1 - self.exponent_bits}"
        return f"{_PREFIXES[self.signedness]}{self.bits}"

    @property
    def qmin(self) -> int:
        """The smallest quantized value."""
        return 0 if self.signedness == "unsigned" else -self.qmax

    @property
    def qmax(self) -> int:
        """The largest quantized value."""
        if self.exponent_bits is not None:
            return _FLOATS[self.exponent_bits][0]
        if self.signedness == "signed":
            return 2 ** (self.bits - 1) - 1
        return 2**self.bits - 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a tensor of quantized values, one element a value."""
        if self.exponent_bits is not None:
            return _FLOATS[self.exponent_bits][1]
        if self.signedness == "unsigned":
            return torch.uint8 if self.bits <= 8 else torch.uint16
        return torch.int8 if self.bits <= 8 else torch.int16

    @property
    def has_one_scale(self) -> bool:
        """Return whether the whole tensor has one scale, of which rows may take power-of-two fractions."""
        return self.granularity in ("tensor", "row_pow2")

    def __str__(self) -> str:
        """Return the text that ``parse`` reads."""
        text = f"{self.element}/{self.granularity}"
        text += "" if self.zero_point is None else f"/zero={self.zero_point}"
        return text if self.row_stride is None else f"{text}/stride={self.row_stride}"


@lru_cache(maxsize=256)
def _parse(text: str) -> QType:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantized type; write one as 'int8/row' or 'uint4/tensor'")
    prefix, bits, exponent, mantissa, granularity, zero, stride = match.groups()
    return QType(
        1 + int(exponent) + int(mantissa) if prefix is None else int(bits),
        "signed" if prefix is None else _SIGNEDNESS[prefix],
        granularity,  # pyright: ignore[reportArgumentType]  # checked by QType
        None if zero is None else int(zero),
        None if stride is None else int(stride),
        None if exponent is None else int(exponent),
    )
