"""Ops of a body that are written as others: layer norms."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gnnc.ir.nodes import unpack


def decomposed(module: GraphModule) -> GraphModule:
    """Return a body without composite ops; the body itself where it has none."""
    if not any(str(node.target) in _FORMS for node in module.graph.nodes):
        return module
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in module.graph.nodes:
        form = _FORMS.get(str(node.target))
        copies[node] = (
            graph.node_copy(node, copies.__getitem__) if form is None else form(node, graph, copies)
        )
    return GraphModule(module, graph)


def _layer_norm(node: Node, graph: Graph, copies: dict[Node, Node]) -> Node:
    """Write a layer norm as means over its dimensions and elementwise steps."""
    x, sizes, weight, bias, eps = unpack(node, "input", "normalized_shape", "weight", "bias", "eps")
    dims = list(range(-len(sizes), 0))
    aten = torch.ops.aten

    def call(op: Any, *args: Any) -> Node:
        return graph.call_function(op, args)

    centered = call(aten.sub.Tensor, copies[x], call(aten.mean.dim, copies[x], dims, True))
    variance = call(aten.mean.dim, call(aten.mul.Tensor, centered, centered), dims, True)
    scale = call(aten.rsqrt.default, call(aten.add.Tensor, variance, float(eps)))
    normed = call(aten.mul.Tensor, centered, scale)
    if weight is not None:
        normed = call(aten.mul.Tensor, normed, copies[weight])
    return normed if bias is None else call(aten.add.Tensor, normed, copies[bias])


_FORMS: dict[str, Callable[[Node, Graph, dict[Node, Node]], Node]] = {"aten.layer_norm.default": _layer_norm}
