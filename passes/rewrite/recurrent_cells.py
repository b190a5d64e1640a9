"""Recurrent cells of ATen without writes in place, for graphs that are differentiated."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def gru_cell(
    x: Tensor,
    hidden: Tensor,
    w_x: Tensor,
    w_hidden: Tensor,
    b_x: Tensor | None = None,
    b_hidden: Tensor | None = None,
) -> Tensor:
    """Return the next state of a GRU: ``aten.gru_cell``, which torch computes in place."""
    reset, update, new = _aten.linear(x, w_x, b_x).chunk(3, 1)
    reset_hidden, update_hidden, new_hidden = _aten.linear(hidden, w_hidden, b_hidden).chunk(3, 1)
    reset, update = (reset_hidden + reset).sigmoid(), (update_hidden + update).sigmoid()
    new = (new + new_hidden * reset).tanh()
    return (hidden - new) * update + new


WITHOUT_WRITES: dict[Any, Callable[..., Any]] = {_aten.gru_cell.default: gru_cell}
"""Functions that compute what an op does, each by its op, and write into no tensor."""
