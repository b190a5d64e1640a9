"""Reads and assignments of ``tensor.data`` in forward, which a trace knows as ``detach()`` alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gnnc.capture.function_mode import Function, FunctionMode
from gnnc.errors import CaptureError

_READ = torch.Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]
_ASSIGN = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]


class DataMode(FunctionMode):
    """Mode in which ``tensor.data`` is ``tensor.detach()``; an assignment raises CaptureError."""

    def _call(self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func == _READ:
            return args[0].detach()
        if func == _ASSIGN:
            raise CaptureError(
                "forward assigns tensor.data, which compiled calls would not do: write the values with "
                "tensor.copy_(value) under torch.no_grad()"
            )
        return func(*args, **kwargs)
