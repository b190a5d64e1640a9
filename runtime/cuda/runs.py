"""The run table of a graph: how the sparse kernels cut its edges into units of work (csrc/cuda/runs.cuh)."""

from typing import NamedTuple

import torch
from torch import Tensor

ROW_COST = 4
"""A row costs about as much as this many edges, beyond its own."""
_CHUNK, _WIDE_CHUNK = 32, 64
"""Runs that a block of a large graph takes at a time. Blocks work on neighbouring chunks: larger ones would
spread them over more than L2 holds. Rows of 256 bytes and more get larger ones, whose sources are found in L1
more often."""
_TURNS = 16
"""Chunks for each block, at least: with fewer, what they cost differs too much between blocks."""
_LEAST_SHORT, _MOST_SHORT = 8, 256
"""A slot gathers the rows of so many edges at once; a run of rows with more is too much for one warp."""
_UNSPLIT = 256
"""Edges of a row that is not split on a small graph: to join parts is to wait for memory once more."""
MOST_ENTRIES = 16
"""Rows of a run, at most: ``gnnc::kMostEntries``."""
MOST_PART = 2048
"""Edges of an entry, at most: ``gnnc::kMostPart``."""
_MOST_OF_A_SLOT = MOST_PART // 2
"""Edges that a slot adds up, at most: sums in fixed point have 32 bits (csrc/cuda/product_sum.cuh)."""
_SHARES = 32
"""Parts of rows have a multiple of this many edges, so that the slots of a warp get whole steps."""


class Cut(NamedTuple):
    """How finely edges are cut.

    Attributes:
        part: rows with more edges are split into parts of about as many.
        short: rows with at most so many edges are worked on side by side.
        window: short rows are sorted by their edges within so many neighbours.
        group: so many of them make a run at least.
        entries: and so many at most, where a group is fewer.
        chunk: runs that a block takes at a time, 0: each has one share; None: as ``chunk_of`` says.
        by_stretch: whether edges are arranged by stretch (``staged.py``), and not as runs.
    """

    part: int
    short: int
    window: int = 256
    group: int = 8
    entries: int = MOST_ENTRIES
    chunk: int | None = None
    by_stretch: bool = False

    def __str__(self) -> str:
        """What tells it from others of one graph."""
        turns = f", {self.chunk} at a time" if self.chunk else ""
        return f"{'stretches' if self.by_stretch else 'runs'}, part {self.part}, short {self.short}{turns}"


