"""Lowering of general messages and edge ops: their bodies become CUDA C++."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from gnnc.ir.body import body_operands
from gnnc.ir.format import EDGE_LIST, RUN_TABLE, Format
from gnnc.ir.message import reductions
from gnnc.ir.nodes import argument, as_node, op_name, operand, unpack
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, length, pointer
from gnnc.runtime.cuda.formats.tables import (
    destinations,
    runs_arguments,
    write_runs,
    write_staging,
)
from gnnc.runtime.cuda.kernels.body_stages import TILE, Block, Functor, Side
from gnnc.runtime.cuda.kernels.edge_body import write_body, write_sides
from gnnc.runtime.cuda.kernels.epilogue import TYPES
from gnnc.runtime.plans import sddmm
from gnnc.runtime.program.launches import Argument, Expr, Operand, count_of, expr
from gnnc.runtime.registry import BYTES, Decline, kernel
from gnnc.runtime.row_program.build import Refusal, fixed_width, planned

_MOST_STATES = 32
"""Words of the states of a thread's columns, at most, where stages make it hold all of them at a time."""
_STORED = {"edge_map": (torch.float32, torch.float16, torch.bfloat16)}
"""Dtypes that an op stores; those with a reduction store FP32."""
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


@kernel("gnnc.edge_map", "gnnc.message", backend="cuda", name="edge_body", priority=10, elements=BYTES)
class EdgeBody:
    """Kernel of ``csrc/cuda/sparse/edge.cuh``: threads compute columns of the body; no E x F matrix."""

    @staticmethod
    @planned
    def plan(node: Node) -> Plan:
        """Take bodies whose elements a thread can compute by itself."""
        return body_plan(node)

    @staticmethod
    def formats(plan: Plan, node: Node) -> tuple[Format, ...]:
        """Return the run table for reductions, the edge list for results with one row an edge."""
        return (EDGE_LIST,) if plan.reduce is None else (RUN_TABLE,)

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launch that reduces the values of the body, or stores one for each edge."""
        _emit(plan, node, emitter)


@kernel("gnnc.sddmm", "gnnc.qsddmm", backend="cuda", name="edge_sddmm", priority=5, elements=BYTES)
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
        """Write the launch that stores a value for each edge."""
        _emit(plan, node, emitter)


def body_plan(node: Node, body: str | None = None) -> Plan:
    """Return the plan of an op with a body; raise Refusal where a thread cannot compute an element.

    Args:
        node: the op.
        body: text of the body on the op's operands; that of the op by default.
    """
    plan = unchecked_plan(node, body or argument(node, "body"))
    reduced = plan.reduce is not None
    _check_states(plan, write_body(plan.body, *plain_operands(plan, node), reduced=reduced))
    return plan


def unchecked_plan(node: Node, body: str) -> Plan:
    """Return the plan of a body on the operands of an op whose result and widths kernels of bodies take."""
    dtype = node.meta["val"].dtype
    if dtype not in _STORED.get(op_name(node), (torch.float32,)):
        raise Refusal(f"the result is {dtype}")
    operands = body_operands(node)
    for value in operands.values():
        fixed_width(value)
    positions = tuple((name, node.all_input_nodes.index(value)) for name, value in operands.items())
    return Plan(body, argument(node, "reduce", None), positions)


def plain_operands(plan: Plan, node: Node) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Return the fake tensors of a body's operands, and the strides of their rows where these are dense."""
    values = _operands(plan, node)
    return values, {name: prod(map(int, value.shape[1:])) for name, value in values.items()}


def _operands(plan: Plan, node: Node) -> dict[str, torch.Tensor]:
    return {name: node.all_input_nodes[index].meta["val"] for name, index in plan.operands}


