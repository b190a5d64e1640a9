"""Lowering of sums over all edges of a body: the gradient of a weight or a bias inside of it.

A sum of what a thread can compute by itself is added up as it is computed. Values of bodies with stages are
added up tile by tile. A product over all edges, ``a^T b``, is computed on the tensor cores, tile by tile,
from two sides in shared memory; where these find no room there, they are stored and multiplied in FP32.
"""

from dataclasses import dataclass

import torch
from torch.fx import Node

from gnnc.ir.body import body_values, parse_body
from gnnc.ir.format import EDGE_LIST, Format
from gnnc.ir.nodes import argument, first_operand, operand, unpack
from gnnc.ir.vjp import derived_body
from gnnc.runtime.cuda.emitter import CudaEmitter, blocks, length, pointer
from gnnc.runtime.cuda.kernels.body_stages import TILE, Side
from gnnc.runtime.cuda.kernels.column_sum import write_column_sum, write_sum_of_parts
from gnnc.runtime.cuda.kernels.edge_body import write_sides
from gnnc.runtime.cuda.kernels.gemm_tn_fp32 import write_product
from gnnc.runtime.cuda.kernels.message import (
    Body,
    Plan,
    body_plan,
    launch_tiles,
    plain_operands,
    unchecked_plan,
    write_destinations,
    write_edge_map,
    write_functor,
    write_side_functor,
)
from gnnc.runtime.program.launches import Expr, Operand, expr
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program.build import Refusal, planned

_MAX_WIDTH = 4096
_MOST_COLUMNS = 512
"""Columns of values that a warp adds up: 16 a thread."""
_MOST_FRAGMENTS = 12
"""Fragments of a product, of four sums a thread, that a warp has registers for, beside those of stages."""
_FRAGMENTS_ALONE = 8
"""Fragments of a product that each warp adds up by itself."""
_MOST_BLOCKS = 528
"""Blocks of a sum at most: they fill a large GPU. The same number on each: one order of the sum."""
_RESHAPES = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.squeeze.dim")


@dataclass(frozen=True, slots=True)
class SumPlan:
    """A sum over the edges: of the values of one body, or of the products of those of two.

    Attributes:
        sides: plans of one body, or of the two sides of a product.
        together: plan of the body of both sides of a product, where they find room in shared memory.
    """

    sides: tuple[Plan, ...]
    together: Plan | None = None


