"""Quantization of gradients: one set of quantized values for every op that reads a gradient.

Rounding errors of gradients add up where many of them meet: at hubs, in the gradient of a weight, and over
the steps of a training run. The mean of stochastic rounding is the value itself. Its random bits are a
function of one seed a call, of the value's stream and of the element (``gnnc.ir.philox``).
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import fake_mode_of, placeholders
from gnnc.ir.nodes import argument, shape_or_none
from gnnc.ir.source import Source, source_of
from gnnc.precision import Precision

GradientScale = Literal["row_pow2", "row", "tensor"]
Rounding = Literal["stochastic", "nearest"]

SEED = Source("seed", "rounding")
"""Source of the seed of all random bits of a call."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized rows of a gradient.

    Attributes:
        values: the quantized values.
        scale: the scale of each row; None where ``base`` is that of all.
        base: the scale of the whole tensor, of which rows may take fractions; None: rows have their own.
        shift: the binary logarithm of the fraction of each row; None: there are none.
    """

    values: Node
    scale: Node | None = None
    base: Node | None = None
    shift: Node | None = None


@dataclass(slots=True)
class GradientRounding:
    """Rounding of the gradients of a joint graph.

    Attributes:
        granularity: which values share a scale; those of a row in FP8.
        rounding: to nearest, or stochastic.
        nodes: the nodes that depend on the gradient of an output.
        summed: the gradients that an aggregation sums as integers. Others gain nothing from fractions of one
            scale, and take scales a row in their place: the kernel that computes a row finds its scale.
    """

    granularity: GradientScale
    rounding: Rounding
    nodes: set[Node]
    summed: set[Node]
    _streams: dict[Node, int] = field(default_factory=dict)

    def quantize(self, build: Any, x: Node) -> Quantized:
        """Return the quantized rows of a gradient, equal for each of its readers: ``cache`` merges them.

        Args:
            build: builder of nodes before the op that reads the gradient.
            x: the gradient, float32 ``[N, ...]``.
        """
        granularity = build.node.meta.get("granularity") or self.granularity
        if granularity == "row_pow2" and x not in self.summed or not build.precision.is_integer:
            granularity = "row"
        qtype = str(build.precision.gradient_qtype(granularity))
        scale = build.op("scale", x, qtype)
        seed = self._seed(build.gm, x) if self.rounding_of(build.precision) == "stochastic" else ()
        if granularity != "row_pow2":
            values = build.op("quantize", x, scale, qtype, *((None, *seed) if seed else ()))
            return Quantized(values, scale) if granularity == "row" else Quantized(values, base=scale)
        is_flat = len(shape_or_none(x) or ()) == 2
        rows = x if is_flat else build.aten("flatten.using_ints", x, 1)
        shift = build.op("row_shift", rows, scale, qtype)
        values = build.op("quantize", x, scale, qtype, shift, *seed)
        return Quantized(values, build.op("row_scale", scale, shift), scale, shift)

    def rounding_of(self, precision: Precision) -> Rounding:
        """Return how gradients round in a precision: floats of 8 bits to nearest.

        They have no common step, which stochastic rounding draws a fraction of.
        """
        return self.rounding if precision.is_integer else "nearest"

    def row_scale(self, build: Any, x: Node, rows: Quantized) -> Node:
        """Return the scale of each row, also where there is one for all."""
        if rows.scale is not None:
            return rows.scale
        count = build.aten("sym_size.int", x, 0)
        return build.aten("mul.Tensor", build.aten("new_ones", x, [count], dtype=torch.float32), rows.base)

    def _seed(self, gm: fx.GraphModule, x: Node) -> tuple[Node, int]:
        """Return the seed, and the stream of a gradient."""
        return seed_of(gm, x.meta["val"].device), self._streams.setdefault(x, next_stream(gm))


def seed_of(gm: fx.GraphModule, device: torch.device) -> Node:
    """Return the placeholder of the seed of a graph; add it where there is none.

    Args:
        gm: the graph.
        device: the device on which the random bits are made.
    """
    given = placeholders(gm)
    found = next((node for node in given if source_of(node) == SEED), None)
    if found is not None:
        return found
    with gm.graph.inserting_after(given[-1]):
        seed = gm.graph.placeholder("seed")
    mode = fake_mode_of(gm)
    with contextlib.nullcontext() if mode is None else mode:
        value = torch.empty((), dtype=torch.int64, device=device)
    seed.meta = {"source": SEED, "val": value, "layer": ""}
    return seed


def next_stream(gm: fx.GraphModule) -> int:
    """Return a stream that no quantization of a graph has."""
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.gnnc.quantize.default)
    groups = gm.graph.find_nodes(op="call_function", target=torch.ops.gnnc.quantize_groups.default)
    taken = [*map(stream_of, calls), *(argument(node, "stream") for node in groups)]
    return 1 + max(taken, default=0)


def stream_of(quantize: Node) -> int:
    """Return the stream of a quantization; 0 where it rounds to nearest."""
    return quantize.args[5] if len(quantize.args) > 5 else 0  # pyright: ignore[reportReturnType]
