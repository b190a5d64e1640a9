"""Rules for values of the forward pass that the backward pass computes again instead of keeping them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.aten import TRANSCENDENTAL
from gnnc.ir.body import parse_body, product_of
from gnnc.ir.nodes import (
    argument,
    aten_name,
    first_operand,
    holds_tensor,
    is_pointwise,
    is_random,
    is_result,
    is_view,
    op_name,
    result_index,
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
    if (dropout := dropout_of(node)) is not None:
        return is_made_of_nodes(first_operand(dropout), counts, memo)
    if _holds_product(node) or not (
        _is_along_edges(node) or is_pointwise(node) or is_view(node) or _is_reordered(node, counts)
    ):
        return False
    along = [arg for arg in node.all_input_nodes if holds_tensor(arg) and _rows(arg) in counts]
    return all(arg.op == "placeholder" or is_made_of_nodes(arg, counts, memo) for arg in along)


def _holds_product(node: Node) -> bool:
    """Return whether a body has products with a weight: its values take longer to compute than to move."""
    body = argument(node, "body", None) if op_of(node) is not None else None
    return body is not None and any(map(product_of, parse_body(body).graph.nodes))


def _is_reordered(node: Node, counts: set[Any]) -> bool:
    """Return whether a value for each edge is another one in another order of the edges."""
    return aten_name(node) == "index_select.default" and _rows(first_operand(node)) in counts


def dropout_of(node: Node) -> Node | None:
    """Return the dropout whose values, and not whose mask, a node holds; None for another node."""
    if not is_result(node) or result_index(node) != 0:
        return None
    made = first_operand(node)
    is_dropout = aten_name(made) == "native_dropout.default" and argument(made, "train") is True
    return made if is_dropout else None


def is_cheap(node: Node, is_kept: Callable[[Node], bool]) -> bool:
    """Return whether elementwise arithmetic makes a value of what is kept or given anyway.

    Args:
        node: the value.
        is_kept: whether the backward pass has a value.
    """
    if node.op != "call_function" or not holds_tensor(node) or is_random(node):
        return False
    if (dropout := dropout_of(node)) is not None:
        before = first_operand(dropout)
        return _is_given(before) or is_kept(before) or is_cheap(before, is_kept)
    if _narrows(node):
        return dropout_of(first_operand(node)) is not None and is_cheap(first_operand(node), is_kept)
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
