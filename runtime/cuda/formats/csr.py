"""The structure of a graph on the device: CSR by a radix sort, ids checked before anything reads by them."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from gnnc.errors import GraphError
from gnnc.runtime.cuda.driver.readback import Readback
from gnnc.runtime.cuda.formats.keys import PENDING_RUNS, RUNS, window_sizes_key
from gnnc.runtime.cuda.formats.run_table import Draft, PendingRuns, cut_for, multiprocessors_of
from gnnc.runtime.cuda.formats.sort import Sorted, rows_of, sort_edges
from gnnc.runtime.cuda.formats.tensor_cache import Ready, attach, cached_tensors, refuse_in_capture
from gnnc.runtime.cuda.formats.window_table import NUMBERS as WINDOW_NUMBERS
from gnnc.runtime.cuda.formats.window_table import Sizes, find_sizes, may_pay, window_cut_for
from gnnc.runtime.structure.kernels import structure_kernel
from gnnc.torch_private import raw_stream

_READY = "_ready"
"""Attribute of a result: the event after which it is in memory."""


@structure_kernel("gnnc.csr", backend="cuda", name="radix_sort")
def csr(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort edges by destination; see ``gnnc.csr``.

    The host waits once, for one read-back: whether ids are out of range, and the sizes of the tables, which
    are cached on ``rowptr`` and ``col``. Sorting and searching do not use ids as addresses, so that ids out
    of range do no harm.

    Raises:
        GraphError: an id is out of range.
    """
    if src.shape[0] == 0:
        empty = torch.empty(0, dtype=torch.int64, device=src.device)
        rowptr = torch.zeros(num_dst + 1, dtype=torch.int64, device=src.device)
        return rowptr, empty.to(torch.int32), empty
    return sorted_edges(src, dst, num_src, num_dst)