@kernel("gnnc.edge_sum", backend="cuda", name="edge_sum", priority=10)
class EdgeSum:
    """Kernels of ``sparse/edge_sum.cuh``, or those of ``column_sum.cuh`` and ``gemm_tn_fp32.cuh``."""

    @staticmethod
    @planned
    def plan(node: Node) -> SumPlan:
        """Take sums and products over the edges of what an ``edge_map`` could compute."""
        body = argument(node, "body")
        count = len(_sides(body_values(parse_body(body).graph)[0]))
        if count == 1 and node.meta["val"].numel() > _MAX_WIDTH:
            raise Refusal(f"{node.meta['val'].numel()} values an edge")
        texts = [
            derived_body(body, lambda _, values, number=number: _sides(values[0])[number])
            for number in range(count)
        ]
        together = _plan_together(node) if count == 2 else None
        sides = () if together is not None else tuple(body_plan(node, text) for text in texts)
        return SumPlan(sides, together)

    @staticmethod
    def formats(plan: SumPlan, node: Node) -> tuple[Format, ...]:
        """Return the edge list."""
        return (EDGE_LIST,)

    @staticmethod
    def emit(plan: SumPlan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launches."""
        columns = emitter.vector(operand(node, "col"))
        rows = write_destinations(operand(node, "rowptr"), length(columns), emitter)
        if plan.together is not None:
            body, (a, b) = write_side_functor(plan.together, node, emitter)
            _write_products(emitter, body, (a, b), rows, columns, emitter.allocate(node, dense=True))
            return
        bodies = [write_functor(side, node, emitter) for side in plan.sides]
        if len(bodies) == 1:
            _write_values(emitter, bodies[0], rows, columns, emitter.allocate(node, dense=True))
            return
        a, b = (_stored(body, rows, columns, emitter) for body in bodies)
        out = emitter.allocate(node, dense=True)
        write_product(emitter, (a, b), [body.width for body in bodies], length(columns), out)


def _plan_together(node: Node) -> Plan | None:
    """Return the plan of a body whose values are both sides of a product; None where they find no room."""
    text = derived_body(argument(node, "body"), lambda _, values: _sides(values[0]))
    plan = unchecked_plan(node, text)
    try:
        functor, (a, b) = write_sides(text, *plain_operands(plan, node))
    except Refusal:
        return None
    assert functor.block is not None
    return plan if _grid(a, b, functor.block.warps) is not None else None


def _grid(a: Side, b: Side, warps: int) -> tuple[int, int] | None:
    """Return how many warps lie below and beside each other on a product; None: it has too many fragments."""
    down, across = -(-a.columns // 16), -(-b.columns // 8)
    if down * across <= _FRAGMENTS_ALONE:
        return 1, 1
    shares = []
    for below in (count for count in range(1, warps + 1) if warps % count == 0):
        own = -(-down // below), -(-across * below // warps)
        shares.append((own[0] * own[1], 2 * own[0] + own[1], (below, warps // below)))
    most, _, grid = min(shares)
    return grid if most <= _MOST_FRAGMENTS else None


def _write_products(
    emitter: CudaEmitter, body: Body, sides: tuple[Side, Side], rows: Expr, columns: Expr, out: Expr
) -> None:
    """Write the launches that add up the products of two values of a body."""
    assert body.block is not None
    a, b = sides
    grid = _grid(a, b, body.block.warps)
    assert grid is not None, "the plan has found one"
    sizes = f"{a.columns}, {b.columns}, {body.name}::{a.place}, {body.name}::{b.place}, {grid[0]}, {grid[1]}"
    each = body.block.warps if grid == (1, 1) else 1
    kernel = f"gnnc::edge_sum_products<{sizes}, {body.name}>"
    _write_sum(emitter, kernel, body, each, a.columns * b.columns, rows, columns, out)


def _write_values(emitter: CudaEmitter, body: Body, rows: Expr, columns: Expr, out: Expr) -> None:
    """Write the launches that add up the values of a body."""
    if body.block is None or body.width > _MOST_COLUMNS:
        value, members = _value(body, rows, columns, emitter)
        write_column_sum(emitter, value, members, length(columns), body.width, out)
        return
    kernel = f"gnnc::edge_sum_values<{body.width}, {body.name}>"
    _write_sum(emitter, kernel, body, body.block.warps, body.width, rows, columns, out)


def _write_sum(
    emitter: CudaEmitter,
    kernel: str,
    body: Body,
    each: int,
    width: int,
    rows: Expr,
    columns: Expr,
    out: Expr,
) -> None:
    """Write the launches of a kernel whose blocks give ``each`` rows of sums, and of the sum of these."""
    assert body.block is not None
    edges = length(columns)
    parts = emitter.scratch(1, _MOST_BLOCKS * each * width, torch.float32, flat=True)
    count = expr("max(1, min({}, {}))", blocks(edges, body.block.warps * TILE), _MOST_BLOCKS)
    values = [pointer(rows), pointer(columns), pointer(parts.written), edges, *body.pointers]
    launch_tiles(kernel, count, values, body, emitter)
    write_sum_of_parts(emitter, parts, expr("{} * {}", count, each), width, out)


def _value(body: Body, rows: Expr, columns: Expr, emitter: CudaEmitter) -> tuple[str, list[Operand]]:
    """Return the functor of a column of an edge's value, with its members: computed, or read where stored."""
    if body.block is not None:
        text = f"  const float* x;\n  {_HEAD}\n    return x[edge * {body.width} + column];\n  }}\n"
        return emitter.kernel_set.struct("Value", text), [pointer(_stored(body, rows, columns, emitter))]
    text = f"  const int32_t* rows;\n  const int32_t* col;\n  {body.name} body;\n  {_HEAD}\n"
    text += "    float value[1];\n    body(rows[edge], col[edge], edge, nullptr, column, value);\n"
    text += "    return value[0];\n  }\n"
    return emitter.kernel_set.struct("Value", text), [pointer(rows), pointer(columns), *body.pointers]


_HEAD = "__device__ float operator()(int64_t edge, int column) const {"


def _stored(body: Body, rows: Expr, columns: Expr, emitter: CudaEmitter) -> Expr:
    """Write the launch that stores a body's value of every edge; return the matrix."""
    values = emitter.empty("s", (length(columns), body.width), torch.float32)
    write_edge_map(emitter, body, rows, columns, values)
    return values


def _sides(value: Node) -> tuple[Node, ...]:
    """Return the rows of edges whose sum a body gives, in that shape or another; ``a, b`` of ``a^T b``."""
    while str(value.target) in _RESHAPES:
        value = first_operand(value)
    transposed = False
    while str(value.target) == "aten.t.default":
        value, transposed = first_operand(value), not transposed
    if str(value.target) == "aten.mm.default":
        left, right = unpack(value, "self", "mat2")
        if str(left.target) == "aten.t.default":
            sides = first_operand(left), right
            return sides[::-1] if transposed else sides
    if transposed or str(value.target) != "aten.sum.dim_IntList" or list(argument(value, "dim")) != [0]:
        raise Refusal(f"the body ends in {value.target}, not in a sum over the edges alone")
    return (first_operand(value),)
