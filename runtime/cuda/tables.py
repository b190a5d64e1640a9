"""What kernels need of a CSR beside itself, made once and kept as long as the CSR lives."""

import torch
from torch import Tensor

from gnnc.runtime.cuda.runs import build_runs, run_limit


class RunTable:
    """The run table of one CSR on its device, as kernels take it.

    Attributes:
        blocks: chunks of runs.
        splits: rows that are split.
        count: runs.
        slots: rows of the staging buffer.
        pointers: addresses of ``begin``, ``place``, ``chunk`` and ``split``.
    """

    def __init__(self, rowptr: Tensor, edges: int, multiprocessors: int) -> None:
        runs = build_runs(rowptr, run_limit(edges, multiprocessors), multiprocessors)
        self._held = (runs.begin, runs.place, runs.chunk, runs.split)
        self.blocks = runs.chunk.shape[0] if rowptr.numel() > 1 else 0
        self.splits, self.slots = runs.split.shape[0], runs.slots
        self.count = runs.begin.numel() - 1
        self.pointers = tuple(tensor.data_ptr() for tensor in self._held)
        torch.cuda.current_stream(rowptr.device).synchronize()  # other streams may use the table next


def runs_of(rowptr: Tensor, edges: int) -> RunTable:
    """Return the run table of a CSR; it lives as long as the tensor, which the structure cache holds."""
    table = rowptr.__dict__.get("gnnc_runs")
    if table is None:
        properties = torch.cuda.get_device_properties(rowptr.device)
        table = rowptr.gnnc_runs = RunTable(rowptr, edges, properties.multi_processor_count)  # pyright: ignore[reportAttributeAccessIssue]
    return table


def in_order(rowptr: Tensor, edges: int) -> Tensor:
    """Return the columns of a segment reduction that reads its rows as they come."""
    col = rowptr.__dict__.get("gnnc_order")
    if col is None:
        col = torch.arange(edges, dtype=torch.int32, device=rowptr.device)
        torch.cuda.current_stream(rowptr.device).synchronize()
        rowptr.gnnc_order = col  # pyright: ignore[reportAttributeAccessIssue]
    return col


def destinations(rowptr: Tensor, edges: int) -> Tensor:
    """Return the destination of every edge, int32; kept as long as the CSR."""
    rows = rowptr.__dict__.get("gnnc_destinations")
    if rows is None:
        count = torch.arange(rowptr.shape[0] - 1, dtype=torch.int32, device=rowptr.device)
        rows = torch.repeat_interleave(count, rowptr.diff(), output_size=edges)
        torch.cuda.current_stream(rowptr.device).synchronize()
        rowptr.gnnc_destinations = rows  # pyright: ignore[reportAttributeAccessIssue]
    return rows


def runs_arguments(rowptr: str, col: str, runs: str) -> list[str]:
    """Return the texts of the six arguments that make a ``gnnc::Runs``."""
    return [f"{rowptr}.data_ptr()", f"{col}.data_ptr()", f"*{runs}.pointers"]


RUNS_EXTRA = 3
"""Arguments that ``*runs.pointers`` stands for, beyond one."""
