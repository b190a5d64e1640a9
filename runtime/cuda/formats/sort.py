"""Sort of the edges of a new graph on the device: the launches of ``csrc/cuda/structure/radix.cuh``."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gnnc.errors import BackendError
from gnnc.runtime.cuda.driver.kernel_set import BLOCK, KernelSet, kernels_on
from gnnc.runtime.cuda.driver.launch import Launcher
from gnnc.runtime.cuda.emitter import round_up
from gnnc.torch_private import raw_stream

_TILE, _THREADS = 8192, 512
_SHARED = 10 * _TILE + 128
_BITS = (8, 9)
"""Widths of a digit in bits with a kernel. Nine bits save one pass for ids of 9, 17, 18 or 25 to 27 bits."""
_ARGUMENTS, _ROWPTR_ARGUMENTS = 20, 5
_IDS = {torch.int64: "int64_t", torch.int32: "int32_t"}
MOST_EDGES = 2**31 - 1


class Sorted(NamedTuple):
    """Edges of a graph, sorted by the ids of one end.

    Attributes:
        keys: int32 ``[E]``, the sorted ids.
        rowptr: int64 ``[bound + 1]``, the first edge of each id.
        perm: int64 ``[E]``, the position of each edge before the sort.
        col: int32 ``[E]``, the other end of each edge, in memory padded to a multiple of four.
    """

    keys: Tensor
    rowptr: Tensor
    perm: Tensor
    col: Tensor


class Kernels:
    """Kernels of the sort for one type of ids and one width of digits, on one device.

    Attributes:
        count: launchers of the kernel that counts digits, by whether the pass is the first.
        sums: launcher of the kernel that adds the counts up.
        scatter: launchers of the kernel that moves edges, by whether the pass is the first, and the last.
        rowptr: launcher of the kernel that finds the first edge of each id.

    Args:
        kernel_set: the set that compiles the kernels.
        ids: C++ type of the ids.
        bits: bits of a digit.
        loops: whether every node gets one self loop.
    """

    def __init__(self, kernel_set: KernelSet, ids: str, bits: int, loops: bool) -> None:
        shared = _SHARED + (1 << bits) * (2 * _THREADS // 32 + 4)
        fits = f"sizeof(RadixShared<{bits}>) == {shared}"
        count = partial(kernel_set.launcher, count=_ARGUMENTS, block=_THREADS)
        scatter = partial(count, shared=shared)
        self.sums = kernel_set.launcher("gnnc::radix_sums", _ARGUMENTS)
        self.rowptr = kernel_set.launcher("gnnc::radix_rowptr", _ROWPTR_ARGUMENTS)
        kernel_set.expect(self.sums.name, "RadixArgs", _ARGUMENTS)
        kernel_set.expect(self.rowptr.name, "RowptrArgs", _ROWPTR_ARGUMENTS)
        self.count: dict[bool, Launcher] = {}
        self.scatter: dict[tuple[bool, bool], Launcher] = {}
        for first in (False, True):
            pass_, adds = f"{ids}, {bits}, {_text(first)}", _text(first and loops)
            self.count[first] = count(f"gnnc::radix_count<{pass_}, {adds}>")
            for last in (False, True):
                kernel = f"gnnc::radix_scatter<{pass_}, {_text(last)}, {adds}>"
                kernel_set.require(kernel, fits, "a launch gives the tile its shared memory")
                self.scatter[first, last] = scatter(kernel)


def _text(flag: bool) -> str:
    return "true" if flag else "false"


def digits_for(bound: int) -> tuple[int, int]:
    """Return the number of passes that sort ids below ``bound``, and the bits of a digit."""
    bits = max(1, max(bound - 1, 0).bit_length())
    passes = -(-bits // max(_BITS))
    return passes, next(width for width in _BITS if passes * width >= bits)


def sort_edges(
    ids: Tensor, others: Tensor, bound: int, others_bound: int, counts: Tensor, *, loops: bool = False
) -> Sorted:
    """Sort edges by the ids of one end, stably, without waiting for the device.

    The sort takes 16 bytes an edge beside the result, and less than one byte for counts. It does not use ids
    as addresses. The content of rowptr is undefined if an id is out of range.

    Args:
        ids: integer ``[E]``, with any stride, on the current device; E at least 1 where there are no loops.
        others: the other ends, integer ``[E]``.
        bound: upper bound of the ids, exclusive.
        others_bound: upper bound of the other ends, exclusive.
        counts: int32, zeros: the first two numbers become nonzero if an id, or another end, is out of range;
            the third becomes the number of edges whose ids are below the bound.
        loops: every node gets one self loop, after its other edges; self loops among the edges move to the
            end, with the id ``bound``. Results have ``E + bound`` edges.

    Raises:
        BackendError: there are more edges than places of 32 bits.
    """
    edges = ids.shape[0] + (bound if loops else 0)
    if edges > MOST_EDGES:
        self_loops = f", {bound} of them from a node to itself" if loops else ""
        raise BackendError(f"a graph of {edges} edges{self_loops}: backend 'cuda' sorts at most {MOST_EDGES}")
    if ids.dtype not in _IDS or others.dtype != ids.dtype:
        ids, others = ids.long(), others.long()
    return _sort(ids, others, bound, others_bound, counts, edges)


def _sort(ids: Tensor, others: Tensor, bound: int, others_bound: int, counts: Tensor, edges: int) -> Sorted:
    device, loops = ids.device, edges > ids.shape[0]
    (passes, bits), tiles = digits_for(bound + loops), -(-edges // _TILE)
    digits, between = 1 << bits, 2 * edges if passes > 1 else 0
    rowptr = torch.empty(bound + 1, dtype=torch.int64, device=device)
    perm = torch.empty(edges, dtype=torch.int64, device=device)
    col = padded_columns(edges, device)
    # In order: keys of odd and even passes, positions with other ends, counts of digits, totals.
    size = edges + between // 2 + between + digits * tiles + digits
    memory = torch.empty(size, dtype=torch.int32, device=device)
    keys = memory.data_ptr(), memory.data_ptr() + 4 * edges
    pairs = keys[1] + 2 * between
    digit_counts = pairs + 4 * between
    kernels = kernels_on(device.index, Kernels, _IDS[ids.dtype], bits, loops)
    stream = raw_stream(device.index)
    inputs = [ids.data_ptr(), ids.stride(0), bound, others.data_ptr(), others.stride(0), others_bound]
    outputs = [
        perm.data_ptr(),
        digit_counts,
        digit_counts + 4 * digits * tiles,
        counts.data_ptr(),
        edges,
        tiles,
    ]
    read = [0, 0, 0]
    for number in range(passes):
        first, last = number == 0, number == passes - 1
        # Positions and other ends, between two passes. The last pass writes perm, so it reads other memory;
        # the input of the pass before it may be in the memory of perm.
        places = perm.data_ptr() if (passes - number) % 2 else pairs
        written = [keys[number % 2], places, places + 4 * edges]
        if last:
            written[1:] = [0, col.data_ptr()]
        values = [*inputs, *read, *written, *outputs, number * bits, ids.shape[0]]
        kernels.count[first](tiles, stream, *values)
        kernels.sums(digits, stream, *values)
        kernels.scatter[first, last](tiles, stream, *values)
        read = written
    edges_in_range = counts.data_ptr() + 2 * counts.itemsize
    kernels.rowptr(bound // BLOCK + 1, stream, read[0], rowptr.data_ptr(), edges_in_range, edges, bound)
    begin = (passes - 1) % 2 * edges
    return Sorted(memory[begin : begin + edges], rowptr, perm, col)


class RowsKernel:
    """Kernel that writes the row of every edge, on one device."""

    def __init__(self, kernel_set: KernelSet) -> None:
        self.launch = kernel_set.launcher("gnnc::radix_rows", 3)
        kernel_set.expect(self.launch.name, "RowsArgs", 3)


def rows_of(rowptr: Tensor, edges: int) -> Tensor:
    """Return the row of every edge of a CSR, int32 ``[E]``.

    Args:
        rowptr: integer ``[rows + 1]``.
        edges: E.
    """
    rowptr = rowptr.long().contiguous()
    row = torch.empty(edges, dtype=torch.int32, device=rowptr.device)
    rows, index = rowptr.shape[0] - 1, rowptr.device.index
    with torch.cuda.device(rowptr.device):
        stream = raw_stream(index)
        launch = kernels_on(index, RowsKernel).launch
        launch(-(-rows // BLOCK), stream, rowptr.data_ptr(), row.data_ptr(), rows)
    return row


def padded_columns(edges: int, device: torch.device) -> Tensor:
    """Return an int32 tensor ``[edges]`` with memory up to a multiple of four, for reads of four."""
    return torch.empty(round_up(edges, 4), dtype=torch.int32, device=device)[:edges]
