"""Lowering of the product over all rows in FP32, which is the gradient of a weight."""

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from gnnc.runtime.cuda.emitter import CudaEmitter, pointer
from gnnc.runtime.cuda.kernels.column_sum import shares_of, write_sum_of_parts
from gnnc.runtime.plans import gemm_tn
from gnnc.runtime.plans.gemm_tn import Plan
from gnnc.runtime.program.launches import Expr, Operand, expr
from gnnc.runtime.registry import Decline, kernel
from gnnc.runtime.row_program.build import argument_of, optional_argument

_TILE = 64
"""Columns of a tile of either matrix: ``gnnc::tn_fp32::kMostColumns``."""
_MOST_TILES = 32
"""Pairs of tiles at most: with more the multiplications bound a product, and cuBLAS has the larger tiles."""
_MOST_SHARES = 528
"""Blocks of a product at most: what fills a large GPU. The same on each, so that all add up in one order."""
_SHARE = 256
"""Rows of a block at least: its sums are then a small part of what it reads."""


@kernel("fused:gemm_tn", "gnnc.gemm_tn", backend="cuda", name="gemm_tn_fp32", priority=7)
class GemmTnFp32:
    """Kernel of ``csrc/cuda/dense/gemm_tn_fp32.cuh``: fused multiply-adds, no atomics."""

    @staticmethod
    def plan(node: Node) -> Plan | Decline:
        """Take products in FP32 of few columns."""
        plan = gemm_tn.plan(node)
        if isinstance(plan, Decline):
            return plan
        if plan.dtype != torch.float32:
            return Decline("only float32 products")
        if any(argument_of(node, number).meta["val"].dtype != torch.float32 for number in plan.sides):
            return Decline("an operand is not float32")
        if not 0 < _tiles(plan.widths) <= _MOST_TILES:
            return Decline(f"a product of {plan.widths[0]} by {plan.widths[1]} columns is left to cuBLAS")
        return plan

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launches."""
        sides = [argument_of(node, number) for number in plan.sides]
        matrices = [emitter.matrix(side, width) for side, width in zip(sides, plan.widths, strict=True)]
        strides = [emitter.row_stride(side, width) for side, width in zip(sides, plan.widths, strict=True)]
        divisor = emitter.optional_vector(optional_argument(node, plan.divisor))
        rows = emitter.size(sides[0].meta["val"].shape[0])
        out = emitter.allocate(node, dense=True)
        write_product(emitter, matrices, plan.widths, rows, out, strides=strides, divisor=divisor)


def write_product(
    emitter: CudaEmitter,
    matrices: Sequence[Expr],
    widths: Sequence[int],
    rows: Operand,
    out: Expr,
    *,
    strides: Sequence[int] | None = None,
    divisor: Expr | None = None,
) -> None:
    """Write the launches of ``a^T @ b`` in FP32.

    Args:
        emitter: the program under construction.
        matrices: both matrices.
        widths: their columns.
        rows: number of their rows.
        out: the result, dense.
        strides: elements from one row of them to the next; None: as many as columns.
        divisor: one value that divides the result; None: nothing does.
    """
    strides = widths if strides is None else strides
    together = [math.gcd(4, width, stride) for width, stride in zip(widths, strides, strict=True)]
    config = ", ".join(map(str, (*widths, *strides, *together)))
    tiles, size = _tiles(widths), math.prod(widths)
    shares = shares_of(rows, _SHARE, most := max(1, _MOST_SHARES // tiles))
    parts = emitter.scratch(1, most * size, torch.float32, flat=True)
    emitter.launch(
        f"gnnc::gemm_tn_fp32<gnnc::GemmTnFp32Config<{config}>>",
        expr("{} * {}", shares, tiles),
        [*map(pointer, matrices), pointer(parts.written), rows, shares],
    )
    write_sum_of_parts(emitter, parts, shares, size, out, divisor)


def _tiles(widths: Sequence[int]) -> int:
    return math.prod(-(-width // _TILE) for width in widths)
