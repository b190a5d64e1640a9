"""The run table of a graph: how the sparse kernels cut its edges into units of work (csrc/cuda/runs.cuh)."""

from typing import NamedTuple

import torch
from torch import Tensor

_ALIGN = 16
"""Where a row is split, runs begin at multiples of this many edges: whole sectors of ``col``."""
_ROW_COST = 8
"""A run costs about as much as this many edges more than its own, when blocks are balanced."""


class Runs(NamedTuple):
    """The tensors of ``gnnc::Runs``, on the graph's device.

    Attributes:
        begin: int64 ``[runs + 1]``, first edge of every run.
        place: int32 ``[runs, 2]``, row and staging slot (-1: the run is its whole row).
        chunk: int32 ``[blocks + 1]``, first run of every block.
        split: int32 ``[splits, 2]``, first run and number of runs of every split row.
        slots: rows that the staging buffer has.
    """

    begin: Tensor
    place: Tensor
    chunk: Tensor
    split: Tensor
    slots: int


def run_limit(edges: int, multiprocessors: int) -> int:
    """Return how many edges a run may have: few enough that every group of the device gets several runs.

    A device holds about 128 groups a multiprocessor; with eight runs each, the last ones to finish
    cost little (the analytical model of GNNAdvisor section 3.6, with the device's parallelism alone).

    Args:
        edges: E of the graph.
        multiprocessors: of the device.
    """
    each = max(edges // (multiprocessors * 128 * 8), 1)
    return min(max(1 << (each - 1).bit_length(), 128), 2048)


def build_runs(rowptr: Tensor, limit: int, blocks: int) -> Runs:
    """Cut the rows of a CSR into runs of at most about ``limit`` edges, and the runs into ``blocks`` chunks.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        limit: most edges a run has (up to ``16`` more where a split row is cut at aligned edges).
        blocks: number of chunks; fewer where there are fewer runs.

    Returns:
        The tables; one synchronisation.
    """
    device, rows = rowptr.device, rowptr.numel() - 1
    degree = rowptr.diff()
    parts = torch.div(degree + (limit - 1), limit, rounding_mode="floor").clamp(min=1)
    first = torch.cat([parts.new_zeros(1), parts.cumsum(0)])
    is_split = parts > 1
    split_rows = is_split.nonzero().squeeze(1)
    num_runs = int(first[-1]) if rows else 0
    row = torch.repeat_interleave(torch.arange(rows, device=device), parts, output_size=num_runs)
    index = torch.arange(num_runs, device=device) - first[row]
    cut = rowptr[row] + degree[row] * index // parts[row]
    begin = torch.maximum(cut // _ALIGN * _ALIGN, rowptr[row])
    begin = torch.cat([begin, rowptr[-1:]])
    in_split = is_split[row]
    slot = torch.where(in_split, in_split.cumsum(0) - 1, -1)
    split = torch.stack([first[:-1][split_rows], parts[split_rows]], 1)
    return Runs(
        begin,
        torch.stack([row, slot], 1).int(),
        _chunks(begin, min(blocks, max(num_runs, 1))),
        split.int(),
        int(split[:, 1].sum()),
    )


def _chunks(begin: Tensor, blocks: int) -> Tensor:
    """First run of every block, so that blocks cost about the same."""
    cost = begin + _ROW_COST * torch.arange(begin.numel(), device=begin.device)
    wanted = torch.arange(1, blocks, device=begin.device) * cost[-1] // max(blocks, 1)
    inner = torch.searchsorted(cost, wanted)
    ends = torch.tensor([0, begin.numel() - 1], device=begin.device)
    return torch.cat([ends[:1], inner, ends[1:]]).int()