@structure_kernel("gnnc.csr_with_loops", backend="cuda", name="radix_sort_with_loops")
def csr_with_loops(src: Tensor, dst: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the CSR of a graph with one self loop at each node, which replaces the self loops that it has.

    The result is that of ``gnnc.csr`` for the other edges, followed by the new loops.

    Returns:
        ``rowptr`` int64 ``[nodes + 1]``, ``col`` int32 and ``perm`` int64: the position of every edge among
        the caller's E edges, followed by the new loops.

    Raises:
        GraphError: an id is out of range.
    """
    if src.shape[0] + nodes == 0:
        return csr(src, dst, nodes, nodes)
    return sorted_edges(src, dst, nodes, nodes, loops=True)


def sorted_edges(
    src: Tensor, dst: Tensor, num_src: int, num_dst: int, *, loops: bool = False, cuts: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the CSR by destination of at least one edge; see ``csr`` and ``csr_with_loops``.

    ``cuts``: build the run table, or its sizes, and cache them on ``rowptr`` and ``col``.
    """
    device = src.device
    with torch.cuda.device(device):
        readback = Readback(3 + _Tables.NUMBERS, device)
        done = sort_edges(dst, src, num_dst, num_src, readback.tensor, loops=loops)
        # rowptr is correct if a source is out of range, undefined if a destination is.
        tables = _Tables(done, readback.tensor[3:], readback.tensor[:1]) if cuts else None
        readback.send()
        bad_dst, bad_src, edges, *sizes = readback.wait()
        if bad_src:
            _refuse("src", src, num_src, "source")
        if bad_dst:
            _refuse("dst", dst, num_dst, "destination")
        col, perm = (done.col[:edges], done.perm[:edges]) if loops else (done.col, done.perm)
        if tables is not None:
            tables.finish(col, sizes)
    return done.rowptr, col, perm


class _Tables:
    """Builder of the tables of a new graph: launched after its sort, finished with the sizes on the host.

    Args:
        done: the sort, on the current device.
        sizes: int32 ``[NUMBERS]``, zeros: receives the sizes that ``finish`` takes.
        refused: an int32; if it is not 0, the content of the sort's rowptr is undefined.
    """

    NUMBERS = 4 + WINDOW_NUMBERS

    def __init__(self, done: Sorted, sizes: Tensor, refused: Tensor) -> None:
        rowptr = done.rowptr
        rows, edges, shares = rowptr.shape[0] - 1, done.col.shape[0], multiprocessors_of(rowptr)
        self._rowptr, self._window_cut = rowptr, None
        self._draft = Draft(rowptr, edges, cut_for(rows, edges, shares), shares, sizes[:4], refused)
        if may_pay(rows, edges, shares):
            self._window_cut = window_cut_for(rows, edges)
            find_sizes(rowptr, done.keys, done.col, self._window_cut, sizes[4:])

    def finish(self, col: Tensor, sizes: Sequence[int]) -> None:
        """Cache the run table on rowptr; if a window table may pay, window sizes on col too."""
        edges, sizes, window_sizes = col.shape[0], sizes[:4], sizes[4:]
        if self._window_cut is None:
            attach(self._rowptr, RUNS, self._draft.finish(sizes, edges))
            return
        attach(self._rowptr, PENDING_RUNS, PendingRuns(self._draft, sizes, edges))
        attach(col, window_sizes_key(self._rowptr), Sizes.of(window_sizes, edges, self._window_cut))


@structure_kernel("gnnc.csr_transpose", backend="cuda", name="radix_sort_transpose")
def csr_transpose(rowptr: Tensor, col: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the CSR by source; see ``gnnc.csr_transpose``. Its run table is built on demand."""
    if col.shape[0] == 0:
        return csr(col, col, rowptr.shape[0] - 1, num_src)
    return sorted_edges(rows_of(rowptr, col.shape[0]), col, rowptr.shape[0] - 1, num_src, cuts=False)


@structure_kernel("gnnc.degree", backend="cuda", name="degree")
def degree(rowptr: Tensor) -> Tensor:
    """Return the number of edges of every row, as ``gnnc.degree`` but without torch's dispatcher."""
    return (rowptr[1:] - rowptr[:-1]).float()


def _refuse(name: str, index: Tensor, bound: int, kind: str) -> NoReturn:
    bad = int(((index < 0) | (index >= bound)).nonzero()[0, 0])
    raise GraphError(
        f"[gnnc.csr] {name}[{bad}] = {int(index[bad])} is not a {kind} node: ids must be in "
        f"0..{bound - 1} ({bound} nodes); check edge_index against the number of rows of x"
    )


def _device_of(values: Sequence[Any]) -> torch.device | None:
    return next((tensor.device for tensor in _on_device(values)), None)


class StreamHooks:
    """Waits between streams: one stream builds the structure of a graph, others read it.

    A result carries the event after which it is in memory; each stream that reads it
    is recorded with torch's allocator. While a single stream builds and calls, events are not waited for.
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._only: int | None = None
        self._several = False

    def before_build(self, operands: Sequence[Any]) -> None:
        """Wait for the operands of a part on the current stream.

        Raises:
            BackendError: see ``refuse_in_capture``.
        """
        if _device_of(operands) is not None:
            refuse_in_capture()
        self.after_call(operands)

    def after_build(self, results: Sequence[Any]) -> None:
        """Record the event after which results are in memory, before any call finds them."""
        device = _device_of(results)
        if device is None:
            return
        ready = Ready.now(device)
        for tensor in _on_device(results):
            vars(tensor)[_READY] = ready
        if self._only is None:
            self._only = ready.stream
        elif ready.stream != self._only:
            self._several = True

    def tables_of(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the tensors that are cached on a result."""
        return cached_tensors(tensor)

    def after_call(self, values: Sequence[Any]) -> None:
        """Wait for the results of builds on the current stream."""
        if self._device is None:
            self._device = _device_of(values)
            if self._device is None:
                return
        handle = raw_stream(self._device.index)
        if handle == self._only and not self._several:
            return
        if self._only is None:
            self._only = handle
            return
        self._several = True
        for tensor in _on_device(values):
            ready = vars(tensor).get(_READY)
            if ready is not None:  # else the tensor is the caller's
                ready.wait(chain([tensor], cached_tensors(tensor)))


def _on_device(values: Sequence[Any]) -> Iterator[Tensor]:
    yield from (value for value in values if isinstance(value, Tensor) and value.is_cuda)
