"""Reduction of edge values to the nodes: the scatter at the end of a region.

A plain or weighted sum of gathered rows is an ``spmm``; rows that come from no gather, or have few
columns, go through ``segment_reduce``; anything else is the body of a ``message``. There, a sum of values
times the softmax of logits of the same shape is one reduction, which stores no weight.
"""

from dataclasses import dataclass

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, aten_name, holds_tensor, same_shape, same_size, shape_of, unpack
from gnnc.passes.edges.bodies import BodyBuilder
from gnnc.passes.edges.factors import Factor, factors_of, of_one_rank, squeezed
from gnnc.passes.edges.node_tables import same_rows
from gnnc.passes.edges.orders import Csr, Order
from gnnc.passes.edges.region import Regions
from gnnc.passes.edges.rowwise import Gather, is_narrow, rows_of
from gnnc.passes.edges.softmax import Softmax

aten, gnnc = torch.ops.aten, torch.ops.gnnc


def aggregate(regions: Regions, node: Node, order: Order, reduce: str, like: Node) -> Node:
    """Reduce the edge value ``node`` at each destination; an empty row gives 0."""
    result = (
        _aggregate_leaf(regions, node, order, reduce)
        or _aggregate_rows(regions, node, order, reduce)
        or _aggregate_softmax(regions, node, order, reduce)
        or _aggregate_narrow(regions, node, order, reduce)
        or _message(regions, node, order, reduce)
    )
    result.meta["layer"] = result.meta["layer"] or like.meta["layer"].removesuffix(".aggr_module")
    return regions.cast(result, like)


def _aggregate_leaf(regions: Regions, node: Node, order: Order, reduce: str) -> Node | None:
    if regions.indices(node):
        return None
    csr = regions.csr(order)
    if aten_name(node) == "full.default" and reduce == "sum":
        return _degree(regions, node, csr)
    return regions.builder.call(
        gnnc.segment_reduce.default, csr.rowptr, csr.perm, node, reduce, order.num_dst
    )


def _degree(regions: Regions, ones: Node, csr: Csr) -> Node:
    """Return the sum of equal rows: the degree, times their value."""
    degree = regions.builder.call(gnnc.degree.default, csr.rowptr)
    value = argument(ones, "fill_value")
    if value != 1:
        degree = regions.times(degree, value, "")
    columns = shape_of(ones)[1:]
    if not columns:
        return degree
    degree = regions.builder.call(aten.reshape.default, degree, [-1, *([1] * len(columns))])
    return regions.builder.call(aten.expand.default, degree, [-1, *columns])


def _aggregate_rows(regions: Regions, node: Node, order: Order, reduce: str) -> Node | None:
    """Return ``sum_j value_ij x_j`` as an spmm, or None for another form."""
    gather = regions.gather_form(node, order)
    if gather is not None:
        return None if gather.index is order.dst else _spmm(regions, gather, None, reduce, order)
    factors = factors_of(node, regions)
    split = _split(regions, node, factors, order)
    if split is None:
        return None
    layer = node.meta["layer"]
    value = regions.product(split.narrow, order, layer) if split.narrow else None
    table = split.gather.table
    for constant in split.constants:
        target = aten.div.Tensor if constant.inverted else aten.mul.Tensor
        table = regions.builder.call(target, table, constant.value, layer=layer)
    if not same_shape(shape_of(table)[1:], shape_of(node)[1:]):
        return None
    return _spmm(regions, Gather(table, split.gather.index), value, reduce, order)


def _spmm(regions: Regions, gather: Gather, value: Node | None, reduce: str, order: Order) -> Node:
    csr, table = regions.csr(order, gather.index), gather.table
    if value is not None and len(shape_of(value)) == 2 and len(shape_of(table)) < 3:
        value = regions.builder.call(aten.reshape.default, value, [-1])
    return regions.builder.call(gnnc.spmm.default, csr.rowptr, csr.col, value, table, reduce, order.num_dst)


@dataclass(frozen=True)
class _ProductOfRows:
    """A product of gathered rows with weights of the edges.

    Attributes:
        gather: the rows, read by source.
        narrow: factors of one rank with a number for every edge, or one a head.
        constants: factors that are the same for all edges.
    """

    gather: Gather
    narrow: list[Factor]
    constants: list[Factor]


