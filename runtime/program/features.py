"""Quantized values of feature matrices, computed once for each set of matrices that stay the same."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnc.errors import PrecisionError
from gnnc.runtime.structure.cache import StructureCache
from gnnc.runtime.structure.hooks import BuildHooks


class FeaturesProgram:
    """Program of a features graph, whose results are cached by the identity and version of its inputs.

    Attributes:
        cache: the results, which are dropped with the tensors that they were computed from.

    Args:
        execute: runs the lowered graph on its inputs.
        hooks: callbacks of the device; None: there are none.
        check: raises the errors that the device found in earlier runs; None: errors are raised at once.
    """

    def __init__(
        self,
        execute: Callable[..., tuple[Any, ...]],
        hooks: BuildHooks | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._execute, self._hooks, self._check = execute, hooks, check
        self.cache = StructureCache()

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Return the outputs of the graph for these inputs; treat their tensors as read-only.

        While the caller captures a CUDA graph, nothing is cached: each replay computes the outputs again,
        from inputs that may have been written since.

        Raises:
            PrecisionError: the values of this call, or on CUDA of an earlier one, are not finite; no result
                stays cached, so that calls with the same inputs raise again.
        """
        try:
            return self._results(values)
        except PrecisionError:  # the error does not say which call's inputs it is about
            self.clear()
            raise

    def _results(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if _is_capturing(values):
            return self._execute(*values)
        if self._check is not None:
            self._check()
        results = self.cache.get(values, lambda: self._compute(values))
        if self._hooks is not None:
            self._hooks.after_call(results)
        return results

    def _compute(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        results = self._execute(*values)
        if self._hooks is not None:
            self._hooks.after_build(results)
        return results

    def clear(self) -> None:
        """Drop all results."""
        self.cache.clear()


def _is_capturing(values: tuple[Any, ...]) -> bool:
    """Return whether the current stream of a GPU that holds an input records a CUDA graph."""
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in values)
    return on_gpu and torch.cuda.is_current_stream_capturing()
