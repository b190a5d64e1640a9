"""Attention as a backend computes it: logits, softmax and weighted sum in one pass over the edges.

``match_attention`` reads the parts from the ops of a graph; pass ``fuse`` groups the nodes that it covers,
and a backend calls it again on the inner graph to find the kernel's arguments.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Node

from gnnc.ir.nodes import argument, is_number, operand, shape_or_none, unpack

_AGGREGATES = ("gnnc.spmm.default", "gnnc.qspmm.default")
"""Aggregations that an attention kernel computes together with the softmax of their edge values."""


@dataclass(frozen=True, slots=True)
class Attention:
    """The parts of ``sum_j softmax_j(logit_ij) * x_j``.

    Attributes:
        aggregate: the ``spmm`` or ``qspmm`` whose edge values are the attention weights.
        softmax: the ``edge_softmax``.
        kind: ``add``: logit = leaky_relu(a_dst_i + a_src_j + edge, slope); ``dot``: logit = scale *
            <a_dst_i, a_src_j> + edge; ``logits``: logit = edge.
        covers: every node of the pattern, the aggregation last.
    """

    aggregate: Node
    softmax: Node
    kind: Literal["add", "dot", "logits"]
    covers: tuple[Node, ...]
    a_dst: Node | None = None
    a_src: Node | None = None
    edge: Node | None = None
    scale: float = 1.0
    slope: float = 1.0

    @property
    def eps(self) -> float:
        """The term that the softmax adds to its denominator."""
        return float(argument(self.softmax, "eps"))


def match_attention(aggregate: Node) -> Attention | None:
    """Return the attention that ends in ``aggregate``, or None."""
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
    return _with_leaky_relu(plain, logits) or _with_edge(plain, logits, softmax) or plain


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
        if (found := _node_part(base, part, logits)) and shape_or_none(edge) == shape_or_none(part):
            covers = (*found.covers[:-2], logits, *found.covers[-2:])
            return replace(found, edge=edge, covers=covers)
    return None


def _node_part(base: Attention, node: Node, reader: Node) -> Attention | None:
    if not _read_only_by(node, reader):
        return None
    name = str(node.target)
    if name in ("aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar"):
        return _scaled_dot(base, node)
    if name != "gnnc.sddmm.default":
        return None
    rowptr, col, a_dst, a_src, op = unpack(node, "rowptr", "col", "a", "b", "op")
    if (rowptr, col) != unpack(base.aggregate, "rowptr", "col"):
        return None
    if op not in ("add", "dot") or not _per_head(node, base.softmax):
        return None
    covers = (node, *base.covers[-2:])
    return replace(base, kind=op, a_dst=a_dst, a_src=a_src, edge=None, covers=covers)


def _per_head(sddmm: Node, softmax: Node) -> bool:
    return shape_or_none(sddmm) == shape_or_none(softmax)


def _scaled_dot(base: Attention, node: Node) -> Attention | None:
    dot, factor = unpack(node, "self", "other")
    if not isinstance(dot, Node) or not is_number(factor):
        return None
    found = _node_part(base, dot, node)
    if found is None or found.kind != "dot":
        return None
    divides = str(node.target).startswith("aten.div")
    scale = found.scale / factor if divides else found.scale * factor
    return replace(found, scale=scale, covers=(*found.covers[:-2], node, *found.covers[-2:]))


def _read_only_by(node: Node, reader: Node) -> bool:
    return set(node.users) == {reader}