def _check_states(plan: Plan, functor: Functor) -> None:
    """Refuse states of reductions that a thread has no registers for."""
    if functor.block is not None and plan.reduce is not None:
        words = -(-functor.width // 32) * sum(map(_words, reductions(plan.reduce)))
        if words > _MOST_STATES:
            raise Refusal(f"the reductions of the body take {words} registers of a thread")


def _words(reduce: str) -> int:
    """Return the words of the state of a reduction: ``gnnc::Reduction::kWords``."""
    return 3 if reduce == "softmax" else 1


@dataclass(frozen=True, slots=True)
class Body:
    """C++ struct of a body in a program, and what its members are.

    Attributes:
        name: the struct.
        width: columns of an edge's value.
        pointers: the members.
        block: block of threads that runs the stages; None where there are none.
    """

    name: str
    width: int
    pointers: tuple[Operand, ...]
    block: Block | None


def write_functor(plan: Plan, node: Node, emitter: CudaEmitter, *, in_vectors: bool = False) -> Body:
    """Return the body of an op as a struct of the program's kernels; ``in_vectors`` as in ``write_body``."""
    tensors, strides = operand_matrices(plan, node, emitter)
    operands, reduced = _operands(plan, node), plan.reduce is not None
    functor = write_body(plan.body, operands, strides, in_vectors=in_vectors, reduced=reduced)
    return body_of(functor, tensors, emitter)


def write_side_functor(plan: Plan, node: Node, emitter: CudaEmitter) -> tuple[Body, tuple[Side, ...]]:
    """Return a body that leaves its values in shared memory as a struct, and where they lie."""
    tensors, strides = operand_matrices(plan, node, emitter)
    functor, sides = write_sides(plan.body, _operands(plan, node), strides)
    return body_of(functor, tensors, emitter), sides


def operand_matrices(plan: Plan, node: Node, emitter: CudaEmitter) -> tuple[dict[str, Expr], dict[str, int]]:
    """Return the tensors of a body's operands in the program, and the strides of their rows."""
    tensors: dict[str, Expr] = {}
    strides: dict[str, int] = {}
    for name, index in plan.operands:
        value = node.all_input_nodes[index]
        if name[0] == "c":
            tensors[name], strides[name] = emitter.vector(value), 1
        else:
            tensors[name], strides[name] = emitter.matrix(value), emitter.row_stride(value)
    return tensors, strides


def body_of(functor: Functor, tensors: Mapping[str, Expr], emitter: CudaEmitter) -> Body:
    """Return a functor as a struct of the program's kernels, whose members are tensors of the program."""
    pointers = [pointer(tensors[name]) for name in functor.operands] or [pointer(None)]
    name = emitter.kernel_set.struct("Body", functor.text)
    return Body(name, functor.width, tuple(pointers), functor.block)


def write_destinations(rowptr: Node, edges: Operand, emitter: CudaEmitter) -> Expr:
    """Return the destination of every edge, int32 ``[E]``."""
    function = emitter.bind(destinations, "destinations")
    return emitter.let_call("rows", function, [emitter.vector(rowptr), edges])


def _emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
    body = write_functor(plan, node, emitter)
    rowptr, columns = operand(node, "rowptr"), emitter.vector(operand(node, "col"))
    if plan.reduce is None:
        rows = write_destinations(rowptr, length(columns), emitter)
        dtype = node.meta["val"].dtype
        write_edge_map(emitter, body, rows, columns, emitter.allocate(node, dense=True), dtype)
    else:
        starts = emitter.vector(rowptr)
        runs = write_runs(emitter, starts, length(columns), 4 * body.width)
        out = emitter.allocate(node, dense=True)
        edges = runs_arguments(starts, columns, runs)
        write_message(emitter, body, plan.reduce, runs, edges, out, emitter.row_stride(node))


def write_edge_map(
    emitter: CudaEmitter,
    body: Body,
    rows: Expr,
    columns: Expr,
    out: Expr,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the launch that stores a body's value of every edge.

    Args:
        emitter: the program under construction.
        body: the body.
        rows: destination of every edge.
        columns: source of every edge.
        out: the result, one dense row an edge.
        dtype: dtype of the result: FP32, or of 16 bits.
    """
    edges = length(columns)
    parameters = f"{TYPES[dtype]}, {body.width}, {body.name}"
    values: list[Argument] = [pointer(rows), pointer(columns), pointer(out.written), edges, *body.pointers]
    if body.block is None:
        grid = expr("({})", blocks(expr("{} * {}", edges, body.width), BLOCK))
        emitter.launch(f"gnnc::edge_map<{parameters}>", grid, values)
        return
    grid = blocks(edges, body.block.warps * TILE)
    launch_tiles(f"gnnc::edge_map_tiles<{parameters}>", grid, values, body, emitter)


def launch_tiles(
    kernel: str,
    grid: Expr,
    values: Sequence[Argument],
    body: Body,
    emitter: CudaEmitter,
    *,
    resident: bool = True,
) -> None:
    """Write the launch of a kernel that runs the stages of a body.

    Args:
        kernel: C++ name of the kernel.
        grid: number of blocks.
        values: arguments of the kernel.
        body: the body.
        emitter: the program under construction.
        resident: launch no more blocks than run at a time: each loads the weights.
    """
    assert body.block is not None
    condition = f"EdgeTile<{body.name}>::kBytes == {body.block.nbytes}"
    emitter.kernel_set.require(kernel, condition, "stages are given another block")
    threads, shared = 32 * body.block.warps, body.block.nbytes
    emitter.launch(kernel, grid, values, block=threads, shared=shared, resident=resident)


def write_message(
    emitter: CudaEmitter,
    body: Body,
    reduce: str,
    runs: Expr,
    edges: Sequence[Argument],
    out: Expr,
    stride: int,
) -> None:
    """Write the launch that reduces a body's values by destination.

    Args:
        emitter: the program under construction.
        body: the body.
        reduce: names of the reductions, joined by commas.
        runs: the run table.
        edges: members of ``gnnc::Runs``.
        out: the result, one row a destination.
        stride: elements from one row of the result to the next.
    """
    names = reductions(reduce)
    count = expr("{}.count", runs)
    staging = write_staging(emitter, runs, body.width * sum(map(_words, names)))
    values = [*edges, *staging, pointer(out.written), count]
    joins = ", ".join(f"gnnc::Join::{name}" for name in names)
    if body.block is not None:
        kernel = f"gnnc::message_tiles<{body.width}, {stride}, gnnc::Reductions<{joins}>, {body.name}>"
        emitter.kernel_set.expect(kernel, "MessageArgs", count_of(values))
        launch_tiles(kernel, blocks(count, body.block.warps), [*values, *body.pointers], body, emitter)
        return
    lanes = next(lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes >= body.width or lanes == 32)
    kernel = f"gnnc::message<{body.width}, {stride}, {lanes}, gnnc::Reductions<{joins}>, {body.name}>"
    emitter.kernel_set.expect(kernel, "MessageArgs", count_of(values))
    emitter.launch(kernel, blocks(count, BLOCK // lanes), [*values, *body.pointers])
