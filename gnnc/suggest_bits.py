"""Number of bits that a model needs, by Tango's rule."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gnnc.compiler.build import example_values
from gnnc.compiler.narrow_inputs import capture_call
from gnnc.cost.quantization_error import relative_quantization_error
from gnnc.errors import GnncError, PrecisionError
from gnnc.ir.op import op_of
from gnnc.ir.qtype import QType
from gnnc.passes.base import Context, run_passes
from gnnc.passes.normalize import Normalize
from gnnc.passes.raise_ import Raise
from gnnc.passes.search.sensitivity import Bench

LIMIT = 0.3
"""The error of the first layer's output up to which Tango found training accuracy unharmed."""

BITS = range(2, 17)


def suggest_bits(model: torch.nn.Module, *inputs: Any) -> int:
    """Return the least number of bits that Tango's rule allows.

    The output of the first graph layer is quantized, symmetrically and under one scale, and held
    against itself by Tango's relative quantization error (equation 4); the least number of bits with
    an error of at most 0.3 is enough for the model (Tango, section 3.2).

    Args:
        model: a message-passing model.
        *inputs: representative arguments of a call.

    Returns:
        2 to 16, or 32 where 16 bits err more than that.

    Raises:
        GnncError: ``model`` is not a module, or aggregates nothing.
        CaptureError: it cannot be traced.
        PrecisionError: the first layer's output is not finite on these inputs.
    """
    if not isinstance(model, torch.nn.Module):
        raise GnncError(f"gnnc.suggest_bits takes a torch.nn.Module, got {type(model).__name__}")
    model = getattr(model, "model", model) if hasattr(model, "capture_examples") else model
    with torch.no_grad():
        captured = capture_call(model, inputs, {})
        gm = run_passes(captured.graph_module, (Normalize(), Raise()), Context())[-1][1].forward
        layer_output = Bench(gm, example_values(model, captured)).value(_first_layer_output(gm, model))
    if not bool(layer_output.isfinite().all()):
        raise PrecisionError("gnnc.suggest_bits: the first layer's output is not finite on these inputs")
    return least_bits(layer_output)


def least_bits(x: Tensor, limit: float = LIMIT) -> int:
    """Return the least bits with which ``x`` errs at most ``limit`` by equation 4, or 32.

    Args:
        x: a floating tensor.
        limit: the error that is allowed.
    """
    within = (bits for bits in BITS if relative_quantization_error(x, _round_trip(x, bits)) <= limit)
    return next(within, 32)


def _round_trip(x: Tensor, bits: int) -> Tensor:
    largest = QType(bits).qmax
    scale = x.abs().amax() / largest if x.numel() else x.new_ones(())
    return x if scale == 0 else (x / scale).round().clamp(-largest, largest) * scale


def _first_layer_output(gm: GraphModule, model: torch.nn.Module) -> Node:
    """The last value that the layer of the first aggregation makes."""
    first = next((n for n in gm.graph.nodes if (op := op_of(n)) and op.kind == "aggregate"), None)
    if first is None:
        raise GnncError(
            f"gnnc.suggest_bits: {type(model).__name__} aggregates nothing over edges: it has no graph layer"
        )
    layer = first.meta.get("layer") or ""
    if not layer:
        return first
    inside = [n for n in gm.graph.nodes if _is_in(str(n.meta.get("layer") or ""), layer)]
    return [n for n in inside if _is_floating(n)][-1]


def _is_in(layer: str, owner: str) -> bool:
    return layer == owner or layer.startswith(f"{owner}.")


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    return node.op != "placeholder" and isinstance(value, Tensor) and value.is_floating_point()
