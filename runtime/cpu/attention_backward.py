"""Lowering of the gradient of attention: a pass over the edges by rows, and one by columns."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import shape_of
from gnnc.runtime.cpu import epilogue
from gnnc.runtime.cpu.gemm_tn import write_division
from gnnc.runtime.plans import attention_backward
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import Expr
from gnnc.runtime.registry import Decline, kernel
from gnnc.runtime.row_program.build import argument_of, optional_argument

_ELEMENTS = (torch.float32, torch.bfloat16, torch.int8)


@kernel("fused:attention_backward", backend="cpu", name="attention_backward", priority=10, elements=("int8",))
class AttentionBackward:
    """Kernels ``gnnc_cpu_valid.attention_backward_*``, which store nothing for an edge."""

    @staticmethod
    def plan(node: Node) -> attention_backward.Plan | Decline:
        """Take rows of float32, bfloat16 and int8."""
        plan = attention_backward.plan(node)
        if isinstance(plan, Decline):
            return plan
        for index in plan.ends[2:]:
            dtype = argument_of(node, index).meta["val"].dtype
            if dtype not in _ELEMENTS:
                return Decline(f"x or grad is {dtype}")
        return plan

    @staticmethod
    def emit(plan: attention_backward.Plan, node: Node, emitter: Emitter) -> None:
        """Write both launches."""
        nodes = [argument_of(node, index) for index in plan.edges]
        num_dst, num_src = (shape_of(rowptr)[0] - 1 for rowptr in (nodes[0], nodes[2]))
        rowptr, col, rowptr_t, col_t = map(emitter.vector, nodes)
        a_dst, a_src = (emitter.dense(argument_of(node, index), plan.heads) for index in plan.ends[:2])
        x, grad = (emitter.matrix(argument_of(node, index), plan.width) for index in plan.ends[2:])
        scales = [emitter.optional_vector(optional_argument(node, index)) for index in plan.scales]
        att_dst, att_src = (emitter.optional_vector(optional_argument(node, i)) for i in plan.att)
        results = [None if index is None else emitter.outputs(node)[index] for index in plan.results]

        def rows(result: Node | None, count: int) -> Expr:
            if result is None:
                return emitter.scratch(count, plan.heads, torch.float32, flat=True)
            return emitter.allocate(result, dense=True)

        statistics = emitter.scratch(num_dst, 4 * plan.heads, torch.float32, flat=True)
        da_dst, da_src = rows(results[0], num_dst), rows(results[1], num_src)
        by_rows = emitter.bind(
            torch.ops.gnnc_cpu_valid.attention_backward_rows.default, "attention_backward_rows"
        )
        ends = [rowptr, col, a_dst, a_src, x, grad, *scales, plan.slope, plan.eps, plan.heads]
        emitter.call(by_rows, [*ends, da_dst.written, statistics.written])
        vectors = [None if result is None else emitter.allocate_vector(result) for result in results[2:]]
        weights = [None if vector is None else vector.written for vector in vectors]
        program = epilogue.emit_program(plan.program, node, emitter, num_src, plan.width)
        by_columns = emitter.bind(
            torch.ops.gnnc_cpu_valid.attention_backward_columns.default, "attention_backward_columns"
        )
        ends = [
            rowptr_t,
            col_t,
            a_src,
            statistics,
            x,
            grad,
            *scales,
            att_dst,
            att_src,
            None if att_dst is None else da_dst,
        ]
        emitter.call(by_columns, [*ends, plan.slope, plan.heads, da_src.written, *weights, *program])
        for vector, divisor in zip(vectors, plan.divisors, strict=True):
            if vector is not None:
                write_division(emitter, vector, optional_argument(node, divisor))
        epilogue.check_scales(emitter)
