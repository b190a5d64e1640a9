"""Lowering of the product over all rows in FP32, which is the gradient of a weight."""

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from gnnc.runtime.cuda.emitter import CudaEmitter, pointer
from gnnc.runtime.cuda.kernels.gemm_tn import tiles_of, write_shares
from gnnc.runtime.plans import gemm_tn
from gnnc.runtime.plans.gemm_tn import Plan
from gnnc.runtime.program.launches import Expr, Operand
from gnnc.runtime.registry import Decline, kernel
from gnnc.runtime.row_program.build import argument_of, optional_argument

_MOST_TILES = 32
"""Pairs of tiles at most: with more the multiplications bound a product, and cuBLAS has the larger tiles."""
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
        if not 0 < tiles_of(plan.widths) <= _MOST_TILES:
            return Decline(f"a product of {plan.widths[0]} by {plan.widths[1]} columns is left to cuBLAS")
        return plan

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launches of the product and of the sum of its parts."""
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
    kernel = f"gnnc::gemm_tn_fp32<gnnc::GemmTnFp32Config<{config}>>"
    given = list(map(pointer, matrices))
    write_shares(emitter, kernel, given, widths, rows, out, least=_SHARE, divisor=divisor)
