"""Reads and assignments of ``tensor.data`` in forward, which a trace knows as ``detach()`` alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gnnc.errors import CaptureError

_READ = torch.Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]
_ASSIGN = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]


class DataMode(TorchFunctionMode):
    """Mode in which ``tensor.data`` is ``tensor.detach()``; an assignment raises CaptureError."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _READ:
            return args[0].detach()
        if func == _ASSIGN:
            raise CaptureError(
                "forward assigns tensor.data, which compiled calls would not do: write the values with "
                "tensor.copy_(value) under torch.no_grad()"
            )
        return func(*args, **(kwargs or {}))
