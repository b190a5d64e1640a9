"""Window table of a graph, for graphs whose edges mostly connect nearby ids (csrc/cuda/sparse/staged.cuh)."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gnnc.ir.format import NODE_BLOCK, RUN_TABLE, WINDOW_TABLE, Gather, cheapest, window_rows
from gnnc.runtime.cuda.driver.kernel_set import KernelSet, kernels_on
from gnnc.runtime.cuda.driver.launch import Launcher
from gnnc.runtime.cuda.emitter import BLOCK
from gnnc.runtime.cuda.formats.run_table import ROW_COST, Cut, few_edges
from gnnc.runtime.cuda.formats.sort import rows_of
from gnnc.torch_private import raw_stream

LEAST_SHARED = 227 * 1024
"""Bytes of shared memory that a block needs: a window and the buffers of its warps."""
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
        first: int64 ``[entries]``, the first edge of each entry.
        part: int64 ``[entries]``, the slot of a part in the staging buffer, -1 for a whole row.
        split: int32 ``[slots, 4]``: row, first slot and number of parts, 0, of the row of each part.
    """

    row: Tensor
    edges: Tensor
    first: Tensor
    part: Tensor
    split: Tensor


class Sizes(NamedTuple):
    """Sizes of a graph that the host needs to build its window table.

    Attributes:
        entries: number of rows and parts of rows.
        slots: number of parts of rows.
        runs: number of runs for each window: rows of x of at most 64 bytes, and of more.
        near: number of near edges for each window.
        edges: E of the graph.
        cut: sizes by which the edges are cut.
    """

    entries: int
    slots: int
    runs: tuple[int, int]
    near: tuple[int, int]
    edges: int
    cut: Cut

    @classmethod
    def of(cls, numbers: Sequence[int], edges: int, cut: Cut) -> "Sizes":
        """Return the sizes from the device's counts: entries, slots, runs and near edges of each window."""
        entries, slots, narrow, wide, *near = numbers
        return cls(entries, slots, (narrow, wide), (near[0], near[1]), edges, cut)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Empty tuple: sizes are numbers."""
        return ()

    def near_for(self, window: int) -> int:
        """Return the number of near edges with so many rows of x in a window."""
        return self.near[window != NODE_BLOCK]

    def runs_for(self, window: int) -> int:
        """Return the number of runs with so many rows of x in a window."""
        return self.runs[window != NODE_BLOCK]

    def words_for(self, window: int) -> int:
        """Return the largest number of words: entries end with partial words, near and far."""
        near = self.near_for(window)
        return near // 8 + (self.edges - near) // 4 + 2 * self.entries


NUMBERS = 6
"""Number of counts that ``Sizes.of`` takes."""


class WindowRuns(NamedTuple):
    """Tensors of ``gnnc::StagedRuns``, on the graph's device.

    Attributes:
        word: int32 ``[words, 4]``.
        entry: int32 ``[entries, 4]``: row, near edges, far edges, first word.
        run: int32 ``[runs, 4]``: first entry, entries, staging slot (-1: whole rows), node block.
        split: as in ``Entries``.
        begin: int32 ``[node blocks + 1]``, the first run of each node block.
        share: int32 ``[blocks + 1]``, the first run of each block of threads.
        place: int32 ``[entries]``, the position of each entry in ``Entries``; None once words are written.
        slot: int32 ``[entries]``, 0 or 1: an even or odd slot of a warp has the entry; -1: all slots have;
            None once words are written.
        near: number of near edges.
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
        """Tensors that kernels read, in the order of ``gnnc::StagedRuns``."""
        return self.word, self.entry, self.run, self.split, self.begin, self.share


def window_cut_for(rows: int, edges: int) -> Cut:
    """Return the sizes by which a window table cuts the edges of a large graph.

    Rows of more edges share a run than in a run table. The bounds are measured:
    docs/cuda-sparse-kernels.md.

    Args:
        rows: number of rows of the CSR.
        edges: E of the graph.
    """
    few = few_edges(rows, edges)
    return Cut(min(4 * few, _MOST_PART), few, windowed=True)


