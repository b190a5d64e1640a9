"""Lowering of the bits that a ReLU keeps for its gradient, and of the gradient."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import op_name, operand
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Refusal, planned


@planned
def _plan(node: Node) -> int:
    """Return the width; refuse what is no float32 matrix."""
    values = operand(node, "x" if op_name(node) == "relu_mask" else "grad").meta["val"]
    if values.dtype != torch.float32 or values.dim() != 2:
        raise Refusal(f"the values are {values.dtype} of {values.dim()} dimensions")
    return build.fixed_width(values)


@kernel("gnnc.relu_mask", backend="cpu", name="relu_mask", priority=10)
class ReluMask:
    """Kernel ``gnnc_cpu.relu_mask``: one bit for each value."""

    plan = staticmethod(_plan)

    @staticmethod
    def emit(plan: int, node: Node, emitter: Emitter) -> None:
        """Write the launch that stores the bits."""
        x = emitter.matrix(operand(node, "x"), plan)
        out = emitter.allocate(node, dense=True)
        emitter.call(emitter.bind(torch.ops.gnnc_cpu.relu_mask.default, "relu_mask"), [x, out.written])


@kernel("gnnc.relu_backward", backend="cpu", name="relu_backward", priority=10)
class ReluBackward:
    """Kernel ``gnnc_cpu.relu_backward``: values whose bit is set, else 0."""

    plan = staticmethod(_plan)

    @staticmethod
    def emit(plan: int, node: Node, emitter: Emitter) -> None:
        """Write the launch that masks the gradient."""
        values = [emitter.matrix(operand(node, "grad"), plan), emitter.dense(operand(node, "mask"))]
        out = emitter.allocate(node, dense=True)
        op = emitter.bind(torch.ops.gnnc_cpu.relu_backward.default, "relu_backward")
        emitter.call(op, [*values, out.written])
