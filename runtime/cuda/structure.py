"""The structure of a graph on the device: CSR by a radix sort, ids checked before anything reads by them."""

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from gnnc.errors import GraphError
from gnnc.runtime.cuda.kept import tensors_kept
from gnnc.runtime.cuda.radix import sort_edges
from gnnc.runtime.structure_runner import StructureRunner


def use_kernels(runner: StructureRunner) -> None:
    """Let a structure program sort on the device, count its tables, and make its results safe to share."""
    for group in runner.groups:
        for node in group.module.graph.nodes:
            if node.target is torch.ops.gnnc.csr.default:
                node.target = csr
            elif node.target is torch.ops.gnnc.csr_transpose.default:
                node.target = csr_transpose
        group.module.recompile()
    runner.cache.made_of = tensors_kept
    runner.after_build = _wait
    runner.after_call = _Streams()


def csr(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort edges by destination; see ``gnnc.csr``.

    Everything is launched before the host looks at the check, and it waits for the sort's first pass
    alone. Sorting and searching read no memory by the ids, so that ids out of range do no harm.

    Raises:
        GraphError: an id is out of range.
    """
    if src.shape[0] == 0:
        empty = torch.empty(0, dtype=torch.int64, device=src.device)
        rowptr = torch.zeros(num_dst + 1, dtype=torch.int64, device=src.device)
        return rowptr, empty.to(torch.int32), empty
    done = sort_edges(dst, src, num_dst, num_src)
    rows = torch.arange(num_dst + 1, dtype=torch.int32, device=src.device)
    rowptr = torch.searchsorted(done.keys, rows)
    bad_dst, bad_src = done.out_of_range()
    if bad_src:
        _refuse("src", src, num_src, "source")
    if bad_dst:
        _refuse("dst", dst, num_dst, "destination")
    return rowptr, done.col, done.perm


def csr_transpose(rowptr: Tensor, col: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the CSR by source; see ``gnnc.csr_transpose``."""
    return csr(destinations_of(rowptr, col.shape[0]), col, rowptr.shape[0] - 1, num_src)


def destinations_of(rowptr: Tensor, edges: int) -> Tensor:
    """Return the destination of every edge of a CSR, int32 ``[E]``."""
    return torch.repeat_interleave(rowptr.diff().int(), output_size=edges)


def _refuse(name: str, index: Tensor, bound: int, what: str) -> NoReturn:
    bad = int(((index < 0) | (index >= bound)).nonzero()[0, 0])
    raise GraphError(
        f"[gnnc.csr] {name}[{bad}] = {int(index[bad])} is not a {what} node: ids must be in "
        f"0..{bound - 1} ({bound} nodes); check edge_index against the number of rows of x"
    )


def _device_of(results: tuple[Any, ...]) -> torch.device | None:
    return next((r.device for r in results if isinstance(r, Tensor) and r.is_cuda), None)


def _wait(results: tuple[Any, ...]) -> None:
    """Later calls may read the results from other streams."""
    device = _device_of(results)
    if device is not None:
        torch.cuda.current_stream(device).synchronize()


class _Streams:
    """Tells torch's allocator where structures and their tables are used, once several streams use them."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._only: int | None = None
        self._several = False

    def __call__(self, results: tuple[Any, ...]) -> None:
        if self._device is None:
            self._device = _device_of(results)
            if self._device is None:
                return
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        if stream == self._only and not self._several:
            return
        if self._only is None:
            self._only = stream
            return
        self._several = True
        if not torch.cuda.is_current_stream_capturing():
            current = torch.cuda.current_stream(self._device)
            for tensor in _memory_of(results):
                tensor.record_stream(current)


def _memory_of(results: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors on a device, and what kernels of earlier calls made of them."""
    for result in results:
        if isinstance(result, Tensor) and result.is_cuda:
            yield result
            yield from tensors_kept(result)
