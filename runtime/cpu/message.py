"""Lowering of general messages: the body runs in ATen, on blocks of edges that stay in cache."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from gnnc.ir.body import GROUPS, body_operands, widest_value
from gnnc.ir.message import pair_values
from gnnc.ir.nodes import argument, operand, unpack
from gnnc.runtime.cpu.body import STORE, Tensors, evaluate
from gnnc.runtime.plans.spmm import REDUCTIONS
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Refusal, planned

BLOCK_VALUES = 1 << 17
"""Elements of the widest value in a block: half a megabyte of floats."""

_MIN_EDGES = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """Parts of a launch that do not change between calls.

    Attributes:
        body: text of the body.
        reductions: names of the reductions of the body's values; empty for ``gnnc.edge_map``.
        edges: edges in a block.
    """

    body: str
    reductions: tuple[str, ...]
    edges: int


@kernel("gnnc.edge_map", "gnnc.message", backend="cpu", name="edge_blocks", priority=10, elements=("int8",))
class EdgeBlocks:
    """Kernel that gathers, computes and reduces block by block: no tensor of edges times features."""

    @staticmethod
    @planned
    def plan(node: Node) -> Plan:
        """Choose the block size by the body's widest value; refuse results that are not float32."""
        if node.meta["val"].dtype != torch.float32:
            raise Refusal(f"the result is {node.meta['val'].dtype}")
        build.fixed_width(node)
        body, reduce = argument(node, "body"), argument(node, "reduce", None)
        reductions = () if reduce is None else tuple(reduce.split(","))
        return Plan(body, reductions, block_edges(node))

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: Emitter) -> None:
        """Write the call."""
        rowptr, col = (emitter.vector(operand(node, name)) for name in ("rowptr", "col"))
        groups = [emitter.argument(list(group)) for group in unpack(node, *GROUPS.values())]
        out = emitter.allocate(node, dense=True)
        run = emitter.bind(run_blocks, "edge_blocks")
        emitter.call(run, [emitter.bind(plan, "plan"), rowptr, col, *groups, out.written])


def block_edges(node: Node) -> int:
    """Return the edges of a block by the body's widest value; raise Refusal where a width is not fixed."""
    operands = {name: operand.meta["val"] for name, operand in body_operands(node).items()}
    for value in operands.values():
        build.fixed_width(value)
    return max(BLOCK_VALUES // widest_value(argument(node, "body"), operands), _MIN_EDGES)


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
    out: Tensor,
) -> None:
    """Compute ``gnnc.edge_map`` or ``gnnc.message`` into ``out``, float32 ``[E or num_dst, F]``.

    The results of several reductions stand side by side: ``[num_dst, K * F]``.
    """
    width = out.shape[1] // max(len(plan.reductions), 1)
    parts = [out[:, k * width : (k + 1) * width] for k in range(len(plan.reductions))]
    states = [out.new_empty(3, width) if name == "softmax" else None for name in plan.reductions]
    if parts:
        out.zero_()
    for block in split(rowptr, col.shape[0], plan.edges):
        values = _values(plan, block, rowptr, col, dst, src, edge, const)
        if not plan.reductions:
            out[block.first_edge : block.last_edge] = values[0]
        for (name, operands), part, state in zip(
            pair_values(plan.reductions, values), parts, states, strict=True
        ):
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
    """Return the values of the body at the edges of a block, a list of ``[edges, F]``."""
    edges = slice(block.first_edge, block.last_edge)
    count = block.last_edge - block.first_edge
    groups = (dst, src, [t[edges] for t in edge], const)
    results = evaluate(plan.body, col[edges], lambda: rows_of(block, rowptr), groups)
    values = results if isinstance(results, list) else [results]
    return [value[:count].reshape(count, -1).contiguous() for value in values]


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
