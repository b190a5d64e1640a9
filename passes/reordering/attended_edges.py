"""Move of products with edge features from attention to the nodes, head by head.

``q_i . (k_j + W e) = q_i . k_j + (W^T q_i) . e``, and ``sum_j a_ij (v_j + W e_ij) = sum_j a_ij v_j + W
(sum_j a_ij e_ij)``. What an edge needs is then a dot product and a sum of its own features a head; the
products are computed once a node, with a weight that has the heads' blocks on its diagonal.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.aten import VIEWS
from gnnc.ir.attention import FEATURE_SUM, feature_dot
from gnnc.ir.body import GROUPS, body_values, parse_body
from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import (
    argument,
    aten_name,
    first_operand,
    is_number,
    op_name,
    same_shape,
    shape_of,
    unpack,
)
from gnnc.ir.op import size_expr
from gnnc.ir.source import wants_gradient
from gnnc.passes.base import Context
from gnnc.passes.rewrite.assumed_sizes import AssumedSizes
from gnnc.passes.rewrite.node_builder import NodeBuilder
from gnnc.passes.rewrite.structure_edit import StructureEdit

_aten = torch.ops.aten
_ops = torch.ops.gnnc


@dataclass(frozen=True, slots=True)
class _Product:
    """Rows of the sources plus a product with edge features, in heads.

    Attributes:
        rows: rows of the sources ``[N, heads, columns]``.
        features: edge features ``[E, inner]``.
        weight: ``[heads * columns, inner]``.
    """

    rows: Node
    features: Node
    weight: Node


def move_products_from_attention(
    gm: fx.GraphModule, structure: fx.GraphModule, sizes: AssumedSizes, ctx: Context
) -> None:
    """Move products with edge features from the logits and the messages of attention to the nodes, in place.

    In training they stay: the gradients of a body run in one pass over its edges.
    """
    if any(map(wants_gradient, placeholders(gm))):
        return
    mover = _Mover(gm, StructureEdit(gm, structure), sizes, ctx)
    for softmax in list(gm.graph.find_nodes(op="call_function", target=_ops.edge_softmax.default)):
        mover.rewrite(softmax)
    mover.edit.commit(ctx)


class _Mover:
    """Rewriter of the ops before and behind an edge softmax."""

    def __init__(self, gm: fx.GraphModule, edit: StructureEdit, sizes: AssumedSizes, ctx: Context) -> None:
        self.edit, self.sizes, self.ctx = edit, sizes, ctx
        self.builder = NodeBuilder(gm)

    def rewrite(self, softmax: Node) -> None:
        """Move the product out of the logits of a softmax, and out of the message that it weighs."""
        self._logits(softmax)
        for reader in _readers(softmax):
            if op_name(reader) == "message":
                self._message(reader, softmax)

    def _logits(self, softmax: Node) -> None:
        logits = argument(softmax, "logits")
        edge_map, factor = _unscaled(logits)
        if op_name(edge_map) != "edge_map" or len(edge_map.users) != 1:
            return
        (result,) = body_values(parse_body(argument(edge_map, "body")).graph)
        terms = _summed(result)
        if terms is None:
            return
        for own, other in (terms, terms[::-1]):
            product = _product(other, edge_map) if _is_row(own, "i", edge_map) else None
            if product is not None and self._pays(edge_map, product):
                self._move_logits(logits, edge_map, _operand(own, edge_map), product, factor)
                return

    def _move_logits(self, logits: Node, edge_map: Node, own: Node, product: _Product, factor: float) -> None:
        rowptr, col = unpack(edge_map, "rowptr", "col")
        layer = edge_map.meta.get("layer", "")
        _, heads, columns = shape_of(own)
        flat = self._call(layer, _aten.reshape.default, own, [-1, heads * columns])
        moved = self._call(layer, _ops.gemm.default, flat, self._blocks(product, layer), None, True)
        moved = self._call(layer, _aten.reshape.default, moved, [-1, heads, shape_of(product.features)[1]])
        dot = self._call(layer, _ops.sddmm.default, rowptr, col, own, product.rows, "dot")
        body = feature_dot(factor)
        if factor != 1.0:
            dot = self._call(layer, _aten.mul.Tensor, dot, factor)
        term = self._call(
            layer, _ops.edge_map.default, rowptr, col, body, [moved], [], [product.features], []
        )
        logits.replace_all_uses_with(self._call(layer, _aten.add.Tensor, dot, term))
        self.ctx.note(edge_map, "its product with edge features is computed on the rows of the destinations")

    def _message(self, message: Node, softmax: Node) -> None:
        if argument(message, "reduce") != "sum":
            return
        values = body_values(parse_body(argument(message, "body")).graph)
        if len(values) != 1 or aten_name(values[0]) != "mul.Tensor":
            return
        for weight, rows in (unpack(values[0], "self", "other"), unpack(values[0], "other", "self")):
            if _is_row(weight, "e", message) and _viewed(_operand(weight, message)) is softmax:
                product = _product(rows, message)
                if product is not None and self._pays(message, product):
                    self._move_message(message, softmax, _operand(weight, message), product)
                    return

    def _move_message(self, message: Node, softmax: Node, alpha: Node, product: _Product) -> None:
        rowptr, col, num_dst = unpack(message, "rowptr", "col", "num_dst")
        layer = message.meta.get("layer", "")
        _, heads, columns = shape_of(product.rows)
        inner = shape_of(product.features)[1]
        total = self._call(layer, _ops.spmm.default, rowptr, col, softmax, product.rows, "sum", num_dst)
        edges = [product.features, alpha]
        summed = self._call(
            layer, _ops.message.default, rowptr, col, FEATURE_SUM, "sum", [], [], edges, [], num_dst
        )
        summed = self._call(layer, _aten.reshape.default, summed, [-1, heads * inner])
        moved = self._call(layer, _ops.gemm.default, summed, self._blocks(product, layer), None, False)
        moved = self._call(layer, _aten.reshape.default, moved, [-1, heads, columns])
        message.replace_all_uses_with(self._call(layer, _aten.add.Tensor, total, moved))
        self.ctx.note(message, "its product with edge features is computed on the sums of them")

    def _pays(self, reader: Node, product: _Product) -> bool:
        """Return whether an edge saves more multiplications than a node has more."""
        nodes = self.sizes.value(size_expr(shape_of(argument(reader, "rowptr"))[0]))
        edges = self.sizes.value(size_expr(shape_of(product.features)[0]))
        _, heads, columns = shape_of(product.rows)
        inner = shape_of(product.features)[1]
        return edges * (heads * columns * inner - heads * inner) > nodes * heads * columns * heads * inner

    def _blocks(self, product: _Product, layer: str) -> Node:
        """Return the weight ``[heads * columns, heads * inner]``, the blocks of heads on its diagonal."""
        _, heads, columns = shape_of(product.rows)
        inner = shape_of(product.features)[1]
        if heads == 1:
            return product.weight
        build, device = self.edit.builder, product.weight.meta["val"].device
        eye = build.call(_aten.eye.default, heads, device=device)
        eye = build.call(_aten.unsqueeze.default, eye, 1)
        eye = build.call(_aten.expand.default, eye, [heads, columns, heads])
        eye = build.call(_aten.clone.default, eye, memory_format=torch.contiguous_format)
        eye = build.call(_aten.reshape.default, eye, [heads * columns, heads, 1])
        rows = self._call(layer, _aten.reshape.default, product.weight, [heads * columns, 1, inner])
        blocks = self._call(layer, _aten.mul.Tensor, rows, self.edit.take(eye, "diagonal"))
        return self._call(layer, _aten.reshape.default, blocks, [heads * columns, heads * inner])

    def _call(self, layer: str, target: Any, *args: Any) -> Node:
        return self.builder.call(target, *args, layer=layer)


def _readers(node: Node) -> list[Node]:
    """Return the nodes that read a value or a view of it."""
    readers = []
    for user in list(node.users):
        readers += _readers(user) if aten_name(user) in VIEWS else [user]
    return readers


def _unscaled(node: Node) -> tuple[Node, float]:
    """Return the value that a node multiplies by a number, and the number."""
    name = aten_name(node)
    if name not in ("mul.Tensor", "div.Tensor") or len(node.users) != 1:
        return node, 1.0
    value, factor = unpack(node, "self", "other")
    if not is_number(factor) or not isinstance(value, Node):
        return node, 1.0
    return value, float(factor) if name == "mul.Tensor" else 1.0 / float(factor)


def _summed(result: Any) -> tuple[Any, Any] | None:
    """Return the factors of the terms that a body sums over the last of three dimensions."""
    if not isinstance(result, Node) or aten_name(result) != "sum.dim_IntList":
        return None
    terms, dims, keeps = unpack(result, "self", "dim", "keepdim")
    if keeps or list(dims) not in ([2], [-1]) or aten_name(terms) != "mul.Tensor":
        return None
    return unpack(terms, "self", "other")


def _operand(placeholder: Node, reader: Node) -> Node:
    """Return the operand of an op with a body that a placeholder of the body stands for."""
    name = str(placeholder.target)
    return argument(reader, GROUPS[name[0]])[int(name[1:])]


def _is_row(value: Any, kind: str, reader: Node) -> bool:
    """Return whether a value of a body is an operand of three dimensions of one kind."""
    if not isinstance(value, Node) or value.op != "placeholder" or str(value.target)[0] != kind:
        return False
    return len(shape_of(_operand(value, reader))) == 3


def _viewed(node: Node) -> Node:
    """Return the value that a node is a view of."""
    while aten_name(node) in VIEWS:
        node = first_operand(node)
    return node


def _product(value: Any, reader: Node) -> _Product | None:
    """Match rows of the sources plus a product with edge features in as many heads."""
    if not isinstance(value, Node) or aten_name(value) != "add.Tensor" or argument(value, "alpha") != 1:
        return None
    for rows, heads in (unpack(value, "self", "other"), unpack(value, "other", "self")):
        if _is_row(rows, "j", reader) and (found := _edge_product(heads, reader)):
            features, weight = found
            of_rows = _operand(rows, reader)
            _, count, columns = shape_of(of_rows)
            is_split = list(argument(heads, "shape"))[1:] == [count, columns]
            if is_split and same_shape(shape_of(weight), (count * columns, shape_of(features)[1])):
                return _Product(of_rows, features, weight)
    return None


def _edge_product(heads: Any, reader: Node) -> tuple[Node, Node] | None:
    """Match a product of edge features with a weight, split into heads; return both."""
    if not isinstance(heads, Node) or aten_name(heads) not in ("reshape.default", "view.default"):
        return None
    linear = first_operand(heads)
    if aten_name(linear) != "linear.default" or argument(linear, "bias") is not None:
        return None
    features, weight = unpack(linear, "input", "weight")
    if not all(isinstance(node, Node) and node.op == "placeholder" for node in (features, weight)):
        return None
    if str(features.target)[0] != "e" or str(weight.target)[0] != "c":
        return None
    operands = _operand(features, reader), _operand(weight, reader)
    return operands if all(len(shape_of(node)) == 2 for node in operands) else None
