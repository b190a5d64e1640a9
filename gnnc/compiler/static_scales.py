"""Static scales hold for the weights and the range of values that they were taken with.

Scales that ``example_inputs`` gave are constants of a program. Other weights, or inputs unlike the examples,
make values that they clip, or that use a few of the integers only. Each call therefore compares versions,
addresses and optimizer steps of the weights that the scales depend on with those that they were taken with.
The CPU and reference kernels also compare the largest value that each scale quantizes with what it holds.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnnc.compiler.call_function import owner_of
from gnnc.ir.source import Source
from gnnc.tensor_state import optimizer_steps

_PIECE = 1 << 16
"""Elements that a checksum reads at a time: it makes eight bytes of each."""


class ScaledWeights:
    """The state of the weights that static scales were taken with.

    Args:
        model: the model that holds them.
        sources: the parameters and buffers that the scaled values are computed from.
        constants: tensors of the program that they are computed from too.
    """

    def __init__(self, model: nn.Module, sources: Iterable[Source], constants: Sequence[Tensor]) -> None:
        self._constants = constants
        self._owners = [(*owner_of(model, source), source.kind) for source in sources]
        self._read = self._reader()
        self._seen = self._state()
        self._note_content()

    def are_unchanged(self) -> bool:
        """Return whether the weights are those that the scales were taken with."""
        state = self._state()
        return (state is not None and state == self._seen) or self.have_same_content()

    def have_same_content(self) -> bool:
        """Return whether the weights have the same values, whatever their versions and addresses."""
        tensors = self._tensors()
        if any(tensor is None for tensor in tensors) or list(map(_layout, tensors)) != self._layouts:
            return True  # the call itself refuses other shapes
        if list(map(_checksum, tensors)) != self._checksums:
            return False
        self._seen = self._state()
        self._memory = [tensor.untyped_storage() for tensor in tensors]
        return True

    def _state(self) -> Any:
        """Return versions and addresses; None where a weight is missing, or an inference tensor."""
        try:
            return self._read()
        except (AttributeError, RuntimeError):
            return None

    def _note_content(self) -> None:
        tensors = self._tensors()
        self._memory = [tensor.untyped_storage() for tensor in tensors]
        """Kept, so that nothing else gets these addresses."""
        self._layouts, self._checksums = list(map(_layout, tensors)), list(map(_checksum, tensors))

    def _tensors(self) -> list[Any]:
        weights = [_table(owner, kind).get(name) for owner, name, kind in self._owners]
        return [*weights, *self._constants]

    def _reader(self) -> Callable[[], Any]:
        """Return the function that reads versions and addresses, written as Python for its speed."""
        scope: dict[str, Any] = {"steps": optimizer_steps}
        texts = ["steps()"]
        for i, (owner, name, kind) in enumerate(self._owners):
            scope[f"d{i}"] = _table(owner, kind)
            texts.append(f"(w := d{i}.get({name!r}))._version, w.data_ptr()")
        for i, constant in enumerate(self._constants):
            scope[f"c{i}"] = constant
            texts.append(f"c{i}._version, c{i}.data_ptr()")
        reader: Callable[[], Any] = eval(f"lambda: ({', '.join(texts)},)", scope)
        return reader


def _table(owner: nn.Module, kind: str) -> dict[str, Any]:
    return owner._parameters if kind == "parameter" else owner._buffers


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _checksum(tensor: Tensor) -> int:
    """Return a number that changes with any element, and with their order."""
    with torch.no_grad():
        flat = tensor.detach().contiguous().reshape(-1)
        flat = flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8)
        total = 0
        for start in range(0, flat.numel(), _PIECE):
            piece = flat[start : start + _PIECE].long()
            places = torch.arange(start, start + piece.numel(), device=piece.device)
            total += int((piece * (2 * places + 1)).sum())
        return total
