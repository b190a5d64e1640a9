"""Lowering of general messages and edge ops: their bodies become CUDA C++."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.format import EDGE_LIST, RUN_TABLE, Format
from gnnc.ir.nodes import argument, as_node, operand, unpack
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, length, pointer
from gnnc.runtime.cuda.formats.tables import (
    destinations,
    runs_arguments,
    write_runs,
    write_staging,
)
from gnnc.runtime.cuda.kernels.edge_body import write_body
from gnnc.runtime.plans import sddmm
from gnnc.runtime.program.launches import Argument, count_of, expr
from gnnc.runtime.registry import Decline, kernel
from gnnc.runtime.row_program.build import Refusal, fixed_width, planned

_EXACT = 2**24 // 128**2
"""Number of products of two int8 values whose sum is always exact in FP32."""
_SDDMM = {
    "dot": "t0 = aten.mul.Tensor(i0, j0); t1 = aten.sum.dim_IntList(t0, [-1]); return t1",
    "add": "t0 = aten.add.Tensor(i0, j0); return t0",
    "sub": "t0 = aten.sub.Tensor(i0, j0); return t0",
    "mul": "t0 = aten.mul.Tensor(i0, j0); return t0",
    "copy_src": "return j0",
    "copy_dst": "return i0",
}
_SCALED_DOT = (
    "t0 = aten.mul.Tensor(i0, j0); t1 = aten.sum.dim_IntList(t0, [-1]); t2 = aten.mul.Tensor(t1, i1); "
    "t3 = aten.mul.Tensor(t2, j1); return t3",
    "t0 = aten.mul.Tensor(i0, j0); t1 = aten.sum.dim_IntList(t0, [-1]); t2 = aten.unsqueeze.default(i1, -1); "
    "t3 = aten.mul.Tensor(t1, t2); t4 = aten.unsqueeze.default(j1, -1); t5 = aten.mul.Tensor(t3, t4); "
    "return t5",
)
"""Bodies of dot products of rows with scales ``i1`` and ``j1``: one result an edge, and one a head."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Parts of a launch that do not change between calls.

    Attributes:
        body: text of the body.
        reduce: name of the reduction; None for ops whose result has one row an edge.
        operands: for every operand its name in the body and its position in ``all_input_nodes``.
    """

    body: str
    reduce: str | None
    operands: tuple[tuple[str, int], ...]


@kernel("gnnc.edge_map", "gnnc.message", backend="cuda", name="edge_body", priority=10, elements=("int8",))
class EdgeBody:
    """Kernel of ``csrc/cuda/sparse/edge.cuh``: a thread computes a column of the body; no E x F matrix."""

    @staticmethod
    @planned
    def plan(node: Node) -> Plan:
        """Take bodies whose elements a thread can compute by itself."""
        if node.meta["val"].dtype != torch.float32:
            raise Refusal(f"the result is {node.meta['val'].dtype}")
        operands = _operands(node)
        for value in operands.values():
            fixed_width(value)
        positions = tuple((name, node.all_input_nodes.index(value)) for name, value in operands.items())
        plan = Plan(argument(node, "body"), argument(node, "reduce", None), positions)
        _functor(plan, node, {name: 1 for name in operands})
        return plan

    @staticmethod
    def formats(plan: Plan, node: Node) -> tuple[Format, ...]:
        """Return the run table for reductions, the edge list for results with one row an edge."""
        return (EDGE_LIST,) if plan.reduce is None else (RUN_TABLE,)

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launch."""
        _emit(plan, node, emitter)


