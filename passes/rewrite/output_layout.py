"""Layout of outputs: a result that is contiguous in eager is contiguous after a rewrite, too.

A caller may ask for ``out.view(...)`` or a raw pointer; everything within a graph is free of that.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import output_node
from gnnc.ir.nodes import holds_tensor, outputs_of, same_size, value_of
from gnnc.passes.rewrite.node_builder import NodeBuilder

aten = torch.ops.aten


def is_contiguous(node: Node) -> bool:
    """Return whether a tensor is known to be contiguous."""
    value = value_of(node)
    if value.layout is not torch.strided:
        return False
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not same_size(size, 1) and not same_size(stride, expected):
            return False
        expected *= size
    return True


def contiguous_outputs(gm: fx.GraphModule) -> list[bool]:
    """Return for each output of a graph whether it is a tensor that is known to be contiguous."""
    return [holds_tensor(result) and is_contiguous(result) for result in _outputs(gm)]


def restore_contiguous_outputs(gm: fx.GraphModule, contiguous: Sequence[bool]) -> None:
    """Copy each output that was contiguous, by ``contiguous_outputs`` before a rewrite, and is no longer."""
    builder = NodeBuilder(gm)
    results = _outputs(gm)
    for place, before in enumerate(contiguous):
        node = results[place]
        if before and not is_contiguous(node):
            options = {"memory_format": torch.contiguous_format}
            results[place] = builder.call(aten.clone.default, node, layer=node.meta["layer"], **options)
    if results != _outputs(gm):
        output_node(gm).args = (tuple(results),)


def _outputs(gm: fx.GraphModule) -> list[Any]:
    results = outputs_of(gm.graph)
    return list(results) if isinstance(results, list | tuple) else [results]