def _split(regions: Regions, node: Node, factors: list[Factor], order: Order) -> _ProductOfRows | None:
    """Return ``factors``, whose product is ``node``, by kind; None unless one index reads all wide rows."""
    rank = len(shape_of(node))
    tables: dict[Node, Node] = {}
    narrow: list[Factor] = []
    constants: list[Factor] = []
    for factor in factors:
        value = factor.value
        if not isinstance(value, Node) or not _has_rows(value, node):
            constants.append(factor)
            continue
        wide = _wide_end(regions, factor, node, order)
        if wide is not None:
            table = tables.get(wide.index)
            if table is not None and not same_rows((table, wide.table)):
                return None
            tables[wide.index] = (
                wide.table if table is None else regions.times(table, wide.table, node.meta["layer"])
            )
            continue
        if rank > 1 and not same_size(shape_of(value)[-1], 1):
            return None
        narrow.append(factor)
    if len(tables) != 1:
        return None
    ((index, table),) = tables.items()
    flat = [part for factor in narrow for part in squeezed(factor, rank, regions)]
    return _ProductOfRows(Gather(table, index), of_one_rank(flat, regions), constants)


def _wide_end(regions: Regions, factor: Factor, node: Node, order: Order) -> Gather | None:
    """Return the gather of a factor that is read from the sources in full width, or None."""
    if factor.inverted or not same_shape(shape_of(factor.value), shape_of(node)):
        return None
    gather = regions.gather_form(factor.value, order)
    return None if gather is None or gather.index is order.dst else gather


def _aggregate_softmax(regions: Regions, node: Node, order: Order, reduce: str) -> Node | None:
    """Return ``sum_e softmax(l)_e v_e`` for logits and values of one shape, or None."""
    pair = _softmax_and_value(regions, node, order) if reduce == "sum" else None
    if pair is None:
        return None
    softmax, value = pair
    body = regions.body(node, order, (softmax.logits, value))
    return None if body is None else _reduced_body(regions, body, order, "softmax")


def _softmax_and_value(regions: Regions, node: Node, order: Order) -> tuple[Softmax, Node] | None:
    """Return the two factors of ``node`` if one is an edge softmax over the destinations of ``order``."""
    if aten_name(node) != "mul.Tensor" or _is_vector(node):
        return None
    left, right = unpack(node, "self", "other")
    for weight, value in ((left, right), (right, left)):
        softmax = regions.softmaxes.get(weight)  # type: ignore[arg-type]
        if softmax is None or not isinstance(value, Node):
            continue
        sum_order = regions.order_of(softmax)
        same = holds_tensor(value) and same_shape(shape_of(value), shape_of(softmax.logits))
        if sum_order is order and same and 1.0 + softmax.eps == 1.0:
            return softmax, value
    return None


def _is_vector(node: Node) -> bool:
    """Return whether a value is one number per edge."""
    return all(same_size(size, 1) for size in shape_of(node)[1:])


def _aggregate_narrow(regions: Regions, node: Node, order: Order, reduce: str) -> Node | None:
    """Reduce a value that is stored for every edge anyway: one column, or with other readers."""
    if not is_narrow(node) or not regions.all_narrow(node):
        return None
    if not _is_vector(node) and len(node.users) < 2 and node not in order.values:
        return None
    return _stored(regions, node, order, reduce)


def _stored(regions: Regions, node: Node, order: Order, reduce: str) -> Node:
    """Compute the value of every edge, then reduce it."""
    value = regions.emit(node, order)
    rowptr = regions.csr(order).rowptr
    return regions.builder.call(gnnc.segment_reduce.default, rowptr, None, value, reduce, order.num_dst)


def _message(regions: Regions, node: Node, order: Order, reduce: str) -> Node:
    body = None if node in regions.shared else regions.body(node, order)
    if body is None:
        return _stored(regions, node, order, reduce)
    return _reduced_body(regions, body, order, reduce)


def _reduced_body(regions: Regions, body: BodyBuilder, order: Order, reduce: str) -> Node:
    csr = regions.csr(order, body.source)
    return regions.builder.call(
        gnnc.message.default, csr.rowptr, csr.col, body.text, reduce, *body.operands, order.num_dst
    )


def _has_rows(value: Node, node: Node) -> bool:
    rows = rows_of(value)
    same_rank = len(shape_of(value)) == len(shape_of(node))
    return same_rank and rows is not None and same_size(rows, rows_of(node))
