"""Tables of a CSR as kernels take them: built once, cached on the tensors of the CSR, and freed with them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnc.ir.graph import placeholders
from gnnc.ir.source import is_structure
from gnnc.runtime.cuda.emitter import CudaEmitter, pointer, round_up
from gnnc.runtime.cuda.formats.keys import (
    DESTINATIONS,
    EDGE_ORDER,
    PADDED_COLUMNS,
    PENDING_RUNS,
    run_table_key,
    sum_table_key,
    window_sizes_key,
    window_table_key,
)
from gnnc.runtime.cuda.formats.run_table import Cut, Runs, chunk_of, model_runs, multiprocessors_of
from gnnc.runtime.cuda.formats.sort import padded_columns, rows_of
from gnnc.runtime.cuda.formats.tensor_cache import (
    BUILDING,
    attached,
    cached,
    cached_values,
    detach,
    launching,
)
from gnnc.runtime.cuda.formats.window_table import (
    WindowRuns,
    WindowTable,
    build_window_table,
    pays,
    sizes_of,
    window_cut_for,
    window_rows,
)
from gnnc.runtime.program.launches import Argument, Expr, Operand, Unpacked, expr, tuple_of
from gnnc.torch_private import storage_id

_RUN_FIELDS = 6
"""Number of ``RunTable.fields``."""

_STAGED_FIELDS = 7
"""Number of ``SumTable.staged_fields``."""


class RunTable:
    """The run table of one CSR on its device, as kernels take it.

    Attributes:
        blocks: blocks of threads of a launch, one a multiprocessor.
        count: number of runs, with the empty runs that pad shares.
        chunk: number of runs that a block takes at a time.
        slots: rows of the staging buffer.
        fields: members of ``gnnc::Runs`` after ``rowptr`` and ``col``.
        tensors: tensors whose addresses are in the fields.

    Args:
        runs: the table, complete.
        multiprocessors: number of multiprocessors of the device.
        row_bytes: bytes of a row of x.
        chunk: see ``Cut``.
    """

    def __init__(self, runs: Runs, multiprocessors: int, row_bytes: int, chunk: int | None = None) -> None:
        if chunk is None:
            chunk = chunk_of(
                runs.run.shape[0], multiprocessors, row_bytes, per_block=runs.per_block is not None
            )
        self.blocks = min(runs.run.shape[0], multiprocessors)
        if not chunk:
            assert runs.per_block is not None
            runs = runs._replace(run=runs.per_block)
            chunk = runs.run.shape[0] // max(self.blocks, 1)
        self.tensors = runs.entry, runs.run, runs.split
        self.count, self.chunk = runs.run.shape[0], chunk
        self.slots = runs.split.shape[0]
        self.fields = (*(tensor.data_ptr() for tensor in self.tensors), self.count, self.chunk, runs.edges)


def runs_of(rowptr: Tensor, edges: int, row_bytes: int) -> RunTable:
    """Return the run table of a CSR, cached on ``rowptr``.

    Args:
        rowptr: int64 ``[rows + 1]``.
        edges: E.
        row_bytes: bytes of a row of x.
    """
    return cached(
        rowptr,
        run_table_key(row_bytes),
        lambda: RunTable(model_runs(rowptr, edges), multiprocessors_of(rowptr), row_bytes),
    )


class SumTable:
    """Table for sums over a CSR: a run table or a window table; the launch for the other one has no blocks.

    Attributes:
        blocks, fields: blocks and arguments of the launch that takes ``gnnc::Runs``.
        staged_blocks, staged_fields: blocks and arguments of the launch that takes ``gnnc::StagedRuns``.
        slots: rows of the staging buffer.
        tensors: tensors whose addresses are in the fields.

    Args:
        table: the table that the sums use.
    """

    def __init__(self, table: RunTable | WindowTable) -> None:
        self.slots, self.tensors = table.slots, table.tensors
        self.blocks = self.staged_blocks = 0
        self.fields, self.staged_fields = (0,) * _RUN_FIELDS, (0,) * _STAGED_FIELDS
        if isinstance(table, WindowTable):
            self.staged_blocks, self.staged_fields = table.blocks, table.fields
        else:
            self.blocks, self.fields = table.blocks, table.fields


def sums_of(rowptr: Tensor, col: Tensor, sources: int, row_bytes: int) -> SumTable:
    """Return the table for sums over the edges of a CSR, cached on ``col``.

    Args:
        rowptr: int64 ``[rows + 1]``.
        col: int32 ``[E]``.
        sources: number of rows of x.
        row_bytes: bytes of a row of x.
    """

    def build() -> SumTable:
        windowed = _window_runs_of(rowptr, col, row_bytes)
        if windowed is None:
            return SumTable(runs_of(rowptr, col.shape[0], row_bytes))
        return SumTable(WindowTable(windowed, sources))

    return cached(col, sum_table_key(rowptr, sources, row_bytes), build)


def _window_runs_of(rowptr: Tensor, col: Tensor, row_bytes: int) -> WindowRuns | None:
    """Return the tensors of the window table of a CSR, or None if a run table costs less for such rows."""
    rows, edges, window = rowptr.shape[0] - 1, col.shape[0], window_rows(row_bytes)
    processors = multiprocessors_of(rowptr)
    if not pays(edges, edges, rows, processors, row_bytes):
        return None

    def build() -> WindowRuns | None:
        with launching(rowptr.device):
            sizes = attached(col, window_sizes_key(rowptr))
            if sizes is None:
                sizes = sizes_of(rowptr, col, window_cut_of(rowptr, col))
            return build_window_table(rowptr, col, sizes, processors, window)

    runs = cached(col, window_table_key(rowptr, window), build)
    return runs if runs is not None and pays(runs.near, edges, rows, processors, row_bytes) else None


def window_cut_of(rowptr: Tensor, col: Tensor) -> Cut:
    """Return the model's cut of windowed edges: the cut that the cached sizes are for, if there are any."""
    sizes = attached(col, window_sizes_key(rowptr))
    return window_cut_for(rowptr.shape[0] - 1, col.shape[0]) if sizes is None else sizes.cut


