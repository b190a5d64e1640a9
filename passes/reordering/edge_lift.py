"""Lift of elementwise ops and linear layers from edges to nodes: ``f(x[src])`` is ``f(x)[src]``."""

from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import argument, first_operand, holds_tensor, shape_of, unpack
from gnnc.ir.op import op_of, size_expr
from gnnc.passes.base import Context
from gnnc.passes.rewrite.assumed_sizes import AssumedSizes
from gnnc.passes.rewrite.node_builder import NodeBuilder

_aten = torch.ops.aten
_ops = torch.ops.gnnc
_UNARY = frozenset(
    {
        _aten.relu.default, _aten.leaky_relu.default, _aten.elu.default, _aten.sigmoid.default,
        _aten.tanh.default, _aten.gelu.default, _aten.silu.default, _aten.exp.default,
        _aten.neg.default, _aten.abs.default, _aten.sqrt.default, _aten.rsqrt.default,
        _aten.reciprocal.default, _aten.pow.Tensor_Scalar, _aten._to_copy.default,
    }
)  # fmt: skip


def lift_from_edges(gm: fx.GraphModule, assumed_sizes: AssumedSizes, ctx: Context) -> None:
    """Move elementwise ops and linear layers from gathered rows to the nodes that the rows come from."""
    builder = NodeBuilder(gm)
    for node in list(gm.graph.nodes):
        if node.target in _UNARY:
            _lift_unary(node, builder, assumed_sizes, ctx)
        elif _is(node, "gemm"):
            _lift_gemm(node, builder, assumed_sizes, ctx)
    gm.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


def _lift_unary(node: Node, builder: NodeBuilder, assumed_sizes: AssumedSizes, ctx: Context) -> None:
    rows = first_operand(node)
    source = _gathered(rows)
    if source is None or not _is_worth(node, rows, source, assumed_sizes, ctx):
        return
    on_nodes = builder.call(node.target, source, *node.args[1:], layer=_layer(node), **node.kwargs)
    node.replace_all_uses_with(_gather_again(builder, rows, on_nodes))
    ctx.note(node, "moved from the edges to the nodes they read")


def _lift_gemm(node: Node, builder: NodeBuilder, assumed_sizes: AssumedSizes, ctx: Context) -> None:
    parts = _concatenated(argument(node, "x"))
    if not any(_gathered(part) is not None for part in parts):
        return
    if argument(node, "w_is_kn") or not _all_worth(node, parts, assumed_sizes, ctx):
        return
    total: Node | None = None
    start = 0
    for part in parts:
        width = int(size_expr(shape_of(part)[-1]))
        weight = argument(node, "w")
        if len(parts) > 1:
            weight = builder.call(_aten.slice.Tensor, weight, 1, start, start + width, layer=_layer(node))
        start += width
        term = _transformed(builder, part, weight, _layer(node))
        total = term if total is None else builder.call(_aten.add.Tensor, total, term, layer=_layer(node))
    bias = argument(node, "bias")
    if bias is not None:
        total = builder.call(_aten.add.Tensor, total, bias, layer=_layer(node))
    assert total is not None
    node.replace_all_uses_with(total)
    ctx.note(node, "linear layer moved from the edges to the nodes they read")


def _transformed(builder: NodeBuilder, part: Node, weight: Any, layer: str) -> Node:
    source = _gathered(part)
    if source is None:
        return builder.call(_ops.gemm.default, part, weight, None, False, layer=layer)
    on_nodes = builder.call(_ops.gemm.default, source, weight, None, False, layer=layer)
    return _gather_again(builder, part, on_nodes)


def _gathered(node: Any) -> Node | None:
    """Return the tensor on the nodes whose rows ``node`` reads at every edge, or None."""
    if not holds_tensor(node) or not _is(node, "sddmm"):
        return None
    a, b, kind = unpack(node, "a", "b", "op")
    return {"copy_src": b, "copy_dst": a}.get(kind)


def _gather_again(builder: NodeBuilder, gather: Any, x: Node) -> Node:
    rowptr, col, kind = unpack(gather, "rowptr", "col", "op")
    a, b = (None, x) if kind == "copy_src" else (x, None)
    return builder.call(_ops.sddmm.default, rowptr, col, a, b, kind, layer=_layer(gather))


def _concatenated(node: Any) -> list[Node]:
    """Return the parts of a concatenation of columns, or the tensor itself."""
    if not holds_tensor(node) or len(shape_of(node)) != 2:
        return []
    if node.target is not _aten.cat.default or len(node.users) > 1:
        return [node]
    parts, dim = unpack(node, "tensors", "dim")
    return list(parts) if dim in (1, -1) else []


def _all_worth(node: Node, parts: list[Node], assumed_sizes: AssumedSizes, ctx: Context) -> bool:
    gathered = [(part, source) for part in parts if (source := _gathered(part)) is not None]
    return all(_is_worth(node, part, source, assumed_sizes, ctx) for part, source in gathered)


def _is_worth(node: Node, edges: Any, source: Node, assumed_sizes: AssumedSizes, ctx: Context) -> bool:
    rows, nodes = (assumed_sizes.value(size_expr(shape_of(t)[0])) for t in (edges, source))
    if rows <= nodes:
        ctx.note(node, f"stays on the edges: {rows:.0f} edges, {nodes:.0f} nodes")
        return False
    return True


def _is(node: Node, name: str) -> bool:
    op = op_of(node)
    return op is not None and op.name == name


def _layer(node: Any) -> str:
    return node.meta.get("layer", "")
