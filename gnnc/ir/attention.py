"""Attention as a backend computes it: logits, softmax and weighted sum in one pass over the edges.

``match_attention`` reads the parts from the ops of a graph; pass ``fuse`` groups the nodes that it covers,
and a backend calls it again on the inner graph to find the kernel's arguments.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Node

from gnnc.ir.body import parse_body
from gnnc.ir.nodes import (
    argument,
    is_number,
    is_pointwise,
    is_view,
    op_name,
    operand,
    outputs_of,
    shape_or_none,
    unpack,
)

_SUM = "aten.sum.dim_IntList"
_AGGREGATES = ("gnnc.spmm.default", "gnnc.qspmm.default")
"""Aggregations that an attention kernel computes together with the softmax of their edge values."""

_FEATURE_DOT = (
    "t0 = aten.unsqueeze.default(e0, 1); t1 = aten.mul.Tensor(i0, t0); t2 = aten.sum.dim_IntList(t1, [2]); "
)
FEATURE_SUM = "t0 = aten.unsqueeze.default(e0, 1); t1 = aten.mul.Tensor(t0, e1); return t1"
"""Body of a message: the features ``e0 [E, features]`` of an edge, times its weight ``e1 [E, heads, 1]``."""


@dataclass(frozen=True, slots=True)
class Attention:
    """The parts of ``sum_j softmax_j(logit_ij) * x_j``.

    Attributes:
        aggregate: the ``spmm`` or ``qspmm`` whose edge values are the attention weights.
        softmax: the ``edge_softmax``.
        kind: ``add``: logit = leaky_relu(a_dst_i + a_src_j + edge, slope); ``dot``: logit = scale *
            <a_dst_i, a_src_j> + edge; ``body``: logit = scale * body(a_dst_i, a_src_j, edge, constants), a
            sum over the columns of each head; ``logits``: logit = edge.
        covers: every node of the pattern, the aggregation last.
        feature_own, features, feature_sum: edges have features ``[E, columns]``, so that logit = scale *
            (<a_dst_i, a_src_j> + <feature_own_i, features>), and their sums by the attention weights are
            ``feature_sum``, a message; None where there are none.
    """

    aggregate: Node
    softmax: Node
    kind: Literal["add", "dot", "body", "logits"]
    covers: tuple[Node, ...]
    body: str = ""
    constants: tuple[Node, ...] = ()
    a_dst: Node | None = None
    a_src: Node | None = None
    edge: Node | None = None
    scale: float = 1.0
    slope: float = 1.0
    feature_own: Node | None = None
    features: Node | None = None
    feature_sum: Node | None = None

    @property
    def eps(self) -> float:
        """The term that the softmax adds to its denominator."""
        return float(argument(self.softmax, "eps"))


def match_attention(aggregate: Node, *, bodies: bool = False) -> Attention | None:
    """Return the attention that ends in ``aggregate``, or None.

    Args:
        aggregate: an ``spmm`` or ``qspmm``.
        bodies: whether an ``edge_map`` may compute the logits (kind ``body``).
    """
    if str(aggregate.target) not in _AGGREGATES or argument(aggregate, "reduce") != "sum":
        return None
    softmax = argument(aggregate, "value")
    if not isinstance(softmax, Node) or str(softmax.target) != "gnnc.edge_softmax.default":
        return None
    if argument(softmax, "rowptr") is not argument(aggregate, "rowptr") or not _one_aggregate(softmax):
        return None
    if argument(aggregate, "x_scale", "fp32") is None:
        return None
    logits = operand(softmax, "logits")
    plain = Attention(aggregate, softmax, "logits", (softmax, aggregate), edge=logits)
    found = _with_leaky_relu(plain, logits) or _with_edge(plain, logits, softmax)
    return plain if found is None or (found.kind == "body" and not bodies) else found


def _one_aggregate(softmax: Node) -> bool:
    return sum(str(user.target) in _AGGREGATES for user in softmax.users) == 1


def _with_leaky_relu(base: Attention, logits: Node) -> Attention | None:
    if str(logits.target) != "aten.leaky_relu.default" or not _read_only_by(logits, base.softmax):
        return None
    found = _with_edge(base, operand(logits, "self"), logits)
    if found is None or found.kind != "add":
        return None
    slope = float(argument(logits, "negative_slope"))
    return replace(found, slope=slope, covers=(*found.covers[:-2], logits, *found.covers[-2:]))


def _with_edge(base: Attention, logits: Node, reader: Node) -> Attention | None:
    """Match the logits from node values, with or without an edge term added to them."""
    if found := _node_part(base, logits, reader):
        return found
    if str(logits.target) != "aten.add.Tensor" or not _read_only_by(logits, reader):
        return None
    left, right, alpha = unpack(logits, "self", "other", "alpha")
    if alpha != 1 or not (isinstance(left, Node) and isinstance(right, Node)):
        return None
    for part, edge in ((left, right), (right, left)):
        found = _node_part(base, part, logits)
        if found and found.kind != "body" and shape_or_none(edge) == shape_or_none(part):
            covers = (*found.covers[:-2], logits, *found.covers[-2:])
            return replace(found, edge=edge, covers=covers)
    return None


def _node_part(base: Attention, node: Node, reader: Node) -> Attention | None:
    if not _read_only_by(node, reader):
        return None
    name = str(node.target)
    if name in ("aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar"):
        return _scaled_dot(base, node)
    if name == "gnnc.edge_map.default":
        return _body_part(base, node)
    if name != "gnnc.sddmm.default":
        return None
    rowptr, col, a_dst, a_src, op = unpack(node, "rowptr", "col", "a", "b", "op")
    if (rowptr, col) != unpack(base.aggregate, "rowptr", "col"):
        return None
    if op not in ("add", "dot") or not _per_head(node, base.softmax):
        return None
    covers = (node, *base.covers[-2:])
    return replace(base, kind=op, a_dst=a_dst, a_src=a_src, edge=None, covers=covers)


def _body_part(base: Attention, node: Node) -> Attention | None:
    """Match logits that a body computes from one row at each end, and from one value of the edge a head."""
    rowptr, col, text, dst, src, edge, const = unpack(
        node, "rowptr", "col", "body", "dst", "src", "edge", "const"
    )
    if (rowptr, col) != unpack(base.aggregate, "rowptr", "col") or not _per_head(node, base.softmax):
        return None
    if len(dst) != 1 or len(src) != 1 or len(edge) > 1 or not sums_columns(text):
        return None
    if edge and shape_or_none(edge[0]) != shape_or_none(base.softmax):
        return None
    return replace(
        base,
        kind="body",
        a_dst=dst[0],
        a_src=src[0],
        edge=edge[0] if edge else None,
        covers=(node, *base.covers[-2:]),
        body=text,
        constants=tuple(const),
    )


def sums_columns(text: str) -> bool:
    """Return whether a body is one sum, and elementwise ops before and behind it."""
    graph = parse_body(text).graph
    results = outputs_of(graph)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    sums = [node for node in calls if str(node.target) == _SUM]
    return (
        isinstance(results, Node)
        and len(sums) == 1
        and all(node in sums or is_pointwise(node) or is_view(node) for node in calls)
    )


def _per_head(sddmm: Node, softmax: Node) -> bool:
    return shape_or_none(sddmm) == shape_or_none(softmax)


def _scaled_dot(base: Attention, node: Node) -> Attention | None:
    dot, factor = unpack(node, "self", "other")
    if not isinstance(dot, Node) or not is_number(factor):
        return None
    found = _node_part(base, dot, node)
    if found is None or found.kind not in ("dot", "body"):
        return None
    divides = str(node.target).startswith("aten.div")
    scale = found.scale / factor if divides else found.scale * factor
    return replace(found, scale=scale, covers=(*found.covers[:-2], node, *found.covers[-2:]))


def _read_only_by(node: Node, reader: Node) -> bool:
    return set(node.users) == {reader}


def feature_dot(scale: float) -> str:
    """Return the body of dot products of edge features with rows of each head, times ``scale``."""
    return _FEATURE_DOT + ("return t2" if scale == 1.0 else f"t3 = aten.mul.Tensor(t2, {scale!r}); return t3")


def _feature_scale(body: str) -> float | None:
    """Return the scale of a body that ``feature_dot`` wrote, or None for another one."""
    if body == feature_dot(1.0):
        return 1.0
    found = re.fullmatch(re.escape(_FEATURE_DOT) + r"t3 = aten\.mul\.Tensor\(t2, (\S+)\); return t3", body)
    return None if found is None else float(found[1])


def with_features(found: Attention) -> Attention | None:
    """Return an attention of dot products together with the dot products and the sums of edge features.

    None: its logits have no such term, or nothing else reads the attention weights than other ops.
    """
    edge, places = found.edge, ("rowptr", "col")
    if found.kind != "dot" or edge is None or op_name(edge) != "edge_map" or len(edge.users) != 1:
        return None
    if _feature_scale(argument(edge, "body")) != found.scale:
        return None
    if unpack(edge, *places) != unpack(found.aggregate, *places):
        return None
    own, features = argument(edge, "dst")[0], argument(edge, "edge")[0]
    weights = [user for user in found.softmax.users if user is not found.aggregate]
    if len(weights) != 1 or not is_view(weights[0]) or len(weights[0].users) != 1:
        return None
    (total,) = weights[0].users
    if op_name(total) != "message" or argument(total, "body") != FEATURE_SUM:
        return None
    if unpack(total, *places) != unpack(found.aggregate, *places) or argument(total, "reduce") != "sum":
        return None
    if list(argument(total, "edge")) != [features, weights[0]]:
        return None
    covers = (edge, *found.covers[:-1], weights[0], total, found.aggregate)
    return replace(found, edge=None, feature_own=own, features=features, feature_sum=total, covers=covers)
