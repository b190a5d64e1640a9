"""Lowering of matrix products with a weight in FP32."""

import math
from dataclasses import astuple, dataclass

import torch
from torch.fx import Node

from gnnc.ir.nodes import shape_of
from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, lanes_for, pointer, round_up
from gnnc.runtime.cuda.kernels.column_sum import write_sum_of_parts
from gnnc.runtime.cuda.kernels.epilogue import TYPES, scales_of, write_epilogue
from gnnc.runtime.cuda.kernels.gemm import MAX_SHARED, single_float
from gnnc.runtime.cuda.kernels.rowmap import sum_of, why_no_sums
from gnnc.runtime.plans import gemm
from gnnc.runtime.program.launches import Expr, expr
from gnnc.runtime.registry import BYTES, Decline, kernel
from gnnc.runtime.row_program.build import argument_of

_MOST_INNER = 512
"""Columns of x at most: with more the multiplications bound a product, and cuBLAS has the larger tiles."""
_MOST_SHARES = 1056
"""Blocks of a sum of all rows at most: what fills a large GPU. The same on each, so that bits are equal."""
_MOST_OUT = 512
"""Columns of the result at most: sixteen warps side by side have whole rows."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Work of a block: the last constants of ``GemmFp32Config``, in their order."""

    chunk: int
    column_lanes: int
    down: int
    across: int
    split: int

    def __str__(self) -> str:
        """Return the constants as C++ text."""
        return ", ".join(map(str, astuple(self)))

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 32 * self.down

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.down * self.across * self.split

    @property
    def columns(self) -> int:
        """Columns of the packed weight."""
        return 4 * self.column_lanes * self.across

    def places(self, inner: int) -> int:
        """Return the rows of the packed weight."""
        return round_up(inner, self.chunk)

    def shared(self, inner: int) -> int:
        """Return the bytes of shared memory of a block: ``GemmFp32<Config>::kShared``."""
        stage = self.rows * (self.chunk + 4) + self.chunk * self.columns
        parts = self.split * self.rows * (self.columns + 4)
        return 4 * max(stage * (2 if inner > self.chunk else 1), parts)


def tile_of(inner: int, out: int) -> Tile:
    """Return the tile for rows of ``inner`` columns and results of ``out``."""
    lanes = min(8, 1 << max(0, math.ceil(math.log2(out / 4))))
    across = -(-out // (4 * lanes))
    down, split = 2 if across <= 4 else 1, 2 if across == 1 else 1
    tiles = (Tile(chunk, lanes, down, across, split) for chunk in (32, 16))
    return next(tile for tile in tiles if tile.shared(inner) <= MAX_SHARED)


@kernel("fused:gemm", "gnnc.gemm", backend="cuda", name="gemm_fp32", priority=7, elements=BYTES)
class GemmFp32:
    """Kernel of ``csrc/cuda/dense/gemm_fp32.cuh``: fused multiply-adds, and the row program on whole rows."""

    @staticmethod
    def plan(node: Node) -> gemm.Plan | Decline:
        """Take float products whose rows fit into a block."""
        plan = single_float(node)
        if isinstance(plan, Decline):
            return plan
        if [out.form for out in plan.program.outs].count("scalar") > 1:
            return Decline("it finds two scales of all rows")
        reason = why_no_sums(plan.program, plan.width)
        if reason is not None:
            return Decline(reason)
        inner = int(argument_of(node, plan.x).meta["val"].shape[-1])
        if not 0 < inner <= _MOST_INNER or plan.width > _MOST_OUT:
            return Decline(f"a product of {inner} by {plan.width} columns is left to cuBLAS")
        return plan

    @staticmethod
    def emit(plan: gemm.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write two launches: the weight's and the product's."""
        x = argument_of(node, plan.x)
        rows, inner = shape_of(x)[0], int(x.meta["val"].shape[-1])
        tile = tile_of(inner, plan.width)
        tensor, stride = emitter.matrix(x), emitter.row_stride(x)
        epilogue, values = write_epilogue(plan.program, node, emitter, rows, plan.width, begins_scales=False)
        weight = _pack(plan, node, emitter, inner, tile)
        together = math.gcd(4, inner, stride)
        sizes = f"{inner}, {stride}, {plan.width}, {together}"
        config = f"gnnc::GemmFp32Config<{TYPES[x.meta['val'].dtype]}, {sizes}, {tile}>"
        count = emitter.size(rows)
        sums = sum_of(plan.program, node, emitter)
        name = (
            f"gnnc::gemm_fp32{'' if sums is None else '_sums'}<{config}, {lanes_for(plan.width)}, {epilogue}>"
        )
        emitter.kernel_set.require(
            name,
            f"GemmFp32<{config}>::kShared == {tile.shared(inner)}",
            "the host and the kernel lay shared memory out alike",
        )
        grid, given = blocks(count, tile.rows), [pointer(tensor), pointer(weight), count]
        shape = {"block": tile.threads, "shared": tile.shared(inner)}
        if sums is None:
            emitter.launch(name, grid, [*given, *values], **shape)
            return
        shares = expr("max(1, min({}, {}))", _MOST_SHARES, grid)
        parts = emitter.scratch(1, _MOST_SHARES * plan.width, torch.float32, flat=True)
        emitter.launch(name, shares, [*given, pointer(parts.written), shares, *values], **shape)
        write_sum_of_parts(emitter, parts, shares, plan.width, emitter.allocate(sums, dense=True))


def _pack(plan: gemm.Plan, node: Node, emitter: CudaEmitter, inner: int, tile: Tile) -> Expr:
    """Write the launch that lays the weight out; return the packed weight."""
    w = argument_of(node, plan.weights[0].w)
    tensor, stride = emitter.matrix(w), emitter.row_stride(w)
    strides = f"{stride}, 1" if plan.weights[0].is_kn else f"1, {stride}"
    places = tile.places(inner)
    count = places * tile.columns
    zero = next((scale.written for scale in scales_of(plan.program, node, emitter)), None)
    packed = emitter.scratch(1, count, torch.float32, flat=True)
    emitter.launch(
        f"gnnc::pack_fp32<gnnc::PackFp32Config<{inner}, {plan.width}, {strides}, {places}, {tile.columns}>>",
        -(-count // BLOCK),
        list(map(pointer, (tensor, packed.written, zero))),
    )
    return packed
