"""Copies in fewer bits of FP32 values of the forward pass, which the backward pass reads instead of these."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.exact_reads import EXACT
from gnnc.ir.nodes import (
    arguments,
    aten_name,
    first_operand,
    holds_tensor,
    is_float,
    is_result,
    is_view,
    qtype_of,
)
from gnnc.ir.op import op_of, size_expr
from gnnc.ir.qtype import QType
from gnnc.precision import BF16, FP8, INT8, Precision

_HALVES = (torch.bfloat16, torch.float16)
_MIN_WIDTH = 8
"""Columns from which on a matrix is kept in fewer bits: a narrower one is of statistics or logits."""
_OVER_EDGES = frozenset(("attention_backward", "body_attention_backward", "edge_map", "message", "sddmm"))
"""Primitives that read rows at the ends of edges."""


@dataclass(frozen=True, slots=True)
class SavedCopy:
    """Values of 16 bits, or quantized values with the scale of each row.

    Attributes:
        values: the matrix in fewer bits.
        scale: FP32 scale of each row of quantized values; None for values of 16 bits.
    """

    values: Node
    scale: Node | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that hold the copy."""
        return (self.values,) if self.scale is None else (self.values, self.scale)

    def widen(self, graph: fx.Graph, copies: Mapping[Node, Node], node: Node) -> Node:
        """Append the FP32 values of the copy to a graph, in the shape of the value that it is a copy of.

        Args:
            graph: the backward graph.
            copies: its nodes, by those of the joint graph.
            node: the value.
        """
        if self.scale is None:
            options = {"dtype": torch.float32}
            wide = graph.call_function(torch.ops.aten._to_copy.default, (copies[self.values],), options)
        else:
            args = (copies[self.values], copies[self.scale], "row")
            wide = graph.call_function(torch.ops.gnnc.dequantize.default, args)
        value, layer = node.meta["val"], node.meta.get("layer", "")
        wide.meta = {"val": self.values.meta["val"].to(torch.float32), "layer": layer}
        if wide.meta["val"].dim() == value.dim():
            return wide
        view = graph.call_function(torch.ops.aten.reshape.default, (wide, [-1, *value.shape[1:]]))
        view.meta = {"val": value, "layer": layer}
        return view


def find_copy(node: Node) -> SavedCopy | None:
    """Return the copy in fewer bits that a graph makes of an FP32 matrix, if gradients may read that."""
    if not _may_be_rounded(node):
        return None
    views = [user for user in node.users if is_view(user) and _has_rows_of(user, node)]
    users = [user for value in (node, *views) for user in value.users if user.args[:1] == (value,)]
    quantized = next((user for user in users if _is_quantized_by_rows(user)), None)
    if quantized is not None:
        return SavedCopy(quantized, _node(quantized.args[1]))
    half = next((user for user in users if is_half_copy(user)), None)
    return None if half is None else SavedCopy(half)


def add_copy(node: Node, counts: set[Any], precision: Precision) -> SavedCopy | None:
    """Add a copy in fewer bits of a matrix with a row for each node to its graph; None: it has none.

    Matrices of features are kept in the bits of the program, and of 8-bit programs the logits of attention in
    bf16. fp16 programs keep FP32 where no product reads a copy: not every value fits in the range of fp16.

    Args:
        node: the value.
        counts: the numbers of edges, from ``edge_counts``.
        precision: the precision of the program.
    """
    if precision not in (BF16, INT8, FP8) or not _is_matrix_of_nodes(node, counts):
        return None
    if node.meta["val"].shape[-1] < _MIN_WIDTH:
        return _add_half_copy(node) if precision.is_quantized and _is_read_by_edges(node) else None
    return _add_half_copy(node) if precision == BF16 else _add_quantized_copy(node, precision)


def may_be_copied(node: Node, counts: set[Any]) -> bool:
    """Return whether a value is a matrix of features with a row for each node, which gradients may round.

    Args:
        node: the value.
        counts: the numbers of edges, from ``edge_counts``.
    """
    return _is_matrix_of_nodes(node, counts) and node.meta["val"].shape[-1] >= _MIN_WIDTH


def _is_matrix_of_nodes(node: Node, counts: set[Any]) -> bool:
    shape = node.meta["val"].shape if holds_tensor(node) else ()
    is_matrix = len(shape) in (2, 3) and all(isinstance(size, int) for size in shape[1:])
    return is_matrix and not isinstance(shape[0], int) and _rows(node) not in counts and _may_be_rounded(node)


