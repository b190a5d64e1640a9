"""Lowering of sums over all edges of a body: the gradient of a weight or a bias inside of it.

A sum of what a thread can compute by itself is added up as it is computed. Values of bodies with stages are
added up tile by tile. A product over all edges, ``a^T b``, is computed on the tensor cores, tile by tile,
from two sides in shared memory; where these find no room there, they are stored and multiplied in FP32.
Sums of the sides of a product are added up beside it, by the same kernel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from gnnc.ir.body import GROUPS, body_inputs, body_values, name_operands, parse_body
from gnnc.ir.format import EDGE_LIST, Format
from gnnc.ir.joint_body import JointBody
from gnnc.ir.nodes import argument, operand, unpack
from gnnc.ir.summed_rows import summed_rows
from gnnc.ir.vjp import derived_body
from gnnc.runtime.cuda.emitter import CudaEmitter, blocks, length, pointer
from gnnc.runtime.cuda.kernels.body_stages import TILE, Side
from gnnc.runtime.cuda.kernels.column_sum import write_column_sum, write_sum_of_parts
from gnnc.runtime.cuda.kernels.edge_body import write_sides
from gnnc.runtime.cuda.kernels.epilogue import truth
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
from gnnc.runtime.row_program.build import Inner, Refusal, argument_of, fixed_width, planned

_MAX_WIDTH = 4096
_MOST_COLUMNS = 512
"""Columns of values that a warp adds up: 16 a thread."""
_MOST_FRAGMENTS = 12
"""Fragments of a product, of four sums a thread, that a warp has registers for, beside those of stages."""
_FRAGMENTS_ALONE = 8
"""Fragments of a product that each warp adds up by itself."""
_MOST_BLOCKS = 528
"""Blocks of a sum at most: they fill a large GPU. The same number on each: one order of the sum."""


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
        """Write the launches of the destinations of edges, and of the sums over them."""
        columns = emitter.vector(operand(node, "col"))
        rows = write_destinations(operand(node, "rowptr"), length(columns), emitter)
        if plan.together is not None:
            body, (a, b) = write_side_functor(plan.together, node, emitter)
            outs = emitter.allocate(node, dense=True), None, None
            _write_products(emitter, body, (a, b), rows, columns, outs)
            return
        bodies = [write_functor(side, node, emitter) for side in plan.sides]
        if len(bodies) == 1:
            _write_values(emitter, bodies[0], rows, columns, emitter.allocate(node, dense=True))
            return
        a, b = (_stored(body, rows, columns, emitter) for body in bodies)
        out = emitter.allocate(node, dense=True)
        write_product(emitter, (a, b), [body.width for body in bodies], length(columns), out)


@dataclass(frozen=True, slots=True)
class JointPlan:
    """A product over the edges, with the sums of one of its sides or of both.

    Attributes:
        sides: plan of the body of both sides.
        edges: numbers of the offsets and the columns among the operands.
        product: number of the product among the results.
        sums: numbers of the sums of both sides; None: it is not asked for.
    """

    sides: Plan
    edges: tuple[int, int]
    product: int
    sums: tuple[int | None, int | None]


@kernel("fused:bodies", backend="cuda", name="edge_sums", priority=10)
class EdgeSums:
    """Kernel ``edge_sum_products`` of ``sparse/edge_sum.cuh``, which adds up the sides, too."""

    @staticmethod
    @planned
    def plan(node: Node) -> JointPlan:
        """Take a product and sums of its sides, where the sides find room in shared memory."""
        inner = Inner(node)
        bodies = inner.some("gnnc.edge_sum.default")
        if not len(bodies) == len(inner.nodes) == len(inner.results):
            raise Refusal("holds other ops than sums over the edges, or sums that nothing reads")
        joint, rows = JointBody(), dict[Node, tuple[Node, ...]]()
        for body in bodies:
            (value,) = joint.add(argument(body, "body"), unpack(body, *GROUPS.values()))
            rows[body] = _sides(value)
        products = [body for body in bodies if len(rows[body]) == 2]
        if len(products) != 1:
            raise Refusal(f"holds {len(products)} products")
        numbers = [_sums_of(side, rows, inner) for side in dict.fromkeys(rows[products[0]])]
        if len(bodies) != 1 + sum(number is not None for number in numbers):
            raise Refusal("holds sums of other rows than the sides of its product")
        plan = _plan_sides(joint, rows[products[0]], inner, node)
        edges = {unpack(body, "rowptr", "col") for body in bodies}
        if len(edges) != 1:
            raise Refusal(f"the bodies read {len(edges)} CSRs")
        rowptr, col = (inner.operand(value, "the CSR") for value in next(iter(edges)))
        a, b = (*numbers, None)[:2]
        return JointPlan(plan, (rowptr, col), inner.results[products[0]], (a, b))

    @staticmethod
    def formats(plan: JointPlan, node: Node) -> tuple[Format, ...]:
        """Return the edge list."""
        return (EDGE_LIST,)

    @staticmethod
    def emit(plan: JointPlan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launches of the destinations of edges, and of the sums over them."""
        rowptr, col = (argument_of(node, number) for number in plan.edges)
        columns = emitter.vector(col)
        rows = write_destinations(rowptr, length(columns), emitter)
        body, (a, b) = write_side_functor(plan.sides, node, emitter)
        outs = [
            None if number is None else emitter.allocate(emitter.outputs(node)[number], dense=True)
            for number in (plan.product, *plan.sums)
        ]
        _write_products(emitter, body, (a, b), rows, columns, outs)


