"""Lowering of row-local chains that follow no product and no aggregation."""

import torch
from torch.fx import Node

from gnnc.runtime.cpu import epilogue
from gnnc.runtime.emitter import Emitter, shape_of
from gnnc.runtime.epilogue import argument_of
from gnnc.runtime.plans import rowmap
from gnnc.runtime.registry import kernel


@kernel("fused:map", backend="cpu", name="map", priority=10)
class Map:
    """``gnnc_cpu.map``: a row program over the rows of one tensor."""

    plan = staticmethod(rowmap.plan)

    @staticmethod
    def emit(plan: rowmap.Plan, node: Node, emitter: Emitter) -> None:
        """Write the launch."""
        x = argument_of(node, plan.x)
        matrix = emitter.matrix(x, plan.width)
        rows = shape_of(x)[0]
        program = epilogue.emit_program(plan.program, node, emitter, rows, plan.width)
        op = emitter.bind(torch.ops.gnnc_cpu.map.default, "rowmap")
        emitter.line(f"{op}({matrix}, None, {program})")
        epilogue.check_scales(emitter)
