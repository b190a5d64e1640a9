"""Lowering of row-local chains that follow no product and no aggregation."""

from dataclasses import dataclass

import torch
from torch.fx import Node

from gnnc.runtime.cpu import epilogue
from gnnc.runtime.cpu.epilogue import Inner, Refusal, RowProgram, planned
from gnnc.runtime.emitter import Emitter
from gnnc.runtime.registry import kernel


@dataclass(frozen=True, slots=True)
class Plan:
    """What the kernel reads and does.

    Attributes:
        x: number of the operand that the chain begins with.
        width: its columns.
        program: what happens to its rows.
    """

    x: int
    width: int
    program: RowProgram


@kernel("fused:map", backend="cpu", name="map", priority=10)
class Map:
    """``gnnc_cpu.map``: a row program over the rows of one tensor."""

    @staticmethod
    @planned
    def plan(node: Node) -> Plan:
        """Find the operand from which every node of the chain follows."""
        inner = Inner(node)
        reasons = []
        for start, index in inner.operands.items():
            if start.meta["val"].dtype not in (torch.float32, torch.bfloat16):
                continue
            try:
                width = epilogue.fixed_width(start)
                program = epilogue.build(inner, epilogue.read_chain(inner, start), ())
                return Plan(index, width, program)
            except Refusal as refusal:
                reasons.append(f"from {start.name}: {refusal}")
        raise Refusal("; ".join(reasons) or "it reads no float matrix")

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: Emitter) -> None:
        """Write the launch."""
        x = epilogue.argument_of(node, plan.x)
        matrix = emitter.matrix(x, plan.width)
        rows = epilogue.shape_of(x)[0]
        program = epilogue.emit_program(plan.program, node, emitter, rows, plan.width)
        op = emitter.bind(torch.ops.gnnc_cpu.map.default, "rowmap")
        emitter.line(f"{op}({matrix}, None, {program})")
        epilogue.check_scales(emitter)
