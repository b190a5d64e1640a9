"""Windowed edge table, for graphs whose edges mostly connect nearby ids (csrc/cuda/sparse/staged.cuh)."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gnnc.ir.format import RUN_TABLE, STRETCH, WINDOW_TABLE, Gather, cheapest, window_rows
from gnnc.runtime.cuda.driver.kernel_set import KernelSet, kernels_on
from gnnc.runtime.cuda.driver.launch import Launcher
from gnnc.runtime.cuda.emitter import BLOCK
from gnnc.runtime.cuda.formats.run_table import ROW_COST, Cut, few_edges
from gnnc.runtime.cuda.formats.sort import rows_of
from gnnc.torch_private import raw_stream

LEAST_SHARED = 227 * 1024
"""Bytes of shared memory that a block of the device can have: a window and what warps hold."""
_POINTERS = ("place", "row", "edges", "near", "entry", "word", "slot")
"""Members of ``gnnc::StageArgs`` between the first two and the last two."""
_ARGUMENTS = len(_POINTERS) + 4
_FOUND = 5
"""Members of ``gnnc::NearArgs``, and of ``gnnc::EntriesArgs``."""
_NEAR_BLOCKS = 1024
_MOST_WORDS = 2**31 - 1


_MOST_PART = 1024
"""Edges of a part of a row."""


class Entries(NamedTuple):
    """Rows, and parts of rows, in the order of the CSR.

    Attributes:
        row: int32 ``[entries]``.
        edges: int32 ``[entries]``.
        first: int64 ``[entries]``, the first edge of each.
        part: int64 ``[entries]``, the slot of the staging buffer of a part, -1 of a whole row.
        split: int32 ``[slots, 4]``: row, first slot and number of parts, 0, of the row of each part.
    """

    row: Tensor
    edges: Tensor
    first: Tensor
    part: Tensor
    split: Tensor


class Sizes(NamedTuple):
    """What the host has to know of a graph to arrange it.

    Attributes:
        entries: rows, and parts of rows.
        slots: parts of rows.
        runs: for both windows, of rows of x of at most 64 bytes and of more.
        near: near edges, for both.
        edges: of all.
        cut: how they are cut.
    """

    entries: int
    slots: int
    runs: tuple[int, int]
    near: tuple[int, int]
    edges: int
    cut: Cut

    @classmethod
    def of(cls, numbers: Sequence[int], edges: int, cut: Cut) -> "Sizes":
        """Return what the device found: entries, slots, runs and near edges, those for both windows."""
        entries, slots, narrow, wide, *near = numbers
        return cls(entries, slots, (narrow, wide), (near[0], near[1]), edges, cut)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """None: they are numbers."""
        return ()

    def near_for(self, window: int) -> int:
        """Near edges, with so many rows of x in a window."""
        return self.near[window != STRETCH]

    def runs_for(self, window: int) -> int:
        """Runs, with so many rows of x in a window."""
        return self.runs[window != STRETCH]

    def words_for(self, window: int) -> int:
        """Words, at most: entries end with a word that is not full, of each kind."""
        near = self.near_for(window)
        return near // 8 + (self.edges - near) // 4 + 2 * self.entries


NUMBERS = 6
"""Of which sizes are made."""


class WindowRuns(NamedTuple):
    """The tensors of ``gnnc::StagedRuns``, on the graph's device.

    Attributes:
        word: int32 ``[words, 4]``.
        entry: int32 ``[entries, 4]``: row, near edges, far edges, first word.
        run: int32 ``[runs, 4]``: first entry, entries, staging slot (-1: whole rows), stretch.
        split: as in ``Entries``.
        begin: int32 ``[stretches + 1]``, the first run of each.
        share: int32 ``[blocks + 1]``, the first run of each block of threads.
        place: int32 ``[entries]``, where those of ``Entries`` stand; None once words are written.
        slot: int32 ``[entries]``, 0 or 1: an even or odd slot of a warp has the entry; -1: all slots have;
            None likewise.
        near: near edges of all.
    """

    word: Tensor
    entry: Tensor
    run: Tensor
    split: Tensor
    begin: Tensor
    share: Tensor
    place: Tensor | None
    slot: Tensor | None
    near: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of ``gnnc::StagedRuns``."""
        return self.word, self.entry, self.run, self.split, self.begin, self.share


