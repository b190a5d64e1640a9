"""Base of the modes in which a trace replaces calls of torch's functions."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]


class FunctionMode(TorchFunctionMode):
    """Mode in which ``_call`` runs in the place of each function and method of torch."""

    @abstractmethod
    def _call(self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call: ``func(*args, **kwargs)``, or another in its place."""

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._call(func, args, kwargs or {})
