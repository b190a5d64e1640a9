"""Gradients that are differentiated themselves: the forward graph again, op by op, under torch's autograd.

A lowered program has no history for autograd. The graph that the gradients were derived from has: each of its
ops, also a primitive, has a rule whose parts have rules. ``create_graph=True`` runs it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from gnnc.errors import UnsupportedError
from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import is_random
from gnnc.ir.parts import DIFFERENTIABLE, GRADIENTS
from gnnc.ir.source import WRITTEN, source_of


class DifferentiatedGraph:
    """Gradients of a forward graph as differentiable functions of its inputs and of the tangents.

    Args:
        owner: class name of the model, for messages.
        graph_module: the forward graph before ``joint`` has added gradients to it.
        forward: the lowered forward graph, whose first placeholders are those of the other: numbers, then
            tensors and symbolic numbers, as ``joint`` leaves them.
    """

    def __init__(self, owner: str, graph_module: GraphModule, forward: GraphModule) -> None:
        self._owner = owner
        self._graph_module = graph_module
        self._nodes = placeholders(graph_module)
        in_joint = sorted(self._nodes, key=lambda node: not isinstance(node.meta["val"], int))
        self._positions = [in_joint.index(node) for node in self._nodes]
        sources = [source_of(node) for node in self._nodes]
        self._leaves = [sources.index(source) for source in forward.meta[GRADIENTS]]
        self._differentiable = forward.meta[DIFFERENTIABLE]
        self._written = [self._positions[i] for i, node in enumerate(self._nodes) if WRITTEN in node.meta]
        self._is_random = any(map(is_random, graph_module.graph.nodes))

    def state(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return what a later call of ``gradients`` needs of a forward pass that is about to run.

        Args:
            values: one value for each placeholder of the lowered forward graph.
        """
        before = {i: values[i].clone() for i in self._written}
        given = tuple(before.get(i, value) for i, value in enumerate(values)) if before else values
        return given, _versions(given), _generators(given) if self._is_random else None

    def gradients(self, state: tuple[Any, ...], tangents: Mapping[int, Tensor]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the leaves, with their history.

        Args:
            state: the result of ``state`` for the forward pass.
            tangents: the gradient of each differentiable output, by its number.

        Raises:
            UnsupportedError: a value was written since the forward pass, or an op has no second gradient.
        """
        values, versions, generators = state
        if _versions(values) != versions:
            raise UnsupportedError(
                f"[{self._owner}] a tensor that the gradient depends on was modified in place between the "
                "forward pass and a backward pass with create_graph=True: write it after the backward pass"
            )
        given = [self._value(i, values[position]) for i, position in enumerate(self._positions)]
        leaves = [given[i] for i in self._leaves]
        with _drawing_again(generators):
            outputs = fx.Interpreter(self._graph_module).run(*given)
        return torch.autograd.grad(
            [outputs[i] for i in self._differentiable],
            leaves,
            [tangents[i] for i in self._differentiable],
            create_graph=True,
            allow_unused=True,
        )

    def _value(self, number: int, value: Any) -> Any:
        """Return the value of a placeholder: of its dtype, and a leaf as a node of its own in the history."""
        if not isinstance(value, Tensor):
            return value
        expected = self._nodes[number].meta["val"].dtype
        value = value if value.dtype == expected else value.to(expected)
        return value.view_as(value) if number in self._leaves else value


def _versions(values: Sequence[Any]) -> list[int]:
    """Return how often each tensor was written; tensors of inference mode, which cannot be, count as one."""
    return [value._version for value in values if isinstance(value, Tensor) and not value.is_inference()]


def _generators(values: Sequence[Any]) -> dict[torch.device, Tensor]:
    """Return the states of torch's generators: of the CPU, and of the GPU that values are on.

    A generator that a CUDA graph is being captured with has no state that could be read.
    """
    devices = {value.device for value in values if isinstance(value, Tensor) and value.is_cuda}
    devices = set() if devices and torch.cuda.is_current_stream_capturing() else devices
    states = {device: torch.cuda.get_rng_state(device) for device in devices}
    return {torch.device("cpu"): torch.get_rng_state(), **states}


@contextmanager
def _drawing_again(generators: Mapping[torch.device, Tensor] | None) -> Iterator[None]:
    """Let random ops draw what they drew when generators were in these states; None: there are none."""
    if generators is None:
        yield
        return
    gpus = [device for device in generators if device.type == "cuda"]
    with torch.random.fork_rng(devices=[device.index for device in gpus]):
        torch.set_rng_state(generators[torch.device("cpu")])
        for device in gpus:
            torch.cuda.set_rng_state(generators[device], device)
        yield
