"""Node vectors that are infinite where no edge reads them, such as 1/degree of an isolated node.

At an edge such a value never shows. Multiplied into all rows it would: ``0 * inf`` is not a number,
and one infinite row spoils a scale. So a vector that leaves the edges must be finite or be made so.
"""

import math
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.nodes import shape_of
from gnnc.ir.op import op_of
from gnnc.passes.rewrite.emit import Emitter

_aten = torch.ops.aten
_INVERSES = (_aten.reciprocal.default, _aten.rsqrt.default, _aten.pow.Tensor_Scalar)
_COUNTS = ("degree", "segment_reduce", "spmm")


def zero_unless_destination(emit: Emitter, vector: Node, rowptr: Node) -> Node:
    """Return ``vector [num_dst]`` with 0 for nodes without incoming edges."""
    if is_finite(vector):
        return vector
    degree = emit.call(torch.ops.gnnc.degree.default, rowptr)
    return _kept(emit, vector, emit.call(_aten.gt.Scalar, degree, 0))


def zero_unless_source(emit: Emitter, vector: Node, col: Node) -> Node:
    """Return ``vector [num_src]`` with 0 for nodes without outgoing edges."""
    if is_finite(vector):
        return vector
    nobody = emit.call(_aten.full_like.default, vector, False, dtype=torch.bool)
    index = emit.call(_aten._to_copy.default, col, dtype=torch.int64)
    return _kept(emit, vector, emit.call(_aten.index_fill.int_Scalar, nobody, 0, index, True))


def _kept(emit: Emitter, vector: Node, mask: Node) -> Node:
    zeros = emit.call(_aten.full_like.default, vector, 0)
    return emit.call(_aten.where.self, mask, vector, zeros)


def is_finite(node: Any) -> bool:
    """Whether a node vector is provably finite at nodes without edges, given finite edge weights."""
    if not isinstance(node, Node):
        return isinstance(node, int | float) and math.isfinite(node)
    if node.op == "placeholder" or _counts(node):
        return True
    target, args = node.target, node.args
    if target is _aten.masked_fill.Scalar:
        return _is_infinite_mask(args[1], args[0]) and is_finite(args[2])
    if target in _INVERSES:
        positive = target is _aten.pow.Tensor_Scalar and args[1] >= 0  # type: ignore[operator]
        return is_finite(args[0]) and (positive or _is_positive(args[0]))
    if target in (_aten.mul.Tensor, _aten.add.Tensor, _aten.clamp_min.default, _aten.clamp.default):
        return is_finite(args[0]) and (target is _aten.clamp.default or is_finite(args[1]))
    if target in (_aten.view.default, _aten.reshape.default, _aten.unsqueeze.default, _aten._to_copy.default):
        return is_finite(args[0])
    return False


def _counts(node: Node) -> bool:
    """Sums over a node's edges: finite, and 0 where there are none."""
    op = op_of(node)
    return op is not None and op.name in _COUNTS and len(shape_of(node)) == 1


def _is_infinite_mask(mask: Any, vector: Any) -> bool:
    compared = isinstance(mask, Node) and mask.target is _aten.eq.Scalar
    return compared and mask.args == (vector, math.inf)


def _is_positive(node: Any) -> bool:
    """Whether a node vector is provably above 0 at nodes without edges."""
    if not isinstance(node, Node):
        return False
    low = node.args[1] if len(node.args) > 1 else None
    number = isinstance(low, int | float) and low > 0
    if node.target in (_aten.clamp_min.default, _aten.clamp.default):
        return number
    counted = isinstance(node.args[0], Node) and _counts(node.args[0])
    return node.target is _aten.add.Tensor and number and counted
