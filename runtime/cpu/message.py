"""Lowering of ops with a body: it runs in ATen, on blocks of edges that stay in cache."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from gnnc.ir.body import GROUPS, body_operands, measure_body, values_of
from gnnc.ir.message import pair_values, values_taken
from gnnc.ir.nodes import argument, unpack
from gnnc.runtime.cpu.body import STORE, Tensors, evaluate
from gnnc.runtime.cpu.parts import Part, check_float32, part_of
from gnnc.runtime.plans.spmm import REDUCTIONS
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import tuple_of
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import planned

BLOCK_VALUES = 1 << 17
"""Elements of the widest value in a block: half a megabyte of floats."""

_MIN_EDGES = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """Constants of a pass over the edges.

    Attributes:
        body: text of the body.
        parts: the results, in the order of the body's values.
        edges: edges in a block.
        shared: positions of the nodes of the body with a value that edges share.
    """

    body: str
    parts: tuple[Part, ...]
    edges: int
    shared: frozenset[int] = frozenset()


@kernel("gnnc.edge_map", "gnnc.message", backend="cpu", name="edge_blocks", priority=10, elements=("int8",))
class EdgeBlocks:
    """Kernel that gathers, computes and reduces block by block: no tensor of edges times features."""

    @staticmethod
    @planned
    def plan(node: Node) -> Plan:
        """Choose the block size by the body's widest value; refuse results that are not float32."""
        return plan_body(argument(node, "body"), (part_of(node),), (node,), body_operands(node))

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: Emitter) -> None:
        """Write the call that runs the body block by block."""
        emit_pass(emitter, plan, unpack(node, "rowptr", "col", *GROUPS.values()), (node,))


@kernel("gnnc.edge_sum", backend="cpu", name="edge_sum_blocks", priority=10)
class EdgeSum(EdgeBlocks):
    """Kernel that gathers, computes and sums block by block: no tensor of edges times features."""