def _is_read_by_edges(node: Node) -> bool:
    """Return whether primitives over the edges read a value at the ends of edges, as they do with logits."""
    views = [user for user in node.users if is_view(user)]
    readers = [op_of(user) for value in (node, *views) for user in value.users]
    return any(op is not None and op.name in _OVER_EDGES for op in readers)


def _add_half_copy(node: Node) -> SavedCopy:
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": torch.bfloat16})
    copy.meta = {"val": node.meta["val"].to(torch.bfloat16), "layer": node.meta.get("layer", "")}
    return SavedCopy(copy)


def _add_quantized_copy(node: Node, precision: Precision) -> SavedCopy:
    qtype = precision.activation_qtype("row")
    ops, graph = torch.ops.gnnc, node.graph
    with graph.inserting_after(node):
        scale = graph.call_function(ops.scale.default, (node, str(qtype)))
    with graph.inserting_after(scale):
        values = graph.call_function(ops.quantize.default, (node, scale, str(qtype)))
    value = node.meta["val"]
    for new, made in (
        (scale, value.new_empty(value.shape[:1])),
        (values, value.new_empty(value.shape, dtype=qtype.dtype)),
    ):
        new.meta = {"val": made, "layer": node.meta.get("layer", ""), "precision": precision}
    values.meta["qtype"] = qtype
    return SavedCopy(values, scale)


def why_wide(node: Node, counts: set[Any]) -> str:
    """Return why a value is saved in FP32 by a program whose matrices are saved in fewer bits.

    Args:
        node: the value.
        counts: the numbers of edges, from ``edge_counts``.
    """
    op = op_of(first_operand(node)) if is_result(node) else op_of(node)
    if EXACT in node.meta:
        return str(node.meta[EXACT])
    if op is not None and op.kind == "precision":
        return "scales of quantized values"
    if node.op == "placeholder":
        return "a buffer before it is written"
    if _rows(node) in counts:
        return "a value for each edge"
    shape = node.meta["val"].shape
    if len(shape) < 2 or not isinstance(shape[-1], int) or shape[-1] < _MIN_WIDTH:
        return f"statistics, or logits of fewer than {_MIN_WIDTH} columns"
    return "no product reads a copy in fewer bits"


def read_copies(gm: fx.GraphModule) -> None:
    """Let the products over nodes read quantized rows that a graph makes FP32 of, in place."""
    for node in list(gm.graph.nodes):
        op = op_of(node)
        if op is None or op.name not in ("gemm_tn", "qgemm_tn"):
            continue
        given = {"a_scale": None, "b_scale": None, **arguments(node)}
        for name in ("a", "b"):
            if _is_of_rows(given[name]):
                given[name], given[f"{name}_scale"] = given[name].args[:2]
        if given["a_scale"] is None and given["b_scale"] is None:
            continue
        node.target = torch.ops.gnnc.qgemm_tn.default
        node.args, node.kwargs = tuple(given[name] for name in ("a", "b", "a_scale", "b_scale")), {}
    gm.graph.eliminate_dead_code()


def _is_of_rows(node: Node) -> bool:
    op = op_of(node)
    return (
        op is not None
        and op.name == "dequantize"
        and node.args[2] == "row"
        and qtype_of(_node(node.args[0])) is not None
    )


def _has_rows_of(view: Node, node: Node) -> bool:
    widths = node.meta["val"].shape[1:]
    return _rows(view) == _rows(node) and all(isinstance(width, int) for width in widths)


def _rows(node: Node) -> Any:
    value = node.meta["val"]
    return size_expr(value.shape[0]) if isinstance(value, torch.Tensor) and value.dim() else None


def _may_be_rounded(node: Node) -> bool:
    return is_float(node) and node.op == "call_function" and EXACT not in node.meta


def is_half_copy(node: Node) -> bool:
    """Return whether a node is a copy of a tensor in 16 bits."""
    return aten_name(node) == "_to_copy.default" and node.meta["val"].dtype in _HALVES


def _is_quantized_by_rows(node: Node) -> bool:
    op = op_of(node)
    return op is not None and op.name == "quantize" and QType.parse(str(node.args[2])).granularity == "row"


def _node(value: Any) -> Node:
    assert isinstance(value, Node)
    return value
