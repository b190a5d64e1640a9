"""Rules for values of the forward pass that the backward pass computes again instead of keeping them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.aten import TRANSCENDENTAL
from gnnc.ir.nodes import (
    aten_name,
    first_operand,
    holds_tensor,
    is_pointwise,
    is_random,
    is_view,
    op_name,
)
from gnnc.ir.op import op_of, size_expr
from gnnc.ir.source import WRITTEN

_ALONG_EDGES = frozenset(("sddmm", "edge_map", "edge_softmax"))
"""Primitives with a result for each edge that is cheaper to compute than to keep."""


def edge_counts(graph: fx.Graph) -> set[Any]:
    """Return the sizes of the results that a graph's primitives have for each edge."""
    return {_rows(node) for node in graph.nodes if _is_along_edges(node)}


def _is_along_edges(node: Node) -> bool:
    op = op_of(node)
    return op is not None and op.name in _ALONG_EDGES


def _rows(node: Node) -> Any:
    value = node.meta["val"]
    return size_expr(value.shape[0]) if isinstance(value, torch.Tensor) and value.dim() else None


def is_made_of_nodes(node: Node, counts: set[Any], memo: dict[Node, bool]) -> bool:
    """Return whether a value for each edge, such as an attention weight, comes from values of nodes alone.

    Args:
        node: the value.
        counts: the numbers of edges, from ``edge_counts``.
        memo: answers that are known, to be added to.
    """
    if node not in memo:
        memo[node] = _is_made_of_nodes(node, counts, memo)
    return memo[node]


def _is_made_of_nodes(node: Node, counts: set[Any], memo: dict[Node, bool]) -> bool:
    if node.op != "call_function" or _rows(node) not in counts or is_random(node):
        return False
    if not (_is_along_edges(node) or is_pointwise(node) or is_view(node)):
        return False
    along = [arg for arg in node.all_input_nodes if holds_tensor(arg) and _rows(arg) in counts]
    return all(arg.op == "placeholder" or is_made_of_nodes(arg, counts, memo) for arg in along)


def is_cheap(node: Node, is_kept: Callable[[Node], bool]) -> bool:
    """Return whether elementwise arithmetic makes a value of what is kept or given anyway.

    Args:
        node: the value.
        is_kept: whether the backward pass has a value.
    """
    if node.op != "call_function" or not holds_tensor(node) or is_random(node) or _narrows(node):
        return False
    if not (is_view(node) or is_pointwise(node)) or op_name(node) in TRANSCENDENTAL:
        return False
    read = [arg for arg in node.all_input_nodes if holds_tensor(arg)]
    return all(_is_given(arg) or is_kept(arg) or is_cheap(arg, is_kept) for arg in read)


def _is_given(node: Node) -> bool:
    return node.op == "placeholder" and WRITTEN not in node.meta


def _narrows(node: Node) -> bool:
    if aten_name(node) != "_to_copy.default":
        return False
    before, after = first_operand(node).meta["val"].dtype, node.meta["val"].dtype
    return after.itemsize < before.itemsize
