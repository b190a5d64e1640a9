"""Lowering of sums over all edges of a body: the gradient of a weight or a bias inside of it.

A sum of what a thread can compute by itself is added up as it is computed. A body with products with weights
stores its value of every edge first, and so does a product over all edges, ``a^T b``, whose two sides are
stored and multiplied by cuBLAS.
"""

from dataclasses import dataclass

import torch
from torch.fx import Node

from gnnc.ir.body import body_values, parse_body
from gnnc.ir.format import EDGE_LIST, Format
from gnnc.ir.nodes import argument, first_operand, operand, unpack
from gnnc.ir.vjp import derived_body
from gnnc.runtime.cuda.emitter import CudaEmitter, length, pointer
from gnnc.runtime.cuda.kernels.column_sum import write_column_sum
from gnnc.runtime.cuda.kernels.message import (
    Body,
    Plan,
    body_plan,
    write_destinations,
    write_edge_map,
    write_functor,
)
from gnnc.runtime.program.launches import Expr, Operand, expr
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program.build import Refusal, planned

_MAX_WIDTH = 4096
_RESHAPES = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.squeeze.dim")


@dataclass(frozen=True, slots=True)
class SumPlan:
    """A sum over the edges: of the values of one body, or of the products of those of two.

    Attributes:
        sides: plans of one body, or of the two sides of a product.
    """

    sides: tuple[Plan, ...]


@kernel("gnnc.edge_sum", backend="cuda", name="edge_sum", priority=10)
class EdgeSum:
    """Kernel of ``csrc/cuda/dense/column_sum.cuh`` on the values of a body, or a product by ``torch.mm``."""

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
        return SumPlan(tuple(body_plan(node, text) for text in texts))

    @staticmethod
    def formats(plan: SumPlan, node: Node) -> tuple[Format, ...]:
        """Return the edge list."""
        return (EDGE_LIST,)

    @staticmethod
    def emit(plan: SumPlan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launches."""
        columns = emitter.vector(operand(node, "col"))
        rows = write_destinations(operand(node, "rowptr"), length(columns), emitter)
        bodies = [write_functor(side, node, emitter) for side in plan.sides]
        if len(bodies) == 1:
            value, members = _value(bodies[0], rows, columns, emitter)
            out = emitter.allocate(node, dense=True)
            write_column_sum(emitter, value, members, length(columns), bodies[0].width, out)
            return
        a, b = (_stored(body, rows, columns, emitter) for body in bodies)
        out = emitter.allocate(node, dense=True)
        product = expr("{}.view({}, {})", out, *(body.width for body in bodies))
        emitter.call(emitter.bind(torch.mm, "mm"), [expr("{}.t()", a), b], {"out": product.written})


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
