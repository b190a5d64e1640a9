"""Feature matrices in 8 bits, which a compiled model takes in the place of FP32 ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnc.errors import InputError, PrecisionError, UnsupportedError
from gnnc.ir.qtype import QType
from gnnc.ir.quantized import dequantize_reference, quantize_reference, scale_reference

PACKED_BITS = (8,)
"""Bits that ``pack`` packs values to."""

ROWS = QType(8, "signed", "row")
"""The type of the values of a ``QuantizedTensor``."""

PARTS = ("values", "scale")
"""Names of the tensors of a ``QuantizedTensor``, in order."""


_ROW_BYTES = 64


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class QuantizedTensor:
    """Rows of int8 values with an FP32 scale each: row i is ``values[i] * scale[i]``.

    A compiled model takes it as a feature matrix: ``compiled(gnnc.pack(x), edge_index)``. ``torch.save``
    writes it, and ``torch.load`` reads it with ``weights_only=True``, which runs no code of the file.

    Attributes:
        values: int8 ``[N, ...]``, from -127 to 127.
        scale: float32 ``[N]``, not negative.

    Raises:
        InputError: a tensor has another shape or dtype, or the two are on different devices.
    """

    values: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        """Refuse tensors that do not make a matrix of quantized rows."""
        for name in PARTS:
            if not isinstance(part := getattr(self, name), Tensor) or part.layout is not torch.strided:
                raise InputError(f"QuantizedTensor: {name} must be a dense tensor, got {_kind(part)}")
        values, scale = self.values, self.scale
        if values.dtype != torch.int8 or values.dim() < 2:
            raise InputError(
                f"QuantizedTensor: values must be int8 with at least 2 dimensions, got {_kind(values)}; "
                "gnnc.pack(x) makes them of a float matrix"
            )
        if scale.dtype != torch.float32 or scale.shape != values.shape[:1]:
            raise InputError(
                f"QuantizedTensor: scale must be float32 of shape {tuple(values.shape[:1])}, one for each "
                f"row of values, got {_kind(scale)}"
            )
        if scale.device != values.device:
            raise InputError(
                f"QuantizedTensor: values are on {values.device}, but scale is on {scale.device}: "
                "move both to one device"
            )
        if scale.requires_grad:
            raise InputError(
                "QuantizedTensor: scale requires a gradient, which no program computes: detach it"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.values, self.scale)

    def __len__(self) -> int:
        return self.values.shape[0]

    def __getitem__(self, rows: Any) -> "QuantizedTensor":
        """Return some rows, chosen by a slice, a mask or ids of rows, such as the nodes of a mini-batch."""
        if isinstance(rows, int | tuple):
            raise InputError(f"QuantizedTensor: rows are chosen by a slice, a mask or ids, got {rows!r}")
        return QuantizedTensor(self.values[rows], self.scale[rows])

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a QuantizedTensor is not iterable: iterate over dequantize()")

    def __repr__(self) -> str:
        return f"QuantizedTensor({list(self.shape)}, bits={self.bits}, device={str(self.device)!r})"

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return ROWS.bits

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Device of both tensors."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scale.nbytes

    def to(self, *args: Any, **kwargs: Any) -> "QuantizedTensor":
        """Return the tensor on another device; arguments are those of ``Tensor.to`` but a dtype."""
        values = self.values.to(*args, **kwargs)
        return self if values is self.values else QuantizedTensor(values, self.scale.to(*args, **kwargs))

    def dequantize(self) -> Tensor:
        """Return the FP32 values, float32 of the same shape."""
        return dequantize_reference(self.values, self.scale, "row")


def pack(x: Tensor, bits: int = 8) -> QuantizedTensor:
    """Quantize the rows of a feature matrix, each with a scale of its own, to the nearest values.

    Args:
        x: floating ``[N, ...]``, such as the features of nodes ``[N, F]``.
        bits: bits of a value: 8.

    Returns:
        The quantized rows. ``pack(x).dequantize()`` differs from ``x`` by at most half a step, which is the
        largest magnitude of the row divided by 127.

    Raises:
        InputError: ``x`` is no floating matrix.
        UnsupportedError: there is no packing to so many bits.
        PrecisionError: a value of ``x`` is not finite.
    """
    if bits not in PACKED_BITS or isinstance(bits, bool):
        listed = ", ".join(map(str, PACKED_BITS))
        raise UnsupportedError(f"gnnc.pack: bits={bits!r} is not built in this version: use bits={listed}")
    is_matrix = isinstance(x, Tensor) and x.layout is torch.strided and x.dim() >= 2
    if not is_matrix or not x.is_floating_point():
        raise InputError(
            f"gnnc.pack takes a dense floating tensor with at least 2 dimensions, got {_kind(x)}"
        )
    values = x.detach().float()
    scale = scale_reference(values, str(ROWS))
    if not bool(scale.isfinite().all()):
        raise PrecisionError("gnnc.pack: a value of x is NaN or infinite, and has no quantized value")
    return QuantizedTensor(_aligned(quantize_reference(values, scale, str(ROWS))), scale)


def _aligned(values: Tensor) -> Tensor:
    """Return rows that each begin on 64 bytes, as kernels read them, where that adds at most half to them."""
    rows, width = values.shape[0], values[:1].numel()
    stride = -(-width // _ROW_BYTES) * _ROW_BYTES
    if values.dim() > 2 or not width < stride <= 1.5 * width:
        return values
    return values.new_zeros((rows, stride))[:, :width].copy_(values)


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    layout = "" if value.layout is torch.strided else f"{str(value.layout).removeprefix('torch.')} "
    return f"{layout}{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


torch.serialization.add_safe_globals([QuantizedTensor])
