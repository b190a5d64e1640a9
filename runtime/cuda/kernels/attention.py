"""Lowering of attention: logits, softmax and weighted sum in one pass over the edges."""

import torch
from torch.fx import Node

from gnnc.ir.format import RUN_TABLE, Format
from gnnc.ir.nodes import shape_of
from gnnc.runtime.cuda.driver.kernel_set import AS_COMPILED
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, length, pointer, round_up
from gnnc.runtime.cuda.formats.tables import (
    destinations,
    runs_arguments,
    write_columns,
    write_runs,
    write_staging,
)
from gnnc.runtime.cuda.kernels.edge_body import write_body
from gnnc.runtime.cuda.kernels.epilogue import literal, truth, write_epilogue
from gnnc.runtime.cuda.kernels.spmm import ELEMENTS, gathered_rows, packed_width
from gnnc.runtime.plans import attention
from gnnc.runtime.program.launches import Argument, Expr, count_of, expr
from gnnc.runtime.registry import BYTES, Decline, kernel
from gnnc.runtime.row_program.build import argument_of, optional_argument

_ADD, _DOT = 0, 1
_MAX_WIDTH = 1024


@kernel("fused:attention", backend="cuda", name="attention", priority=10, elements=BYTES)
class Attend:
    """Kernel of ``csrc/cuda/sparse/attention.cuh``; only logits of dot products reach memory."""

    @staticmethod
    def plan(node: Node) -> attention.Plan | Decline:
        """Take rows that fit into the registers of a warp."""
        plan = attention.plan(node)
        if isinstance(plan, Decline):
            return plan
        dtype = argument_of(node, plan.x).meta["val"].dtype
        if packed_width(plan.width, plan.heads, dtype) > _MAX_WIDTH:
            return Decline(f"rows of {plan.width} columns in {plan.heads} heads")
        if plan.kind == _DOT and len(argument_of(node, plan.a_src or 0).meta["val"].shape) < 2:
            return Decline("dot products of single values")
        return plan

    @staticmethod
    def formats(plan: attention.Plan, node: Node) -> tuple[Format, ...]:
        """Return the run table."""
        return (RUN_TABLE,)

    @staticmethod
    def emit(plan: attention.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launches: logits of dot products, sums, and attention weights where a node reads them."""
        rowptr = argument_of(node, plan.rowptr)
        rows = shape_of(rowptr)[0] - 1
        starts = emitter.vector(rowptr)
        col = write_columns(emitter, emitter.vector(argument_of(node, plan.col)))
        x = gathered_rows(emitter, argument_of(node, plan.x), plan.width, plan.heads)
        scale = emitter.optional_vector(optional_argument(node, plan.x_scale))
        additive = plan.kind == _ADD
        ends = [None, None]
        if additive:
            ends = [_dense(emitter, node, i, plan.heads) for i in (plan.a_src, plan.a_dst)]
        edge = _edge_term(plan, node, emitter, starts, col)
        runs = write_runs(emitter, starts, length(col), x.nbytes)
        alpha = None if plan.alpha is None else emitter.outputs(node)[plan.alpha]
        weights = None if alpha is None else emitter.allocate(alpha, dense=True)
        stats = None
        if weights is not None:
            stats = emitter.scratch(rows, 2 * plan.heads, torch.float32, flat=True).written
        epilogue, values = write_epilogue(plan.program, node, emitter, rows, plan.width)
        words = round_up(x.columns, 4) + round_up(2 * plan.heads, 4)
        arguments = [*runs_arguments(starts, col, runs), pointer(x.tensor), x.stride]
        arguments += map(pointer, (scale, *ends, edge, stats))
        arguments += write_staging(emitter, runs, words)
        config = _config(plan, node, emitter, additive, edge is not None)
        kernel, grid = f"gnnc::attention<{config}, {epilogue}>", expr("{}.blocks", runs)
        emitter.kernel_set.expect(kernel, "AttentionArgs", count_of(arguments))
        emitter.launch(kernel, grid, [*arguments, *values], block=AS_COMPILED)
        if weights is not None:
            kernel = f"gnnc::attention_weights<{config}>"
            emitter.launch(kernel, grid, [*arguments, pointer(weights.written)], block=AS_COMPILED)


def _config(plan: attention.Plan, node: Node, emitter: CudaEmitter, additive: bool, edge: bool) -> str:
    dtype = argument_of(node, plan.x).meta["val"].dtype
    slope = plan.slope if additive else 1.0
    constants = emitter.kernel_set.struct(
        "Constants",
        f"  static constexpr float kSlope = {literal(slope)};\n"
        f"  static constexpr float kEps = {literal(plan.eps)};\n",
    )
    return (
        f"gnnc::AttentionConfig<gnnc::Element::{ELEMENTS[dtype]}, {plan.width}, {plan.heads}, "
        f"{truth(additive)}, {truth(edge)}, {constants}>"
    )


def _dense(emitter: CudaEmitter, node: Node, index: int | None, width: int) -> Expr:
    assert index is not None
    return emitter.dense(argument_of(node, index), width)


def _edge_term(
    plan: attention.Plan, node: Node, emitter: CudaEmitter, rowptr: Expr, col: Expr
) -> Expr | None:
    """Return the term of the edges in the logits; for dot products, the logits themselves."""
    edge = None if plan.edge is None else _dense(emitter, node, plan.edge, plan.heads)
    if plan.kind != _DOT:
        return edge
    assert plan.a_src is not None and plan.a_dst is not None
    ends = {"i0": argument_of(node, plan.a_dst), "j0": argument_of(node, plan.a_src)}
    operands = {name: value.meta["val"] for name, value in ends.items()}
    strides = {name: emitter.row_stride(value) for name, value in ends.items()}
    rows = {name: emitter.matrix(value) for name, value in ends.items()}
    body = "t0 = aten.mul.Tensor(i0, j0); t1 = aten.sum.dim_IntList(t0, [-1]); "
    body += f"t2 = aten.mul.Tensor(t1, {float(plan.scale)!r}); "
    if edge is None:
        body += "return t2"
    else:
        assert plan.edge is not None
        operands["e0"] = argument_of(node, plan.edge).meta["val"]
        strides["e0"], rows["e0"] = plan.heads, edge
        body += "t3 = aten.add.Tensor(t2, e0); return t3"
    functor = write_body(body, operands, strides)
    name = emitter.kernel_set.struct("Body", functor.text)
    edges = length(col)
    targets = emitter.let_call("rows", emitter.bind(destinations, "destinations"), [rowptr, edges])
    logits = emitter.empty("logits", [expr("{} * {}", edges, plan.heads)], torch.float32)
    values: list[Argument] = [pointer(targets), pointer(col), pointer(logits.written), edges]
    values += [pointer(rows[operand]) for operand in functor.operands]
    grid = expr("({})", blocks(expr("{} * {}", edges, functor.width), BLOCK))
    emitter.launch(f"gnnc::edge_map<{functor.width}, {name}>", grid, values)
    return logits
