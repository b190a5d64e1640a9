"""Numbers that the device finds in a new graph, and the host waits for once."""

import torch


class Facts:
    """A few integers of the device on their way to the host.

    Attributes:
        tensor: int32 ``[count]`` on the device, zeros at first.

    Args:
        count: numbers.
        device: of CUDA, the current one.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.tensor = torch.zeros(count, dtype=torch.int32, device=device)
        self._host = torch.empty(count, dtype=torch.int32, pin_memory=True)
        self._sent = torch.cuda.Event()

    def send(self) -> None:
        """Copy them behind the kernels that find them."""
        self._host.copy_(self.tensor, non_blocking=True)
        self._sent.record()

    def wait(self) -> list[int]:
        """Return them; waits for what was launched before ``send``, and for nothing later."""
        self._sent.synchronize()
        return self._host.tolist()
