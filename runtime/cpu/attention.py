"""Lowering of attention: logits, softmax and weighted sum in one pass over the edges."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import shape_of
from gnnc.runtime.cpu import epilogue
from gnnc.runtime.plans import attention
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import Expr
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program.build import argument_of, optional_argument

_HEADS = (1, 2, 4, 8, 16)
"""Numbers of heads that repeat within a vector of AVX-512; narrower ones leave memory for more unused."""

_LARGEST_EPS = 1e-9
"""Largest eps that is lost in a sum whose largest term is 1, so that a bound may replace the maximum."""


@kernel("fused:attention", backend="cpu", name="attention", priority=10, elements=("int8",))
class Attend:
    """Kernel ``gnnc_cpu_valid.attention``, which allocates no tensor of edges times features."""

    plan = staticmethod(attention.plan)

    @staticmethod
    def emit(plan: attention.Plan, node: Node, emitter: Emitter) -> None:
        """Write the launch of the attention and of the row program behind it."""

        def dense(index: int | None, width: int | None = None) -> Expr | None:
            return None if index is None else emitter.dense(argument_of(node, index), width)

        rowptr = argument_of(node, plan.rowptr)
        rows = shape_of(rowptr)[0] - 1
        col = emitter.vector(argument_of(node, plan.col))
        x = emitter.matrix(argument_of(node, plan.x), plan.width)
        scale = emitter.optional_vector(optional_argument(node, plan.x_scale))
        ends = dense(plan.a_src), dense(plan.a_dst), dense(plan.edge, plan.heads)
        alpha, factors = _alpha(plan, node, emitter), _factors(plan, node, emitter)
        program = epilogue.emit_program(plan.program, node, emitter, rows, plan.width)
        op = emitter.bind(torch.ops.gnnc_cpu_valid.attention.default, "attention")
        logits = [plan.kind, *ends, plan.scale, plan.slope, plan.eps, plan.heads]
        emitter.call(op, [emitter.vector(rowptr), col, x, scale, *logits, alpha, factors, *program])
        epilogue.check_scales(emitter)


def _alpha(plan: attention.Plan, node: Node, emitter: Emitter) -> Expr | None:
    result = None if plan.alpha is None else emitter.outputs(node)[plan.alpha]
    return None if result is None else emitter.allocate(result, dense=True).written


def _factors(plan: attention.Plan, node: Node, emitter: Emitter) -> Expr | None:
    """Allocate the factors of the sources, where a bound may replace the maximum of a row."""
    additive = plan.kind == attention.ADDITIVE and plan.edge is None and plan.alpha is None
    if not additive or plan.heads not in _HEADS or plan.eps > _LARGEST_EPS or not 0 <= plan.slope <= 1:
        return None
    rows = shape_of(argument_of(node, plan.x))[0]
    return emitter.scratch(rows, 4 if plan.heads == 1 else 2 * plan.heads, torch.float32, flat=True).written
