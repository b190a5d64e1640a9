"""Numbers that the device finds in a new graph, and the host waits for once."""

import ctypes

import torch

from gnnc.runtime.cuda.driver.launch import check, driver
from gnnc.torch_private import raw_stream

_MOST = 16


class _Letter:
    """Where a few integers arrive, and what tells when. It is used again.

    Attributes:
        numbers: int32 ``[_MOST]`` of the host, pinned.
        address: of them.
        sent: recorded behind the copy.
    """

    def __init__(self) -> None:
        self.numbers = torch.empty(_MOST, dtype=torch.int32, device="cpu", pin_memory=True)
        self.address = ctypes.c_void_p(self.numbers.data_ptr())
        self.sent = torch.cuda.Event()


_idle: dict[int, list[_Letter]] = {}
"""Letters by device: events belong to one. Threads share them: to take one from a list is one step."""
_under_way: set[_Letter] = set()
"""Those that a copy may still write to, also where the call that sent them has failed."""


class Facts:
    """A few integers of the device on their way to the host.

    Attributes:
        tensor: int32 ``[count]`` on the device, zeros at first.

    Args:
        count: numbers, at most 16.
        device: of CUDA, the current one.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        assert count <= _MOST
        self.tensor = torch.zeros(count, dtype=torch.int32, device=device)
        self._device = torch.cuda.current_device()

    def send(self) -> None:
        """Copy them behind the kernels that find them."""
        try:
            letter = _idle.setdefault(self._device, []).pop()
        except IndexError:
            letter = _Letter()
        _under_way.add(letter)
        self._letter = letter
        stream = ctypes.c_void_p(raw_stream(self._device))
        found, nbytes = ctypes.c_void_p(self.tensor.data_ptr()), ctypes.c_size_t(self.tensor.nbytes)
        # torch's own copy would also note until when the pinned memory must not be used for something else.
        check(driver().cuMemcpyDtoHAsync_v2(letter.address, found, nbytes, stream), "copy what it found")
        letter.sent.record()

    def wait(self) -> list[int]:
        """Return them, once; waits for what was launched before ``send``, and for nothing later."""
        letter = self._letter
        letter.sent.synchronize()
        numbers = letter.numbers[: self.tensor.shape[0]].tolist()
        _under_way.discard(letter)
        _idle[self._device].append(letter)
        return numbers
