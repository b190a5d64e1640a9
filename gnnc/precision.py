"""Precisions by name: the bits and the number format of weights and activations."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from gnnc.errors import PrecisionError
from gnnc.ir.qtype import Granularity, QType, Signedness

Format = Literal["float", "int", "binary"]

_FLOAT_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8}
BUILT = ("fp32", "fp16", "bf16", "fp8", "int8", "auto")
"""Names of the precisions that ``gnnc.compile`` takes: some backend has kernels for them."""

_NAMES = ("fp32", "fp16", "bf16", "fp8", "int8", "int4", "int2", "w4a8", "binary", "auto")


@dataclass(frozen=True, slots=True)
class Precision:
    """The number format of an op's operands.

    Attributes:
        name: the canonical name, such as ``"int8"`` or ``"w4a8"``.
        format: ``"float"``, ``"int"`` or ``"binary"``.
        weight_bits: bits of a weight element.
        activation_bits: bits of an activation element.
    """

    name: str
    format: Format
    weight_bits: int
    activation_bits: int

    def __str__(self) -> str:
        return self.name

    @property
    def is_integer(self) -> bool:
        """Return whether the operands are integers with scales."""
        return self.format != "float"

    @property
    def is_quantized(self) -> bool:
        """Return whether the operands are values with scales: integers, or floats of 8 bits."""
        return self.is_integer or self.name == "fp8"

    def weight_qtype(self, granularity: Granularity = "row") -> QType:
        """Return the quantized type of a weight; a row is an output channel."""
        return self._qtype(self.weight_bits, granularity, exponent_bits=4)

    def activation_qtype(self, granularity: Granularity = "row") -> QType:
        """Return the quantized type of an activation, or of the rows that an aggregation adds."""
        return self._qtype(self.activation_bits, granularity, exponent_bits=4)

    def gradient_qtype(self, granularity: Granularity = "row") -> QType:
        """Return the quantized type of a gradient; of floats the one with the wider range."""
        return self._qtype(self.activation_bits, granularity, exponent_bits=5)

    def _qtype(self, bits: int, granularity: Granularity, exponent_bits: int) -> QType:
        if self.is_integer:
            return QType(bits, self._signedness, granularity)
        return QType(bits, granularity=granularity, exponent_bits=exponent_bits)

    @property
    def _signedness(self) -> Signedness:
        return "plus_minus_one" if self.format == "binary" else "signed"

    @staticmethod
    def parse(value: "str | Precision") -> "Precision":
        """Return the precision that ``value`` names.

        Accepts ``fp32 fp16 bf16 fp8``, ``intK`` for K in 1..16, ``wKaL`` (K-bit weights, L-bit
        activations), ``binary`` and ``auto``.

        Raises:
            PrecisionError: ``value`` is not a precision; the message lists the names.
        """
        if isinstance(value, Precision):
            return value
        if not isinstance(value, str):
            raise PrecisionError(
                f"precision must be a name or a gnnc.Precision, got {type(value).__name__}; "
                f"known names: {', '.join(_NAMES)}, intK, wKaL"
            )
        parsed = _parse_name(value)
        if parsed is None:
            close = get_close_matches(value, _NAMES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise PrecisionError(
                f"unknown precision {value!r}{hint} Known names: {', '.join(_NAMES)}, intK, wKaL"
            )
        return parsed


def _parse_name(name: str) -> Precision | None:
    if name in _FLOAT_BITS:
        return Precision(name, "float", _FLOAT_BITS[name], _FLOAT_BITS[name])
    if name == "binary":
        return Precision(name, "binary", 1, 1)
    if name == "auto":
        return Precision(name, "float", 32, 32)
    if match := re.fullmatch(r"int(\d+)", name):
        bits = int(match[1])
        return Precision(name, "int", bits, bits) if 1 <= bits <= 16 else None
    if match := re.fullmatch(r"w(\d+)a(\d+)", name):
        weight, activation = int(match[1]), int(match[2])
        if not (1 <= weight <= 16 and 1 <= activation <= 16):
            return None
        return Precision(name, "int", weight, activation)
    return None


FP32 = Precision.parse("fp32")
BF16 = Precision.parse("bf16")
INT8 = Precision.parse("int8")
FP8 = Precision.parse("fp8")
AUTO = Precision.parse("auto")
