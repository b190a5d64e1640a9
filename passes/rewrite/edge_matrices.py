"""Matrices with a row of features for every edge: what a lowered program still stores, for ``explain()``."""

from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch.fx import Node

from gnnc.ir.body import body_operands, values_of, widest_value
from gnnc.ir.nodes import argument, is_view
from gnnc.ir.op import nbytes, op_of, size_expr
from gnnc.ir.parts import STRUCTURE, Parts
from gnnc.passes.edges.rowwise import NARROW
from gnnc.passes.rewrite.assumed_sizes import FLOAT_BYTES
from gnnc.torch_private import pytree


def edge_matrices(parts: Parts) -> Iterator[tuple[Node, str]]:
    """Yield the nodes that make more than a few numbers for every edge, and what they make."""
    edges = {size for _, gm in parts for node in gm.graph.nodes for size in _edge_counts(node)}
    for part, gm in parts:
        for node in gm.graph.nodes if part != STRUCTURE else ():
            if working := _working_bytes(node):
                yield node, f"runs on matrices of all edges, the widest of {working} bytes an edge"
            elif stored := _stored_bytes(node, edges):
                yield node, f"stores {stored} bytes for every edge"


def _edge_counts(node: Node) -> Iterator[sympy.Expr]:
    """Yield the symbolic number of edges that an op reads, or sorts."""
    op = op_of(node)
    for name in ("col", "src") if op is not None else ():
        columns = argument(node, name, None)
        value = columns.meta.get("val") if isinstance(columns, Node) else None
        if isinstance(value, torch.Tensor) and not size_expr(value.shape[0]).is_number:
            yield size_expr(value.shape[0])


def _stored_bytes(node: Node, edges: set[sympy.Expr]) -> int:
    if node.op not in ("call_function", "call_module") or is_view(node):
        return 0
    return max(
        (_bytes_an_edge(value, edges) for value in pytree.tree_leaves(node.meta.get("val"))), default=0
    )


def _bytes_an_edge(value: Any, edges: set[sympy.Expr]) -> int:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return 0
    count = next((size for size in map(size_expr, value.shape) if size in edges), None)
    found = sympy.Integer(0) if count is None else sympy.simplify(nbytes(value) / count)
    return int(found) if found.is_number and found > NARROW * FLOAT_BYTES else 0


def _working_bytes(node: Node) -> int:
    """Return the bytes an edge of the widest matrix of a body that no kernel computes."""
    body = argument(node, "body", None) if op_of(node) is not None else None
    if body is None or node.meta.get("kernel") != "reference":
        return 0
    widest = widest_value(body, values_of(body_operands(node)))
    return widest * FLOAT_BYTES if widest > NARROW else 0
