"""Reorder: move linear layers before or after aggregation, and separable edge weights out of the kernel.

Both follow from the linearity of aggregation: ``A(XW) = (AX)W`` and ``diag(a) A diag(b) X = a * A(b * X)``.
Linear layers of scaled matrices side by side are split: ``cat([X, a * X]) W = X W0 + a * (X W1)``.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import argument, first_operand, operand, same_size, shape_of, unpack
from gnnc.ir.op import op_of
from gnnc.ir.parts import Parts
from gnnc.passes.base import Context
from gnnc.passes.reordering.attended_edges import move_products_from_attention
from gnnc.passes.reordering.concatenated import split_concatenated
from gnnc.passes.reordering.edge_lift import lift_from_edges
from gnnc.passes.reordering.finite_where_read import zero_unless_destination, zero_unless_source
from gnnc.passes.reordering.linear_order import LinearOrder
from gnnc.passes.reordering.row_scale import row_scale
from gnnc.passes.reordering.separable import Factors, Separation
from gnnc.passes.rewrite.assumed_sizes import EDGES_PER_NODE, AssumedSizes
from gnnc.passes.rewrite.node_builder import NodeBuilder
from gnnc.passes.rewrite.structure_edit import StructureEdit

_aten = torch.ops.aten
_ops = torch.ops.gnnc


@dataclass(frozen=True, slots=True)
class Reorder:
    """Move linear layers to the cheaper side of aggregations; fold separable weights into nodes.

    Attributes:
        edges_per_node: ratio of the assumed graph, used without examples.
        min_gain: a linear layer moves where the cost falls at least by this share.
    """

    edges_per_node: int = EDGES_PER_NODE
    min_gain: float = 0.05
    name: ClassVar[str] = "reorder"

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with a reordered forward graph; its structure graph changes with it."""
        gm = parts.forward
        assumed_sizes = AssumedSizes(gm, ctx.examples, self.edges_per_node)
        lift_from_edges(gm, assumed_sizes, ctx)
        split_concatenated(gm, ctx)
        LinearOrder(gm, assumed_sizes, self.min_gain, ctx).run()
        if parts.structure is not None:
            move_products_from_attention(gm, parts.structure, assumed_sizes, ctx)
            _separate(gm, parts.structure, ctx)
        _gather_products(gm)
        return parts


def _gather_products(gm: fx.GraphModule) -> None:
    """Move products of the same matrix together, so that one kernel can read the matrix once for all."""
    last: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        op = op_of(node)
        if op is None or op.name != "gemm":
            continue
        x = operand(node, "x")
        before = last.get(x)
        if before is not None and all(arg < before for arg in node.all_input_nodes):
            before.append(node)
        last[x] = node


def _separate(gm: fx.GraphModule, structure: fx.GraphModule, ctx: Context) -> None:
    edit = StructureEdit(gm, structure)
    separator = _Separator(gm, edit, ctx)
    for node in list(gm.graph.nodes):
        op = op_of(node)
        if op is not None and op.name == "spmm":
            separator.rewrite(node)
    for node in list(gm.graph.nodes):
        separator.multiply_not_divide(node)
    edit.commit(ctx)


