"""Detection of the arguments that describe the graph: edge lists, batch vectors, edge weights and types."""

from typing import Any

import sympy
import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import argument, shape_of, unpack
from gnnc.ir.op import op_of, size_expr
from gnnc.ir.source import source_of, wants_gradient
from gnnc.torch_private import OpOverload, schema

_INDEX_OPERANDS = {
    "index_select": "index", "index": "indices", "index_put": "indices", "gather": "index",
    "scatter": "index", "scatter_add": "index", "scatter_reduce": "index", "index_add": "index",
    "bincount": "self", "sort": "self",
}  # fmt: skip


def structural_inputs(gm: fx.GraphModule) -> set[Node]:
    """Return the placeholders that the structure graph may depend on.

    They are arguments, and graphs that the model holds itself as an integer buffer or constant.
    Integer and bool tensors that serve as indices are the graph. Floating tensors belong to it only
    where their first dimension counts edges: edge weights, edge attributes. Node features never do, nor
    does an input whose gradient is wanted.
    """
    candidates = [node for node in placeholders(gm) if _may_describe(node)]
    indices = {node for node in candidates if not _is_float(node) and _serves_as_index(node)}
    edges = _edge_sizes(gm, indices)
    return indices | {node for node in candidates if _counts_edges(node, edges)}


def _may_describe(node: Node) -> bool:
    source, value = source_of(node), node.meta.get("val")
    if source is None or not isinstance(value, torch.Tensor) or value.dim() == 0 or wants_gradient(node):
        return False
    if source.kind == "input":
        return True
    return source.kind in ("buffer", "constant") and not _is_float(node)


def _is_float(node: Node) -> bool:
    value = node.meta["val"]
    return value.is_floating_point() or value.is_complex()


def _serves_as_index(node: Node) -> bool:
    """Return whether the values of ``node``, or integers computed from them, are used as row indices."""
    seen, pending = set[Node](), [node]
    while pending:
        current = pending.pop()
        for user in current.users:
            if _takes_as_index(user, current):
                return True
            if user not in seen and _holds_indices(user):
                seen.add(user)
                pending.append(user)
    return False


def _takes_as_index(user: Node, value: Node) -> bool:
    op = op_of(user)
    if op is not None:
        return op.name == "csr" and value in unpack(user, "src", "dst")
    target = user.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    name = schema(target).name.removeprefix("aten::")
    if name not in _INDEX_OPERANDS:
        return False
    index = argument(user, _INDEX_OPERANDS[name], None)
    return index is value or isinstance(index, list | tuple) and value in index


def _holds_indices(node: Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor) and not _is_float(node)


def _edge_sizes(gm: fx.GraphModule, indices: set[Node]) -> set[sympy.Expr]:
    """Return the sizes that count edges: last dimensions of the CSRs' inputs that are no node counts."""
    edges, nodes = set[sympy.Expr](), set[sympy.Symbol]()
    for node in gm.graph.nodes:
        op = op_of(node)
        if op is None or op.name != "csr":
            continue
        for size in unpack(node, "num_src", "num_dst"):
            nodes |= _expr(size).free_symbols
        for source in _sources(unpack(node, "src", "dst")) & indices:
            edges.add(_expr(shape_of(source)[-1]))
    return {edge for edge in edges if not edge.free_symbols & nodes}


def _expr(size: Any) -> sympy.Expr:
    return size_expr(size.meta["val"] if isinstance(size, Node) else size)


def _sources(nodes: Any) -> set[Node]:
    ancestors, pending = set[Node](), [node for node in nodes if isinstance(node, Node)]
    while pending:
        node = pending.pop()
        if node not in ancestors:
            ancestors.add(node)
            pending += node.all_input_nodes
    return {node for node in ancestors if node.op == "placeholder"}


def _counts_edges(node: Node, edges: set[sympy.Expr]) -> bool:
    return _is_float(node) and _expr(shape_of(node)[0]) in edges
