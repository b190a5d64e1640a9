"""Lowering of the product over all rows, which is the gradient of a weight."""

import math

import torch
from torch.fx import Node

from gnnc.ir.nodes import unpack
from gnnc.runtime.cuda.emitter import CudaEmitter, pointer
from gnnc.runtime.cuda.kernels.column_sum import shares_of, write_sum_of_parts
from gnnc.runtime.cuda.kernels.epilogue import TYPES
from gnnc.runtime.plans import gemm_tn
from gnnc.runtime.plans.gemm_tn import Plan
from gnnc.runtime.program.launches import expr
from gnnc.runtime.registry import Decline, kernel
from gnnc.runtime.row_program.build import argument_of

_HALVES = (torch.float16, torch.bfloat16)
_TILE = 64
"""Columns of a tile of either matrix: ``gnnc::tn::kMostColumns``."""
_MOST_SHARES = 528
"""Blocks of a product at most: what fills a large GPU. The same on each, so that all add up in one order."""
_SHARE = 512
"""Rows of a block at least: its sums are then a small part of what it reads."""
_LOAD = 16
"""Bytes that a thread loads at once, at most."""


def _tiles(plan: Plan) -> int:
    """Return the pairs of tiles of columns."""
    return math.prod(-(-width // _TILE) for width in plan.widths)


@kernel("fused:gemm_tn", "gnnc.gemm_tn", backend="cuda", name="gemm_tn", priority=10)
class GemmTn:
    """Kernel of ``csrc/cuda/dense/gemm_tn.cuh``: tensor cores in fp16 or bf16, FP32 sums, no atomics."""

    @staticmethod
    def plan(node: Node) -> Plan | Decline:
        """Take products in 16 bits, of matrices of as many or of FP32."""
        plan = gemm_tn.plan(node)
        if isinstance(plan, Decline) or plan.dtype in _HALVES:
            return plan
        return Decline("float32 products are left to cuBLAS, which keeps them exact")

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launches."""
        operands = [argument_of(node, number) for number in plan.sides]
        sides = list(zip(operands, plan.widths, strict=True))
        matrices = [pointer(emitter.matrix(value, width)) for value, width in sides]
        strides = [emitter.row_stride(value, width) for value, width in sides]
        dtypes = [value.meta["val"].dtype for value, _ in sides]
        together = [
            math.gcd(_LOAD // dtype.itemsize, width, stride)
            for dtype, width, stride in zip(dtypes, plan.widths, strides, strict=True)
        ]
        types = [TYPES[dtype] for dtype in (plan.dtype, *dtypes)]
        config = ", ".join([*types, *map(str, (*plan.widths, *strides, *together))])
        rows = emitter.size(sides[0][0].meta["val"].shape[0])
        tiles = _tiles(plan)
        shares = shares_of(rows, _SHARE, most := max(1, _MOST_SHARES // tiles))
        out = emitter.allocate(node, dense=True)
        size = math.prod(plan.widths)
        parts = emitter.scratch(1, most * size, torch.float32, flat=True)
        emitter.launch(
            f"gnnc::gemm_tn<gnnc::GemmTnConfig<{config}>>",
            expr("{} * {}", shares, tiles),
            [*matrices, pointer(parts.written), rows, shares],
        )
        divisor = None if plan.divisor is None else emitter.vector(argument_of(node, plan.divisor))
        write_sum_of_parts(emitter, parts, shares, size, out, divisor)


@kernel("gnnc.gemm_tn", backend="cuda", name="cublas_tn", priority=5)
class CublasTn:
    """Kernel that calls ``torch.mm`` in FP32."""

    @staticmethod
    def plan(node: Node) -> Plan | Decline:
        """Take float32 matrices."""
        plan = gemm_tn.plan(node)
        if isinstance(plan, Decline) or plan.dtype == torch.float32:
            return plan
        return Decline("only float32 products")

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the call."""
        sides = zip(unpack(node, "a", "b"), plan.widths, strict=True)
        a, b = (emitter.matrix(value, width) for value, width in sides)
        out = emitter.allocate(node, dense=True)
        emitter.call(emitter.bind(torch.mm, "mm"), [expr("{}.t()", a), b], {"out": out.written})