def plan_body(
    body: str, parts: tuple[Part, ...], results: Sequence[Node], operands: Mapping[str, Node]
) -> Plan:
    """Choose the block size by the widest value of a body.

    Args:
        body: the body.
        parts: the results.
        results: the node of each result.
        operands: the body's operands, by name.

    Raises:
        Refusal: a result is not float32, or a width is not fixed.
    """
    check_float32(results)
    for value in operands.values():
        build.fixed_width(value)
    width, shared = measure_body(body, values_of(operands))
    return Plan(body, parts, max(BLOCK_VALUES // width, _MIN_EDGES), shared)


def emit_pass(emitter: Emitter, plan: Plan, operands: Sequence[Any], results: Sequence[Node]) -> None:
    """Write the call of a pass over edges; ``operands`` are offsets, columns, and the groups of a body."""
    rowptr, col = (emitter.vector(value) for value in operands[:2])
    groups = [emitter.argument(list(group)) for group in operands[2:]]
    outs = tuple_of(emitter.allocate(result, dense=True).written for result in results)
    run = emitter.bind(run_blocks, "edge_blocks")
    emitter.call(run, [emitter.bind(plan, "plan"), rowptr, col, *groups, outs])


@dataclass(frozen=True, slots=True)
class Block:
    """Edges ``first_edge .. last_edge`` of rows ``first_row .. last_row``.

    Attributes:
        whole: whether the block has all edges of its rows; else it is a piece of one row.
    """

    first_row: int
    last_row: int
    first_edge: int
    last_edge: int
    whole: bool


def run_blocks(
    plan: Plan,
    rowptr: Tensor,
    col: Tensor,
    dst: Tensors,
    src: Tensors,
    edge: Tensors,
    const: Tensors,
    outs: Sequence[Tensor],
) -> None:
    """Compute the results of a body into ``outs``, float32: one for each part of the plan.

    A result by rows or by sources is ``[num, F]``, where those of several reductions stand side by side
    (``[num_dst, K * F]``), one by edges ``[E, F]``; one of all edges has the elements of the body's value.
    """
    states = [_prepare(part, out) for part, out in zip(plan.parts, outs, strict=True)]
    for block in split(rowptr, col.shape[0], plan.edges):
        values = iter(_values(plan, block, rowptr, col, dst, src, edge, const))
        for part, out, state in zip(plan.parts, outs, states, strict=True):
            _write(part, block, rowptr, col, values, state, out)


def _prepare(part: Part, out: Tensor) -> list[Tensor | None]:
    """Fill a result that is added up with zeros; return what passes between pieces of a row, by reduction."""
    if part.kind != "edges":
        out.zero_()
    return [
        out.new_empty(3, out.shape[1] // len(part.reductions)) if name == "softmax" else None
        for name in part.reductions
    ]


def _write(
    part: Part,
    block: Block,
    rowptr: Tensor,
    col: Tensor,
    values: Iterator[Tensor],
    states: list[Tensor | None],
    out: Tensor,
) -> None:
    """Put the values of a block into a result."""
    edges = slice(block.first_edge, block.last_edge)
    match part.kind:
        case "edges":
            out[edges] = _rows(next(values), block)
        case "all":
            out += next(values).reshape(out.shape)
        case "sources":
            out.index_add_(0, col[edges], _rows(next(values), block))
        case "rows":
            taken = [
                _rows(next(values), block) for name in part.reductions for _ in range(values_taken(name))
            ]
            _reduce(part.reductions, block, rowptr, taken, states, out)


def _rows(values: Tensor, block: Block) -> Tensor:
    """Return the values of the edges of a block, without the padding, as a matrix."""
    count = block.last_edge - block.first_edge
    return values[:count].reshape(count, -1).contiguous()


def _reduce(
    names: tuple[str, ...],
    block: Block,
    rowptr: Tensor,
    values: Tensors,
    states: list[Tensor | None],
    out: Tensor,
) -> None:
    width = out.shape[1] // len(names)
    for k, (name, operands) in enumerate(pair_values(names, values)):
        part, state = out[:, k * width : (k + 1) * width], states[k]
        if state is not None:
            _softmax_sum(block, rowptr, operands, state, part)
        elif block.whole:
            _reduce_rows(name, block, rowptr, operands[0], part)
        else:
            _reduce_piece(name, block, rowptr, operands[0], part)


def split(rowptr: Tensor, num_edges: int, edges: int) -> Iterator[Block]:
    """Cut the rows into blocks of about ``edges`` edges; a longer row is cut into pieces."""
    if num_edges == 0:
        return
    marks = torch.searchsorted(rowptr, torch.arange(0, num_edges, edges, dtype=rowptr.dtype), right=True) - 1
    rows = [*marks.unique().tolist(), rowptr.numel() - 1]
    starts = rowptr[torch.tensor(rows)].tolist()
    for i in range(len(rows) - 1):
        yield from _cut(rowptr, (rows[i], rows[i + 1]), (starts[i], starts[i + 1]), edges)


def _cut(rowptr: Tensor, rows: tuple[int, int], span: tuple[int, int], edges: int) -> Iterator[Block]:
    """Yield the blocks of some rows; only the first row can be a long one, which is cut into pieces."""
    first, last = rows
    begin, end = span
    after = int(rowptr[first + 1])
    if after - begin > 2 * edges:
        for start in range(begin, after, edges):
            yield Block(first, first + 1, start, min(start + edges, after), False)
        first, begin = first + 1, after
    if begin < end:
        yield Block(first, last, begin, end, True)


def _values(
    plan: Plan,
    block: Block,
    rowptr: Tensor,
    col: Tensor,
    dst: Tensors,
    src: Tensors,
    edge: Tensors,
    const: Tensors,
) -> Tensors:
    """Return the values of the body at the edges of a block and of its padding, or those that edges share."""
    edges = slice(block.first_edge, block.last_edge)
    groups = (dst, src, [t[edges] for t in edge], const)
    return evaluate(plan.body, plan.shared, col[edges], lambda: rows_of(block, rowptr), groups)


def rows_of(block: Block, rowptr: Tensor) -> Tensor:
    """Return the row of every edge of a block."""
    count = block.last_edge - block.first_edge
    if not block.whole:
        return torch.full((count,), block.first_row)
    degrees = rowptr[block.first_row : block.last_row + 1].diff()
    rows = torch.arange(block.first_row, block.last_row)
    return torch.repeat_interleave(rows, degrees, output_size=count)


def _softmax_sum(block: Block, rowptr: Tensor, operands: Tensors, state: Tensor, out: Tensor) -> None:
    """Sum values by the softmax of logits; ``state`` passes from one piece of a row to the next."""
    kernel, rows = torch.ops.gnnc_cpu_valid.softmax_sum, out[block.first_row : block.last_row]
    if block.whole:
        kernel(_starts(block, rowptr), *operands, None, rows)
        return
    if block.first_edge == rowptr[block.first_row]:
        state.zero_()
        state[0].fill_(-math.inf)
    kernel(torch.tensor([0, block.last_edge - block.first_edge]), *operands, state, rows)


def _starts(block: Block, rowptr: Tensor) -> Tensor:
    return rowptr[block.first_row : block.last_row + 1] - block.first_edge


def _reduce_rows(reduce: str, block: Block, rowptr: Tensor, values: Tensor, out: Tensor) -> None:
    _segments(reduce, _starts(block, rowptr), values, out[block.first_row : block.last_row])


def _segments(reduce: str, starts: Tensor, values: Tensor, out: Tensor) -> None:
    number = REDUCTIONS[reduce]
    torch.ops.gnnc_cpu_valid.spmm(
        starts, None, None, values.contiguous(), None, None, number, 1, STORE, (), (), (out,)
    )


def _reduce_piece(reduce: str, block: Block, rowptr: Tensor, values: Tensor, out: Tensor) -> None:
    row = out[block.first_row]
    begin, end = rowptr[block.first_row : block.last_row + 1].tolist()
    if reduce in ("sum", "mean"):
        # ATen adds up a single column in an order that depends on the number of threads.
        piece = values.new_empty(1, values.shape[1])
        _segments("sum", torch.tensor([0, values.shape[0]]), values, piece)
        row += piece[0]
        if reduce == "mean" and block.last_edge == end:
            row /= end - begin
        return
    extreme = values.amax(0) if reduce == "max" else values.amin(0)
    if block.first_edge > begin:
        extreme = torch.maximum(row, extreme) if reduce == "max" else torch.minimum(row, extreme)
    row.copy_(extreme)