def _parts_of(rowptr: Tensor, cut: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """Return the edges of each row, the edges of each of its parts but the last, and the number of parts."""
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
    """Return the positions at which a mask is true, int64 ``[count]``, without a wait for their number."""
    return torch.nonzero_static(mask, size=count).squeeze(1)


def arrange(entries: Entries, near: Tensor, rows: int, blocks: int, window: int, sizes: Sizes) -> WindowRuns:
    """Group entries into runs by node block: long entries first, one a run, then short ones by words.

    Args:
        entries: entries of the graph.
        near: int32 ``[entries]``, the number of near edges of each entry.
        rows: number of rows of the CSR.
        blocks: number of blocks of threads of a launch.
        window: number of sources of a node block in its window, from the first one on.
        sizes: sizes of the graph by the same cut.

    Returns:
        The table, without its words.
    """
    row, edges, near, short = entries.row.long(), entries.edges.long(), near.long(), sizes.cut.short
    near_words, far_words = -(-near // 8), -(-(edges - near) // 4)
    node_block, is_short = row // NODE_BLOCK, (edges <= short) & (entries.part < 0)
    cost = torch.where(is_short, near_words * (short + 1) + far_words, edges)
    order = torch.argsort(((node_block * 2 + is_short) << 32) - cost, stable=True)
    ascending = torch.arange(order.numel(), device=order.device)
    place = torch.empty_like(order)
    place[order] = ascending

    words = (near_words + far_words)[order]
    first = words.cumsum(0) - words
    entry = torch.stack([row[order], near[order], (edges - near)[order], first], 1).int()
    kind = (node_block * 2 + is_short)[order]
    starts = ~is_short[order] | (places_within(kind) % entries_of(window) == 0)
    opens = _places(starts, sizes.runs_for(window))
    count = torch.diff(opens, append=opens.new_full((1,), order.numel()))
    where = node_block[order][opens]
    run = torch.stack([opens, count, entries.part[order][opens], where], 1).int()

    node_blocks = -(-rows // NODE_BLOCK)
    begin = torch.searchsorted(where, torch.arange(node_blocks + 1, device=where.device))
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
    """Return the position of each element in its group, from 0; ``groups`` are sorted numbers, ``[n]``."""
    return torch.arange(groups.numel(), device=groups.device) - torch.searchsorted(groups, groups)


class WindowTable:
    """Window table of one CSR as kernels take it.

    Attributes:
        blocks: blocks of threads of a launch, one a multiprocessor.
        slots: rows of the staging buffer.
        fields: members of ``gnnc::StagedRuns`` after ``rowptr``.
        tensors: tensors whose addresses are in the fields.

    Args:
        runs: the tensors of the table, with its words.
        sources: number of rows of x.
    """

    def __init__(self, runs: WindowRuns, sources: int) -> None:
        self.tensors = runs.tensors
        self.blocks = runs.share.shape[0] - 1
        self.slots = runs.split.shape[0]
        self.fields = (*(tensor.data_ptr() for tensor in self.tensors), sources)


def shared_bytes(row_bytes: int, scale: str = "none") -> int:
    """Return the bytes of a window: ``gnnc::Window::kBytes``.

    Args:
        row_bytes: bytes of a row of x.
        scale: kind of scale of a row, as ``gnnc::Scale`` names it.
    """
    factor = {"none": 0, "in_row": 0, "power": 1, "row": 4}[scale]
    rows = window_rows(row_bytes)
    return (rows + 1) * slice_bytes(row_bytes) + -(-rows * factor // 16) * 16 + 16


@cache
def has_room(device: torch.device) -> bool:
    """Return whether a device has the shared memory for a window; True for code compiled without a device."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= LEAST_SHARED


def slice_bytes(row_bytes: int) -> int:
    """Return the bytes of a row, or of a slice of a row, in a window: ``gnnc::Window::kRow``."""
    return max(16, 1 << (row_bytes - 1).bit_length()) if row_bytes <= 64 else 128


def slices_of(row_bytes: int) -> int:
    """Return the number of slices of a row of so many bytes."""
    return -(-row_bytes // slice_bytes(row_bytes))


WINDOWS = window_rows(64), window_rows(65)
"""Rows of x in a window: rows of at most 64 bytes, and of more."""


def entries_of(window: int) -> int:
    """Return the most entries of a run with so many rows of x in a window: ``entries_within``."""
    return 16 if window == NODE_BLOCK else 8


class Kernels:
    """Kernels that build window tables (csrc/cuda/structure/stage_edges.cuh), on one device."""

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

    def find(self, rowptr: Tensor, row: Tensor, col: Tensor, cut: Cut, counts: Tensor) -> None:
        """Count the sizes of a graph; see ``find_sizes``."""
        stream = raw_stream(col.device.index)
        edges, rows, pointer = col.shape[0], rowptr.shape[0] - 1, counts.data_ptr()
        self._entries(-(-rows // NODE_BLOCK), stream, rowptr.data_ptr(), pointer, rows, cut.part, cut.short)
        near, blocks = pointer + 4 * counts.itemsize, min(-(-edges // BLOCK), _NEAR_BLOCKS)
        self._near(blocks, stream, row.data_ptr(), col.data_ptr(), near, edges, rows)

    def count(self, col: Tensor, entries: Entries, window: int) -> Tensor:
        """Return int32 ``[entries]``: the edges whose source is in the window of their node block."""
        near = torch.empty_like(entries.edges)
        self._launch(self._count, col, entries, window, row=entries.row, edges=entries.edges, near=near)
        return near

    def write(self, col: Tensor, entries: Entries, runs: WindowRuns, window: int) -> None:
        """Write the words of a table."""
        tensors = {name: getattr(runs, name) for name in ("place", "entry", "word", "slot")}
        self._launch(self._write, col, entries, window, **tensors)

    @staticmethod
    def _launch(launch: Launcher, col: Tensor, entries: Entries, window: int, **tensors: Tensor) -> None:
        values = [col.data_ptr(), entries.first.data_ptr()]
        values += [tensors[name].data_ptr() if name in tensors else 0 for name in _POINTERS]
        count = entries.row.shape[0]
        stream = raw_stream(col.device.index)
        launch(-(-count * 32 // BLOCK), stream, *values, count, window)


def pays(near: int, edges: int, rows: int, blocks: int, row_bytes: int) -> bool:
    """Return whether a window table costs less than a run table; see ``gnnc.ir.format`` for the costs."""
    gather = Gather(edges, rows, near, blocks, row_bytes)
    return cheapest((RUN_TABLE, WINDOW_TABLE), gather) is WINDOW_TABLE


def may_pay(rows: int, edges: int, blocks: int) -> bool:
    """Return whether a window table pays for rows of x of some size if all edges are near."""
    return any(pays(edges, edges, rows, blocks, row_bytes) for row_bytes in (64, 256))


def find_sizes(rowptr: Tensor, row: Tensor, col: Tensor, cut: Cut, counts: Tensor) -> None:
    """Launch the kernels that count the sizes of a graph, without a wait; they do not use ids as addresses.

    Args:
        rowptr: int64 ``[rows + 1]``, on the current device.
        row: int32 ``[E]``, the sorted row of every edge; positions with the number ``rows`` are no edges.
        col: int32 ``[E]``.
        cut: sizes of parts and short rows.
        counts: int32 ``[NUMBERS]``, zeros: receives the counts.
    """
    kernels_on(col.device.index, Kernels).find(rowptr, row, col, cut, counts)


def sizes_of(rowptr: Tensor, col: Tensor, cut: Cut) -> Sizes:
    """Return the sizes of a graph by a cut; the host waits for the device."""
    with torch.cuda.device(col.device):
        counts = torch.zeros(NUMBERS, dtype=torch.int32, device=col.device)
        find_sizes(rowptr, rows_of(rowptr, col.shape[0]), col, cut, counts)
    return Sizes.of(counts.tolist(), col.shape[0], cut)


def build_window_table(
    rowptr: Tensor, col: Tensor, sizes: Sizes, blocks: int, window: int, *, always: bool = False
) -> WindowRuns | None:
    """Build the window table of a CSR.

    Args:
        rowptr: int64 ``[rows + 1]``.
        col: int32 ``[E]``.
        sizes: sizes of the graph, with its cut.
        blocks: number of blocks of threads of a launch.
        window: number of sources of a node block in its window, from the first one on.
        always: build the table even if it pays for no rows of x.

    Returns:
        The table; None if it does not pay or has too many words.
    """
    rows, row_bytes = rowptr.shape[0] - 1, 64 if window == NODE_BLOCK else 256
    pays_for_some = pays(sizes.near_for(window), sizes.edges, rows, blocks, row_bytes)
    if not (pays_for_some or always) or sizes.words_for(window) > _MOST_WORDS:
        return None
    with torch.cuda.device(rowptr.device):
        kernels, entries = kernels_on(rowptr.device.index, Kernels), cut_rows(rowptr, sizes)
        near = kernels.count(col, entries, window)
        runs = arrange(entries, near, rows, blocks, window, sizes)
        kernels.write(col, entries, runs, window)
    return runs._replace(place=None, slot=None)