def _sums_of(side: Node, rows: Mapping[Node, tuple[Node, ...]], inner: Inner) -> int | None:
    """Return the number of the result that is the sum of a side; None: there is none."""
    found = [inner.results[body] for body, values in rows.items() if values == (side,)]
    return found[0] if len(found) == 1 else None


def _plan_sides(joint: JointBody, sides: tuple[Node, ...], inner: Inner, node: Node) -> Plan:
    """Return the plan of the body of both sides of a product; refuse sides that find no room."""
    text = derived_body(joint.text(list(sides)), lambda _, values: values)
    named = name_operands(joint.operands)
    operands = {name: argument_of(node, inner.operand(named[name], name)) for name in body_inputs(text)}
    for value in operands.values():
        fixed_width(value)
    plan = Plan(
        text, None, tuple((name, node.all_input_nodes.index(each)) for name, each in operands.items())
    )
    if not _has_room(plan, node):
        raise Refusal("the sides of the product find no room in shared memory")
    return plan


def _plan_together(node: Node) -> Plan | None:
    """Return the plan of a body whose values are both sides of a product; None where they find no room."""
    text = derived_body(argument(node, "body"), lambda _, values: _sides(values[0]))
    plan = unchecked_plan(node, text)
    return plan if _has_room(plan, node) else None


def _has_room(plan: Plan, node: Node) -> bool:
    """Return whether both sides of a product fit into shared memory, and its sums into registers."""
    try:
        functor, (a, b) = write_sides(plan.body, *plain_operands(plan, node))
    except Refusal:
        return False
    assert functor.block is not None
    return _grid(a, b, functor.block.warps) is not None


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
    emitter: CudaEmitter,
    body: Body,
    sides: tuple[Side, Side],
    rows: Expr,
    columns: Expr,
    outs: Sequence[Expr | None],
) -> None:
    """Write the launches that add up the products of two values of a body, and these values.

    Args:
        emitter: the program under construction.
        body: the body that leaves both values in shared memory.
        sides: places of both values in shared memory.
        rows: destination of every edge.
        columns: source of every edge.
        outs: the product, the sum of the first value and that of the second; None: it is not asked for.
    """
    assert body.block is not None
    a, b = sides
    grid = _grid(a, b, body.block.warps)
    assert grid is not None, "the plan has found one"
    types = ", ".join(
        f"gnnc::ProductSide<{side.type}, {side.columns}, {body.name}::{side.place}>" for side in sides
    )
    flags = ", ".join(truth(out is not None) for out in outs[1:])
    each = body.block.warps if grid == (1, 1) else 1
    kernel = f"gnnc::edge_sum_products<{types}, {grid[0]}, {grid[1]}, {flags}, {body.name}>"
    widths = a.columns * b.columns, a.columns, b.columns
    _write_sums(emitter, kernel, body, each, list(zip(widths, outs, strict=True)), rows, columns)


def _write_values(emitter: CudaEmitter, body: Body, rows: Expr, columns: Expr, out: Expr) -> None:
    """Write the launches that add up the values of a body."""
    if body.block is None or body.width > _MOST_COLUMNS:
        value, members = _value(body, rows, columns, emitter)
        write_column_sum(emitter, value, members, length(columns), body.width, out)
        return
    kernel = f"gnnc::edge_sum_values<{body.width}, {body.name}>"
    _write_sums(emitter, kernel, body, body.block.warps, [(body.width, out)], rows, columns)


def _write_sums(
    emitter: CudaEmitter,
    kernel: str,
    body: Body,
    each: int,
    results: Sequence[tuple[int, Expr | None]],
    rows: Expr,
    columns: Expr,
) -> None:
    """Write the launches of a kernel whose blocks give ``each`` rows of every result, and of their sums."""
    assert body.block is not None
    edges = length(columns)
    parts = [
        None if out is None else emitter.scratch(1, _MOST_BLOCKS * each * width, torch.float32, flat=True)
        for width, out in results
    ]
    count = expr("max(1, min({}, {}))", blocks(edges, body.block.warps * TILE), _MOST_BLOCKS)
    first, *others = (pointer(None if part is None else part.written) for part in parts)
    values = [pointer(rows), pointer(columns), first, edges, *others, *body.pointers]
    launch_tiles(kernel, count, values, body, emitter, resident=False)
    for (width, out), part in zip(results, parts, strict=True):
        if out is not None and part is not None:
            write_sum_of_parts(emitter, part, expr("{} * {}", count, each), width, out)


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
    """Return the rows of edges whose sum a body gives, or both sides of a product; refuse other bodies."""
    rows = summed_rows(value)
    if not rows:
        raise Refusal(f"the body ends in {value.target}, not in a sum over the edges alone")
    return rows
