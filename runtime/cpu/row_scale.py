"""Lowering of the scales of rows that share a base scale."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import operand
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.registry import kernel


@kernel("gnnc.row_scale", backend="cpu", name="row_scale", priority=10)
class RowScale:
    """Kernel ``gnnc_cpu.row_scale``: base / 2^shift of each row."""

    @staticmethod
    def plan(node: Node) -> None:
        """Take all."""

    @staticmethod
    def emit(plan: None, node: Node, emitter: Emitter) -> None:
        """Write the launch that stores the scale of each row."""
        values = [emitter.vector(operand(node, name)) for name in ("base", "shift")]
        out = emitter.allocate_vector(node)
        op = emitter.bind(torch.ops.gnnc_cpu.row_scale.default, "row_scale")
        emitter.call(op, [*values, out.written])