@kernel("gnnc.sddmm", "gnnc.qsddmm", backend="cuda", name="edge_sddmm", priority=5, elements=("int8",))
class EdgeSddmm:
    """Kernel `EdgeBody` for products and sums of the rows at an edge's ends."""

    @staticmethod
    def plan(node: Node) -> Plan | Decline:
        """Take operands of one shape a row; int8 only where FP32 sums of their products are exact."""
        operation = sddmm.plan(node)
        if isinstance(operation, Decline):
            return operation
        a, b, op = unpack(node, "a", "b", "op")
        scales = [argument(node, scale, None) for scale in ("a_scale", "b_scale")]
        dims = node.meta["val"].dim()
        if operation.is_scaled and dims > len(_SCALED_DOT):
            return Decline(f"dot products of {dims - 1} dimensions an edge")
        body = _SCALED_DOT[dims - 1] if operation.is_scaled else _SDDMM[str(op)]
        named = zip(("i0", "j0", "i1", "j1"), (a, b, *scales), strict=True)
        operands = [(name, value) for name, value in named if name in body]
        first = as_node(operands[0][1]).meta["val"]
        if op == "dot" and first.dim() == 1:
            return Decline("rows of one value")
        if first.dtype == torch.int8 and first.shape[-1] > _EXACT:
            return Decline(f"sums of {first.shape[-1]} int8 products are not exact in float32")
        if op == "dot" and dims != as_node(a).meta["val"].dim() - 1:
            return Decline("the dot product is not over the last dimension")
        positions = tuple((name, node.all_input_nodes.index(as_node(value))) for name, value in operands)
        return Plan(body, None, positions)

    @staticmethod
    def formats(plan: Plan, node: Node) -> tuple[Format, ...]:
        """Return the run table for reductions, the edge list for results with one row an edge."""
        return (EDGE_LIST,) if plan.reduce is None else (RUN_TABLE,)

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launch."""
        _emit(plan, node, emitter)


def _operands(node: Node) -> dict[str, Node]:
    groups = zip("ijec", unpack(node, "dst", "src", "edge", "const"), strict=True)
    return {f"{kind}{number}": value for kind, group in groups for number, value in enumerate(group)}


def _functor(plan: Plan, node: Node, strides: dict[str, int]) -> Any:
    values = {name: node.all_input_nodes[index].meta["val"] for name, index in plan.operands}
    return write_body(plan.body, values, strides)


def _emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
    rowptr, col = operand(node, "rowptr"), operand(node, "col")
    tensors, strides = {}, {}
    for name, index in plan.operands:
        value = node.all_input_nodes[index]
        if name[0] == "c":
            tensors[name], strides[name] = emitter.vector(value), 1
        else:
            tensors[name], strides[name] = emitter.matrix(value), emitter.row_stride(value)
    functor = _functor(plan, node, strides)
    body = emitter.kernel_set.struct("Body", functor.text)
    pointers = [pointer(tensors[name]) for name in functor.operands] or [pointer(None)]
    columns = emitter.vector(col)
    edges = length(columns)
    if plan.reduce is None:
        function = emitter.bind(destinations, "destinations")
        rows = emitter.let_call("rows", function, [emitter.vector(rowptr), edges])
        out = emitter.allocate(node, dense=True)
        values: list[Argument] = [pointer(rows), pointer(columns), pointer(out.written), edges, *pointers]
        grid = expr("({})", blocks(expr("{} * {}", edges, functor.width), BLOCK))
        emitter.launch(f"gnnc::edge_map<{functor.width}, {body}>", grid, values)
        return
    runs = write_runs(emitter, emitter.vector(rowptr), edges, 4 * functor.width)
    out = emitter.allocate(node, dense=True)
    stride = emitter.row_stride(node)
    lanes = next(lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes >= functor.width or lanes == 32)
    values = runs_arguments(emitter.vector(rowptr), columns, runs)
    values += write_staging(emitter, runs, functor.width)
    count = expr("{}.count", runs)
    values += [pointer(out.written), count]
    kernel = f"gnnc::message<{functor.width}, {stride}, {lanes}, gnnc::Join::{plan.reduce}, {body}>"
    emitter.kernel_set.expect(kernel, "MessageArgs", count_of(values))
    emitter.launch(kernel, blocks(count, BLOCK // lanes), [*values, *pointers])
