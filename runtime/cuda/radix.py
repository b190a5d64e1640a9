"""Sorts the edges of a new graph on the device: the launches of ``csrc/cuda/radix.cuh``."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gnnc.errors import BackendError
from gnnc.runtime.cuda.emitter import round_up
from gnnc.runtime.cuda.launch import Launch
from gnnc.runtime.cuda.unit import Unit

_TILE = 3072
_BITS = 8
_ARGUMENTS = 18
_IDS = {torch.int64: "int64_t", torch.int32: "int32_t"}
MOST_EDGES = 2**31 - 1


class Sorted(NamedTuple):
    """Edges in order.

    Attributes:
        keys: int32 ``[E]``, the ids by which they are sorted.
        perm: int64 ``[E]``, where each was.
        col: int32 ``[E]``, the other end of each, with memory up to a multiple of four.
        out_of_range: int32 ``[2]``, not 0 where an id, or another end, is out of range.
    """

    keys: Tensor
    perm: Tensor
    col: Tensor
    out_of_range: Tensor


class Kernels:
    """The kernels for ids of one type on one device.

    Attributes:
        count: the launch that counts digits, by whether the pass is the first.
        scatter: the launch that moves edges, by whether the pass is the first, and the last.
    """

    def __init__(self, unit: Unit, ids: str) -> None:
        unit.include("radix.cuh")
        unit.expect("RadixArgs", _ARGUMENTS)
        flags = ((False, "false"), (True, "true"))
        self.count: dict[bool, Launch] = {
            first: unit.launch(f"gnnc::radix_count<{ids}, {text}>", _ARGUMENTS) for first, text in flags
        }
        self.scatter: dict[tuple[bool, bool], Launch] = {
            (first, last): unit.launch(f"gnnc::radix_scatter<{ids}, {text}, {end}>", _ARGUMENTS)
            for first, text in flags
            for last, end in flags
        }


@cache
def _kernels(device: int, ids: str) -> Kernels:
    unit = Unit()
    kernels = Kernels(unit, ids)
    unit.build(device)
    return kernels


def passes_for(bound: int) -> int:
    """Return how many passes sort ids below ``bound``."""
    return max(1, -(-max(bound - 1, 0).bit_length() // _BITS))


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
    passes, tiles = passes_for(bound), -(-edges // _TILE)
    perm = torch.empty(edges, dtype=torch.int64, device=device)
    col = padded_columns(edges, device)
    out_of_range = torch.zeros(2, dtype=torch.int32, device=device)
    counts = torch.empty((1 << _BITS) * tiles, dtype=torch.int32, device=device)
    keys = [torch.empty(edges, dtype=torch.int32, device=device) for _ in range(min(passes, 2))]
    places = [torch.empty(edges, dtype=torch.int32, device=device) for _ in range(min(passes - 1, 2))]
    kernels = _kernels(device.index, _IDS[ids.dtype])
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    given = [ids.data_ptr(), ids.stride(0), bound, others.data_ptr(), others.stride(0), others_bound]
    found = [perm.data_ptr(), col.data_ptr(), counts.data_ptr()]
    for number in range(passes):
        first, last = number == 0, number == passes - 1
        read = [0, 0] if first else [t[(number - 1) % 2].data_ptr() for t in (keys, places)]
        written = [keys[number % 2].data_ptr(), 0 if last else places[number % 2].data_ptr()]
        rest = [out_of_range.data_ptr(), edges, tiles, number * _BITS]
        kernels.count[first](tiles, stream, *given, *read, *written, *found, 0, *rest)
        sums = torch.cumsum(counts, 0, dtype=torch.int32)
        kernels.scatter[first, last](tiles, stream, *given, *read, *written, *found, sums.data_ptr(), *rest)
    return Sorted(keys[(passes - 1) % 2], perm, col, out_of_range)


def padded_columns(edges: int, device: torch.device) -> Tensor:
    """Return an int32 tensor ``[edges]`` with memory up to a multiple of four, for reads of four."""
    return torch.empty(round_up(edges, 4), dtype=torch.int32, device=device)[:edges]
