"""Lowering of row-local chains that follow no product and no aggregation."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import shape_of
from gnnc.runtime.cpu import epilogue
from gnnc.runtime.plans import rowmap
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.registry import Decline, kernel
from gnnc.runtime.row_program.build import argument_of


@kernel(
    "fused:map",
    "aten._to_copy",
    "gnnc.dequantize",
    backend="cpu",
    name="map",
    priority=10,
    elements=("int8",),
)
class Map:
    """Kernel ``gnnc_cpu.map``: a row program over the rows of one tensor."""

    @staticmethod
    def plan(node: Node) -> rowmap.Plan | Decline:
        """Take rows of every dtype but fp16, which the CPU kernels neither read nor store."""
        plan = rowmap.plan(node)
        if isinstance(plan, Decline):
            return plan
        dtypes = argument_of(node, plan.x).meta["val"].dtype, *(out.dtype for out in plan.program.outs)
        return Decline("rows in fp16") if torch.float16 in dtypes else plan

    @staticmethod
    def emit(plan: rowmap.Plan, node: Node, emitter: Emitter) -> None:
        """Write the launch of the row program."""
        x = argument_of(node, plan.x)
        matrix = emitter.matrix(x, plan.width)
        rows = shape_of(x)[0]
        program = epilogue.emit_program(plan.program, node, emitter, rows, plan.width)
        op = emitter.bind(torch.ops.gnnc_cpu.map.default, "rowmap")
        emitter.call(op, [matrix, None, *program])
        epilogue.check_scales(emitter)
