"""The run table of a graph: how the sparse kernels cut its edges into units of work (csrc/cuda/runs.cuh)."""

from typing import NamedTuple

import torch
from torch import Tensor

_ALIGN = 16
"""Where a row is split, parts begin at multiples of this many edges: whole sectors of ``col``."""
_ROW_COST = 4
"""A row costs about as much as this many edges, beyond its own."""


class Runs(NamedTuple):
    """The tensors of ``gnnc::Runs``, on the graph's device.

    Attributes:
        begin: int64 ``[runs + 1]``, first edge of every run.
        place: int32 ``[runs + 1, 2]``, first row and staging slot (-1: whole rows); at last (rows, -1).
        chunk: int32 ``[blocks, 2]``, first run of every block and the one past its last.
        split: int32 ``[splits, 2]``, first run and number of runs of every split row.
        slots: rows that the staging buffer has.
    """

    begin: Tensor
    place: Tensor
    chunk: Tensor
    split: Tensor
    slots: int


def run_limit(edges: int, multiprocessors: int) -> int:
    """Return how many edges a run should have: so few that every warp of the device gets several runs.

    A multiprocessor holds about 32 warps; with six runs each, the last ones to finish cost little
    (the analytical model of GNNAdvisor section 3.6, with the device's parallelism alone).

    Args:
        edges: E of the graph.
        multiprocessors: of the device.
    """
    each = max(edges // (multiprocessors * 32 * 6), 1)
    return min(max(1 << (each - 1).bit_length(), 64), 512)


def build_runs(rowptr: Tensor, limit: int, blocks: int) -> Runs:
    """Cut the edges of a CSR into runs that cost about ``limit`` edges, and the runs into chunks.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        limit: a row with more edges is split into parts of at most ``limit + 16``; other rows are
            gathered until they cost as much, so that a run of theirs has less than ``2 * limit``.
        blocks: number of chunks: of the device's multiprocessors, each of which works on one.

    Returns:
        The tables; three synchronisations.
    """
    device, rows = rowptr.device, rowptr.numel() - 1
    degree = rowptr.diff()
    split = degree > limit
    cost = torch.where(split, 0, degree + _ROW_COST).cumsum(0)
    bucket = torch.div(cost - 1, limit, rounding_mode="floor")
    opens = torch.ones(rows, dtype=torch.bool, device=device)
    opens[1:] = (bucket.diff() > 0) | split[1:] | split[:-1]
    first_row = opens.nonzero().squeeze(1)
    parts = torch.div(degree + (limit - 1), limit, rounding_mode="floor")
    parts = torch.where(split, parts, 1)[first_row]
    first_run = torch.cat([parts.new_zeros(1), parts.cumsum(0)])
    num_runs = int(first_run[-1])
    which = torch.repeat_interleave(
        torch.arange(first_row.numel(), device=device), parts, output_size=num_runs
    )
    row, index = first_row[which], torch.arange(num_runs, device=device) - first_run[which]
    start = rowptr[row]
    cut = start + torch.where(index > 0, degree[row] * index // parts[which], 0)
    begin = torch.cat([torch.maximum(cut // _ALIGN * _ALIGN, start), rowptr[-1:]])
    is_part = split[row]
    slot = torch.where(is_part, is_part.cumsum(0) - 1, -1)
    end = torch.tensor([[rows, -1]], device=device)
    table = torch.stack([first_run[:-1], parts], 1)[split[first_row]]
    return Runs(
        begin,
        torch.cat([torch.stack([row, slot], 1), end]).int(),
        _chunks(begin, blocks),
        table.int(),
        int(table[:, 1].sum()),
    )


def _chunks(begin: Tensor, blocks: int) -> Tensor:
    """First and last run of every block, so that blocks have about the same number of edges."""
    runs = begin.numel() - 1
    cost = begin + _ROW_COST * torch.arange(runs + 1, device=begin.device)
    wanted = torch.arange(blocks + 1, device=begin.device) * cost[-1] // blocks
    chunk = torch.searchsorted(cost, wanted)
    chunk[0], chunk[-1] = 0, runs
    return torch.stack([chunk[:-1], chunk[1:]], 1).int()
