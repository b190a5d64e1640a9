"""Checks of values: NaN and infinity, which quantized values would hide; memory that was freed."""

from collections.abc import Callable, Sequence
from math import isfinite

import torch
from torch import Tensor

from gnnc.errors import BackendError, PrecisionError
from gnnc.runtime.cpu import library
from gnnc.tensor_state import storage_fault


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


class OutOfRange(PrecisionError):
    """The error for values that a static scale does not suit.

    A compiled model computes such a call with scales of its own.

    Args:
        layer: the layer of the values, by name.
        largest: their largest magnitude.
        suited: the least and the most that the scale suits.
    """

    def __init__(self, layer: str, largest: float, suited: tuple[float, float]) -> None:
        self.text = f"the largest value{f' of layer {layer!r}' if layer else ''} is {largest:.3g}"
        self.text += f", and its static scale suits {suited[0]:.3g} to {suited[1]:.3g}"
        super().__init__(f"{self.text}: give example_inputs that are like the inputs of calls")


def check_range(layer: str, suited: tuple[float, float], factor: float, largest: Tensor) -> None:
    """Raise unless the largest of some values suits their static scale.

    Args:
        layer: the layer of the values, by name.
        suited: the least and the most that the scale suits. Zeros suit every scale.
        factor: number that ``largest`` is multiplied by before the comparison.
        largest: the largest magnitude, or that of each row.

    Raises:
        OutOfRange: it does not.
    """
    found = largest.item() if largest.numel() == 1 else largest.amax().item() if largest.numel() else 0.0
    found *= factor
    if not (suited[0] <= found <= suited[1] or found == 0):
        raise OutOfRange(layer, found, suited)


def check_values_in_range(layer: str, suited: tuple[float, float], values: Tensor) -> None:
    """Raise unless the largest of all values suits their static scale; see ``check_range``.

    Raises:
        OutOfRange: it does not.
    """
    check_range(layer, suited, 1.0, values.abs().amax() if values.numel() else values)


def check_finite(layer: str, values: Tensor) -> None:
    """Raise unless every value of a tensor is finite.

    Raises:
        PrecisionError: a value is NaN or infinite; the message names the layer.
    """
    if values.numel() and not isfinite(torch.amax(values.abs())):
        raise not_finite(layer)


def storage_check() -> Callable[[Sequence[Tensor]], int]:
    """Return the function that finds the first tensor whose storage does not hold its elements, or -1.

    It reads no element, and takes dense tensors of any device. The C++ kernels have one of a microsecond;
    backends that run without these kernels take its equivalent in Python.
    """
    try:
        library.load()
    except BackendError:
        return _first_unstored
    return torch.ops.gnnc_cpu.first_unstored.default


def _first_unstored(tensors: Sequence[Tensor]) -> int:
    return next((i for i, tensor in enumerate(tensors) if storage_fault(tensor) is not None), -1)
