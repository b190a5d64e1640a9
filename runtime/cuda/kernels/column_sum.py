"""Lowering of sums over the rows of a matrix, such as the gradient of a bias."""

from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, operand
from gnnc.runtime.cuda.emitter import CudaEmitter, blocks, pointer
from gnnc.runtime.cuda.kernels.epilogue import TYPES
from gnnc.runtime.program.launches import Expr, Operand, expr
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Refusal, planned

_MOST_SHARES = 1024
"""Blocks of a sum at most: what fills a large GPU. The same on each, so that all add up in one order."""
_SHARE = 64
"""Rows of a block at least."""
_MAX_WIDTH = 4096


@kernel("aten.sum", backend="cuda", name="column_sum", priority=10)
class ColumnSum:
    """Kernel of ``csrc/cuda/dense/column_sum.cuh``: blocks add up shares of the rows, without atomics."""

    @staticmethod
    @planned
    def plan(node: Node) -> int:
        """Return the columns; refuse sums that are not over the first dimension alone, of float32 rows."""
        value, result = operand(node, "self").meta["val"], node.meta["val"]
        dims: Any = argument(node, "dim", None)
        if value.dtype != torch.float32 or result.dtype != torch.float32:
            raise Refusal(f"the sum is of {value.dtype} to {result.dtype}")
        if value.dim() < 2 or dims is None or list(dims) not in ([0], [-value.dim()]):
            raise Refusal("the sum is not over the first dimension of several")
        width = build.fixed_width(value)
        if width > _MAX_WIDTH:
            raise Refusal(f"rows of {width} columns")
        return width

    @staticmethod
    def emit(plan: int, node: Node, emitter: CudaEmitter) -> None:
        """Write the launches of the sums of shares of the rows, and of the sum of these."""
        x = operand(node, "self")
        rows, stride = emitter.matrix(x, plan), emitter.row_stride(x, plan)
        kind = TYPES[x.meta["val"].dtype]
        text = f"  const {kind}* x;\n  __device__ float operator()(int64_t row, int column) const {{\n"
        text += f"    return step::as_float(x[row * {stride} + column]);\n  }}\n"
        value = emitter.kernel_set.struct("Value", text)
        count = emitter.size(x.meta["val"].shape[0])
        write_column_sum(emitter, value, [pointer(rows)], count, plan, emitter.allocate(node, dense=True))


def write_column_sum(
    emitter: CudaEmitter,
    value: str,
    members: list[Operand],
    rows: Operand,
    width: int,
    out: Expr,
    divisor: Expr | None = None,
) -> None:
    """Write the launches that add up what a functor computes for every row.

    Args:
        emitter: the program under construction.
        value: C++ name of the functor.
        members: values of its members.
        rows: number of rows.
        width: columns of a row.
        out: the result, dense.
        divisor: one value that divides the result; None: nothing does.
    """
    parts = emitter.scratch(1, _MOST_SHARES * width, torch.float32, flat=True)
    shares = shares_of(rows, _SHARE, _MOST_SHARES)
    emitter.launch(
        f"gnnc::column_sum<{width}, {value}>", shares, [pointer(parts.written), rows, shares, *members]
    )
    write_sum_of_parts(emitter, parts, shares, width, out, divisor)


def shares_of(rows: Operand, least: int, most: int) -> Expr:
    """Return the number of blocks that share rows: each has ``least`` at least, and there are ``most``."""
    return expr("max(1, min({}, {} // {}))", most, rows, least)


def write_sum_of_parts(
    emitter: CudaEmitter, parts: Expr, count: Operand, width: int, out: Expr, divisor: Expr | None = None
) -> None:
    """Write the launch of ``gnnc::sum_parts``: the sum of ``count`` rows of ``width`` values, divided."""
    values = [pointer(parts), pointer(out.written), count, width, pointer(divisor)]
    emitter.launch("gnnc::sum_parts", blocks(width, 32), values, block=1024)
