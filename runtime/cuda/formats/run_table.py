"""Run table of a graph: its edges cut into units of work for the warps of sparse kernels.

Kernels read it in ``csrc/cuda/sparse/runs.cuh``.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gnnc.runtime.cuda.driver.kernel_set import KernelSet, kernels_on
from gnnc.runtime.cuda.driver.launch import Launcher
from gnnc.runtime.cuda.driver.readback import Readback
from gnnc.runtime.cuda.formats.keys import PENDING_RUNS, RUNS
from gnnc.runtime.cuda.formats.tensor_cache import cached, detach, launching
from gnnc.torch_private import raw_stream

ROW_COST = 4
"""Cost of a row, in edges, beyond the cost of its edges."""
_CHUNK, _WIDE_CHUNK = 32, 64
"""Runs that a block of a large graph takes at a time. Blocks work on neighboring chunks: larger ones would
spread them over more than L2 holds. Rows of 256 bytes and more get larger ones, whose sources are found in L1
more often."""
_TURNS = 16
"""Chunks for each block, at least: with fewer, blocks differ too much in cost."""
_LEAST_SHORT, _MOST_SHORT = 8, 256
"""Bounds of ``Cut.short``: a slot gathers rows of x for so many edges; more take too long for a warp."""
_UNSPLIT = 256
"""Edges of a row that is not split on a small graph: joining parts takes one more wait for memory."""
MOST_ENTRIES = 16
"""Rows of a run, at most: ``gnnc::kMostEntries``."""
MOST_PART = 2048
"""Edges of an entry, at most: ``gnnc::kMostPart``."""
_MOST_OF_A_SHARE = 4096
"""Runs of a share that are sorted, in quadratic time; a share of more consists of rows without edges."""
_MOST_OF_A_SLOT = MOST_PART // 2
"""Edges that a slot adds up, at most: sums in fixed point have 32 bits (csrc/cuda/sparse/product_sum.cuh)."""
_WINDOW, _GROUP = 256, 8
"""Rows that one block cuts, and the least number of short rows in a run."""
_FIELDS = (
    *("rowptr", "refused", "counts", "sums", "entry", "run", "split"),
    *("cost", "ends", "begin", "sizes", "per_block"),
    *("rows", "windows", "part", "few", "run_cost", "least_cost", "shares", "share"),
)
"""Members of ``gnnc::CutArgs``."""
_NO_RUN = [0, 0, -1, 0]


class Cut(NamedTuple):
    """Sizes by which the edges of a graph are cut into units of work.

    Attributes:
        part: rows with more edges are split into parts of about as many.
        short: rows with at most so many edges share a run.
        entries: short rows of a run, at most; a group of eight rows is always allowed.
        chunk: runs that a block takes at a time; 0: one share for each block; None: decided by ``chunk_of``.
        windowed: whether edges are arranged in a window table (``window_table.py``), not in a run table.
    """

    part: int
    short: int
    entries: int = MOST_ENTRIES
    chunk: int | None = None
    windowed: bool = False

    def __str__(self) -> str:
        """Return the kind of table and the sizes."""
        turns = f", {self.chunk} at a time" if self.chunk else ""
        return f"{'windowed' if self.windowed else 'runs'}, part {self.part}, short {self.short}{turns}"


class Runs(NamedTuple):
    """The tensors of ``gnnc::Runs``, on the graph's device.

    Attributes:
        entry: int32 ``[entries, 4]``: row, edges, and the first of them as int64.
        run: int32 ``[runs, 4]``: first entry, entries, staging slot (-1: whole rows), 0.
        split: int32 ``[slots, 4]``: row, first slot and number of parts, 0, of the row of each part.
        edges: E of the graph.
        cut: sizes by which the edges were cut.
        per_block: int32 ``[shares * n, 4]`` like ``run``, ``n`` a power of two: a share of neighboring runs
            for each block of threads, or for each run where runs are fewer. Shares cost about the same;
            the warps of a block take its runs in order of falling cost, so that they end together. A share
            is padded with runs of no entries, at which warps stop. None if blocks take chunks in turn: there
            are many runs, or many cost so little that one share has thousands.
    """

    entry: Tensor
    run: Tensor
    split: Tensor
    edges: int
    cut: Cut
    per_block: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of the table."""
        tensors = self.entry, self.run, self.split
        return tensors if self.per_block is None else (*tensors, self.per_block)


