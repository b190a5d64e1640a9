"""Lowering of matrix products with a weight."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.functional import pad

from gnnc.ir.nodes import shape_of, unpack
from gnnc.runtime.cuda.emitter import CudaEmitter, blocks, lanes_for, pointer, round_up
from gnnc.runtime.cuda.kernels.epilogue import TYPES, scales_of, write_epilogue
from gnnc.runtime.cuda.kernels.rowmap import launch_rowmap, why_no_sums
from gnnc.runtime.plans import gemm
from gnnc.runtime.program.launches import Expr, Operand, expr, variable
from gnnc.runtime.registry import BYTES, Decline, kernel
from gnnc.runtime.row_program.build import RowProgram, argument_of, optional_argument
from gnnc.runtime.row_program.opcodes import Op

_SHARED = 72 * 1024
"""Bytes of shared memory of a block of more than 16 rows, at most: three blocks fit an SM."""
MAX_SHARED = 99 * 1024
"""Bytes of shared memory that a block can have on every architecture since sm_80."""
_MAX_WIDTH = 4096
_MOST_PRODUCTS = 2**31 // 128**2
"""Number of products of two int8 values whose sum always fits into 32 bits."""
_PRODUCTS = {
    gemm.INT8: ("i8", 1),
    gemm.E4M3: ("e4m3", 1),
    gemm.E5M2: ("e5m2", 1),
    gemm.FP16: ("f16", 2),
    gemm.BF16: ("bf16", 2),
}
"""The ``gnnc::Product`` of each mode, and the bytes of an element."""
_HALF_PRODUCTS = {torch.float16: "f16", torch.bfloat16: "bf16"}

_RUN = 128
"""Columns that a warp loads at once: four a thread."""
_HELD = 12
"""Runs of x that fit into the registers of a warp beside little else."""
_SUMS = 16
"""Tiles of 16 x 8 sums that fit into the registers of a warp; half as many beside more loads in flight."""
_LONG = 1280
"""Bytes of a row in shared memory above which warps share its columns."""
_MOST_PARTS = 8
"""Products of a launch at most: the arguments of a kernel are few, and compilers take long for more."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one product.

    Attributes:
        product: name of the number format that is multiplied.
        size: bytes of one of its numbers.
        inner: columns of x.
        out: columns of the result.
        is_quantized: whether x is quantized values with scales.
    """

    product: str
    size: int
    inner: int
    out: int
    is_quantized: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row of x in shared memory."""
        return round_up(self.inner * self.size, 64)

    @property
    def places(self) -> int:
        """Columns of x with the zeros that pad them."""
        return self.row_bytes // self.size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weight."""
        return round_up(self.out, 8) * self.row_bytes

    @property
    def runs(self) -> int:
        """Number of runs that a warp loads a row of x in."""
        return -(-self.inner // _RUN)

    def load_width(self, stride: int) -> int:
        """Return the number of columns that a thread loads at once from rows ``stride`` elements apart."""
        return 4 if self.is_quantized else math.gcd(4, self.inner, stride)

    @property
    def pack_warps(self) -> int:
        """Warps, of eight in a block, that pack the weights of one output: two loads a thread, or more."""
        return min(8, _ceil_power(-(-self.runs // 2)))


@dataclass(frozen=True, slots=True)
class Tile:
    """Work of a block: the constants of ``GemmConfig`` in ``csrc/cuda/dense/gemm.cuh``, in their order."""

    rows: int
    chunk: int
    row_warps: int
    rows_once: int
    down: int
    split: int
    threads: int
    blocks: int = 0

    def __str__(self) -> str:
        """Return the constants as C++ text."""
        return ", ".join(map(str, astuple(self)))

    def shared(self, shapes: Sequence[Shape]) -> int:
        """Return the bytes of shared memory of a block: ``SharedOf<Parts...>::kBytes``."""
        rows = self.rows * (min(self.chunk * shapes[0].size, shapes[0].row_bytes) + 16)
        out = self.split * self.rows * 4 * (max(round_up(shape.out, 8) for shape in shapes) + 4)
        is_in_place = len(shapes) == 1 and self.holds_sums(shapes[0])
        main = max(rows, out) if is_in_place else rows + out
        return main + 4 * self.rows * (1 + self.row_warps)

    def holds_sums(self, shape: Shape) -> bool:
        """Return whether registers hold the sums of a product: its results may then overwrite the rows."""
        down = self.rows // 16 // self.down
        column_warps = self.threads // 32 // self.down // self.split
        limit = _SUMS // down if down > 1 or self.is_chunked(shape) else _SUMS // 2
        return -(-round_up(shape.out, 8) // 8 // column_warps) <= limit

    def is_chunked(self, shape: Shape) -> bool:
        """Return whether a row is loaded into shared memory in several chunks."""
        return self.chunk * shape.size < shape.row_bytes

    def fits(self, shapes: Sequence[Shape]) -> bool:
        """Return whether a kernel of this tile has enough shared memory and registers."""
        if self.shared(shapes) > (_SHARED if self.rows > 16 else MAX_SHARED):
            return False
        is_chunked = self.is_chunked(shapes[0])
        if is_chunked and len(shapes) > 1:
            return False
        return all(self.holds_sums(shape) or not is_chunked and self.split == 1 for shape in shapes)


def tile_of(*shapes: Shape) -> Tile | None:
    """Return the fastest tile for products of one matrix, as measured on an H200; None where none fits."""
    widest = max(shapes, key=lambda shape: shape.out)
    tiles = _long_tiles(widest) if widest.row_bytes > _LONG else _short_tiles(widest)
    return next((tile for tile in tiles if tile.fits(shapes)), None)


def joins_products(dtype: torch.dtype, columns: int, widths: Sequence[int]) -> bool:
    """Return whether one launch multiplies a matrix with several weights.

    Args:
        dtype: dtype of the factors.
        columns: columns of the matrix.
        widths: columns of the products.
    """
    if columns == 0 or dtype not in _HALF_PRODUCTS and dtype.itemsize > 1 or len(widths) > _MOST_PARTS:
        return False
    product = _HALF_PRODUCTS.get(dtype, "i8")
    forms = [
        [Shape(product, dtype.itemsize, columns, width, is_quantized) for width in widths]
        for is_quantized in (False, True)
    ]
    return max(widths) <= _MAX_WIDTH and all(tile_of(*shapes) for shapes in forms)


def _short_tiles(shape: Shape) -> Iterator[Tile]:
    """Yield tiles for short rows: a warp loads several at once, and multiplies 16, or 32 of a block of 64."""
    is_small = shape.row_bytes < 256
    for rows in (64, 32, 16) if shape.is_quantized and is_small else (32, 16):
        rows_once = min(rows // 4, 8, _floor_power(_HELD // shape.runs))
        yield Tile(rows, shape.places, 1, rows_once, min(rows // 16, 2), 1, 128, 0 if is_small else 5)


def _long_tiles(shape: Shape) -> Iterator[Tile]:
    """Yield tiles for long rows: warps share the columns of a product, and the loads where one lacks room.

    Blocks of few rows keep all SMs busy on a graph of a few thousand nodes, which has such rows. Two such
    blocks an SM leave registers for all loads of a row beside the loads of the weight.
    """
    warps = _ceil_power(-(-shape.runs // _HELD))
    room = MAX_SHARED if shape.size == 1 else _SHARED  # only rows that are quantized must be whole
    if not shape.is_quantized and warps <= 8 and 16 * shape.row_bytes <= room:
        rows_once = 2 if warps > 1 and 2 * -(-shape.runs // warps) <= 20 else 1
        yield Tile(16, shape.places, warps, rows_once, 1, _split(shape, 16), 256, 2)
    for rows in (32, 16):
        yield Tile(rows, 2048 if shape.is_quantized else 512, 1, 2, 1, _split(shape, rows), 256)


def _split(shape: Shape, rows: int) -> int:
    """Return how many of eight warps share the columns of x: few enough for eight tiles of sums a warp."""
    tiles = -(-shape.out // 8) * rows // 16
    return max(1, 8 // _ceil_power(-(-tiles // 8)))


@kernel("fused:gemm", "gnnc.gemm", "gnnc.qgemm", backend="cuda", name="gemm", priority=10, elements=BYTES)
class Gemm:
    """Kernel of ``csrc/cuda/dense/gemm.cuh``: tensor cores in 8 or 16 bits; x is rounded on load."""

    @staticmethod
    def plan(node: Node) -> gemm.Plan | Decline:
        """Take products that fit into the shared memory of a block, but those in FP32, which cuBLAS takes."""
        plan = gemm.plan(node)
        if isinstance(plan, Decline):
            return plan
        if plan.mode == gemm.FLOAT:
            return Decline("float32 products are not rounded to 16 bits")
        shapes = shapes_of(plan, node)
        for program in plan.program.windows:
            if [op for op, *_ in program.steps].count(Op.SCALE_TENSOR) > 1:
                return Decline("it finds two scales of all rows, and the launch before sets one to zero")
        widest = max(shape.out for shape in shapes)
        if widest > _MAX_WIDTH or tile_of(*shapes) is None:
            return Decline(f"sixteen rows of {widest} columns exceed shared memory")
        return plan

    @staticmethod
    def emit(plan: gemm.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write two launches: that of the weights and that of the products."""
        shapes = shapes_of(plan, node)
        tile = tile_of(*shapes)
        assert tile is not None, "plan() has looked"
        x = argument_of(node, plan.x)
        rows = shape_of(x)[0]
        tensor, stride = emitter.matrix(x), emitter.row_stride(x)
        x_scale = emitter.optional_vector(optional_argument(node, plan.x_scale))
        programs = plan.program.windows
        epilogues = [
            write_epilogue(program, node, emitter, rows, shape.out, begins_scales=False)
            for program, shape in zip(programs, shapes, strict=True)
        ]
        packed = _pack(plan, node, emitter, shapes, shapes[0].load_width(stride))
        parts: list[str] = []
        values: list[Operand] = []
        for shape, program, weight, (epilogue, own) in zip(shapes, programs, packed, epilogues, strict=True):
            config = config_of(shape, tile, TYPES[x.meta["val"].dtype], stride)
            parts.append(f"gnnc::Part<{config}, {_lanes(program, tile, shape)}, {epilogue}>")
            values += [*map(pointer, weight), *own]
        count = emitter.size(rows)
        name = f"gnnc::gemm<{', '.join(parts)}>"
        emitter.kernel_set.require(
            name,
            f"gnnc::SharedOf<{', '.join(parts)}>::kBytes == {tile.shared(shapes)}",
            "the host and the kernel lay shared memory out alike",
        )
        emitter.launch(
            name,
            blocks(count, tile.rows),
            [*map(pointer, (tensor, x_scale)), count, *values],
            block=tile.threads,
            shared=tile.shared(shapes),
        )


def _lanes(program: RowProgram, tile: Tile, shape: Shape) -> int:
    """Return the number of threads that run the row program of one row.

    They are few where rows are quantized, so that every thread has a row: all threads of a row compute its
    scale. They are many where rows are stored, so that they write more contiguous memory at once.
    """
    max_lanes = lanes_for(shape.out)
    if not program.quantizes:
        return max_lanes
    return min(max(tile.threads // tile.rows, 4), max_lanes)


@kernel("fused:gemm", "gnnc.gemm", backend="cuda", name="cublas", priority=5, elements=BYTES)
class Cublas:
    """Kernel that calls ``torch.mm`` in FP32, then runs the row program in a second launch."""

    @staticmethod
    def plan(node: Node) -> gemm.Plan | Decline:
        """Take float products."""
        plan = single_float(node)
        if isinstance(plan, Decline):
            return plan
        reason = why_no_sums(plan.program, plan.width)
        if reason is not None:
            return Decline(reason)
        return plan if plan.width <= _MAX_WIDTH else Decline(f"rows of {plan.width} columns")

    @staticmethod
    def emit(plan: gemm.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the product in cuBLAS, and the launch of its row program."""
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
    """Kernel that calls ``aten._int_mm`` (cuBLASLt), for int8 rows too wide for a block of `Gemm`."""

    @staticmethod
    def plan(node: Node) -> Decline | None:
        """Take int8 matrices whose sums fit into 32 bits."""
        x, w = (value.meta["val"] for value in unpack(node, "x", "w"))
        if x.dim() != 2 or x.shape[1] > _MOST_PRODUCTS:
            return Decline(f"x has the shape {tuple(x.shape)}")
        return None if w.dtype == x.dtype == torch.int8 else Decline(f"x is {x.dtype}")

    @staticmethod
    def emit(plan: None, node: Node, emitter: CudaEmitter) -> None:
        """Write the call of the product in cuBLASLt."""
        x, w = map(emitter.exact, unpack(node, "x", "w"))
        name = emitter.fresh("v")
        emitter.call(emitter.bind(product_of_quantized, "product_of_quantized"), [x, w], result=name)
        emitter.define(node, variable(name))


def product_of_quantized(x: Tensor, w: Tensor) -> Tensor:
    """Return ``x @ w.T`` of int8 ``[N, K]`` and ``[O, K]``, exact, rounded once to float32 ``[N, O]``.

    cuBLASLt takes multiples of eight, and more than sixteen rows.
    """
    (rows, inner), out = x.shape, w.shape[0]
    pad_inner, pad_rows, pad_out = -inner % 8, max(17 - rows, 0), -out % 8
    if pad_inner or pad_rows:
        x = pad(x, (0, pad_inner, 0, pad_rows))
    if pad_inner or pad_out:
        w = pad(w, (0, pad_inner, 0, pad_out))
    return torch.ops.aten._int_mm(x.contiguous(), w.contiguous().t())[:rows, :out].float()


def single_float(node: Node) -> gemm.Plan | Decline:
    """Return the plan of one product of FP32 values."""
    plan = gemm.plan(node)
    if isinstance(plan, Decline):
        return plan
    if len(plan.weights) > 1:
        return Decline("one product a launch")
    return plan if plan.mode == gemm.FLOAT else Decline("only float32 products")


def shapes_of(plan: gemm.Plan, node: Node) -> list[Shape]:
    """Return the sizes of the products of a plan."""
    product, size = _PRODUCTS[plan.mode]
    inner = int(argument_of(node, plan.x).meta["val"].shape[-1])
    return [Shape(product, size, inner, weight.width, plan.x_scale is not None) for weight in plan.weights]


def config_of(shape: Shape, tile: Tile, kind: str, stride: int) -> str:
    """Return the C++ name of the ``GemmConfig`` for rows of ``kind`` that are ``stride`` elements apart."""
    sizes = f"{shape.inner}, {stride}, {shape.out}, {shape.load_width(stride)}"
    return f"gnnc::GemmConfig<gnnc::Product::{shape.product}, {kind}, {sizes}, {tile}>"


def _pack(
    plan: gemm.Plan, node: Node, emitter: CudaEmitter, shapes: Sequence[Shape], load_width: int
) -> list[tuple[Expr, Expr]]:
    """Write the launch that quantizes and lays out the weights; return each packed weight with its scales."""
    configs: list[str] = []
    values: list[Operand] = []
    packed: list[tuple[Expr, Expr]] = []
    for given, shape, program in zip(plan.weights, shapes, plan.program.windows, strict=True):
        w = argument_of(node, given.w)
        tensor, stride = emitter.matrix(w), emitter.row_stride(w)
        sizes = f"{shape.inner}, {shape.out}, {f'{stride}, 1' if given.is_kn else f'1, {stride}'}"
        configs.append(
            f"gnnc::PackConfig<gnnc::Product::{shape.product}, {sizes}, {load_width}, {shape.pack_warps}>"
        )
        zero = next((scale.written for scale in scales_of(program, node, emitter)), None)
        weight = emitter.scratch(1, shape.weight_bytes, torch.int8, flat=True)
        scale = emitter.scratch(1, shape.out, torch.float32, flat=True)
        values += map(pointer, (tensor, weight.written, scale.written, zero))
        packed.append((weight, scale))
    count = sum(round_up(shape.out, 8) for shape in shapes) * shapes[0].pack_warps // 8
    emitter.launch(f"gnnc::pack_weights<{', '.join(configs)}>", count, values)
    return packed


def _floor_power(number: int) -> int:
    """Return the largest power of two that is not above ``number``; 1 for less."""
    return 1 << max(0, number.bit_length() - 1)


def _ceil_power(number: int) -> int:
    """Return the least power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()
