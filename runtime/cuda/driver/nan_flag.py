"""Flag that kernels raise when they meet NaN or infinity, read without waiting for the device.

The flag is one word of pinned host memory, which kernels write only when they meet such a value. The
word is read before each call: an error of one call is raised by a later one, as CUDA's own errors
are. The first call of a program waits for the device and raises its own errors.
"""

import torch

from gnnc.runtime.program.checks import not_finite


class NanFlag:
    """The flag of one program, and the layers that its values stand for.

    Attributes:
        address: address of the word, valid on the host and on every device; 0 without a device.

    Args:
        offline: whether there is no device.
    """

    def __init__(self, *, offline: bool = False) -> None:
        self.address = 0
        self._layers: list[str] = []
        self._word = None
        if not offline:
            self._pinned = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
            self._word = self._pinned.numpy()
            self.address = self._pinned.data_ptr()

    def add(self, layer: str) -> int:
        """Return the number that kernels of a layer write to the flag."""
        self._layers.append(layer)
        return len(self._layers)

    def check(self) -> None:
        """Raise if a kernel met NaN or infinity since the last check; lower the flag.

        Raises:
            PrecisionError: the flag is raised; the message names the layer.
        """
        if self._word is not None and self._word[0]:
            layer = self._layers[int(self._word[0]) - 1]
            self._word[0] = 0
            raise not_finite(layer, " (in this call or an earlier one: CUDA runs behind Python)")
