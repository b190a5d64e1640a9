"""Errors of quantized tensors against the real ones: the measures that ``summary()`` shows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from gnnc.ir import describe
from gnnc.ir.nodes import arguments, is_gnnc, op_name
from gnnc.ir.qtype import QType

TANGO_EPSILON = 0.0005


def relative_quantization_error(x: Tensor, x_hat: Tensor, eps: float = TANGO_EPSILON) -> float:
    """Return Tango's relative quantization error (its equation 4).

    ``mean_i |(x_i - x̂_i) / (x_i + x̂_i + eps)|``: 0 where nothing was rounded, and 1 where a value
    was rounded to zero and is large against ``eps``.

    Args:
        x: the values before quantization.
        x_hat: the quantized values times their scale, of the same shape.
        eps: keeps ``0 / 0`` away; Tango uses 0.0005.

    Returns:
        The mean over all elements; 0 for an empty tensor.
    """
    _check_shapes(x, x_hat)
    if x.numel() == 0:
        return 0.0
    exact, rounded = x.double(), x_hat.double()
    return ((exact - rounded) / (exact + rounded + eps)).abs().mean().item()


def sqnr_db(x: Tensor, x_hat: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio in decibels.

    ``10 log10(sum x² / sum (x - x̂)²)``; infinite where nothing was rounded.

    Args:
        x: the values before quantization.
        x_hat: the quantized values times their scale, of the same shape.
    """
    _check_shapes(x, x_hat)
    signal = x.double().square().sum().item()
    noise = (x.double() - x_hat.double()).square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _check_shapes(x: Tensor, x_hat: Tensor) -> None:
    if x.shape != x_hat.shape:
        raise ValueError(f"shapes differ: {tuple(x.shape)} and {tuple(x_hat.shape)}")


@dataclass(frozen=True, slots=True)
class TensorError:
    """Errors of one quantized tensor.

    Attributes:
        relative: Tango's equation 4.
        sqnr: signal-to-quantization-noise ratio in decibels.
        clipped: number of elements beyond the largest quantized value.
    """

    relative: float
    sqnr: float
    clipped: int


def quantization_errors(gm: GraphModule, values: Sequence[Any]) -> dict[str, TensorError]:
    """Run the reference semantics of ``gm`` and measure every tensor that it quantizes.

    Args:
        gm: a graph with ``quantize`` ops, at the top or in fused submodules.
        values: its arguments in placeholder order.

    Returns:
        The errors by the key that ``quantize_key`` gives for the ``quantize`` node.
    """
    inlined = GraphModule(gm, describe.inline(gm))
    recorder = _Recorder(inlined)
    with torch.no_grad():
        recorder.run(*values)
    return recorder.errors


def quantize_key(node: Node) -> str:
    """Return the key of a ``quantize`` node of an inlined graph: its block and its name."""
    block = node.meta["block"]
    return f"{block.node}.{node.meta['origin']}" if block else str(node.meta["origin"])


class _Recorder(Interpreter):
    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.errors: dict[str, TensorError] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if is_gnnc(n) and op_name(n) == "quantize":
            named = {k: self._value(v) for k, v in arguments(n).items()}
            self.errors[quantize_key(n)] = _measure(result, named)
        return result

    def _value(self, argument: Any) -> Any:
        return self.env[argument] if isinstance(argument, Node) else argument


def _measure(quantized: Tensor, named: dict[str, Any]) -> TensorError:
    x, scale, shift, qtype = named["x"], named["scale"], named["shift"], QType.parse(named["qtype"])
    layout = "tensor" if qtype.has_one_scale else qtype.granularity
    x_hat = torch.ops.gnnc.dequantize(quantized, scale, layout)
    if shift is not None:
        x_hat = x_hat * torch.exp2(-shift.float()).reshape(-1, *[1] * (x.dim() - 1))
    # Rounding moves a value by half a step; a larger distance means that the range of the type ended.
    half_step = x_hat.abs() * (1 + 0.5 / qtype.qmax)
    is_bound = (quantized == qtype.qmin) | (quantized == qtype.qmax)
    clipped = (is_bound & (x.abs() > half_step)).sum().item()
    return TensorError(relative_quantization_error(x, x_hat), sqnr_db(x, x_hat), int(clipped))
