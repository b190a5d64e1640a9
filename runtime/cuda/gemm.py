"""Lowering of matrix products with a weight."""

from dataclasses import dataclass

import torch
from torch.fx import Node

from gnnc.runtime.cuda.emitter import CudaEmitter, blocks, lanes_for, round_up
from gnnc.runtime.cuda.epilogue import TYPES, write_epilogue
from gnnc.runtime.cuda.rowmap import launch_rowmap
from gnnc.runtime.emitter import shape_of
from gnnc.runtime.epilogue import argument_of
from gnnc.runtime.plans import gemm
from gnnc.runtime.registry import Decline, kernel

_THREADS = 128
_SHARED = 72 * 1024
"""Shared memory of a block, at most, where sixteen rows fit into it: three blocks an SM."""
_MAX_SHARED = 99 * 1024
"""What every architecture since sm_80 can give a block."""
_MAX_WIDTH = 4096
_PRODUCTS = {gemm.INT8: ("i8", 1), gemm.FP16: ("f16", 2), gemm.BF16: ("bf16", 2)}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one instance; the constants of ``Gemm<Config>`` in ``csrc/cuda/gemm.cuh``.

    Attributes:
        product: name of the number format that is multiplied.
        size: bytes of one of its numbers.
        inner: columns of x.
        out: columns of the result.
    """

    product: str
    size: int
    inner: int
    out: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of x in shared memory."""
        return round_up(self.inner * self.size, 64)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weight."""
        return round_up(self.out, 8) * self.row_bytes

    def shared(self, rows: int) -> int:
        """Bytes of shared memory of a block of ``rows`` rows."""
        return rows * (self.row_bytes + 16 + 4 + 4 * (round_up(self.out, 8) + 4))

    @property
    def rows(self) -> int:
        """Rows of a block: as many as leave room for other blocks beside it."""
        return next((rows for rows in (64, 32) if self.shared(rows) <= _SHARED), 16)


@kernel("fused:gemm", "gnnc.gemm", "gnnc.qgemm", backend="cuda", name="gemm", priority=10)
class Gemm:
    """``csrc/cuda/gemm.cuh``: int8, fp16 and bf16 on the tensor cores, rounding x as it is loaded."""

    @staticmethod
    def plan(node: Node) -> gemm.Plan | Decline:
        """Take what fits into the shared memory of a block; decline FP32, which cuBLAS multiplies."""
        plan = _single(node)
        if isinstance(plan, Decline):
            return plan
        if plan.mode == gemm.FLOAT:
            return Decline("float32 products are left to cuBLAS, which keeps them exact")
        shape = shape_of_plan(plan, node)
        if shape.shared(16) > _MAX_SHARED or plan.width > _MAX_WIDTH:
            return Decline(f"a tile of rows of {shape.inner} and {shape.out} columns exceeds shared memory")
        return plan

    @staticmethod
    def emit(plan: gemm.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write two launches: the weight's and the product's."""
        emitter.unit.include("gemm.cuh")
        shape = shape_of_plan(plan, node)
        weight, scale = _pack(plan, node, emitter, shape)
        x = argument_of(node, plan.x)
        rows = shape_of(x)[0]
        text, stride = emitter.matrix(x), emitter.row_stride(x)
        x_scale = "0"
        if plan.x_scale is not None:
            x_scale = f"{emitter.vector(argument_of(node, plan.x_scale))}.data_ptr()"
        kind = TYPES[x.meta["val"].dtype]
        tile = shape.rows
        lanes = lanes_for(shape.out)
        epilogue, values = write_epilogue(plan.program, node, emitter, rows, plan.width)
        config = (
            f"gnnc::GemmConfig<gnnc::Product::{shape.product}, {kind}, {shape.inner}, {stride}, "
            f"{shape.out}, {tile}, {_THREADS}>"
        )
        count = emitter.size(rows)
        emitter.launch(
            f"gnnc::gemm<{config}, {lanes}, {epilogue}>",
            blocks(count, tile),
            [f"{text}.data_ptr()", x_scale, f"{weight}.data_ptr()", f"{scale}.data_ptr()", count, *values],
            block=_THREADS,
            shared=shape.shared(tile),
        )


@kernel("fused:gemm", "gnnc.gemm", backend="cuda", name="cublas", priority=5)
class Cublas:
    """``torch.mm`` in FP32, then the row program in a kernel of its own."""

    @staticmethod
    def plan(node: Node) -> gemm.Plan | Decline:
        """Take float products."""
        plan = _single(node)
        if isinstance(plan, Decline):
            return plan
        if plan.mode != gemm.FLOAT:
            return Decline("only float32 products")
        return plan if plan.width <= _MAX_WIDTH else Decline(f"rows of {plan.width} columns")

    @staticmethod
    def emit(plan: gemm.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the product and the launch."""
        x, w = argument_of(node, plan.x), argument_of(node, plan.weights[0].w)
        rows = shape_of(x)[0]
        text = emitter.matrix(x)
        if x.meta["val"].dtype != torch.float32:
            text = f"{text}.float()"
        weight = emitter.exact(w) if plan.weights[0].is_kn else f"{emitter.exact(w)}.t()"
        out = emitter.scratch(rows, plan.width, torch.float32)
        stride = emitter.padded(plan.width, torch.float32)
        emitter.line(f"{emitter.bind(torch.mm, 'mm')}({text}, {weight}, out={out})")
        launch_rowmap(emitter, node, out, "float", stride, rows, plan.width, plan.program)


def _single(node: Node) -> gemm.Plan | Decline:
    plan = gemm.plan(node)
    if not isinstance(plan, Decline) and len(plan.weights) > 1:
        return Decline("one product a launch")
    return plan


def shape_of_plan(plan: gemm.Plan, node: Node) -> Shape:
    """Return the sizes of the kernel that a plan asks for."""
    product, size = _PRODUCTS[plan.mode]
    inner = int(argument_of(node, plan.x).meta["val"].shape[-1])
    return Shape(product, size, inner, plan.width)


def _pack(plan: gemm.Plan, node: Node, emitter: CudaEmitter, shape: Shape) -> tuple[str, str]:
    """Write the launch that quantizes and lays out the weight; return the texts of codes and scales."""
    w = argument_of(node, plan.weights[0].w)
    with emitter.preparing():
        text = emitter.matrix(w)
        packed = emitter.scratch(1, shape.weight_bytes, torch.int8, flat=True)
        scale = emitter.scratch(1, shape.out, torch.float32, flat=True)
        columns = int(w.meta["val"].shape[1])
        inner, out = (columns, 1) if plan.weights[0].is_kn else (1, columns)
        config = (
            f"gnnc::PackConfig<gnnc::Product::{shape.product}, {shape.inner}, {shape.out}, {inner}, {out}>"
        )
        values = [f"{text}.data_ptr()", f"{packed}.data_ptr()", f"{scale}.data_ptr()"]
        emitter.launch(f"gnnc::pack_weight<{config}>", str(round_up(shape.out, 8) // 8), values)
    return packed, scale
