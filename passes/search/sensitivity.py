"""Measured sensitivity: the error of the model's output when one op alone runs in low precision.

The graph runs once in FP32 and all its values are cached; a run with some ops rounded recomputes only
the nodes that depend on them. A joint graph is a whole training step: what its dropout draws, it draws again,
and the gradients of its outputs change with these.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.fx.node import map_arg

from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import argument, descendants, is_random, outputs_of
from gnnc.ir.source import tangent_number
from gnnc.passes.quantization.number_formats import FULL, Option
from gnnc.passes.quantization.observe import spmm_sum
from gnnc.passes.search.assumed_loss import loss_gradient
from gnnc.passes.search.generator_state import drawing_from, generator_states, seeded
from gnnc.passes.search.judged_values import JudgedValue, judged_values, relative_error
from gnnc.passes.search.rounding import round_operands

Errors = tuple[float, ...]
"""Relative L2 error of each judged value: an output of the model, or in training a gradient."""


def relative_l2(got: Tensor, want: Tensor) -> float:
    """Return ``|got - want| / |want|`` (L2, in float64).

    Args:
        got: any floating tensor.
        want: the expected tensor, of the same shape.

    Returns:
        0 where both are equal (also zero, also empty), infinite where only ``want`` is zero or
        ``got`` is not finite.
    """
    return relative_error([got], [want])


class Bench:
    """Runner of a graph on example values, with any of its ops rounded.

    Args:
        gm: a graph of primitives in FP32.
        values: values of its placeholders, in order.

    Attributes:
        judged: the values whose errors count: outputs, and gradients in training.
        outputs: all outputs of the graph in FP32.
    """

    def __init__(self, gm: fx.GraphModule, values: Sequence[Any]) -> None:
        self._gm = gm
        self._base: dict[Node, Any] = dict(zip(placeholders(gm), values, strict=True))
        self._states: dict[Node, list[Tensor]] = {}
        self._tangents = {node: n for node in placeholders(gm) if (n := tangent_number(node)) is not None}
        self._gradients = descendants(self._tangents)
        with torch.no_grad(), seeded(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
            for node in gm.graph.nodes:
                states = generator_states() if is_random(node) else None
                if node.op not in ("placeholder", "output"):
                    self._base[node] = self._evaluate(node, self._base, FULL)
                if states is not None:  # the draw above has moved the generators on, for the next node
                    self._states[node] = states
        self.judged: list[JudgedValue] = judged_values(gm)
        self.outputs = self._outputs(self._base)

    def value(self, node: Node) -> Any:
        """Return the FP32 value of ``node``."""
        return self._base[node]

    def errors(self, plan: Mapping[Node, Option], growth: float = 1.0) -> Errors:
        """Return the error of each output with the ops of ``plan`` rounded and the others in FP32.

        Args:
            plan: the option of each op that is rounded.
            growth: ratio of the examples' values to those that static scales were taken from.
        """
        changed: dict[Node, Any] = {}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
            readers_left = self._reader_counts(plan)
            for node in readers_left:
                if node in self._tangents:
                    changed[node] = self._tangent_after(node, changed)
                    continue
                operands = {n: changed.get(n, self._base[n]) for n in node.all_input_nodes}
                changed[node] = self._evaluate(node, operands, plan.get(node, FULL), growth)
                _drop_read(node, changed, readers_left)
        return self.compare(self._outputs({**self._base, **changed}))

    def _reader_counts(self, plan: Mapping[Node, Option]) -> dict[Node, int]:
        """Return the number of readers of each node that depends on a rounded op, in an order to run them."""
        late = self._gradients
        nodes = [node for node in self._gm.graph.nodes if node.op not in ("placeholder", "output")]
        forward = [node for node in nodes if node not in late]
        outputs = outputs_of(self._gm.graph)
        dirty: dict[Node, int] = {}
        for node in (*forward, *self._tangents, *(node for node in nodes if node in late)):
            reads = (outputs[self._tangents[node]],) if node in self._tangents else node.all_input_nodes
            if plan.get(node, FULL) != FULL or any(n in dirty for n in reads):
                dirty[node] = len(node.users)
        for node in filter(dirty.__contains__, [outputs[number] for number in self._tangents.values()]):
            dirty[node] += 1  # its tangent reads it
        return dirty

    def _tangent_after(self, tangent: Node, changed: Mapping[Node, Any]) -> Tensor:
        node = outputs_of(self._gm.graph)[self._tangents[tangent]]
        return loss_gradient(changed[node], self._tangents[tangent])

    def tangents(self, outputs: Sequence[Any]) -> dict[int, Tensor]:
        """Return the gradient of each output, as another program computed the outputs, by its number."""
        return {number: loss_gradient(outputs[number], number) for number in self._tangents.values()}

    def compare(self, outputs: Sequence[Any]) -> Errors:
        """Return the error of each judged value.

        Args:
            outputs: all outputs of the graph, as another program computed them.
        """
        return tuple(
            relative_error([outputs[i] for i in each.positions], [self.outputs[i] for i in each.positions])
            for each in self.judged
        )

    def release(self) -> None:
        """Free the values, which are as large as all that the graph computes; nothing can be run any more."""
        self._base.clear()
        self._states.clear()
        self.outputs.clear()

    def _outputs(self, values: Mapping[Node, Any]) -> list[Any]:
        return [values[n] if isinstance(n, Node) else n for n in outputs_of(self._gm.graph)]

    def _evaluate(self, node: Node, values: Mapping[Node, Any], option: Option, growth: float = 1.0) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.op == "call_module":
            return self._gm.get_submodule(str(node.target))(*args, **kwargs)
        if option != FULL:
            args = round_operands(node, args, option, growth, self._gradients)
        if node.target is torch.ops.gnnc.spmm.default and argument(node, "reduce") in ("sum", "mean"):
            return _spmm(*args)
        assert callable(node.target), node.format_node()
        with drawing_from(self._states[node]) if node in self._states else nullcontext():
            return node.target(*args, **kwargs)


def _spmm(rowptr: Tensor, col: Tensor, value: Any, x: Tensor, reduce: str, num_dst: int) -> Tensor:
    total = spmm_sum(rowptr, col, value, x, num_dst)
    if reduce == "sum":
        return total
    degree = rowptr.diff().clamp(min=1).to(total.dtype)
    return total / degree.reshape(-1, *[1] * (total.dim() - 1))


def _drop_read(node: Node, values: dict[Node, Any], readers_left: dict[Node, int]) -> None:
    """Drop the operands of ``node`` that no later node reads."""
    for operand in node.all_input_nodes:
        if operand in readers_left:
            readers_left[operand] -= 1
            if not readers_left[operand]:
                values.pop(operand, None)
