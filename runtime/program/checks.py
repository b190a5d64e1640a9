"""Checks for NaN and infinity, which quantized values would hide."""

from math import isfinite

import torch
from torch import Tensor

from gnnc.errors import PrecisionError


def not_finite(layer: str, when: str = "") -> PrecisionError:
    """Return the error for a scale that is not finite, with the name of its layer."""
    where = f" in layer {layer!r}" if layer else ""
    return PrecisionError(
        f"a quantization scale is not finite{where}{when}: the values that it scales hold NaN or "
        "infinity; check inputs and weights, or compile with check_finite='off'"
    )


def check_scales(scales: tuple[Tensor, ...], layers: tuple[str, ...]) -> None:
    """Raise unless every value of every scale is finite.

    Args:
        scales: float32, contiguous, on the CPU, of any size.
        layers: the layer of each scale, by name.

    Raises:
        PrecisionError: a scale is NaN or infinite; the message names the layer.
    """
    first = torch.ops.gnnc_cpu.first_not_finite(scales)
    if first >= 0:
        raise not_finite(layers[first])


def check_finite(layer: str, values: Tensor) -> None:
    """Raise unless every value of a tensor is finite.

    Raises:
        PrecisionError: a value is NaN or infinite; the message names the layer.
    """
    if values.numel() and not isfinite(torch.amax(values.abs())):
        raise not_finite(layer)
