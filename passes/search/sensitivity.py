"""How much the model's output errs when one op alone is computed in low precision, measured.

The graph runs once in FP32 and every value is kept; a run with some ops rounded then recomputes what
depends on them and nothing else, so that all runs share their prefixes.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.fx.node import map_arg

from gnnc.ir.graph import output_node, placeholders
from gnnc.passes.quantization.number_formats import FULL, Option
from gnnc.passes.quantization.observe import spmm_sum
from gnnc.passes.search.rounding import round_operands

Errors = tuple[float, ...]
"""Relative L2 error of each floating output of the model."""


def relative_l2(got: Tensor, want: Tensor) -> float:
    """Return ``|got - want| / |want|`` (L2, in float64).

    Args:
        got: any floating tensor.
        want: what it should be, of the same shape.

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
    """Runs a graph on example values with any of its ops rounded.

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
        """Return what ``node`` is in FP32."""
        return self._base[node]

    def errors(self, plan: Mapping[Node, Option], growth: float = 1.0) -> Errors:
        """Return the error of each output with every op computed as ``plan`` says, the others in FP32.

        Args:
            plan: the ops that are rounded.
            growth: how much larger the examples' values are than those that static scales came from.
        """
        changed: dict[Node, Any] = {}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
            left = _uses_left(self._gm, plan)
            for node in left:
                if node.op == "output":
                    break
                known = {n: changed.get(n, self._base[n]) for n in node.all_input_nodes}
                changed[node] = self._evaluate(node, known, plan.get(node, FULL), growth)
                _forget(node, changed, left)
        got = self._outputs({**self._base, **changed})
        return tuple(relative_l2(a, b) for a, b in zip(got, self.outputs, strict=True))

    def _outputs(self, values: Mapping[Node, Any]) -> list[Tensor]:
        found = [values[n] for n in output_node(self._gm).args[0] if isinstance(n, Node)]  # type: ignore[union-attr]
        return [v for v in found if isinstance(v, Tensor) and v.is_floating_point()]

    def _evaluate(self, node: Node, values: Mapping[Node, Any], option: Option, growth: float = 1.0) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.op == "call_module":
            return self._gm.get_submodule(str(node.target))(*args, **kwargs)
        if option != FULL:
            args = round_operands(node, args, option, growth)
        if node.target is torch.ops.gnnc.spmm.default and args[4] in ("sum", "mean"):
            return _spmm(*args)
        assert callable(node.target), node.format_node()
        return node.target(*args, **kwargs)


def _spmm(rowptr: Tensor, col: Tensor, value: Any, x: Tensor, reduce: str, num_dst: int) -> Tensor:
    total = spmm_sum(rowptr, col, value, x, num_dst)
    if reduce == "sum":
        return total
    degree = rowptr.diff().clamp(min=1).to(total.dtype)
    return total / degree.reshape(-1, *[1] * (total.dim() - 1))


def _uses_left(gm: fx.GraphModule, plan: Mapping[Node, Option]) -> dict[Node, int]:
    """The nodes that the plan changes and all that depends on them, in order, with their readers."""
    dirty: dict[Node, int] = {}
    for node in gm.graph.nodes:
        if plan.get(node, FULL) != FULL or any(n in dirty for n in node.all_input_nodes):
            dirty[node] = len(node.users)
    return dirty


def _forget(node: Node, values: dict[Node, Any], left: dict[Node, int]) -> None:
    """Drop a recomputed value once the last node has read it."""
    for read in node.all_input_nodes:
        if read in left:
            left[read] -= 1
            if not left[read]:
                values.pop(read, None)
