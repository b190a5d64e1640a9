"""Lowering of aggregations over edges and over segments."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import shape_of
from gnnc.runtime.cpu import epilogue
from gnnc.runtime.plans import spmm
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import Expr, expr
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program.build import argument_of, optional_argument


@kernel(
    "fused:spmm",
    "gnnc.spmm",
    "gnnc.qspmm",
    "gnnc.segment_reduce",
    backend="cpu",
    name="spmm",
    priority=10,
    elements=("int8",),
)
class Spmm:
    """Kernel ``gnnc_cpu_valid.spmm``: sum, mean, max or min over the edges of a row, float, bf16 or int8."""

    plan = staticmethod(spmm.plan)

    @staticmethod
    def emit(plan: spmm.Plan, node: Node, emitter: Emitter) -> None:
        """Write the launch of the reduction and its row program."""
        rowptr = argument_of(node, plan.rowptr)
        rows = shape_of(rowptr)[0] - 1
        col = column(emitter, node, plan.col)
        value = edge_values(emitter, node, plan.value, plan.heads)
        x = emitter.matrix(argument_of(node, plan.x), plan.width)
        scales = [emitter.optional_vector(optional_argument(node, i)) for i in (plan.x_scale, plan.shift)]
        program = epilogue.emit_program(plan.program, node, emitter, rows, plan.width)
        op = emitter.bind(torch.ops.gnnc_cpu_valid.spmm.default, "spmm")
        arguments = [emitter.vector(rowptr), col, value, x, *scales]
        emitter.call(op, [*arguments, plan.reduce, plan.heads, *program])
        epilogue.check_scales(emitter)


def column(emitter: Emitter, node: Node, index: int | None) -> Expr | None:
    """Return col as int32; an int64 permutation is converted."""
    if index is None:
        return None
    col = argument_of(node, index)
    columns = emitter.vector(col)
    return columns if col.meta["val"].dtype == torch.int32 else expr("{}.int()", columns)


def edge_values(emitter: Emitter, node: Node, index: int | None, heads: int) -> Expr | None:
    """Return the edge values, dense ``[E]`` or ``[E, heads]``."""
    if index is None:
        return None
    value = argument_of(node, index)
    return emitter.vector(value) if value.meta["val"].dim() == 1 else emitter.dense(value, heads)