def cut_for(rows: int, edges: int, multiprocessors: int) -> Cut:
    """Return the sizes for a run table by which every warp of the device gets several runs.

    A multiprocessor holds about 32 warps; with three runs each, the last ones to finish cost little
    (the analytical model of GNNAdvisor section 3.6, with the device's parallelism alone). The bounds are
    measured: docs/cuda-sparse-kernels.md. A graph that leaves warps idle has its rows shared by the slots
    of a warp early, and splits few of them: what counts there is the longest chain of loads.

    Args:
        rows: number of rows of the CSR.
        edges: E of the graph.
        multiprocessors: number of multiprocessors of the device.
    """
    warps = multiprocessors * 32
    few = few_edges(rows, edges)
    by_degree = min(few, _MOST_SHORT)
    short = min(by_degree, max(_power_of_two_from(edges // (2 * warps)), _LEAST_SHORT))
    if short < by_degree:
        return Cut(_UNSPLIT, short, entries=1)
    part = _power_of_two_from(edges // (warps * 3))
    return Cut(min(max(part, 2 * short), 4 * few, MOST_PART), short)


def candidates(model: Cut, other: Cut | None = None) -> list[Cut]:
    """Return the cuts of a graph that are worth a measurement: the model's and up to seven variations.

    Args:
        model: the model's cut, with its chunk; comes first.
        other: the model's cut for the other kind of table; None: the other kind is not tried.
    """
    part, short, chunk = model.part, model.short, model.chunk
    sizes = ((part // 2, short), (2 * part, short), (part, short // 2), (part, 2 * short))
    varied = [model._replace(part=p, short=s) for p, s in sizes if _is_useful(p, s)]
    turns = [model._replace(chunk=size) for size in (chunk // 2, 2 * chunk)] if chunk else []
    return [model, *varied, *turns, *([] if other is None else [other])]


def _is_useful(part: int, short: int) -> bool:
    return _LEAST_SHORT <= short <= min(part, _MOST_OF_A_SLOT) and part <= MOST_PART


def few_edges(rows: int, edges: int) -> int:
    """Return the largest degree of a row of few edges: twice the mean, as a power of two from 64 to 512."""
    return min(max(_power_of_two_from(2 * edges // max(rows, 1)), 64), 512)


def _power_of_two_from(number: int) -> int:
    return 1 << (max(number, 1) - 1).bit_length()


def chunk_of(runs: int, multiprocessors: int, row_bytes: int, *, per_block: bool = True) -> int:
    """Return the number of runs that a block takes at a time; 0 for one share for each block.

    Args:
        runs: number of runs of the graph.
        multiprocessors: number of multiprocessors of the device.
        row_bytes: bytes of a row of x.
        per_block: whether the table has shares.
    """
    chunk = _WIDE_CHUNK if row_bytes >= 256 else _CHUNK
    return chunk if runs >= _TURNS * multiprocessors * chunk or not per_block else 0


class Kernels:
    """Kernels that build run tables (csrc/cuda/structure/cut_rows.cuh), on one device."""

    def __init__(self, kernel_set: KernelSet) -> None:
        names = ("count_runs", "write_runs", "share_runs", "deal_runs")
        self.count, self.write, self.share, self.deal = (
            kernel_set.launcher(f"gnnc::{name}", len(_FIELDS), block=_WINDOW) for name in names
        )
        kernel = self.write.name
        kernel_set.expect(kernel, "CutArgs", len(_FIELDS))
        kernel_set.require(
            kernel, f"kRowCost == {ROW_COST} && kWindow == {_WINDOW}", "windows have so many rows"
        )
        kernel_set.require(kernel, f"kGroup == {_GROUP}", "what a run has room for is counted in groups")
        kernel_set.require(
            kernel, f"kMostEntries == {MOST_ENTRIES}", "a warp has room for the entries of a run"
        )
        kernel_set.require(kernel, f"kMostPart == {MOST_PART}", "sums of so many edges are in range")


class Draft:
    """A run table whose kernels are launched, without a wait, into memory for its largest possible size.

    Args:
        rowptr: int64 ``[rows + 1]``, on the current device.
        edges: E, or more.
        cut: sizes by which the edges are cut.
        shares: number of blocks of threads that may have shares of the runs.
        sizes: int32 ``[4]``, receives the sizes that ``finish`` takes.
        refused: an int32; if it is not 0, the content of rowptr is undefined, and no table is written.
    """

    def __init__(
        self, rowptr: Tensor, edges: int, cut: Cut, shares: int, sizes: Tensor, refused: Tensor | None = None
    ) -> None:
        rows, windows = rowptr.shape[0] - 1, -(-(rowptr.shape[0] - 1) // _WINDOW)
        parts = min(rows, edges // (cut.short + 1)) + edges // cut.part
        count = min(rows, -(-rows // _GROUP) + windows) + parts
        new = partial(torch.empty, dtype=torch.int32, device=rowptr.device)
        self._entry, self._split = new(rows + edges // cut.part, 4), new(2 * edges // cut.part, 4)
        self._run, self._cost, self._begin = new(count, 4), new(count), new(shares + 1)
        self._shares, self._cut = shares, cut
        run_cost = min(cut.part, _GROUP * (cut.short + ROW_COST))
        self._values = {
            "rowptr": rowptr.data_ptr(),
            "refused": 0 if refused is None else refused.data_ptr(),
            "entry": self._entry.data_ptr(),
            "run": self._run.data_ptr(),
            "split": self._split.data_ptr(),
            "cost": self._cost.data_ptr(),
            "begin": self._begin.data_ptr(),
            "sizes": sizes.data_ptr(),
            "rows": rows,
            "windows": windows,
            "part": cut.part,
            "few": cut.short,
            "run_cost": run_cost,
            "least_cost": -(-run_cost * _GROUP // max(cut.entries, _GROUP)),
            "shares": shares,
        }
        self._kernels = kernels_on(rowptr.device.index, Kernels)
        if windows:
            self._launch(windows, new(3, windows))

    def _launch(self, windows: int, counts: Tensor) -> None:
        kernels = self._kernels
        self._run_kernel(kernels.count, windows, counts=counts)
        sums = torch.cumsum(counts, 1, dtype=torch.int32)
        self._run_kernel(kernels.write, windows, sums=sums)
        self._run_kernel(kernels.share, 1, sums=sums, ends=torch.cumsum(self._cost, 0))

    def _run_kernel(self, launch: Launcher, blocks: int, share: int = 0, **tensors: Tensor) -> None:
        values = (
            self._values | {name: tensor.data_ptr() for name, tensor in tensors.items()} | {"share": share}
        )
        stream = raw_stream(self._run.device.index)
        launch(blocks, stream, *[values.get(name, 0) for name in _FIELDS])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of the table."""
        return self._entry, self._run, self._split, self._cost, self._begin

    def finish(self, sizes: Sequence[int], edges: int) -> Runs:
        """Return the table.

        Args:
            sizes: entries, runs, slots, and runs of the longest share.
            edges: E.
        """
        entries, count, slots, longest = sizes
        per_block, cut = None, self._cut
        takes_turns = count >= _TURNS * self._shares * _WIDE_CHUNK or longest > _MOST_OF_A_SHARE
        if cut.chunk == 0 or cut.chunk is None and not takes_turns:
            per_block = self._deal(min(count, self._shares), _power_of_two_from(longest))
        run, split = _fitted(self._run, count), _fitted(self._split, slots)
        return Runs(self._entry[:entries], run, split, edges, cut, per_block)

    def _deal(self, shares: int, share: int) -> Tensor:
        if shares == 0:
            return self._begin.new_tensor([_NO_RUN])
        per_block = self._run.new_empty(shares * share, 4)
        self._run_kernel(self._kernels.deal, shares, share, per_block=per_block)
        return per_block


def _fitted(tensor: Tensor, rows: int) -> Tensor:
    """Return the first rows, as a copy if they are less than half of the tensor, so that it can be freed."""
    return tensor[:rows] if 2 * rows >= tensor.shape[0] else tensor[:rows].clone()


def build_runs(rowptr: Tensor, edges: int, cut: Cut, shares: int) -> Runs:
    """Cut the edges of a CSR into runs.

    Args:
        rowptr: int64 ``[rows + 1]``.
        edges: E.
        cut: sizes; the entries of a run of short rows cost less than ``part`` edges, or are one group.
        shares: number of blocks of threads of a launch, at least 1.

    Returns:
        The table; the host waits once for the device.
    """
    with torch.cuda.device(rowptr.device):
        readback = Readback(4, rowptr.device)
        draft = Draft(rowptr, edges, cut, shares, readback.tensor)
        readback.send()
        return draft.finish(readback.wait(), edges)


class PendingRuns(NamedTuple):
    """A run table whose sizes are known.

    Attributes:
        draft: the launched table.
        sizes: the sizes that ``Draft.finish`` takes.
        edges: E.
    """

    draft: Draft
    sizes: Sequence[int]
    edges: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of the table."""
        return self.draft.tensors

    def finish(self) -> Runs:
        """Return the table, without a wait."""
        return self.draft.finish(self.sizes, self.edges)


def model_runs(rowptr: Tensor, edges: int) -> Runs:
    """Return the run table of a CSR by the model's cut, for rows of x of any size, cached on ``rowptr``.

    Args:
        rowptr: int64 ``[rows + 1]``.
        edges: E.
    """

    def build() -> Runs:
        with launching(rowptr.device), torch.cuda.device(rowptr.device):
            pending = detach(rowptr, PENDING_RUNS)
            if pending is not None:
                return pending.finish()
            shares = multiprocessors_of(rowptr)
            return build_runs(rowptr, edges, cut_for(rowptr.shape[0] - 1, edges, shares), shares)

    return cached(rowptr, RUNS, build)


def multiprocessors_of(tensor: Tensor) -> int:
    """Return the number of multiprocessors of a tensor's device."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