def window_cut_for(rows: int, edges: int) -> Cut:
    """Return how the edges of a large graph are cut by stretch.

    Rows of more edges than elsewhere are worked on side by side. The bounds are measured:
    docs/cuda-sparse-kernels.md.

    Args:
        rows: of the CSR.
        edges: E of the graph.
    """
    few = few_edges(rows, edges)
    return Cut(min(4 * few, _MOST_PART), few, by_stretch=True)


def _parts_of(rowptr: Tensor, cut: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """Return edges of each row, of its parts but the last, and their number: 1 of a row that is whole."""
    degree = rowptr.diff()
    parts = -(-degree // cut.part)
    size = -(-degree // parts.clamp(min=1))
    return degree, size, (-(-degree // size.clamp(min=1))).clamp(min=1)


def cut_rows(rowptr: Tensor, sizes: Sizes) -> Entries:
    """Cut rows of more than ``sizes.cut.part`` edges into equal parts."""
    degree, size, parts = _parts_of(rowptr, sizes.cut)
    row = torch.repeat_interleave(parts, output_size=sizes.entries)
    place = torch.arange(sizes.entries, device=rowptr.device)
    offset = (place - (parts.cumsum(0) - parts)[row]) * size[row]
    edges = torch.minimum(size[row], degree[row] - offset)
    is_part = parts[row] > 1
    slot = is_part.cumsum(0) - 1
    of = row[_places(is_part, sizes.slots)]
    split = torch.stack([of, slot[(parts.cumsum(0) - parts)[of]], parts[of], 0 * of], 1)
    return Entries(row.int(), edges.int(), rowptr[row] + offset, torch.where(is_part, slot, -1), split.int())


def _places(mask: Tensor, count: int) -> Tensor:
    """Return where a mask holds, int64 ``[count]``, without waiting for how often it does."""
    return torch.nonzero_static(mask, size=count).squeeze(1)


def arrange(entries: Entries, near: Tensor, rows: int, blocks: int, window: int, sizes: Sizes) -> WindowRuns:
    """Make runs of entries, by stretch: long ones first, one a run, then short ones of about as many words.

    Args:
        entries: of the graph.
        near: int32 ``[entries]``, how many edges of each are near ones.
        rows: of the CSR.
        blocks: blocks of threads.
        window: sources of a stretch that are near, the first ones.
        sizes: of the graph, cut like this.

    Returns:
        The table; its words are not written yet.
    """
    row, edges, near, short = entries.row.long(), entries.edges.long(), near.long(), sizes.cut.short
    near_words, far_words = -(-near // 8), -(-(edges - near) // 4)
    stretch, is_short = row // STRETCH, (edges <= short) & (entries.part < 0)
    cost = torch.where(is_short, near_words * (short + 1) + far_words, edges)
    order = torch.argsort(((stretch * 2 + is_short) << 32) - cost, stable=True)
    ascending = torch.arange(order.numel(), device=order.device)
    place = torch.empty_like(order)
    place[order] = ascending

    words = (near_words + far_words)[order]
    first = words.cumsum(0) - words
    entry = torch.stack([row[order], near[order], (edges - near)[order], first], 1).int()
    kind = (stretch * 2 + is_short)[order]
    starts = ~is_short[order] | (places_within(kind) % entries_of(window) == 0)
    opens = _places(starts, sizes.runs_for(window))
    count = torch.diff(opens, append=opens.new_full((1,), order.numel()))
    where = stretch[order][opens]
    run = torch.stack([opens, count, entries.part[order][opens], where], 1).int()

    stretches = -(-rows // STRETCH)
    begin = torch.searchsorted(where, torch.arange(stretches + 1, device=where.device))
    spent = (edges[order] + ROW_COST).cumsum(0)
    ends = spent[opens + count - 1]
    shares = torch.arange(blocks + 1, device=where.device) * ends[-1:].sum() / blocks
    share = torch.searchsorted(ends.double(), shares.double())
    share[-1:].fill_(opens.numel())
    word = torch.empty(sizes.words_for(window), 4, dtype=torch.int32, device=row.device)
    slot = torch.where(count > 1, opens, -1).repeat_interleave(count, output_size=order.numel())
    slot = torch.where(slot < 0, -1, (ascending - slot) % 2).int()
    tables = word, entry, run, entries.split, begin.int(), share.int(), place.int(), slot
    return WindowRuns(*tables, sizes.near_for(window))


def places_within(groups: Tensor) -> Tensor:
    """Return the place of each element in its group, from 0 on; ``groups`` are sorted numbers, ``[n]``."""
    return torch.arange(groups.numel(), device=groups.device) - torch.searchsorted(groups, groups)


class WindowTable:
    """The table of one CSR as kernels take it.

    Attributes:
        blocks: of a launch, one a multiprocessor.
        slots: rows of the staging buffer.
        fields: of ``gnnc::StagedRuns`` after ``rowptr``.
        tensors: that the fields are addresses of.

    Args:
        runs: the table, complete.
        sources: rows of x.
    """

    def __init__(self, runs: WindowRuns, sources: int) -> None:
        self.tensors = runs.tensors
        self.blocks = runs.share.shape[0] - 1
        self.slots = runs.split.shape[0]
        self.fields = (*(tensor.data_ptr() for tensor in self.tensors), sources)


def shared_bytes(row_bytes: int, scale: str = "none") -> int:
    """Return the bytes of a window: ``gnnc::Window::kBytes``.

    Args:
        row_bytes: of a row of x.
        scale: what comes with a row, as ``gnnc::Scale`` names it.
    """
    factor = {"none": 0, "in_row": 0, "power": 1, "row": 4}[scale]
    rows = window_rows(row_bytes)
    return (rows + 1) * slice_bytes(row_bytes) + -(-rows * factor // 16) * 16 + 16


@cache
def has_room(device: torch.device) -> bool:
    """Whether a device has the shared memory; for code compiled without one, whether one may have it."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= LEAST_SHARED


def slice_bytes(row_bytes: int) -> int:
    """Return the bytes that a window has for a row, or for a slice of one: ``gnnc::Window::kRow``."""
    return max(16, 1 << (row_bytes - 1).bit_length()) if row_bytes <= 64 else 128


def slices_of(row_bytes: int) -> int:
    """Return how many slices a row of so many bytes has."""
    return -(-row_bytes // slice_bytes(row_bytes))


WINDOWS = window_rows(64), window_rows(65)
"""Of both sizes."""


def entries_of(window: int) -> int:
    """Return the entries of a run, at most, where so many rows of x are in a window: ``entries_within``."""
    return 16 if window == STRETCH else 8


class Kernels:
    """The kernels that look at every edge and row (csrc/cuda/structure/stage_edges.cuh), on one device."""

    def __init__(self, kernel_set: KernelSet) -> None:
        self._near = kernel_set.launcher("gnnc::near_edges", _FOUND)
        self._entries = kernel_set.launcher("gnnc::count_entries", _FOUND)
        self._count = kernel_set.launcher("gnnc::count_near", _ARGUMENTS)
        self._write = kernel_set.launcher("gnnc::stage_edges", _ARGUMENTS)
        kernel, (small, large) = self._write.name, WINDOWS
        kernel_set.expect(kernel, "StageArgs", _ARGUMENTS)
        kernel_set.expect(kernel, "NearArgs", _FOUND)
        kernel_set.expect(kernel, "EntriesArgs", _FOUND)
        kernel_set.require(
            kernel, f"window_rows(64) == {small} && window_rows(65) == {large}", "there are two"
        )

    def find(self, rowptr: Tensor, row: Tensor, col: Tensor, cut: Cut, found: Tensor) -> None:
        """Find the numbers of sizes; see ``find_sizes``."""
        stream = raw_stream(col.device.index)
        edges, rows, counts = col.shape[0], rowptr.shape[0] - 1, found.data_ptr()
        self._entries(-(-rows // STRETCH), stream, rowptr.data_ptr(), counts, rows, cut.part, cut.short)
        near, blocks = counts + 4 * found.itemsize, min(-(-edges // BLOCK), _NEAR_BLOCKS)
        self._near(blocks, stream, row.data_ptr(), col.data_ptr(), near, edges, rows)

    def count(self, col: Tensor, entries: Entries, window: int) -> Tensor:
        """Return int32 ``[entries]``: edges whose source lies in the window of their row's stretch."""
        near = torch.empty_like(entries.edges)
        self._launch(self._count, col, entries, window, row=entries.row, edges=entries.edges, near=near)
        return near

    def write(self, col: Tensor, entries: Entries, runs: WindowRuns, window: int) -> None:
        """Write the words."""
        given = {name: getattr(runs, name) for name in ("place", "entry", "word", "slot")}
        self._launch(self._write, col, entries, window, **given)

    @staticmethod
    def _launch(launch: Launcher, col: Tensor, entries: Entries, window: int, **given: Tensor) -> None:
        values = [col.data_ptr(), entries.first.data_ptr()]
        values += [given[name].data_ptr() if name in given else 0 for name in _POINTERS]
        count = entries.row.shape[0]
        stream = raw_stream(col.device.index)
        launch(-(-count * 32 // BLOCK), stream, *values, count, window)


def pays(near: int, edges: int, rows: int, blocks: int, row_bytes: int) -> bool:
    """Return whether a window table costs less than a run table; see ``gnnc.ir.format`` for the costs."""
    gather = Gather(edges, rows, near, blocks, row_bytes)
    return cheapest((RUN_TABLE, WINDOW_TABLE), gather) is WINDOW_TABLE


def may_pay(rows: int, edges: int, blocks: int) -> bool:
    """Whether a graph is so large that it may pay, if all edges are near ones, for rows of some size."""
    return any(pays(edges, edges, rows, blocks, row_bytes) for row_bytes in (64, 256))


def find_sizes(rowptr: Tensor, row: Tensor, col: Tensor, cut: Cut, found: Tensor) -> None:
    """Have the device find the numbers of a graph's sizes; reads nothing by ids, and waits for nothing.

    Args:
        rowptr: int64 ``[rows + 1]``, on the current device.
        row: int32 ``[E]``, the row of every edge in order; those that are ``rows`` are no edges.
        col: int32 ``[E]``.
        cut: sizes of parts and short rows.
        found: int32 ``[NUMBERS]``, zeros: gets them.
    """
    kernels_on(col.device.index, Kernels).find(rowptr, row, col, cut, found)


def sizes_of(rowptr: Tensor, col: Tensor, cut: Cut) -> Sizes:
    """Return the sizes of a graph whose edges are cut like this; waits for the device."""
    with torch.cuda.device(col.device):
        found = torch.zeros(NUMBERS, dtype=torch.int32, device=col.device)
        find_sizes(rowptr, rows_of(rowptr, col.shape[0]), col, cut, found)
    return Sizes.of(found.tolist(), col.shape[0], cut)


def build_window_table(
    rowptr: Tensor, col: Tensor, sizes: Sizes, blocks: int, window: int, *, always: bool = False
) -> WindowRuns | None:
    """Arrange the edges of a CSR by stretch.

    Args:
        rowptr: int64 ``[rows + 1]``.
        col: int32 ``[E]``.
        sizes: of the graph, with how it is to be cut.
        blocks: blocks of threads that a launch has.
        window: sources of a stretch that are near, the first ones.
        always: also where it pays for no rows of x.

    Returns:
        The table, or None.
    """
    rows, row_bytes = rowptr.shape[0] - 1, 64 if window == STRETCH else 256
    pays_for_some = pays(sizes.near_for(window), sizes.edges, rows, blocks, row_bytes)
    if not (pays_for_some or always) or sizes.words_for(window) > _MOST_WORDS:
        return None
    with torch.cuda.device(rowptr.device):
        kernels, entries = kernels_on(rowptr.device.index, Kernels), cut_rows(rowptr, sizes)
        near = kernels.count(col, entries, window)
        runs = arrange(entries, near, rows, blocks, window, sizes)
        kernels.write(col, entries, runs, window)
    return runs._replace(place=None, slot=None)
