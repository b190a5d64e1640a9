"""Quantized values of feature matrices, computed once for each set of matrices that stay the same."""

from collections.abc import Callable
from typing import Any

from gnnc.runtime.structure.cache import StructureCache


class FeaturesProgram:
    """Program of a features graph, whose results are cached by the identity and version of its inputs.

    Attributes:
        cache: the results, which are dropped with the tensors that they were computed from.

    Args:
        execute: runs the lowered graph on its inputs.
    """

    def __init__(self, execute: Callable[..., tuple[Any, ...]]) -> None:
        self._execute = execute
        self.cache = StructureCache()

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Return the outputs of the graph for these inputs; treat their tensors as read-only."""
        return self.cache.get(values, lambda: self._execute(*values))

    def clear(self) -> None:
        """Drop all results."""
        self.cache.clear()
