"""Lowering of aggregations over edges and over segments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.format import RUN_TABLE, WINDOW_TABLE, Format
from gnnc.ir.nodes import shape_of
from gnnc.runtime.cuda.driver.kernel_set import AS_COMPILED
from gnnc.runtime.cuda.emitter import (
    BLOCK,
    MOST_WHOLE,
    CudaEmitter,
    aligned,
    blocks,
    length,
    pointer,
    round_up,
)
from gnnc.runtime.cuda.formats.tables import (
    in_order,
    runs_arguments,
    staged_arguments,
    write_columns,
    write_runs,
    write_staging,
    write_sums,
)
from gnnc.runtime.cuda.formats.window_table import entries_of, has_room, shared_bytes, slices_of, window_rows
from gnnc.runtime.cuda.kernels.epilogue import TYPES, write_epilogue
from gnnc.runtime.plans import spmm
from gnnc.runtime.program.launches import Argument, Expr, Operand, count_of, expr
from gnnc.runtime.registry import BYTES, Decline, kernel
from gnnc.runtime.row_program.build import argument_of, optional_argument
from gnnc.runtime.row_program.opcodes import Op

ELEMENTS = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
"""The ``gnnc::Element`` of rows that edges gather, by dtype."""

_MAX_WIDTH = 4096
_MAX_SHARED_WIDTH = 2560
"""Columns of an FP32 row that fit into shared memory, for four warps in a block."""
_PIECE = 16
"""Bytes that a thread gathers at once."""
_WHOLE_ROW_OPS = {
    Op.ADD_QROW,
    Op.LAYER_NORM,
    Op.L2_NORMALIZE,
    Op.SOFTMAX,
    Op.LOG_SOFTMAX,
    Op.HEAD_MEAN,
    Op.WINDOW,
    Op.QUANT_ROW,
    Op.QUANT_POW2,
    Op.ROW_DOT,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that edges gather, as a launch takes them.

    Attributes:
        tensor: the rows.
        stride: bytes from one row to the next, a multiple of 16.
        columns: columns of a row with the padding between its heads.
        nbytes: bytes of the columns.
    """

    tensor: Expr
    stride: int
    columns: int
    nbytes: int