def in_fours(col: Tensor) -> Tensor:
    """Return columns that kernels may read four at a time: aligned to 16 bytes, padded to a multiple of four.

    The columns of ``gnnc.csr`` are returned as they are; of other columns a copy is cached on ``col``.
    """

    def build() -> Tensor | None:
        room = col.untyped_storage().nbytes() // col.itemsize - col.storage_offset()
        if col.data_ptr() % 16 == 0 and room >= round_up(col.numel(), 4):
            return None
        with launching(col.device):
            return padded_columns(col.numel(), col.device).copy_(col)

    copy = cached(col, PADDED_COLUMNS, build)
    return col if copy is None else copy


def give_back(col: Tensor, others: Sequence[Tensor], rows: Sequence[Tensor] = ()) -> None:
    """Free the memory of columns if all sums over their edges use window tables, which contain them.

    A pending run table of the same CSR is freed too.

    Args:
        col: int32 ``[E]``, read by such sums alone.
        others: the other structure tensors of the graph; memory that one of them shares stays.
        rows: structure tensors read by such sums alone, ``rowptr`` among them.
    """
    memory = col.untyped_storage()
    if memory.nbytes() == 0 or any(storage_id(other) == storage_id(col) for other in others):
        return
    copy = in_fours(col)
    tables = [value for value in cached_values(copy) if isinstance(value, SumTable)]
    if tables and all(table.staged_blocks for table in tables):
        with BUILDING:
            for columns in (col, copy):
                columns.untyped_storage().resize_(0)
            for rowptr in rows:
                detach(rowptr, PENDING_RUNS)


def in_order(rowptr: Tensor, edges: int) -> Tensor:
    """Return 0, 1, ..., E - 1 as int32 columns: a segment reduction reads row i of x for edge i."""

    def build() -> Tensor:
        with launching(rowptr.device):
            col = padded_columns(edges, rowptr.device)
            return torch.arange(edges, out=col)

    return cached(rowptr, EDGE_ORDER, build)


def destinations(rowptr: Tensor, edges: int) -> Tensor:
    """Return the destination of every edge, int32 ``[E]``, cached on ``rowptr``."""

    def build() -> Tensor:
        with launching(rowptr.device):
            return rows_of(rowptr, edges)

    return cached(rowptr, DESTINATIONS, build)


def write_columns(emitter: CudaEmitter, col: Expr) -> Expr:
    """Write the call of ``in_fours``; return the columns."""
    return emitter.let_call("col", emitter.bind(in_fours, "in_fours"), [col])


def write_runs(emitter: CudaEmitter, rowptr: Expr, edges: Operand, row_bytes: int) -> Expr:
    """Write the call of ``runs_of``; return the table."""
    return emitter.let_call("runs", emitter.bind(runs_of, "runs_of"), [rowptr, edges, row_bytes])


def write_sums(emitter: CudaEmitter, rowptr: Expr, col: Expr, sources: Operand, row_bytes: int) -> Expr:
    """Write the call of ``sums_of``; return the table."""
    return emitter.let_call("runs", emitter.bind(sums_of, "sums_of"), [rowptr, col, sources, row_bytes])


def write_give_back(emitter: CudaEmitter) -> None:
    """Write the call of ``give_back`` after the last sum that reads the columns of a graph."""
    nodes = emitter.graph_module.graph.nodes
    inputs = placeholders(emitter.graph_module)
    structure = [node for node in inputs if is_structure(node) and isinstance(node.meta.get("val"), Tensor)]
    for col, sums in emitter.windowed_sums.items():
        if col in structure and set(col.users) == sums:
            emitter.enter(len(nodes), next(node for node in reversed(nodes) if node in sums))
            others = [node for node in structure if node is not col]
            rows = [node for node in others if set(node.users) <= sums]
            lists = [tuple_of(map(emitter.exact, nodes)) for nodes in (others, rows)]
            function = emitter.bind(give_back, "give_back")
            emitter.let_call("nothing", function, [emitter.exact(col), *lists])


def write_staging(emitter: CudaEmitter, runs: Expr, words: int, slices: int = 1) -> list[Argument]:
    """Write the allocation of a staging buffer for parts of rows; return the fields of a ``gnnc::Staging``.

    Args:
        emitter: the program under construction.
        runs: the run table.
        words: number of 4-byte words of a part.
        slices: number of slices that a row may be cut into.
    """
    memory = emitter.empty("staging", [expr("{}.slots * {}", runs, words)], torch.float32)
    arrived = emitter.counters(expr("{}.slots * {}", runs, slices))
    return [pointer(memory.written), pointer(arrived.written)]


def runs_arguments(rowptr: Expr, col: Expr | None, runs: Expr) -> list[Argument]:
    """Return the arguments that make a ``gnnc::Runs``; a kernel that reads no sources needs no ``col``."""
    return [pointer(rowptr), pointer(col), Unpacked(expr("{}.fields", runs), _RUN_FIELDS)]


def staged_arguments(rowptr: Expr, runs: Expr) -> list[Argument]:
    """Return the arguments that make a ``gnnc::StagedRuns``."""
    return [pointer(rowptr), Unpacked(expr("{}.staged_fields", runs), _STAGED_FIELDS)]


CACHED = (in_fours, in_order, destinations, runs_of, sums_of)
"""Functions whose results are cached on their first argument or on ``col``."""
