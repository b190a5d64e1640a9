"""Measured sensitivity: the error of the model's output when one op alone runs in low precision.

The graph runs once in FP32 and all its values are cached; a run with some ops rounded recomputes only
the nodes that depend on them.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.fx.node import map_arg

from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import argument, outputs_of
from gnnc.passes.quantization.number_formats import FULL, Option
from gnnc.passes.quantization.observe import spmm_sum
from gnnc.passes.search.rounding import round_operands

Errors = tuple[float, ...]
"""Relative L2 error of each floating output of the model."""


def relative_l2(got: Tensor, want: Tensor) -> float:
    """Return ``|got - want| / |want|`` (L2, in float64).

    Args:
        got: any floating tensor.
        want: the expected tensor, of the same shape.

    Returns:
        0 where both are equal (also zero, also empty), infinite where only ``want`` is zero or
        ``got`` is not finite.
    """
    distance = float((got.double() - want.double()).norm())
    norm = float(want.double().norm())
    if distance == 0:
        return 0.0
    return distance / norm if norm > 0 and distance == distance else float("inf")


class Bench:
    """Runner of a graph on example values, with any of its ops rounded.

    Args:
        gm: a graph of primitives in FP32.
        values: values of its placeholders, in order.

    Attributes:
        outputs: the floating outputs in FP32.
    """

    def __init__(self, gm: fx.GraphModule, values: Sequence[Any]) -> None:
        self._gm = gm
        self._base: dict[Node, Any] = dict(zip(placeholders(gm), values, strict=True))
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
            for node in gm.graph.nodes:
                if node.op not in ("placeholder", "output"):
                    self._base[node] = self._evaluate(node, self._base, FULL)
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
            readers_left = _reader_counts(self._gm, plan)
            for node in readers_left:
                if node.op == "output":
                    break
                operands = {n: changed.get(n, self._base[n]) for n in node.all_input_nodes}
                changed[node] = self._evaluate(node, operands, plan.get(node, FULL), growth)
                _drop_read(node, changed, readers_left)
        got = self._outputs({**self._base, **changed})
        return tuple(relative_l2(a, b) for a, b in zip(got, self.outputs, strict=True))

    def _outputs(self, values: Mapping[Node, Any]) -> list[Tensor]:
        outputs = [values[n] for n in outputs_of(self._gm.graph) if isinstance(n, Node)]
        return [v for v in outputs if isinstance(v, Tensor) and v.is_floating_point()]

    def _evaluate(self, node: Node, values: Mapping[Node, Any], option: Option, growth: float = 1.0) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.op == "call_module":
            return self._gm.get_submodule(str(node.target))(*args, **kwargs)
        if option != FULL:
            args = round_operands(node, args, option, growth)
        if node.target is torch.ops.gnnc.spmm.default and argument(node, "reduce") in ("sum", "mean"):
            return _spmm(*args)
        assert callable(node.target), node.format_node()
        return node.target(*args, **kwargs)


def _spmm(rowptr: Tensor, col: Tensor, value: Any, x: Tensor, reduce: str, num_dst: int) -> Tensor:
    total = spmm_sum(rowptr, col, value, x, num_dst)
    if reduce == "sum":
        return total
    degree = rowptr.diff().clamp(min=1).to(total.dtype)
    return total / degree.reshape(-1, *[1] * (total.dim() - 1))


def _reader_counts(gm: fx.GraphModule, plan: Mapping[Node, Option]) -> dict[Node, int]:
    """Return the number of readers of each node that depends on a rounded op, in graph order."""
    dirty: dict[Node, int] = {}
    for node in gm.graph.nodes:
        if plan.get(node, FULL) != FULL or any(n in dirty for n in node.all_input_nodes):
            dirty[node] = len(node.users)
    return dirty


def _drop_read(node: Node, values: dict[Node, Any], readers_left: dict[Node, int]) -> None:
    """Drop the operands of ``node`` that no later node reads."""
    for operand in node.all_input_nodes:
        if operand in readers_left:
            readers_left[operand] -= 1
            if not readers_left[operand]:
                values.pop(operand, None)