@kernel(
    "fused:spmm",
    "gnnc.spmm",
    "gnnc.qspmm",
    "gnnc.segment_reduce",
    backend="cuda",
    name="spmm",
    priority=10,
    elements=BYTES,
)
class Spmm:
    """Kernel of ``csrc/cuda/sparse/spmm.cuh``: sum, mean, max or min over the edges of a row; no atomics."""

    @staticmethod
    def plan(node: Node) -> spmm.Plan | Decline:
        """Take rows that fit into the registers, and their sums into the shared memory, of a warp."""
        plan = spmm.plan(node)
        if isinstance(plan, Decline):
            return plan
        if plan.width > _MAX_WIDTH:
            return Decline(f"a row of {plan.width} columns does not fit into a warp's registers")
        value = None if plan.value is None else argument_of(node, plan.value).meta["val"]
        if value is not None and value.dtype == torch.int8 and plan.heads > 1:
            return Decline("no int8 values a head")
        dtype = argument_of(node, plan.x).meta["val"].dtype
        columns = packed_width(plan.width, _heads_apart(plan, node), dtype)
        if columns > _MAX_SHARED_WIDTH and not _is_by_column(plan):
            return Decline(f"a row of {columns} columns does not fit into a warp's shared memory")
        return plan

    @staticmethod
    def formats(plan: spmm.Plan, node: Node) -> tuple[Format, ...]:
        """Return the run table, and the window table for plain sums of rows that fit into a window."""
        dtype = argument_of(node, plan.x).meta["val"].dtype
        row_bytes = packed_width(plan.width, _heads_apart(plan, node), dtype) * dtype.itemsize
        fits = (_is_by_column(plan) or slices_of(row_bytes) == 1) and _has_windows(plan, node)
        return (RUN_TABLE, WINDOW_TABLE) if fits else (RUN_TABLE,)

    @staticmethod
    def emit(plan: spmm.Plan, node: Node, emitter: CudaEmitter) -> None:
        """Write the launch over rows or slices, and one over the window table where rows allow it."""
        rowptr = argument_of(node, plan.rowptr)
        edges, col = edges_and_columns(node, emitter, plan.rowptr, plan.col, plan.x)
        value = None if plan.value is None else edge_values(emitter, node, plan.value, plan.heads)
        heads = _heads_apart(plan, node)
        x = gathered_rows(emitter, argument_of(node, plan.x), plan.width, heads, windowed=plan.is_plain_sum)
        scale = emitter.optional_vector(optional_argument(node, plan.x_scale))
        shift = emitter.optional_vector(optional_argument(node, plan.shift))
        kind = _scale(plan, node, emitter)
        sliced = _is_by_column(plan)
        staged = WINDOW_TABLE in node.meta.get("format", Spmm.formats(plan, node))
        if staged:
            assert plan.col is not None
            emitter.windowed_sums.setdefault(argument_of(node, plan.col), set()).add(node)
            sources = emitter.size(shape_of(argument_of(node, plan.x))[0])
            runs = write_sums(emitter, emitter.vector(rowptr), col, sources, x.nbytes)
        else:
            runs = write_runs(emitter, emitter.vector(rowptr), edges, x.nbytes)
        epilogue, values = write_epilogue(plan.program, node, emitter, shape_of(rowptr)[0] - 1, plan.width)
        config = _config(plan, node, kind)
        words = round_up(x.columns, 4) * (2 if _is_exact(plan, node) else 1)
        row_arguments: list[Argument] = [pointer(x.tensor), x.stride, *map(pointer, (value, scale, shift))]
        row_arguments += write_staging(emitter, runs, words, slices_of(x.nbytes) if sliced else 1)
        parameters = f"{config}, {epilogue}"
        arguments = [*runs_arguments(emitter.vector(rowptr), col, runs), *row_arguments]
        form = "spmm_sliced" if sliced and x.nbytes > MOST_WHOLE else "spmm"
        kernel = f"gnnc::{form}<{parameters}>"
        kernel_set = emitter.kernel_set
        kernel_set.expect(kernel, "SpmmArgs", count_of(arguments))
        kernel_set.require(kernel, f"Spmm<{config}>::kStagedBytes == {4 * words}", "parts of rows have room")
        kernel_set.require(kernel, f"gnnc::kMostWhole == {MOST_WHOLE}", "rows of more bytes have slices")
        emitter.launch(kernel, expr("{}.blocks", runs), [*arguments, *values], block=AS_COMPILED)
        if not staged:
            return
        arguments = [*staged_arguments(emitter.vector(rowptr), runs), *row_arguments]
        kernel, family = f"gnnc::spmm_staged<{parameters}>", f"gnnc::Staged<{config}>"
        shared, window_entries = shared_bytes(x.nbytes, kind), entries_of(window_rows(x.nbytes))
        kernel_set.expect(kernel, "StagedSpmmArgs", count_of(arguments))
        kernel_set.require(
            kernel, f"{family}::Window::kBytes == {shared}", "a launch gives the window its bytes"
        )
        kernel_set.require(
            kernel, f"{family}::kEntries == {window_entries}", "a warp has room for the entries of a run"
        )
        grid = expr("{}.staged_blocks", runs)
        emitter.launch(kernel, grid, [*arguments, *values], block=AS_COMPILED, shared=shared)


def _has_windows(plan: spmm.Plan, node: Node) -> bool:
    """Return whether windows of sources may be staged in shared memory (csrc/cuda/sparse/staged.cuh)."""
    if not plan.is_plain_sum:
        return False
    assert plan.col is not None
    if not has_room(argument_of(node, plan.x).meta["val"].device):
        return False
    # Columns of another dtype are copied in every call, and every copy would need a new window table.
    return argument_of(node, plan.col).meta["val"].dtype == torch.int32


def _is_by_column(plan: spmm.Plan) -> bool:
    """Return whether columns are independent, as slices of rows need: no step reads several of them."""
    return plan.heads == 1 and plan.program.ops.isdisjoint(_WHOLE_ROW_OPS)


def _heads_apart(plan: spmm.Plan, node: Node) -> int:
    """Return the number of heads that start on 16 bytes in a row of x: all in a sum of int8 rows, else 1."""
    is_quantized = argument_of(node, plan.x).meta["val"].dtype == torch.int8
    return plan.heads if is_quantized and plan.is_sum else 1


