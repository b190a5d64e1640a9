"""Lowering of batch norm in training, and of its gradient."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, unpack
from gnnc.runtime.plans import batch_norm
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import Expr
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program.build import planned

_ROWS = (torch.float32, torch.bfloat16)


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
        return batch_norm.forward_width(node, _ROWS)

    @staticmethod
    def emit(plan: int, node: Node, emitter: Emitter) -> None:
        """Write the launch of a batch norm, with its mean and deviation."""
        momentum, eps = unpack(node, "momentum", "eps")
        given = [emitter.optional_vector(argument(node, name)) for name in batch_norm.VECTORS]
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
        return batch_norm.backward_width(node, _ROWS)

    @staticmethod
    def emit(plan: int, node: Node, emitter: Emitter) -> None:
        """Write the launch of the gradients of a batch norm."""
        grad, x = (emitter.matrix(argument(node, name), plan) for name in ("grad_out", "input"))
        weight, mean, inverse = (
            emitter.optional_vector(argument(node, name)) for name in ("weight", "save_mean", "save_invstd")
        )
        op = emitter.bind(torch.ops.gnnc_cpu.batch_norm_backward.default, "batch_norm_backward")
        emitter.call(op, [grad, x, weight, mean, inverse, *_results(emitter, node, plan)])
