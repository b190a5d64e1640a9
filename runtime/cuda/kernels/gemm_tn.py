"""Lowering of the product over all rows, which is the gradient of a weight."""

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from gnnc.ir.nodes import unpack
from gnnc.runtime.cuda.emitter import CudaEmitter, pointer
from gnnc.runtime.cuda.kernels.column_sum import shares_of, write_sum_of_parts
from gnnc.runtime.cuda.kernels.epilogue import TYPES
from gnnc.runtime.program.launches import expr
from gnnc.runtime.registry import Decline, kernel
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Refusal, planned

_HALVES = (torch.float16, torch.bfloat16)
_TILE = 64
"""Columns of a tile of either matrix: ``gnnc::tn::kMostColumns``."""
_MOST_SHARES = 528
"""Blocks of a product at most: what fills a large GPU. The same on each, so that all add up in one order."""
_SHARE = 512
"""Rows of a block at least: its sums are then a small part of what it reads."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Widths of both matrices, and the type that their elements are multiplied in."""

    a: int
    b: int
    dtype: torch.dtype

    @property
    def tiles(self) -> int:
        """Pairs of tiles of columns."""
        return -(-self.a // _TILE) * -(-self.b // _TILE)


@planned
def _plan(node: Node) -> Plan:
    values = [value.meta["val"] for value in unpack(node, "a", "b")]
    if any(value.dim() != 2 for value in values):
        raise Refusal("an operand is not a matrix")
    if values[0].dtype != values[1].dtype:
        raise Refusal(f"the operands are {values[0].dtype} and {values[1].dtype}")
    a, b = map(build.fixed_width, values)
    return Plan(a, b, values[0].dtype)


@kernel("gnnc.gemm_tn", backend="cuda", name="gemm_tn", priority=10)
class GemmTn:
    """Kernel of ``csrc/cuda/dense/gemm_tn.cuh``: tensor cores in fp16 or bf16, FP32 sums, no atomics."""

    @staticmethod
    def plan(node: Node) -> Plan | Decline:
        """Take matrices of 16 bits."""
        plan = _plan(node)
        if isinstance(plan, Decline) or plan.dtype in _HALVES:
            return plan
        return Decline("float32 products are left to cuBLAS, which keeps them exact")

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launches."""
        kind = TYPES[plan.dtype]
        sides = list(zip(unpack(node, "a", "b"), (plan.a, plan.b), strict=True))
        matrices = [pointer(emitter.matrix(value, width)) for value, width in sides]
        strides = [emitter.row_stride(value, width) for value, width in sides]
        together = [math.gcd(8, width, stride) for (_, width), stride in zip(sides, strides, strict=True)]
        config = ", ".join([kind] * 3 + [str(v) for v in (plan.a, plan.b, *strides, *together)])
        rows = emitter.size(sides[0][0].meta["val"].shape[0])
        shares = shares_of(rows, _SHARE, most := max(1, _MOST_SHARES // plan.tiles))
        out = emitter.allocate(node, dense=True)
        parts = emitter.scratch(1, most * plan.a * plan.b, torch.float32, flat=True)
        emitter.launch(
            f"gnnc::gemm_tn<gnnc::GemmTnConfig<{config}>>",
            expr("{} * {}", shares, plan.tiles),
            [*matrices, pointer(parts.written), rows, shares],
        )
        write_sum_of_parts(emitter, parts, shares, plan.a * plan.b, out)


@kernel("gnnc.gemm_tn", backend="cuda", name="cublas_tn", priority=5)
class CublasTn:
    """Kernel that calls ``torch.mm`` in FP32."""

    @staticmethod
    def plan(node: Node) -> Plan | Decline:
        """Take float32 matrices."""
        plan = _plan(node)
        if isinstance(plan, Decline) or plan.dtype == torch.float32:
            return plan
        return Decline("only float32 products")

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the call."""
        sides = zip(unpack(node, "a", "b"), (plan.a, plan.b), strict=True)
        a, b = (emitter.matrix(value, width) for value, width in sides)
        out = emitter.allocate(node, dense=True)
        emitter.call(emitter.bind(torch.mm, "mm"), [expr("{}.t()", a), b], {"out": out.written})
