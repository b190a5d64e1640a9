"""Lowering of batch norm in training, and of its gradient."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, unpack
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import Expr
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Refusal, planned

_ROWS = (torch.float32, torch.bfloat16)
_VECTORS = ("weight", "bias", "running_mean", "running_var")


def _width(node: Node, rows: tuple[str, ...], vectors: tuple[str, ...]) -> int:
    """Return the width of the rows; refuse what the kernels do not read."""
    for name in rows:
        value = argument(node, name).meta["val"]
        allowed = _ROWS if name == "input" else _ROWS[:1]
        if value.dtype not in allowed or value.dim() != 2:
            raise Refusal(f"{name} is {value.dtype} of {value.dim()} dimensions")
    for name in vectors:
        value = argument(node, name)
        if value is not None and value.meta["val"].dtype != torch.float32:
            raise Refusal(f"{name} is {value.meta['val'].dtype}")
    return build.fixed_width(argument(node, "input"))


def _results(emitter: Emitter, node: Node, width: int) -> list[Expr]:
    """Return what holds the results: that of rows first, then vectors of columns."""
    first, *vectors = emitter.outputs(node)
    rows = argument(node, "input").meta["val"].shape[0]
    held = [
        emitter.scratch(rows, width, torch.float32, flat=True)
        if first is None
        else emitter.allocate(first, dense=True)
    ]
    for vector in vectors:
        held.append(
            emitter.scratch(1, width, torch.float32, flat=True)
            if vector is None
            else emitter.allocate_vector(vector)
        )
    return [result.written for result in held]


@kernel("aten._native_batch_norm_legit_functional", backend="cpu", name="batch_norm", priority=10)
class BatchNorm:
    """Kernel ``gnnc_cpu.batch_norm``: statistics of the batch, summed in FP64."""

    @staticmethod
    @planned
    def plan(node: Node) -> int:
        """Return the width; refuse statistics that are given."""
        if argument(node, "training") is not True:
            raise Refusal("the statistics are given")
        return _width(node, ("input",), _VECTORS)

    @staticmethod
    def emit(plan: int, node: Node, emitter: Emitter) -> None:
        """Write the launch."""
        momentum, eps = unpack(node, "momentum", "eps")
        given = [emitter.optional_vector(argument(node, name)) for name in _VECTORS]
        x = emitter.matrix(argument(node, "input"), plan)
        op = emitter.bind(torch.ops.gnnc_cpu.batch_norm.default, "batch_norm")
        emitter.call(op, [x, *given, float(momentum), float(eps), *_results(emitter, node, plan)])


@kernel("aten.native_batch_norm_backward", backend="cpu", name="batch_norm_backward", priority=10)
class BatchNormBackward:
    """Kernel ``gnnc_cpu.batch_norm_backward``."""

    @staticmethod
    @planned
    def plan(node: Node) -> int:
        """Return the width; refuse gradients of norms whose statistics were given."""
        if argument(node, "train") is not True:
            raise Refusal("the statistics were given")
        if None in unpack(node, "save_mean", "save_invstd"):
            raise Refusal("the statistics of the batch are absent")
        return _width(node, ("input", "grad_out"), ("weight", "save_mean", "save_invstd"))

    @staticmethod
    def emit(plan: int, node: Node, emitter: Emitter) -> None:
        """Write the launch."""
        grad, x = (emitter.matrix(argument(node, name), plan) for name in ("grad_out", "input"))
        weight, mean, inverse = (
            emitter.optional_vector(argument(node, name)) for name in ("weight", "save_mean", "save_invstd")
        )
        op = emitter.bind(torch.ops.gnnc_cpu.batch_norm_backward.default, "batch_norm_backward")
        emitter.call(op, [grad, x, weight, mean, inverse, *_results(emitter, node, plan)])
