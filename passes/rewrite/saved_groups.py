"""Copies in 4 or 2 bits of values of the forward pass, stochastically rounded, which gradients read alone."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.groups import quantize_groups_fake
from gnnc.passes.quantization.gradients import next_stream, seed_of
from gnnc.passes.rewrite.saved_copies import may_be_copied


@dataclass(frozen=True, slots=True)
class GroupCopy:
    """Packed values, with a scale and an offset for each group of 64 columns of a row.

    Attributes:
        nodes: the packed values, the scales and the offsets.
        bits: bits of a value.
        width: columns of a row.
    """

    nodes: tuple[Node, ...]
    bits: int
    width: int

    def widen(self, graph: fx.Graph, copies: Mapping[Node, Node], node: Node) -> Node:
        """Append the FP32 values of the copy to the backward graph; see ``SavedCopy.widen``."""
        args = (*(copies[part] for part in self.nodes), self.bits, self.width)
        wide = graph.call_function(torch.ops.gnnc.dequantize_groups.default, args)
        value, layer = node.meta["val"], node.meta.get("layer", "")
        wide.meta = {"val": value.new_empty((value.shape[0], self.width)), "layer": layer}
        if value.dim() == 2:
            return wide
        view = graph.call_function(torch.ops.aten.reshape.default, (wide, [-1, *value.shape[1:]]))
        view.meta = {"val": value, "layer": layer}
        return view


def add_group_copy(gm: fx.GraphModule, node: Node, counts: set[Any], bits: int) -> GroupCopy | None:
    """Add a copy of a matrix of features to its graph; None: the value is no such matrix.

    Args:
        gm: the joint graph.
        node: the value.
        counts: the numbers of edges, from ``edge_counts``.
        bits: 4 or 2.
    """
    if not may_be_copied(node, counts):
        return None
    value, layer = node.meta["val"], node.meta.get("layer", "")
    width, stream = int(value[0].numel()), next_stream(gm)
    seed = seed_of(gm, value.device)
    rows, last = node, node

    def append(target: Any, args: tuple[Any, ...], made: Any) -> Node:
        nonlocal last
        with gm.graph.inserting_after(last):
            last = gm.graph.call_function(target, args)
        last.meta = {"val": made, "layer": layer}
        return last

    if value.dim() != 2:
        flat = value.new_empty((value.shape[0], width))
        rows = append(torch.ops.aten.reshape.default, (node, [-1, width]), flat)
    made = quantize_groups_fake(rows.meta["val"], bits, seed.meta["val"], stream)
    packed = append(torch.ops.gnnc.quantize_groups.default, (rows, bits, seed, stream), made)
    parts = [append(operator.getitem, (packed, i), part) for i, part in enumerate(made)]
    return GroupCopy(tuple(parts), bits, width)
