"""Lowering of matrix products with a weight."""

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.functional import pad

from gnnc.ir.nodes import shape_of, unpack
from gnnc.runtime.cuda.emitter import CudaEmitter, blocks, lanes_for, pointer, round_up
from gnnc.runtime.cuda.kernels.epilogue import TYPES, scales_of, write_epilogue
from gnnc.runtime.cuda.kernels.rowmap import launch_rowmap
from gnnc.runtime.plans import gemm
from gnnc.runtime.program.launches import Expr, expr, variable
from gnnc.runtime.registry import Decline, kernel
from gnnc.runtime.row_program.build import argument_of
from gnnc.runtime.row_program.opcodes import Op

_SHARED = 72 * 1024
"""Shared memory of a block, at most, where one of fewer rows would do: three blocks an SM."""
_MAX_SHARED = 99 * 1024
"""What every architecture since sm_80 can give a block."""
_MAX_WIDTH = 4096
_MOST_PRODUCTS = 2**31 // 128**2
"""Of two codes, whose sum 32 bits hold whatever they are."""
_PRODUCTS = {gemm.INT8: ("i8", 1), gemm.FP16: ("f16", 2), gemm.BF16: ("bf16", 2)}
_RUN = 128
"""Columns that a warp loads together: four a thread."""
_HELD = 12
"""Runs of x that the registers of a warp hold beside little else."""
_SUMS = 16
"""Tiles of 16 x 8 sums that they hold; half as many beside more loads of the weight in flight."""
_LONG = 1280
"""Bytes of a row in shared memory above which warps share its columns."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one product.

    Attributes:
        product: name of the number format that is multiplied.
        size: bytes of one of its numbers.
        inner: columns of x.
        out: columns of the result.
        is_codes: whether x is given as codes with scales.
    """

    product: str
    size: int
    inner: int
    out: int
    is_codes: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of x in shared memory, were it there at once."""
        return round_up(self.inner * self.size, 64)

    @property
    def places(self) -> int:
        """Columns of x and the zeros behind them."""
        return self.row_bytes // self.size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weight."""
        return round_up(self.out, 8) * self.row_bytes

    @property
    def runs(self) -> int:
        """Runs of a row, as warps load it."""
        return -(-self.inner // _RUN)

    def together(self, stride: int) -> int:
        """Return the neighbouring columns that a thread loads at once from rows ``stride`` elements apart."""
        return 4 if self.is_codes else math.gcd(4, self.inner, stride)

    @property
    def pack_warps(self) -> int:
        """Warps of a block's eight that pack one output's weights: each thread has two fours, or more."""
        return min(8, _ceil_power(-(-self.runs // 2)))


@dataclass(frozen=True, slots=True)
class Tile:
    """How a block works: the constants of ``GemmConfig`` in ``csrc/cuda/dense/gemm.cuh``, in their order."""

    rows: int
    chunk: int
    row_warps: int
    rows_once: int
    down: int
    split: int
    threads: int
    blocks: int = 0

    def __str__(self) -> str:
        """The constants as C++ text."""
        return ", ".join(map(str, astuple(self)))

    def shared(self, shape: Shape) -> int:
        """Return the bytes of shared memory of a block: ``Gemm<Config>::kShared``."""
        rows = self.rows * (min(self.chunk * shape.size, shape.row_bytes) + 16)
        out = self.split * self.rows * 4 * (round_up(shape.out, 8) + 4)
        main = max(rows, out) if self.is_in_place(shape) else rows + out
        return main + 4 * self.rows * (1 + self.row_warps)

    def is_in_place(self, shape: Shape) -> bool:
        """Return whether a warp holds all of its sums, so that results take the place of the rows."""
        down = self.rows // 16 // self.down
        across = self.threads // 32 // self.down // self.split
        most = _SUMS // down if down > 1 or self.is_chunked(shape) else _SUMS // 2
        return -(-round_up(shape.out, 8) // 8 // across) <= most

    def is_chunked(self, shape: Shape) -> bool:
        """Return whether a row is brought into shared memory in several parts."""
        return self.chunk * shape.size < shape.row_bytes

    def fits(self, shape: Shape) -> bool:
        """Return whether a kernel can work so."""
        fits = self.shared(shape) <= (_SHARED if self.rows > 16 else _MAX_SHARED)
        return fits and (self.is_in_place(shape) or not self.is_chunked(shape) and self.split == 1)


def tile_of(shape: Shape) -> Tile | None:
    """Return how blocks work best, as measured on an H200; None where no block holds the results."""
    tiles = _long_tiles(shape) if shape.row_bytes > _LONG else _short_tiles(shape)
    return next((tile for tile in tiles if tile.fits(shape)), None)


def _short_tiles(shape: Shape) -> Iterator[Tile]:
    """Rows of which a warp has several in flight; it then multiplies sixteen of them, 32 of a block of 64."""
    is_small = shape.row_bytes < 256
    for rows in (64, 32, 16) if shape.is_codes and is_small else (32, 16):
        once = min(rows // 4, 8, _floor_power(_HELD // shape.runs))
        yield Tile(rows, shape.places, 1, once, min(rows // 16, 2), 1, 128, 0 if is_small else 5)


def _long_tiles(shape: Shape) -> Iterator[Tile]:
    """Rows whose columns warps share as they multiply, and, where one cannot hold them, as they load.

    Few rows a block keep all SMs at work on a graph of a few thousand nodes, which such rows come with. Two
    such blocks an SM leave registers for all of a row's loads beside those of the weight.
    """
    warps = _ceil_power(-(-shape.runs // _HELD))
    room = _MAX_SHARED if shape.size == 1 else _SHARED  # what is not scaled as a whole may come in chunks
    if not shape.is_codes and warps <= 8 and 16 * shape.row_bytes <= room:
        once = 2 if warps > 1 and 2 * -(-shape.runs // warps) <= 20 else 1
        yield Tile(16, shape.places, warps, once, 1, _split(shape, 16), 256, 2)
    for rows in (32, 16):
        yield Tile(rows, 2048 if shape.is_codes else 512, 1, 2, 1, _split(shape, rows), 256)


def _split(shape: Shape, rows: int) -> int:
    """How many of eight warps share the columns of x: few enough that each holds eight tiles of sums."""
    tiles = -(-shape.out // 8) * rows // 16
    return max(1, 8 // _ceil_power(-(-tiles // 8)))


@kernel("fused:gemm", "gnnc.gemm", "gnnc.qgemm", backend="cuda", name="gemm", priority=10, elements=("int8",))
class Gemm:
    """``csrc/cuda/dense/gemm.cuh``: int8, fp16 and bf16 on the tensor cores, rounding x as it is loaded."""

    @staticmethod
    def plan(node: Node) -> gemm.Plan | Decline:
        """Take what fits into the shared memory of a block; decline FP32, which cuBLAS multiplies."""
        plan = _single(node)
        if isinstance(plan, Decline):
            return plan
        if plan.mode == gemm.FLOAT:
            return Decline("float32 products are left to cuBLAS, which keeps them exact")
        shape = shape_of_plan(plan, node)
        if [out.form for out in plan.program.outs].count("scalar") > 1:
            return Decline("it finds two scales of all rows, and the launch before sets one to zero")
        if plan.width > _MAX_WIDTH or tile_of(shape) is None:
            return Decline(f"sixteen rows of {shape.out} columns exceed shared memory")
        return plan

    @staticmethod
    def emit(plan: gemm.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write two launches: the weight's and the product's."""
        shape = shape_of_plan(plan, node)
        tile = tile_of(shape)
        assert tile is not None, "plan() has looked"
        x = argument_of(node, plan.x)
        rows = shape_of(x)[0]
        tensor, stride = emitter.matrix(x), emitter.row_stride(x)
        together = shape.together(stride)
        x_scale = None if plan.x_scale is None else emitter.vector(argument_of(node, plan.x_scale))
        epilogue, values = write_epilogue(plan.program, node, emitter, rows, plan.width)
        weight, scale = _pack(plan, node, emitter, shape, together)
        config = config_of(shape, tile, TYPES[x.meta["val"].dtype], stride)
        count = emitter.size(rows)
        emitter.launch(
            f"gnnc::gemm<{config}, {_lanes(plan, tile, shape)}, {epilogue}>",
            blocks(count, tile.rows),
            [*map(pointer, (tensor, x_scale, weight, scale)), count, *values],
            block=tile.threads,
            shared=tile.shared(shape),
        )


def _lanes(plan: gemm.Plan, tile: Tile, shape: Shape) -> int:
    """Return how many threads end a row.

    Of one that becomes codes so few that every thread has a row: all of them compute its scale. Others are
    stored, and the more threads do it, the longer the stretch of memory that they write at a time.
    """
    most = lanes_for(shape.out)
    if not plan.program.quantizes:
        return most
    return min(max(tile.threads // tile.rows, 4), most)


@kernel("fused:gemm", "gnnc.gemm", backend="cuda", name="cublas", priority=5, elements=("int8",))
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
        if Op.SCALE_TENSOR in plan.program.ops:
            return Decline("a scale of all rows is found by no kernel of its own")
        return plan if plan.width <= _MAX_WIDTH else Decline(f"rows of {plan.width} columns")

    @staticmethod
    def emit(plan: gemm.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the product and the launch."""
        x, w = argument_of(node, plan.x), argument_of(node, plan.weights[0].w)
        rows = shape_of(x)[0]
        tensor = emitter.matrix(x)
        if x.meta["val"].dtype != torch.float32:
            tensor = expr("{}.float()", tensor)
        weight = emitter.exact(w) if plan.weights[0].is_kn else expr("{}.t()", emitter.exact(w))
        out = emitter.scratch(rows, plan.width, torch.float32)
        stride = emitter.padded(plan.width, torch.float32)
        emitter.call(emitter.bind(torch.mm, "mm"), [tensor, weight], {"out": out.written})
        launch_rowmap(emitter, node, out, "float", stride, rows, plan.width, plan.program)


@kernel("gnnc.qgemm", backend="cuda", name="cublaslt", priority=5, elements=("int8",))
class CublasInt8:
    """``aten._int_mm``, which calls cuBLASLt, for codes of rows too wide for a block of ours."""

    @staticmethod
    def plan(node: Node) -> Decline | None:
        """Take matrices of codes whose sums 32 bits hold."""
        x, w = (value.meta["val"] for value in unpack(node, "x", "w"))
        if x.dim() != 2 or x.shape[1] > _MOST_PRODUCTS:
            return Decline(f"x has the shape {tuple(x.shape)}")
        return None if w.dtype == x.dtype == torch.int8 else Decline(f"x is {x.dtype}")

    @staticmethod
    def emit(plan: None, node: Node, emitter: CudaEmitter) -> None:
        """Write the product."""
        x, w = map(emitter.exact, unpack(node, "x", "w"))
        name = emitter.fresh("v")
        emitter.call(emitter.bind(product_of_codes, "product_of_codes"), [x, w], result=name)
        emitter.define(node, variable(name))


def product_of_codes(x: Tensor, w: Tensor) -> Tensor:
    """Return ``x @ w.T`` of int8 ``[N, K]`` and ``[O, K]``, exact, rounded once to float32 ``[N, O]``.

    cuBLASLt takes multiples of eight, and more than sixteen rows.
    """
    (rows, inner), out = x.shape, w.shape[0]
    across, below, more = -inner % 8, max(17 - rows, 0), -out % 8
    if across or below:
        x = pad(x, (0, across, 0, below))
    if across or more:
        w = pad(w, (0, across, 0, more))
    return torch.ops.aten._int_mm(x.contiguous(), w.contiguous().t())[:rows, :out].float()


def _single(node: Node) -> gemm.Plan | Decline:
    plan = gemm.plan(node)
    if not isinstance(plan, Decline) and len(plan.weights) > 1:
        return Decline("one product a launch")
    return plan


def shape_of_plan(plan: gemm.Plan, node: Node) -> Shape:
    """Return the sizes of the kernel that a plan asks for."""
    product, size = _PRODUCTS[plan.mode]
    inner = int(argument_of(node, plan.x).meta["val"].shape[-1])
    return Shape(product, size, inner, plan.width, plan.x_scale is not None)


def config_of(shape: Shape, tile: Tile, kind: str, stride: int) -> str:
    """Return the C++ name of the ``GemmConfig`` for rows of ``kind`` that are ``stride`` elements apart."""
    sizes = f"{shape.inner}, {stride}, {shape.out}, {shape.together(stride)}"
    return f"gnnc::GemmConfig<gnnc::Product::{shape.product}, {kind}, {sizes}, {tile}>"


def _pack(
    plan: gemm.Plan, node: Node, emitter: CudaEmitter, shape: Shape, together: int
) -> tuple[Expr, Expr]:
    """Write the launch that quantizes and lays out the weight; return the packed weight and its scales."""
    w = argument_of(node, plan.weights[0].w)
    sizes = f"{shape.inner}, {shape.out}"
    columns = int(w.meta["val"].shape[1])
    strides = f"{columns}, 1" if plan.weights[0].is_kn else f"1, {columns}"
    config = f"gnnc::Product::{shape.product}, {sizes}, {strides}, {together}, {shape.pack_warps}"
    tensor = emitter.matrix(w)
    zero = next((scale.written for scale in scales_of(plan.program, node, emitter)), None)
    packed = emitter.scratch(1, shape.weight_bytes, torch.int8, flat=True)
    scale = emitter.scratch(1, shape.out, torch.float32, flat=True)
    emitter.launch(
        f"gnnc::pack_weight<gnnc::PackConfig<{config}>>",
        round_up(shape.out, 8) * shape.pack_warps // 8,
        list(map(pointer, (tensor, packed.written, scale.written, zero))),
    )
    return packed, scale


def _floor_power(number: int) -> int:
    """The largest power of two that is not above ``number``; 1 for less."""
    return 1 << max(0, number.bit_length() - 1)


def _ceil_power(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()
