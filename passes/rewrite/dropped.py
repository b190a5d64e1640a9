"""Results of dropout in the backward graph: the values before it, times the mask of the forward pass."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import argument, first_operand, result_index
from gnnc.passes.rewrite.recompute import dropout_of

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Dropped:
    """A dropout as ``before * mask * scale``, as torch computes it.

    Attributes:
        before: the values before it.
        mask: bool, false where a value is dropped.
        scale: the factor of the values that stay.
    """

    before: Node
    mask: Node
    scale: float

    @classmethod
    def of(cls, node: Node) -> "Dropped | None":
        """Return the dropout whose values a node holds, with a node for the mask; None for another node."""
        dropout = dropout_of(node)
        if dropout is None:
            return None
        kept = 1.0 - float(argument(dropout, "p"))
        return cls(first_operand(dropout), _mask_of(dropout), 1.0 / kept if kept else 0.0)

    def append(self, graph: fx.Graph, copies: Mapping[Node, Node], node: Node) -> Node:
        """Append the values to a graph, and return them.

        Args:
            graph: the backward graph.
            copies: its nodes, by those of the joint graph.
            node: the values in the joint graph.
        """
        masked = graph.call_function(_aten.mul.Tensor, (copies[self.before], copies[self.mask]))
        scaled = graph.call_function(_aten.mul.Tensor, (masked, self.scale))
        for made in (masked, scaled):
            made.meta = {"val": node.meta["val"], "layer": node.meta.get("layer", "")}
        return scaled


def _mask_of(dropout: Node) -> Node:
    found = next((user for user in dropout.users if result_index(user) == 1), None)
    if found is not None:
        return found
    with dropout.graph.inserting_after(dropout):
        mask = dropout.graph.call_function(operator.getitem, (dropout, 1))
    mask.meta = {"val": dropout.meta["val"][1], "layer": dropout.meta.get("layer", "")}
    return mask
