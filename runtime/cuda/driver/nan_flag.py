"""Learns of NaN and infinity on the device without waiting for it.

Kernels write to one word of pinned host memory when they meet such a value, and only then. The word
is read before each call: what went wrong in a call is said by a later one, as CUDA's own errors
are. The first call of a program waits for the device and says it at once.
"""

from gnnc.runtime.program.checks import not_finite


class Watch:
    """The word, and the layers that its values stand for.

    Attributes:
        address: of the word, valid on the host and on every device; 0 where there is no device.
    """

    def __init__(self, *, offline: bool = False) -> None:
        self.address = 0
        self._layers: list[str] = []
        self._word = None
        if not offline:
            import torch

            self._pinned = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
            self._word = self._pinned.numpy()
            self.address = self._pinned.data_ptr()

    def add(self, layer: str) -> int:
        """Return the number by which kernels call a layer."""
        self._layers.append(layer)
        return len(self._layers)

    def check(self) -> None:
        """Raise if a kernel met something that is not finite since the last check.

        Raises:
            PrecisionError: names the layer.
        """
        if self._word is not None and self._word[0]:
            layer = self._layers[int(self._word[0]) - 1]
            self._word[0] = 0
            raise not_finite(layer, " (in this call or an earlier one: CUDA runs behind Python)")
