"""Integers computed on the GPU, read back by one asynchronous copy."""

import ctypes

import torch

from gnnc.runtime.cuda.driver.launch import check, driver
from gnnc.torch_private import raw_stream

_MAX_COUNT = 16


class _PinnedSlot:
    """A pinned host buffer for a few integers, and the event recorded after the copy. Reused.

    Attributes:
        numbers: int32 ``[_MAX_COUNT]`` on the host, pinned.
        address: address of ``numbers``.
        copied: event recorded after the copy.
    """

    def __init__(self) -> None:
        self.numbers = torch.empty(_MAX_COUNT, dtype=torch.int32, device="cpu", pin_memory=True)
        self.address = ctypes.c_void_p(self.numbers.data_ptr())
        self.copied = torch.cuda.Event()


_idle: dict[int, list[_PinnedSlot]] = {}
"""Idle slots by device, which their events belong to. Threads share them: ``list.pop`` is atomic."""
_in_flight: set[_PinnedSlot] = set()
"""Slots that a copy may still write to, also where the call that started the copy has failed."""


class Readback:
    """A few integers computed on the GPU, read back by one asynchronous copy.

    Attributes:
        tensor: int32 ``[count]`` on the device, zeros at first.

    Args:
        count: number of integers, at most 16.
        device: the current CUDA device.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        assert count <= _MAX_COUNT
        self.tensor = torch.zeros(count, dtype=torch.int32, device=device)
        self._device = torch.cuda.current_device()

    def send(self) -> None:
        """Start the copy, behind the kernels that compute the integers."""
        try:
            slot = _idle.setdefault(self._device, []).pop()
        except IndexError:
            slot = _PinnedSlot()
        _in_flight.add(slot)
        self._slot = slot
        stream = ctypes.c_void_p(raw_stream(self._device))
        source, nbytes = ctypes.c_void_p(self.tensor.data_ptr()), ctypes.c_size_t(self.tensor.nbytes)
        # torch's own copy would also keep the pinned memory from reuse until the copy is done.
        check(
            driver().cuMemcpyDtoHAsync_v2(slot.address, source, nbytes, stream), "copy integers to the host"
        )
        slot.copied.record()

    def wait(self) -> list[int]:
        """Return the integers, once; waits for work launched before ``send``, not for later work."""
        slot = self._slot
        slot.copied.synchronize()
        numbers = slot.numbers[: self.tensor.shape[0]].tolist()
        _in_flight.discard(slot)
        _idle[self._device].append(slot)
        return numbers
