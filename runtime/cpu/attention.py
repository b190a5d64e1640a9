"""Lowering of attention: logits, softmax and weighted sum in one pass over the edges."""

import torch
from torch.fx import Node

from gnnc.runtime.cpu import epilogue
from gnnc.runtime.emitter import Emitter, shape_of
from gnnc.runtime.epilogue import argument_of
from gnnc.runtime.plans import attention
from gnnc.runtime.registry import kernel


@kernel("fused:attention", backend="cpu", name="attention", priority=10)
class Attend:
    """``gnnc_cpu.attention``: no tensor as large as edges times features ever exists."""

    plan = staticmethod(attention.plan)

    @staticmethod
    def emit(plan: attention.Plan, node: Node, emitter: Emitter) -> None:
        """Write the launch."""

        def dense(index: int | None, width: int | None = None) -> str:
            return "None" if index is None else emitter.dense(argument_of(node, index), width)

        rowptr = argument_of(node, plan.rowptr)
        rows = shape_of(rowptr)[0] - 1
        col = emitter.vector(argument_of(node, plan.col))
        x = emitter.matrix(argument_of(node, plan.x), plan.width)
        scale = "None" if plan.x_scale is None else emitter.vector(argument_of(node, plan.x_scale))
        ends = f"{dense(plan.a_src)}, {dense(plan.a_dst)}, {dense(plan.edge, plan.heads)}"
        alpha = _alpha(plan, node, emitter)
        program = epilogue.emit_program(plan.program, node, emitter, rows, plan.width)
        op = emitter.bind(torch.ops.gnnc_cpu.attention.default, "attention")
        emitter.line(
            f"{op}({emitter.vector(rowptr)}, {col}, {x}, {scale}, {plan.kind}, {ends}, {plan.scale!r}, "
            f"{plan.slope!r}, {plan.eps!r}, {plan.heads}, {alpha}, {program})"
        )
        epilogue.check_scales(emitter)


def _alpha(plan: attention.Plan, node: Node, emitter: Emitter) -> str:
    result = None if plan.alpha is None else emitter.outputs(node)[plan.alpha]
    return "None" if result is None else emitter.allocate(result, dense=True)
