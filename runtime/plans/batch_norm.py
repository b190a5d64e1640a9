"""Plan of batch norm in training, and of its gradient: the width of the rows."""

from collections.abc import Sequence

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, unpack
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Refusal

VECTORS = ("weight", "bias", "running_mean", "running_var")
"""Arguments of batch norm with a number for each column."""
_FLOATS = (torch.float32,)


def forward_width(node: Node, inputs: Sequence[torch.dtype] = _FLOATS) -> int:
    """Return the width of rows of one of the dtypes ``inputs``; refuse statistics that are given."""
    if argument(node, "training") is not True:
        raise Refusal("the statistics are given")
    return _width(node, {"input": inputs}, VECTORS)


def backward_width(node: Node, inputs: Sequence[torch.dtype] = _FLOATS) -> int:
    """Return the same of a gradient; refuse that of a norm whose statistics were given."""
    if argument(node, "train") is not True:
        raise Refusal("the statistics were given")
    if None in unpack(node, "save_mean", "save_invstd"):
        raise Refusal("the statistics of the batch are absent")
    rows = {"input": inputs, "grad_out": _FLOATS}
    return _width(node, rows, ("weight", "save_mean", "save_invstd"))


def _width(node: Node, rows: dict[str, Sequence[torch.dtype]], vectors: tuple[str, ...]) -> int:
    for name, allowed in rows.items():
        value = argument(node, name).meta["val"]
        if value.dtype not in allowed or value.dim() != 2:
            raise Refusal(f"{name} is {value.dtype} of {value.dim()} dimensions")
    for name in vectors:
        value = argument(node, name)
        if value is not None and value.meta["val"].dtype != torch.float32:
            raise Refusal(f"{name} is {value.meta['val'].dtype}")
    return build.fixed_width(argument(node, "input"))