def _config(plan: spmm.Plan, node: Node, scale: str) -> str:
    dtype = argument_of(node, plan.x).meta["val"].dtype
    reduce = next(name for name, number in spmm.REDUCTIONS.items() if number == plan.reduce)
    value = "none"
    if plan.value is not None:
        integer = argument_of(node, plan.value).meta["val"].dtype == torch.int8
        value = "integer" if integer else "real"
    return (
        f"gnnc::SpmmConfig<gnnc::Element::{ELEMENTS[dtype]}, {plan.width}, gnnc::Reduce::{reduce}, "
        f"gnnc::Value::{value}, gnnc::Scale::{scale}, {plan.heads}>"
    )


def _is_exact(plan: spmm.Plan, node: Node) -> bool:
    """Return whether sums are integers: ``gnnc::Spmm::kExact``."""
    value = None if plan.value is None else argument_of(node, plan.value).meta["val"].dtype
    is_sum = plan.is_sum and argument_of(node, plan.x).meta["val"].dtype == torch.int8
    return is_sum and plan.heads == 1 and plan.x_scale is None and value in (None, torch.int8)


def _scale(plan: spmm.Plan, node: Node, emitter: CudaEmitter) -> str:
    """Return the ``gnnc::Scale`` of the rows of x."""
    if plan.x_scale is not None:
        return "row"
    if plan.shift is None:
        return "none"
    is_plain = plan.value is None and plan.heads == 1 and plan.is_sum
    is_plain = is_plain and slices_of(plan.width) == 1
    return "in_row" if is_plain and emitter.has_row_weights(argument_of(node, plan.x)) else "power"


def edges_and_columns(
    node: Node, emitter: CudaEmitter, rowptr: int, col: int | None, x: int
) -> tuple[Operand, Expr]:
    """Return the number of edges, and ``col`` as int32."""
    if col is None:
        edges = emitter.size(shape_of(argument_of(node, x))[0])
        starts = emitter.vector(argument_of(node, rowptr))
        return edges, emitter.let_call("col", emitter.bind(in_order, "in_order"), [starts, edges])
    source = argument_of(node, col)
    columns = emitter.vector(source)
    if source.meta["val"].dtype != torch.int32:
        columns = emitter.let("col", expr("{}.int()", columns))
    columns = write_columns(emitter, columns)
    return length(columns), columns


def gathered_rows(
    emitter: CudaEmitter, x: Node, width: int, heads: int = 1, *, windowed: bool = False
) -> Rows:
    """Return rows whose heads start on 16 bytes, a copy if need be (``csrc/cuda/sparse/pack_rows.cuh``)."""
    dtype = x.meta["val"].dtype
    tensor, stride = emitter.matrix(x, width), emitter.row_stride(x, width)
    columns = packed_width(width, heads, dtype)
    if stride * dtype.itemsize % _PIECE == 0 and columns == width:
        return Rows(tensor, stride * dtype.itemsize, columns, columns * dtype.itemsize)
    packed_stride = emitter.padded(columns, dtype, windowed=windowed)
    rows = shape_of(x)[0]
    copy = emitter.scratch(rows, packed_stride, dtype, flat=True)
    heads_of_row = f"{heads}, {width // heads}, {columns // heads}"
    config = f"gnnc::PackRowsConfig<{TYPES[dtype]}, {heads_of_row}, {stride}, {packed_stride}>"
    count = emitter.size(rows)
    pieces = expr("({} * {})", count, packed_stride * dtype.itemsize // _PIECE)
    grid = expr("({})", blocks(pieces, BLOCK))
    emitter.launch(f"gnnc::pack_rows<{config}>", grid, [pointer(tensor), pointer(copy.written), count])
    return Rows(copy, packed_stride * dtype.itemsize, columns, columns * dtype.itemsize)


def packed_width(width: int, heads: int, dtype: torch.dtype) -> int:
    """Return the columns of a row whose heads, where there are several, each start on 16 bytes."""
    return width if heads == 1 else heads * round_up(width // heads, _PIECE // dtype.itemsize)


def edge_values(emitter: CudaEmitter, node: Node, index: int, heads: int) -> Expr:
    """Return the edge values, dense: ``[E]`` aligned to 16 bytes, or ``[E, heads]``."""
    value: Any = argument_of(node, index)
    values = emitter.vector(value) if value.meta["val"].dim() == 1 else emitter.dense(value, heads)
    if heads > 1 or values.text in emitter.memory.names:  # the memory of launches begins on 16 bytes
        return values
    return emitter.let_call("value", emitter.bind(aligned, "aligned"), [values])
