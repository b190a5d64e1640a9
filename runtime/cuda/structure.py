"""The structure of a graph on the device: CSR by a radix sort, ids checked before anything reads by them."""

from typing import Any

import torch
from torch import Tensor

from gnnc.errors import GraphError
from gnnc.runtime.cuda.emitter import round_up
from gnnc.runtime.structure_runner import StructureRunner


def use_kernels(runner: StructureRunner) -> None:
    """Let every part of a structure program sort on the device, and make its results safe to share."""
    for group in runner.groups:
        for node in group.module.graph.nodes:
            if node.target is torch.ops.gnnc.csr.default:
                node.target = csr
            elif node.target is torch.ops.gnnc.csr_transpose.default:
                node.target = csr_transpose
        group.module.recompile()
    runner.after_build = _wait
    runner.after_call = _Streams()


def csr(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort edges by destination; see ``gnnc.csr``.

    Everything is launched before the host looks at the check: one wait for a new graph. Sorting and
    counting read no memory by the ids, so that ids out of range do no harm on the way.

    Raises:
        GraphError: an id is out of range.
    """
    if src.shape[0] == 0:
        empty = torch.empty(0, dtype=torch.int64, device=src.device)
        rowptr = torch.zeros(num_dst + 1, dtype=torch.int64, device=src.device)
        return rowptr, empty.to(torch.int32), empty
    limits = torch.stack((*src.aminmax(), *dst.aminmax())).to("cpu", non_blocking=True)
    keys, perm = torch.sort(dst.to(torch.int32), stable=True)
    rows = torch.arange(num_dst + 1, dtype=torch.int32, device=src.device)
    rowptr = torch.searchsorted(keys, rows)
    col = padded_columns(src.shape[0], src.device).copy_(src.index_select(0, perm))
    torch.cuda.current_stream(src.device).synchronize()
    low_src, high_src, low_dst, high_dst = limits.tolist()
    _check("src", src, low_src, high_src, num_src, "source")
    _check("dst", dst, low_dst, high_dst, num_dst, "destination")
    return rowptr, col, perm


def padded_columns(edges: int, device: torch.device) -> Tensor:
    """Return an int32 tensor ``[edges]`` with memory up to a multiple of four, for reads of four."""
    return torch.empty(round_up(edges, 4), dtype=torch.int32, device=device)[:edges]


def csr_transpose(rowptr: Tensor, col: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the CSR by source; see ``gnnc.csr_transpose``."""
    rows = torch.repeat_interleave(
        torch.arange(rowptr.shape[0] - 1, device=rowptr.device), rowptr.diff(), output_size=col.shape[0]
    )
    return csr(rows, col, rowptr.shape[0] - 1, num_src)


def _check(name: str, index: Tensor, low: int, high: int, bound: int, what: str) -> None:
    if low >= 0 and high < bound:
        return
    bad = int(((index < 0) | (index >= bound)).nonzero()[0, 0])
    raise GraphError(
        f"[gnnc.csr] {name}[{bad}] = {int(index[bad])} is not a {what} node: ids must be in "
        f"0..{bound - 1} ({bound} nodes); check edge_index against the number of rows of x"
    )


def _wait(results: Any) -> None:
    """Later calls may read the results from other streams."""
    torch.cuda.current_stream().synchronize()


class _Streams:
    """Tells torch's allocator where structures are used, once more than one stream uses them."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def __call__(self, results: tuple[Any, ...]) -> None:
        device = next((r.device.index for r in results if isinstance(r, Tensor) and r.is_cuda), None)
        if device is None:
            return
        self._seen.add(torch._C._cuda_getCurrentRawStream(device))
        if len(self._seen) > 1 and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(device)
            for result in results:
                if isinstance(result, Tensor) and result.is_cuda:
                    result.record_stream(stream)