class Runs(NamedTuple):
    """The tensors of ``gnnc::Runs``, on the graph's device.

    Attributes:
        entry: int32 ``[entries, 4]``: row, edges, and the first of them as int64.
        run: int32 ``[runs, 4]``: first entry, entries, staging slot (-1: whole rows), 0.
        split: int32 ``[slots, 4]``: row, first slot and number of parts, 0, of the row of each part.
        edges: of all.
    """

    entry: Tensor
    run: Tensor
    split: Tensor
    edges: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of ``gnnc::Runs``."""
        return self.entry, self.run, self.split


def cut_for(rows: int, edges: int, multiprocessors: int) -> Cut:
    """Return how edges should be cut: so finely that every warp of the device gets several runs.

    A multiprocessor holds about 32 warps; with three runs each, the last ones to finish cost little
    (the analytical model of GNNAdvisor section 3.6, with the device's parallelism alone). The bounds are
    measured: docs/cuda-sparse-kernels.md. A graph that leaves warps idle has its rows shared by the slots
    of a warp early, and splits few of them: what counts there is the longest chain of loads.

    Args:
        rows: of the CSR.
        edges: E of the graph.
        multiprocessors: of the device.
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
    """Return the cuts of a graph that are worth a measurement: the model's and up to seven like it.

    Args:
        model: what the model says, with its chunk; comes first.
        other: what it says of stretches where it chose runs, or the reverse; None: there is one way alone.
    """
    part, short, chunk = model.part, model.short, model.chunk
    sizes = ((part // 2, short), (2 * part, short), (part, short // 2), (part, 2 * short))
    varied = [model._replace(part=p, short=s) for p, s in sizes if _is_useful(p, s)]
    turns = [model._replace(chunk=size) for size in (chunk // 2, 2 * chunk)] if chunk else []
    return [model, *varied, *turns, *([] if other is None else [other])]


def _is_useful(part: int, short: int) -> bool:
    return _LEAST_SHORT <= short <= min(part, _MOST_OF_A_SLOT) and part <= MOST_PART


def few_edges(rows: int, edges: int) -> int:
    """Return what is few edges for a row of a CSR: twice the mean, as a power of two from 64 to 512."""
    return min(max(_power_of_two_from(2 * edges // max(rows, 1)), 64), 512)


def _power_of_two_from(number: int) -> int:
    return 1 << (max(number, 1) - 1).bit_length()


def chunk_of(runs: int, multiprocessors: int, row_bytes: int) -> int | None:
    """Return how many runs a block takes at a time; None where each should have one share of its own.

    Args:
        runs: of the graph.
        multiprocessors: of the device.
        row_bytes: of a row of x.
    """
    chunk = _WIDE_CHUNK if row_bytes >= 256 else _CHUNK
    return chunk if runs >= _TURNS * multiprocessors * chunk else None


def build_runs(rowptr: Tensor, cut: Cut) -> Runs:
    """Cut the edges of a CSR into runs.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        cut: sizes; the entries of a run of short rows cost less than ``part`` edges, or are one group.

    Returns:
        The tables; a few synchronisations.
    """
    degree = rowptr.diff()
    is_short = degree <= cut.short
    short, long = is_short.nonzero().squeeze(1), (~is_short).nonzero().squeeze(1)
    near = _short_runs(rowptr, degree, short, cut)
    far = _long_runs(rowptr, degree[long], long, cut, near.entry.shape[0])
    order = torch.argsort(torch.cat([near.anchor, far.anchor]), stable=True)
    return Runs(
        torch.cat([near.entry, far.entry]),
        torch.cat([near.run, far.run])[order].int(),
        far.split.int(),
        int(degree.sum()),
    )


def deal(runs: Runs, blocks: int) -> Tensor:
    """Give every block of threads a share of neighbouring runs; all shares cost about the same.

    The warps of a block take its runs in order, the costly ones first, so that they end together.

    Args:
        runs: of a graph.
        blocks: of a launch, one at least.

    Returns:
        int32 ``[blocks * n, 4]`` like ``Runs.run``, ``n`` a power of two: each share ends with runs of no
        entries, at which warps stop; they are no parts.
    """
    first, count = runs.run[:, 0].long(), runs.run[:, 1].long()
    before = torch.nn.functional.pad((runs.entry[:, 1].long() + ROW_COST).cumsum(0), (1, 0))
    cost = before[first + count] - before[first]
    ends = cost.cumsum(0)
    share = (ends - cost // 2) * blocks // ends[-1] if cost.numel() else cost
    order = torch.argsort((share << 32) - cost, stable=True)
    owner = share[order]
    rank = places_within(owner)
    size = _power_of_two_from(int(rank.max()) + 1) if cost.numel() else 1
    dealt = torch.zeros(blocks * size, 4, dtype=torch.int32, device=order.device)
    dealt[:, 2] = -1
    dealt[owner * size + rank] = runs.run[order]
    return dealt


def places_within(groups: Tensor) -> Tensor:
    """Return the place of each element in its group, from 0 on; ``groups`` are sorted numbers, ``[n]``."""
    return torch.arange(groups.numel(), device=groups.device) - torch.searchsorted(groups, groups)


class _Part(NamedTuple):
    entry: Tensor  # int32 [entries, 4]
    run: Tensor  # int64 [runs, 4]
    anchor: Tensor  # int64 [runs], a row near which the run works
    split: Tensor  # int64 [slots, 4]


def _short_runs(rowptr: Tensor, degree: Tensor, rows: Tensor, cut: Cut) -> _Part:
    """Sort rows by edges within windows, up and down in turn, and take neighbours together."""
    window, edges = rows // cut.window, degree[rows]
    key = window * (cut.short + 1) + torch.where(window % 2 == 0, edges, cut.short - edges)
    row = rows[torch.argsort(key, stable=True)]
    groups = -(-row.numel() // cut.group)
    padded = torch.nn.functional.pad(degree[row], (0, groups * cut.group - row.numel()))
    most = padded.view(groups, cut.group).amax(1) if groups else padded
    cost = cut.group * (most + ROW_COST)
    most_cost = min(cut.part, cut.group * (cut.short + ROW_COST))
    least = -(-most_cost * cut.group // max(cut.entries, cut.group))
    bucket = torch.div(cost.clamp(min=least).cumsum(0) - 1, most_cost, rounding_mode="floor")
    opens = torch.ones_like(bucket, dtype=torch.bool)
    opens[1:] = bucket.diff() > 0
    first = opens.nonzero().squeeze(1)
    past = torch.cat([first[1:], first.new_full((min(groups, 1),), groups)])
    begin, end = first * cut.group, (past * cut.group).clamp(max=row.numel())
    run = torch.stack([begin, end - begin, torch.full_like(begin, -1), torch.zeros_like(begin)], 1)
    return _Part(_entries(row, degree[row], rowptr[row]), run, rows[begin], run[:0])


def _long_runs(rowptr: Tensor, degree: Tensor, rows: Tensor, cut: Cut, entries: int) -> _Part:
    """Make every row a run, or equal parts of it."""
    parts = -(-degree // cut.part)
    size = -(-degree // (parts * _SHARES)) * _SHARES
    parts = -(-degree // size)
    count = int(parts.sum())
    which = torch.repeat_interleave(parts, output_size=count)
    first = parts.cumsum(0) - parts
    index = torch.arange(count, device=rowptr.device)
    offset = (index - first[which]) * size[which]
    edges = torch.minimum(size[which], degree[which] - offset)
    is_part = parts[which] > 1
    slot = is_part.cumsum(0) - 1
    entry = _entries(rows[which], edges, rowptr[rows[which]] + offset)
    ones = torch.ones_like(index)
    run = torch.stack([entries + index, ones, torch.where(is_part, slot, -1), 0 * ones], 1)
    split = torch.stack([rows, slot[first], parts, 0 * parts], 1)[which[is_part]]
    return _Part(entry, run, rows[which], split)


def _entries(row: Tensor, edges: Tensor, first: Tensor) -> Tensor:
    return torch.cat([torch.stack([row, edges], 1).int(), first.view(-1, 1).view(torch.int32)], 1)
