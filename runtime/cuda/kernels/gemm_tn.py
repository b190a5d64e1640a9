"""Lowering of the product over all rows, which is the gradient of a weight."""

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from gnnc.ir.nodes import unpack
from gnnc.runtime.cuda.emitter import CudaEmitter, pointer
from gnnc.runtime.cuda.kernels.column_sum import shares_of, write_sum_of_parts
from gnnc.runtime.cuda.kernels.epilogue import TYPES, truth
from gnnc.runtime.plans import gemm_tn
from gnnc.runtime.plans.gemm_tn import Plan
from gnnc.runtime.program.launches import Argument, Expr, Operand, expr
from gnnc.runtime.registry import BYTES, Decline, kernel
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Refusal, argument_of, optional_argument, planned

_HALVES = (torch.float16, torch.bfloat16)
_TILE = 64
"""Columns of a tile of either matrix: ``kMostColumns`` of ``gnnc::tn`` and of ``gnnc::tn_fp32``."""
_MOST_SHARES = 528
"""Blocks of a product at most: what fills a large GPU. The same on each, so that all add up in one order."""
_SHARE = 512
"""Rows of a block at least: its sums are then a small part of what it reads."""
_LOAD = 16
"""Bytes that a thread loads at once, at most."""


@kernel("fused:gemm_tn", "gnnc.gemm_tn", backend="cuda", name="gemm_tn", priority=10)
class GemmTn:
    """Kernel of ``csrc/cuda/dense/gemm_tn.cuh``: tensor cores in fp16 or bf16, FP32 sums, no atomics."""

    @staticmethod
    def plan(node: Node) -> Plan | Decline:
        """Take products in 16 bits, of matrices of as many or of FP32."""
        plan = gemm_tn.plan(node)
        if isinstance(plan, Decline) or plan.dtype in _HALVES:
            return plan
        return Decline("float32 products have a kernel of their own, or are left to cuBLAS")

    @staticmethod
    def emit(plan: Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launches of the product and of the sum of its parts."""
        operands = [argument_of(node, number) for number in plan.sides]
        divisor = emitter.optional_vector(optional_argument(node, plan.divisor))
        _write(node, emitter, operands, plan.widths, plan.dtype, (None, None), divisor)


@kernel("gnnc.qgemm_tn", backend="cuda", name="qgemm_tn", priority=10, elements=BYTES)
class QuantizedGemmTn:
    """Kernel of ``csrc/cuda/dense/gemm_tn.cuh`` of 8-bit rows: products of bf16 parts, FP32 sums."""

    @staticmethod
    @planned
    def plan(node: Node) -> tuple[int, int]:
        """Return the widths of both matrices; refuse operands that the kernel does not read."""
        first, second = (value.meta["val"] for value in unpack(node, "a", "b"))
        for value in (first, second):
            if value.dtype not in TYPES or value.dim() != 2:
                raise Refusal(f"an operand is {value.dtype} of {value.dim()} dimensions")
        return build.fixed_width(first), build.fixed_width(second)

    @staticmethod
    def emit(plan: tuple[int, int], node: Node, emitter: CudaEmitter) -> None:
        """Write the launches of the product and of the sum of its parts."""
        scales = unpack(node, "a_scale", "b_scale")
        vectors = list(map(emitter.optional_vector, scales))
        _write(node, emitter, unpack(node, "a", "b"), plan, torch.bfloat16, vectors, is_split=True)


def _write(
    node: Node,
    emitter: CudaEmitter,
    operands: Sequence[Node],
    widths: tuple[int, int],
    dtype: torch.dtype,
    scales: Sequence[Expr | None],
    divisor: Expr | None = None,
    *,
    is_split: bool = False,
) -> None:
    """Write the launches of a product that is computed in ``dtype``, and of the sum of its parts.

    Args:
        node: the product.
        emitter: the program under construction.
        operands: both matrices.
        widths: their columns.
        dtype: type of the factors on the tensor cores.
        scales: scale vectors of the rows of both matrices; None for rows without scales.
        divisor: one value that divides the result; None: nothing does.
        is_split: whether a value that ``dtype`` rounds is a sum of two parts.
    """
    matrices = [pointer(emitter.matrix(value, width)) for value, width in zip(operands, widths, strict=True)]
    strides = [emitter.row_stride(value, width) for value, width in zip(operands, widths, strict=True)]
    dtypes = [value.meta["val"].dtype for value in operands]
    together = [
        math.gcd(_LOAD // each.itemsize, width, stride)
        for each, width, stride in zip(dtypes, widths, strides, strict=True)
    ]
    types = [TYPES[each] for each in (dtype, *dtypes)]
    flags = [truth(is_split), *(truth(scale is not None) for scale in scales)]
    config = ", ".join([*types, *map(str, (*widths, *strides, *together)), *flags])
    rows = emitter.size(operands[0].meta["val"].shape[0])
    out = emitter.allocate(node, dense=True)
    kernel, given = f"gnnc::gemm_tn<gnnc::GemmTnConfig<{config}>>", [*matrices, *map(pointer, scales)]
    write_shares(emitter, kernel, given, widths, rows, out, least=_SHARE, divisor=divisor)


def tiles_of(widths: Sequence[int]) -> int:
    """Return the number of pairs of tiles of both matrices."""
    return math.prod(-(-width // _TILE) for width in widths)


def write_shares(
    emitter: CudaEmitter,
    kernel: str,
    given: Sequence[Argument],
    widths: Sequence[int],
    rows: Operand,
    out: Expr,
    *,
    least: int,
    divisor: Expr | None,
) -> None:
    """Write the launch of a product whose blocks share the rows, and the sum of their results.

    Args:
        emitter: the program under construction.
        kernel: C++ name of the kernel.
        given: addresses of the matrices, and what else the kernel takes before the partial sums.
        widths: columns of both matrices.
        rows: number of their rows.
        out: the result, dense.
        least: rows of a block at least.
        divisor: one value that divides the result; None: nothing does.
    """
    tiles, size = tiles_of(widths), math.prod(widths)
    shares = shares_of(rows, least, most := max(1, _MOST_SHARES // tiles))
    parts = emitter.scratch(1, most * size, torch.float32, flat=True)
    grid = expr("{} * {}", shares, tiles)
    emitter.launch(kernel, grid, [*given, pointer(parts.written), rows, shares])
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
        """Write the call of the product in cuBLAS."""
        sides = zip(unpack(node, "a", "b"), plan.widths, strict=True)
        a, b = (emitter.matrix(value, width) for value, width in sides)
        out = emitter.allocate(node, dense=True)
        emitter.call(emitter.bind(torch.mm, "mm"), [expr("{}.t()", a), b], {"out": out.written})
