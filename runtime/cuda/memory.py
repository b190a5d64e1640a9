"""Temporaries of CUDA programs, in memory of torch's allocator, by stream."""

from collections.abc import Sequence
from typing import Any

import torch

from gnnc.runtime.cuda.emitter import round_up
from gnnc.runtime.cuda.graphs.cuda_graph import CallState, PatchedGraph, RecordedLaunch
from gnnc.runtime.program.memory import Arena, ArenaPool, Layout
from gnnc.torch_private import raw_stream

_Recorded = tuple[tuple[int, ...] | None, CallState | None, PatchedGraph | None]
"""Sizes of a program's calls, the state of the last one, and their CUDA graph."""


class CudaArena(Arena):
    """Temporaries of one running call, in memory of torch's allocator.

    Attributes:
        stream: handle of the stream whose kernels use the temporaries.
        captured: whether the temporaries are part of the caller's CUDA graph.
        last: the state of the last call of the program that the arena is laid out for, if it was recorded.
        held: the CUDA graph of its calls of the same state, once there were two.
    """

    def __init__(self, device: torch.device, stream: int, *, captured: bool) -> None:
        super().__init__()
        self.stream, self.captured = stream, captured
        self.last: CallState | None = None
        self.held: PatchedGraph | None = None
        self._recorded: dict[Layout, _Recorded] = {}
        self._device = device
        self._counters: torch.Tensor | None = None

    def counters(self, count: int) -> torch.Tensor:
        """Return ``count`` integers, 0 before and after every kernel (csrc/cuda/sparse/split_rows.cuh)."""
        if self._counters is None or self._counters.numel() < count:
            self._counters = torch.zeros(round_up(count, 64), dtype=torch.int32, device=self._device)
        return self._counters

    def lay_out(self, sizes: tuple[int, ...], layout: Layout) -> None:
        """Lay the temporaries of a program out for these sizes; restore what was recorded of its calls."""
        if self._layout is layout and self.sizes == sizes:
            return
        if self._layout is not None:
            self._recorded[self._layout] = self.sizes, self.last, self.held
        super().lay_out(sizes, layout)
        of_sizes, last, held = self._recorded.get(layout, (None, None, None))
        self.last, self.held = (last, held) if of_sizes == sizes else (None, None)

    def hold(
        self,
        recorded: Sequence[RecordedLaunch],
        patches: Sequence[tuple[int, int]],
        fixed: CallState | None,
        aliases: Sequence[Any] = (),
        scratch: Sequence[torch.Tensor] = (),
    ) -> None:
        """Build a CUDA graph for calls of one state, after the second such call in a row.

        Args:
            recorded: the launches of the call.
            patches: launch, and position among its arguments, of every address that calls differ in.
            fixed: the state of the call; None where calls differ in more than addresses.
            aliases: tensors derived from the state, which must be memory of the same tensors.
            scratch: memory that the launches use.
        """
        if fixed is None or self.last is None or not fixed.is_like(self.last):
            self.last = fixed
        elif fixed.holds(aliases):
            self.held = PatchedGraph(recorded, patches, fixed, scratch)

    def _grow(self, slot: int, nbytes: int) -> None:
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.nbytes < nbytes:
            self._recorded.clear()  # launches of the buffer's address
            self._buffers.pop(slot, None)
            self._buffers[slot] = torch.empty(
                -(-max(nbytes, 1) // 256) * 256, dtype=torch.uint8, device=self._device
            )


class CudaArenaPool(ArenaPool):
    """Arenas by stream: kernels of one stream run in order, so that they may share memory.

    Streams are told apart by their handles; ``driver/thread_streams.py`` replaces the stream whose handle
    is ambiguous. An arena that is taken while a CUDA graph is captured belongs to that graph alone.

    Attributes:
        was_captured: whether a CUDA graph was captured since ``clear``.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout)
        self._device, self._index = device, device.index
        self._by_stream: dict[int, list[CudaArena]] = {}
        self.was_captured = False

    def acquire(self, sizes: tuple[int, ...]) -> Arena:
        """Return an arena laid out for these sizes, for the caller alone until released."""
        if not torch.cuda.is_current_stream_capturing():
            return self.acquire_idle(sizes)
        self.was_captured = True
        arena = CudaArena(self._device, raw_stream(self._index), captured=True)
        arena.lay_out(sizes, self._layout)
        return arena

    def acquire_idle(self, sizes: tuple[int, ...]) -> CudaArena:
        """Return an arena laid out for these sizes, when no CUDA graph is being captured."""
        stream = raw_stream(self._index)
        try:
            arena = self._by_stream[stream].pop()
        except (KeyError, IndexError):
            arena = CudaArena(self._device, stream, captured=False)
        arena.lay_out(sizes, self._layout)
        return arena

    def share(self, other: ArenaPool) -> None:
        """Take arenas from those of another executable of the device, and return them there."""
        assert isinstance(other, CudaArenaPool)
        self._by_stream, self._is_shared = other._by_stream, True

    def release(self, arena: Arena) -> None:
        """Return an arena to the pool."""
        assert isinstance(arena, CudaArena)
        if not arena.captured:
            self._by_stream.setdefault(arena.stream, []).append(arena)

    def clear(self) -> None:
        """Free the idle arenas."""
        self._by_stream.clear()
        self.was_captured = False

    @property
    def idle_bytes(self) -> int:
        """Bytes of the idle arenas; none where they are another executable's."""
        if self._is_shared:
            return 0
        return sum(arena.nbytes for arenas in list(self._by_stream.values()) for arena in arenas)
