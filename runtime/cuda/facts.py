"""Numbers that the device finds in a new graph, and the host waits for once."""

import ctypes
import threading

import torch

from gnnc.runtime.cuda.launch import check, driver

_MOST = 16


class _Letter:
    """Where a few integers arrive, and what tells when. It is used again, and never freed.

    Attributes:
        numbers: int32 ``[_MOST]`` of the host, pinned.
        sent: recorded behind the copy.
    """

    def __init__(self) -> None:
        self.numbers = torch.empty(_MOST, dtype=torch.int32, pin_memory=True)
        self.address = ctypes.c_void_p(self.numbers.data_ptr())
        self.sent = torch.cuda.Event()


class _Idle(threading.local):
    """The letters of a thread that are not under way, by device."""

    def __init__(self) -> None:
        self.letters: dict[int, list[_Letter]] = {}


_idle = _Idle()
_all: list[_Letter] = []  # a copy may still be under way to one whose call failed


class Facts:
    """A few integers of the device on their way to the host.

    Attributes:
        tensor: int32 ``[count]`` on the device, zeros at first.

    Args:
        count: numbers, at most 16.
        device: of CUDA, the current one.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.tensor = torch.zeros(count, dtype=torch.int32, device=device)
        self._device = torch.cuda.current_device() if device.index is None else device.index
        idle = _idle.letters.setdefault(self._device, [])
        if not idle:
            idle.append(_Letter())
            _all.append(idle[0])
        self._letter = idle.pop()

    def send(self) -> None:
        """Copy them behind the kernels that find them."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        nbytes = ctypes.c_size_t(self.tensor.nbytes)
        # torch's own copy would also note until when the pinned memory must not be used for something else.
        status = driver().cuMemcpyDtoHAsync_v2(
            self._letter.address, ctypes.c_void_p(self.tensor.data_ptr()), nbytes, ctypes.c_void_p(stream)
        )
        check(status, "copy what it found in a graph")
        self._letter.sent.record()

    def wait(self) -> list[int]:
        """Return them, once; waits for what was launched before ``send``, and for nothing later."""
        letter = self._letter
        letter.sent.synchronize()
        numbers = letter.numbers[: self.tensor.shape[0]].tolist()
        _idle.letters[self._device].append(letter)
        return numbers
