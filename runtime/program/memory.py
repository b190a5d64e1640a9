"""Memory of a call: a pool for outputs, which the caller keeps, and arenas for temporaries."""

import mmap
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnc.errors import GnncError
from gnnc.locks import renew_at_fork
from gnnc.torch_private import empty_strided_cpu

ALIGNMENT = 64
HUGE_PAGE = 2 * 1024 * 1024
"""Page size that buffers of at least this size ask for: gathers miss the TLB less (decision 015)."""
SMALL_OUTPUT = 128 * 1024
"""Bytes of an output below which the pool leaves it to the allocator, which reuses small memory itself."""

_new = empty_strided_cpu()

_NUMPY = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,  # viewed as bfloat16, which numpy has not
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


def _aligned(nbytes: int) -> np.ndarray:
    huge = nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    alignment = HUGE_PAGE if huge else ALIGNMENT
    try:
        raw = _mapped(nbytes + alignment) if huge else np.empty(nbytes + alignment, np.uint8)
    except (MemoryError, OverflowError, OSError):
        raise GnncError(
            f"this call needs {nbytes / 2**30:.1f} GiB at once, more than the machine has left: see if an "
            "id of a graph (batch) is too large, or run the model on parts of the graph"
        ) from None
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


def _mapped(nbytes: int) -> np.ndarray:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages serves small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _size_class(nbytes: int) -> int:
    """Round up to an eighth of an octave, so that batches of similar size share buffers."""
    step = 1 << max(nbytes.bit_length() - 4, 12)
    return -(-nbytes // step) * step


class _Loan(weakref.ref):
    """A weak reference to the array that an output tensor holds, with the array's buffer."""

    __slots__ = ("buffer", "epoch")


class OutputPool:
    """Recycles the memory of large outputs once nobody holds them.

    Fresh pages cost as much as the model that fills them. A tensor's storage keeps a numpy array
    alive; when the last tensor or view over it is gone the array dies, and only then does its
    buffer come back. A tensor that the caller still holds is therefore never overwritten.

    Attributes:
        limit: largest number of bytes of idle buffers; the longest idle are freed first.
        idle_bytes: bytes of the idle buffers.
    """

    def __init__(self, limit: int = 512 * 1024 * 1024) -> None:
        self.limit = limit
        self.idle_bytes = 0
        self._idle: OrderedDict[int, deque[np.ndarray]] = OrderedDict()
        self._loans: dict[int, _Loan] = {}
        self._epoch = 0
        # Reentrant: an array may die, and call `_return`, inside any line of this class.
        self._lock = threading.RLock()
        renew_at_fork(self, "_lock", threading.RLock)

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous CPU matrix that the caller may keep."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < SMALL_OUTPUT or dtype not in _NUMPY:
            return _new(shape, (*shape[1:], 1), dtype)
        buffer = self._pop(_size_class(nbytes))
        array = np.ndarray(shape, _NUMPY[dtype], buffer)
        loan = _Loan(array, self._return)
        loan.buffer, loan.epoch = buffer, self._epoch
        self._loans[id(loan)] = loan
        tensor = torch.from_numpy(array)
        return tensor.view(dtype) if dtype is torch.bfloat16 else tensor

    def clear(self) -> None:
        """Free idle buffers; buffers in use are freed when their tensors die."""
        with self._lock:
            self._epoch += 1
            self._idle.clear()
            self.idle_bytes = 0

    def _pop(self, size: int) -> np.ndarray:
        with self._lock:
            idle = self._idle.get(size)
            if idle:
                self.idle_bytes -= size
                return idle.pop()
        return _aligned(size)

    def _return(self, loan: _Loan) -> None:
        with self._lock:
            self._loans.pop(id(loan), None)
            if loan.epoch != self._epoch:
                return
            size = loan.buffer.nbytes
            self._idle.setdefault(size, deque()).append(loan.buffer)
            self._idle.move_to_end(size)
            self.idle_bytes += size
            self._trim()

    def _trim(self) -> None:
        while self.idle_bytes > self.limit:
            size, idle = next(iter(self._idle.items()))
            if idle:
                idle.popleft()
                self.idle_bytes -= size
            if not idle:
                del self._idle[size]


class Region(NamedTuple):
    """One temporary of a call: its slot of the arena and its layout.

    Attributes:
        slot: number of the slot; temporaries that live at different times share one.
        dtype: element type.
        shape: sizes.
        stride: elements from one index to the next, per dimension.
    """

    slot: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element, padding of the last row included."""
        if not self.shape:
            return self.dtype.itemsize
        return self.shape[0] * max(self.stride[0], 1) * self.dtype.itemsize


Layout = Callable[..., tuple[Region, ...]]


class Arena:
    """Temporaries of one running call, reused by the next call of the same sizes.

    Programs that never run within each other, as the forward and the backward pass of a call, may share one.
    """

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] | None = None
        self.tensors: tuple[Tensor, ...] = ()
        self._buffers: dict[int, Tensor] = {}
        self._typed: dict[tuple[int, torch.dtype], Tensor] = {}
        self._layout: Layout | None = None
        self._known: dict[Layout, tuple[tuple[int, ...], tuple[Tensor, ...]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of this arena."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def lay_out(self, sizes: tuple[int, ...], layout: Layout) -> None:
        """Lay the temporaries of a program out for these sizes, unless they are so already."""
        if self._layout is layout and self.sizes == sizes:
            return
        known = self._known.get(layout)
        if known is None or known[0] != sizes:
            self.resize(sizes, layout)
            self._known[layout] = sizes, self.tensors
        else:
            self.sizes, self.tensors = known
        self._layout = layout

    def resize(self, sizes: tuple[int, ...], layout: Layout) -> None:
        """Lay the temporaries out for these sizes; buffers only grow."""
        regions = layout(*sizes)
        needed: dict[int, int] = {}
        for region in regions:
            needed[region.slot] = max(needed.get(region.slot, 0), region.nbytes)
        grown = [slot for slot, n in needed.items() if self._bytes_of(slot) < n]
        if grown or any((region.slot, region.dtype) not in self._typed for region in regions):
            self._enlarge({slot: needed[slot] for slot in grown}, regions)
        self.tensors = tuple([self._typed[r.slot, r.dtype].as_strided(r.shape, r.stride) for r in regions])
        self.sizes = sizes

    def _bytes_of(self, slot: int) -> int:
        buffer = self._buffers.get(slot)
        return -1 if buffer is None else buffer.nbytes

    def _enlarge(self, needed: dict[int, int], regions: tuple[Region, ...]) -> None:
        # Ordinary tensors serve both inside and outside inference mode; the reverse is an error.
        with torch.inference_mode(False), torch.no_grad():
            for slot, nbytes in needed.items():
                self._grow(slot, nbytes)
            if needed:  # views of the smaller buffers would keep these
                self._known.clear()
                self._typed = {key: view for key, view in self._typed.items() if key[0] not in needed}
            for region in regions:
                key = (region.slot, region.dtype)
                if key not in self._typed:
                    self._typed[key] = self._buffers[region.slot].view(region.dtype)

    def _grow(self, slot: int, nbytes: int) -> None:
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.nbytes < nbytes:
            self._buffers[slot] = torch.from_numpy(_aligned(_size_class(max(nbytes, ALIGNMENT))))


class ArenaPool:
    """Arenas of one executable: a call checks one out, so that threads do not share memory."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._idle: deque[Arena] = deque()
        self._is_shared = False

    def acquire(self, sizes: tuple[int, ...]) -> Arena:
        """Return an arena laid out for these sizes, for the caller alone until released."""
        try:
            arena = self._idle.pop()
        except IndexError:
            arena = Arena()
        arena.lay_out(sizes, self._layout)
        return arena

    def share(self, other: "ArenaPool") -> None:
        """Take arenas from those of another executable, and return them there."""
        self._idle, self._is_shared = other._idle, True

    def release(self, arena: Arena) -> None:
        """Return an arena to the pool."""
        self._idle.append(arena)

    def clear(self) -> None:
        """Free the idle arenas."""
        self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        """Bytes of the idle arenas; none where they are another executable's."""
        return 0 if self._is_shared else sum(arena.nbytes for arena in self._idle)
