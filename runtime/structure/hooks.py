"""Interface between a structure program and the device that it runs on: streams, and memory of tables."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor


class BuildHooks(Protocol):
    """Callbacks of a ``StructureRunner`` around the build of a part and around a call."""

    def before_build(self, operands: Sequence[Any]) -> None:
        """Run before a part is built, with its operands."""
        ...

    def after_build(self, results: Sequence[Any]) -> None:
        """Run when the results of a part are new, before any call finds them."""
        ...

    def after_call(self, outputs: Sequence[Any]) -> None:
        """Run with the outputs of each call."""
        ...

    def tables_of(self, tensor: Tensor) -> Iterable[Tensor]:
        """Return the tensors that are cached on a result of a part."""
        ...
