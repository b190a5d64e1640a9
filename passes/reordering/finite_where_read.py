"""Zeros for infinite values of node vectors at nodes without edges, such as 1/degree of an isolated node.

No edge reads such a value. Multiplied into all rows it would count: ``0 * inf`` is not a number, and
one infinite row spoils a scale. So a vector that moves from the edges to the nodes must be finite.
"""

import math
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, first_operand, shape_of, unpack
from gnnc.ir.op import op_of
from gnnc.passes.rewrite.node_builder import NodeBuilder

_aten = torch.ops.aten
_INVERSES = (_aten.reciprocal.default, _aten.rsqrt.default, _aten.pow.Tensor_Scalar)
_SUMS = ("degree", "segment_reduce", "spmm")
"""Ops that are proven to give 0 to nodes without edges; of a message, its body would have to be."""


def zero_unless_destination(builder: NodeBuilder, vector: Node, rowptr: Node) -> Node:
    """Return ``vector [num_dst]`` with 0 for nodes without incoming edges."""
    if is_finite(vector):
        return vector
    degree = builder.call(torch.ops.gnnc.degree.default, rowptr)
    return _zero_unless(builder, vector, builder.call(_aten.gt.Scalar, degree, 0))


def zero_unless_source(builder: NodeBuilder, vector: Node, col: Node) -> Node:
    """Return ``vector [num_src]`` with 0 for nodes without outgoing edges."""
    if is_finite(vector):
        return vector
    nobody = builder.call(_aten.full_like.default, vector, False, dtype=torch.bool)
    index = builder.call(_aten._to_copy.default, col, dtype=torch.int64)
    return _zero_unless(builder, vector, builder.call(_aten.index_fill.int_Scalar, nobody, 0, index, True))


def _zero_unless(builder: NodeBuilder, vector: Node, mask: Node) -> Node:
    zeros = builder.call(_aten.full_like.default, vector, 0)
    return builder.call(_aten.where.self, mask, vector, zeros)


def is_finite(node: Any) -> bool:
    """Return whether a node vector is provably finite at nodes without edges, given finite edge weights."""
    if not isinstance(node, Node):
        return isinstance(node, int | float) and math.isfinite(node)
    if node.op == "placeholder" or _is_sum_over_edges(node):
        return True
    target = node.target
    if target is _aten.masked_fill.Scalar:
        vector, mask, value = unpack(node, "self", "mask", "value")
        return _is_infinite_mask(mask, vector) and is_finite(value)
    if target in _INVERSES:
        positive = argument(node, "exponent", -1) >= 0
        return is_finite(first_operand(node)) and (positive or _is_positive(first_operand(node)))
    if target in (_aten.mul.Tensor, _aten.add.Tensor, _aten.clamp_min.default, _aten.clamp.default):
        other = argument(node, "min" if target is _aten.clamp_min.default else "other", 0)
        return is_finite(first_operand(node)) and is_finite(other)
    if target in (_aten.view.default, _aten.reshape.default, _aten.unsqueeze.default, _aten._to_copy.default):
        return is_finite(first_operand(node))
    return False


def _is_sum_over_edges(node: Node) -> bool:
    """Return whether a vector sums over each node's edges: finite, and 0 where there are none."""
    op = op_of(node)
    return op is not None and op.name in _SUMS and len(shape_of(node)) == 1


def _is_infinite_mask(mask: Any, vector: Any) -> bool:
    compared = isinstance(mask, Node) and mask.target is _aten.eq.Scalar
    return compared and unpack(mask, "self", "other") == (vector, math.inf)


def _is_positive(node: Any) -> bool:
    """Return whether a node vector is provably above 0 at nodes without edges."""
    if not isinstance(node, Node):
        return False
    if node.target in (_aten.clamp_min.default, _aten.clamp.default):
        return _is_positive_number(argument(node, "min"))
    if node.target is not _aten.add.Tensor:
        return False
    term, other = unpack(node, "self", "other")
    return isinstance(term, Node) and _is_sum_over_edges(term) and _is_positive_number(other)


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0
