"""Runs of a lowered program on example values, for ``precision="auto"``: of a call, or of a training step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gnnc.calibrate.timing import Timer
from gnnc.ir.graph import placeholders
from gnnc.ir.parts import Parts
from gnnc.ir.source import Source, source_of
from gnnc.passes.quantize import STATIC_SCALE
from gnnc.passes.search.generator_state import seeded
from gnnc.passes.search.study import GROWTH
from gnnc.runtime.program.seed import draw_seed
from gnnc.runtime.program.training import Tangents, TrainingExecutable
from gnnc.target import MeasuredTimes

Make = Callable[[GraphModule], Any]
"""Makes the program of one graph."""


class CallRun:
    """Runs of the program of a call.

    Args:
        lowered: the lowered graph.
        examples: the values of its placeholders.
        make: makes the program of the graph.
    """

    def __init__(self, lowered: Parts, examples: Sequence[Any], make: Make) -> None:
        self._graph, self._values = lowered.forward, examples
        self._run = make(lowered.forward)

    def outputs(self) -> Sequence[Any]:
        """Return all outputs of the graph."""
        return self._run(*self._values)

    def outputs_with_smaller_scales(self) -> Sequence[Any] | None:
        """Return the outputs with static scales as smaller values would have given; None without such."""
        nodes = placeholders(self._graph)
        if not any(STATIC_SCALE in node.meta for node in nodes):
            return None
        pairs = zip(nodes, self._values, strict=True)
        return self._run(*[value / GROWTH if STATIC_SCALE in node.meta else value for node, value in pairs])

    @property
    def graphs(self) -> list[tuple[GraphModule, Sequence[Any]]]:
        """The graph, and the values that tell its sizes."""
        return [(self._graph, self._values)]

    def times(self, timer: Timer) -> list[MeasuredTimes]:
        """Return the times of the program of each graph."""
        return [timer(self._run, self._values)]


class StepRun:
    """Runs of a training step: the forward graph, then the backward graph on gradients of the outputs.

    Features that are quantized once a training run count in no time.

    Args:
        joint: the joint graph.
        lowered: the lowered graphs.
        step: the values of the placeholders of the joint graph.
        tangents: maps the outputs of the caller to their gradients, by number.
        make: makes the program of one graph.
    """

    def __init__(
        self, joint: GraphModule, lowered: Parts, step: Sequence[Any], tangents: Tangents, make: Make
    ) -> None:
        assert lowered.backward is not None
        sources = map(source_of, placeholders(joint))
        self._named: dict[Source | None, Any] = dict(zip(sources, step, strict=True))
        if lowered.features is not None:
            values = make(lowered.features)(*[self._value(node) for node in placeholders(lowered.features)])
            self._named |= {Source("features", str(number)): value for number, value in enumerate(values)}
        self._backward = lowered.backward
        self._forward = lowered.forward
        with seeded():
            self._values = [self._value(node) for node in placeholders(lowered.forward)]
        assert all(value is not None for value in self._values), "the examples lack values of the graph"
        self._tangents = tangents
        self._program = TrainingExecutable(type(joint).__name__, lowered, make)

    def _value(self, node: Node) -> Any:
        source = source_of(node)
        if source in self._named:
            return self._named[source]
        if source is not None and source.kind == "seed":
            return draw_seed(node.meta["val"].device)
        return node.meta.get("value")

    def outputs(self) -> Sequence[Any]:
        """Return the outputs of the joint graph; its dropout draws what ``Bench`` draws."""
        with torch.no_grad(), seeded():
            return self._program.step(self._values, self._tangents)

    def outputs_with_smaller_scales(self) -> None:
        """Return None: the scales of training are taken at each call."""

    @property
    def graphs(self) -> list[tuple[GraphModule, Sequence[Any]]]:
        """Both graphs, and the values that tell their sizes."""
        return [
            (self._forward, self._values),
            (self._backward, [self._value(node) for node in placeholders(self._backward)]),
        ]

    def times(self, timer: Timer) -> list[MeasuredTimes]:
        """Return the times of the program of each graph."""
        program = self._program
        with torch.no_grad():
            arguments = program.arguments(self._values, program.forward(*self._values), self._tangents)
            return [timer(program.forward, self._values), timer(program.backward, arguments)]