class _Separator:
    """Rewriter of ``spmm(value, x)`` to ``a * spmm(w, b * x)`` where ``value = a_i b_j w``."""

    def __init__(self, gm: fx.GraphModule, edit: StructureEdit, ctx: Context) -> None:
        self.gm, self.edit, self.ctx = gm, edit, ctx
        self.builder = NodeBuilder(gm)
        self._vectors: dict[tuple[Node, ...], Node] = {}
        self._factored: dict[tuple[Any, ...], tuple[Separation, Factors]] = {}

    def rewrite(self, spmm: Node) -> None:
        """Move the node factors of an aggregation's edge weights out of it."""
        value, reduce = unpack(spmm, "value", "reduce")
        if value is None and reduce != "mean":
            return
        reason = self._refusal(spmm)
        if reason is not None:
            self.ctx.note(spmm, f"edge weights stay in the kernel: {reason}")
            return
        separation, factors = self._factors(spmm)
        left = separation.product(factors)
        dst = self._vector(separation, factors.dst, "dst")
        src = self._vector(separation, factors.src, "src")
        if src is not None and not same_size(shape_of(src)[0], shape_of(operand(spmm, "x"))[0]):
            self.ctx.note(
                spmm, "edge weights stay in the kernel: their nodes are not the rows of the features"
            )
            return
        if dst is None and src is None and left is not None and factors.scale == 1.0:
            self.ctx.note(spmm, "edge weights stay in the kernel: no factor belongs to a node")
            return
        self._replace(spmm, dst, src, left, factors.scale)

    def _refusal(self, spmm: Node) -> str | None:
        rowptr, col, value, reduce = unpack(spmm, "rowptr", "col", "value", "reduce")
        if reduce in ("max", "min"):
            return f"{reduce} does not commute with a scale that may be negative"
        if self.edit.producer(rowptr) is None or self.edit.producer(col) is None:
            return "the graph is made inside the model"
        if value is None:
            return None
        if self.edit.producer(value) is None:
            return "they depend on features or parameters"
        return "they are per head" if len(shape_of(value)) > 1 else None  # type: ignore[arg-type]

    def _factors(self, spmm: Node) -> tuple[Separation, Factors]:
        key = unpack(spmm, "rowptr", "col", "value", "reduce")
        if key not in self._factored:
            self._factored[key] = self._separate(*key)
        return self._factored[key]

    def _separate(self, rowptr: Any, col: Any, value: Any, reduce: Any) -> tuple[Separation, Factors]:
        rows, columns = self.edit.producer(rowptr), self.edit.producer(col)
        assert rows is not None and columns is not None
        separation = Separation(self.edit.builder, rows, columns)
        source = self.edit.producer(value)
        factors = Factors() if source is None else separation.factors(source)
        if reduce == "mean":
            factors = Factors(dst=(self._one_over_degree(rows),)) * factors
        return separation, factors

    def _one_over_degree(self, rowptr: Node) -> Node:
        builder = self.edit.builder
        degree = builder.call(_ops.degree.default, rowptr)
        return builder.call(_aten.reciprocal.default, builder.call(_aten.clamp_min.default, degree, 1))

    def _vector(self, separation: Separation, nodes: tuple[Node, ...], side: str) -> Node | None:
        """Return the structure node for a product of vectors; equal products share one."""
        vector = self._vectors.get(nodes) or separation.vector(nodes)
        if vector is None:
            return None
        self._vectors[nodes] = vector
        if side == "dst":
            return zero_unless_destination(self.edit.builder, vector, separation.rowptr)
        return zero_unless_source(self.edit.builder, vector, separation.col)

    def _replace(
        self, spmm: Node, dst: Node | None, src: Node | None, left: Node | None, scale: float
    ) -> None:
        rowptr, col, x, num_dst = unpack(spmm, "rowptr", "col", "x", "num_dst")
        layer = spmm.meta.get("layer", "")
        weight = None if left is None else self.edit.take(left, "edge_value")
        if src is not None:
            x = self._scaled(x, src, "norm" if src is dst else "norm_src", layer)
        y = self.builder.call(_ops.spmm.default, rowptr, col, weight, x, "sum", num_dst, layer=layer)
        if dst is not None:
            y = self._scaled(y, dst, "norm" if src is dst else "norm_dst", layer)
        if scale != 1.0:
            y = self.builder.call(_aten.mul.Tensor, y, scale, layer=layer)
        rest = "1" if weight is None else "a weight of its own"
        self.ctx.note(spmm, f"edge weights separate: node scales leave the kernel, {rest} stays")
        spmm.replace_all_uses_with(y)
        self.gm.graph.erase_node(spmm)

    def _scaled(self, x: Any, vector: Node, name: str, layer: str) -> Node:
        scale = self.edit.take(vector, name)
        for dim in range(1, len(shape_of(x))):
            scale = self._unsqueezed(scale, dim, layer)
        return self.builder.call(_aten.mul.Tensor, x, scale, layer=layer)

    def _unsqueezed(self, node: Node, dim: int, layer: str) -> Node:
        for user in node.users:
            if user.target is _aten.unsqueeze.default and unpack(user, "self", "dim") == (node, dim):
                return user
        return self.builder.call(_aten.unsqueeze.default, node, dim, layer=layer)

    def multiply_not_divide(self, node: Node) -> None:
        """Replace a division by a vector of the structure by a product with its reciprocal."""
        if node.target is not _aten.div.Tensor or len(shape_of(node)) != 2:
            return
        scale = row_scale(argument(node, "other"))
        vector = None if scale is None else self.edit.producer(scale.vector)
        if vector is None or len(shape_of(vector)) != 1:
            return
        inverse = self._vectors.get((vector,))
        if inverse is None:
            inverse = self.edit.builder.call(_aten.reciprocal.default, vector)
            self._vectors[(vector,)] = inverse
        layer = node.meta.get("layer", "")
        product = self._scaled(first_operand(node), inverse, "norm_dst", layer)
        node.replace_all_uses_with(product)
        self.gm.graph.erase_node(node)
