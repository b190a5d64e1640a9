"""Sorts the edges of a new graph on the device: the launches of ``csrc/cuda/radix.cuh``."""

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from gnnc.errors import BackendError
from gnnc.runtime.cuda.emitter import round_up
from gnnc.runtime.cuda.launch import Launch
from gnnc.runtime.cuda.unit import Unit

_TILE, _THREADS = 8192, 512
_SHARED = 10 * _TILE + 64
_BITS = (8, 9)
"""Bits of a digit that there are kernels for. Nine save ids of 9, 17, 18 or 25 to 27 bits a pass."""
_ARGUMENTS = 19
_IDS = {torch.int64: "int64_t", torch.int32: "int32_t"}
MOST_EDGES = 2**31 - 1


class Sorted(NamedTuple):
    """Edges in order.

    Attributes:
        keys: int32 ``[E]``, the ids by which they are sorted.
        perm: int64 ``[E]``, where each was.
        col: int32 ``[E]``, the other end of each, with memory up to a multiple of four.
        flags: int32 ``[2]``, on the host: not 0 where an id, or another end, is out of range.
        checked: from when on they say so.
    """

    keys: Tensor
    perm: Tensor
    col: Tensor
    flags: Tensor
    checked: torch.cuda.Event

    def out_of_range(self) -> tuple[bool, bool]:
        """Return whether an id, and another end, is out of range; waits for the first pass alone."""
        self.checked.synchronize()
        bad_id, bad_end = self.flags.tolist()
        return bool(bad_id), bool(bad_end)


class Kernels:
    """The kernels for ids of one type, and digits of so many bits, on one device.

    Attributes:
        count: the launch that counts digits, by whether the pass is the first.
        scatter: the launch that moves edges, by whether the pass is the first, and the last.
    """

    def __init__(self, unit: Unit, ids: str, bits: int) -> None:
        unit.include("radix.cuh")
        unit.expect("RadixArgs", _ARGUMENTS)
        shared = _SHARED + (1 << bits) * (2 * _THREADS // 32 + 4)
        unit.require(f"sizeof(RadixShared<{bits}>) == {shared}", "a launch gives the tile its shared memory")
        flags = ((False, "false"), (True, "true"))
        count = partial(unit.launch, count=_ARGUMENTS, block=_THREADS)
        self.count: dict[bool, Launch] = {
            first: count(f"gnnc::radix_count<{ids}, {bits}, {text}>") for first, text in flags
        }
        scatter = partial(count, shared=shared)
        self.scatter: dict[tuple[bool, bool], Launch] = {
            (first, last): scatter(f"gnnc::radix_scatter<{ids}, {bits}, {text}, {end}>")
            for first, text in flags
            for last, end in flags
        }


@cache
def _kernels(device: int, ids: str, bits: int) -> Kernels:
    unit = Unit()
    kernels = Kernels(unit, ids, bits)
    unit.build(device)
    return kernels


def digits_for(bound: int) -> tuple[int, int]:
    """Return how many passes sort ids below ``bound``, and the bits of their digits."""
    bits = max(1, max(bound - 1, 0).bit_length())
    passes = -(-bits // max(_BITS))
    return passes, next(width for width in _BITS if passes * width >= bits)


def sort_edges(ids: Tensor, others: Tensor, bound: int, others_bound: int) -> Sorted:
    """Sort edges by the ids of one end, stably, without waiting for the device.

    Beside the result it takes 16 bytes an edge, and less than one of counts. Nothing is read by the ids.

    Args:
        ids: integer ``[E]``, with any stride; E at least 1.
        others: the other ends, integer ``[E]``.
        bound: ids are below it.
        others_bound: other ends are below it.

    Raises:
        BackendError: there are more edges than places of 32 bits.
    """
    edges, device = ids.shape[0], ids.device
    if edges > MOST_EDGES:
        raise BackendError(f"a graph of {edges} edges: backend 'cuda' sorts at most {MOST_EDGES}")
    if ids.dtype not in _IDS or others.dtype != ids.dtype:
        ids, others = ids.long(), others.long()
    with torch.cuda.device(device):
        return _sort(ids, others, bound, others_bound)


def _sort(ids: Tensor, others: Tensor, bound: int, others_bound: int) -> Sorted:
    edges, device = ids.shape[0], ids.device
    (passes, bits), tiles = digits_for(bound), -(-edges // _TILE)
    perm = torch.empty(edges, dtype=torch.int64, device=device)
    col = padded_columns(edges, device)
    out_of_range = torch.zeros(2, dtype=torch.int32, device=device)
    flags, checked = torch.empty(2, dtype=torch.int32, pin_memory=True), torch.cuda.Event()
    between = 2 * edges if passes > 1 else 0
    sizes = edges, between // 2, between, (1 << bits) * tiles
    *keys, pairs, counts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    kernels = _kernels(device.index, _IDS[ids.dtype], bits)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    given = [ids.data_ptr(), ids.stride(0), bound, others.data_ptr(), others.stride(0), others_bound]
    found = [perm.data_ptr(), counts.data_ptr()]
    read = [0, 0, 0]
    for number in range(passes):
        first, last = number == 0, number == passes - 1
        # Places and other ends, between two passes. The last one writes perm, so it reads memory of their
        # own, and what the one before reads may lie where perm will.
        places = (perm if (passes - number) % 2 else pairs).data_ptr()
        written = [keys[number % 2].data_ptr(), places, places + 4 * edges]
        if last:
            written[1:] = [0, col.data_ptr()]
        rest = [out_of_range.data_ptr(), edges, tiles, number * bits]
        kernels.count[first](tiles, stream, *given, *read, *written, *found, 0, *rest)
        sums = torch.cumsum(counts, 0, dtype=torch.int32)
        kernels.scatter[first, last](tiles, stream, *given, *read, *written, *found, sums.data_ptr(), *rest)
        read = written
        if first:
            flags.copy_(out_of_range, non_blocking=True)
            checked.record()
    return Sorted(keys[(passes - 1) % 2], perm, col, flags, checked)


def padded_columns(edges: int, device: torch.device) -> Tensor:
    """Return an int32 tensor ``[edges]`` with memory up to a multiple of four, for reads of four."""
    return torch.empty(round_up(edges, 4), dtype=torch.int32, device=device)[:edges]
