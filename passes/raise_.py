"""Raise: replace gathers, scatters and edge softmaxes by primitives over a CSR.

From every scatter the pass slices back, through ops that work edge by edge, to the gathers: this slice
is the scatter's *region* (``gnnc.passes.edges.region``). A region of known form becomes ``spmm``,
``sddmm``, ``edge_softmax`` or ``segment_reduce``; any other becomes the body of a ``message`` or
``edge_map``, and messages that read the same rows become one. Values per edge that leave the graph go
back to the caller's order. Products with a weight become ``gemm``. An op that fits no primitive stays
ATen, with a note that says why.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import (
    argument,
    aten_name,
    first_operand,
    holds_tensor,
    is_result,
    result_index,
    shape_of,
    unpack,
    value_of,
)
from gnnc.passes.base import Context
from gnnc.passes.edges.aggregate import aggregate
from gnnc.passes.edges.callers_order import values_in_callers_order
from gnnc.passes.edges.composed_moves import compose_moves
from gnnc.passes.edges.edge_products import EdgeProducts
from gnnc.passes.edges.graph_inputs import structural_inputs
from gnnc.passes.edges.index_bounds import index_bounds
from gnnc.passes.edges.joint_messages import join_messages
from gnnc.passes.edges.orders import Order
from gnnc.passes.edges.region import Regions
from gnnc.passes.edges.rowwise import Scatter, as_scatter, row_inputs
from gnnc.passes.edges.shared_values import SharedValues
from gnnc.passes.edges.softmax import as_softmax, readers
from gnnc.passes.edges.split_products import split_products
from gnnc.passes.edges.typed_products import lift_typed_products
from gnnc.passes.normalize import only_index
from gnnc.passes.rewrite.node_builder import is_of_model

aten, gnnc = torch.ops.aten, torch.ops.gnnc

_LOOKUP = "stays ATen: a lookup of rows by one index, with no edge computation"
_ANY_ORDER = ("max.default", "min.default", "sum.default", "mean.default")
"""Reductions of all elements, which do not depend on the order of the edges."""


@dataclass(frozen=True, slots=True)
class Raise:
    """Raise a normalized graph to primitives.

    ``meta["index_bounds"]`` of the result lists the upper bounds of the integer inputs.
    """

    name: ClassVar[str] = "raise"

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Return ``gm`` raised."""
        uses = lift_typed_products(gm, ctx)
        split_products(gm, ctx)
        regions = Regions(gm, EdgeProducts(gm))
        _plan(gm, regions)
        in_softmax = _scatters_of_softmaxes(regions)
        regions.shared = _shared(gm, regions, in_softmax, joins=ctx.target.joint_bodies)
        _raise_scatters(gm, regions, lambda node: node not in in_softmax)
        _raise_edge_outputs(gm, regions, ctx, lambda node: node in regions.softmaxes)
        _raise_scatters(gm, regions, lambda node: True)
        _raise_edge_outputs(gm, regions, ctx, lambda node: True)
        _raise_products(gm, regions, ctx)
        _drop_added_dimensions(gm)
        gm.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        join_messages(gm, regions.builder, ctx)
        compose_moves(gm, regions.builder, regions.sizes, _structural(gm), ctx)
        _note_leftovers(gm, regions, ctx)
        gm.meta["index_bounds"] = [*gm.meta.get("index_bounds", ()), *index_bounds(gm, uses)]
        return gm


def _drop_added_dimensions(gm: fx.GraphModule) -> None:
    """Read what a view gave a dimension of one index, where this index is selected (PNA's only tower).

    Nodes of edges are between both in the captured graph; those of the node tables follow each other.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.select.int):
        source = only_index(node)
        if source is not None:
            node.replace_all_uses_with(source)


def _plan(gm: fx.GraphModule, regions: Regions) -> None:
    """Find the softmaxes, and every pair of indices that a region reads and reduces by."""
    for node in gm.graph.nodes:
        softmax = as_softmax(node)
        if softmax is not None:
            regions.softmaxes[node] = softmax
    regions.in_callers_order = values_in_callers_order(gm, regions.indices, regions.softmaxes)
    for scatter in _scatters(gm):
        order = regions.order(scatter.index, regions.sizes.of(scatter.base, 0), scatter.node)
        for index, size in regions.table_sizes(scatter.source).items():
            if index is not scatter.index:
                order.sources.setdefault(index, size)


def _shared(gm: fx.GraphModule, regions: Regions, in_softmax: set[Node], *, joins: bool) -> set[Node]:
    """Return the edge values that are stored because several bodies read them."""
    reasons = SharedValues(gm, regions.indices, in_softmax, joins=joins).reasons
    regions.edge_notes.update(reasons)
    return set(reasons)


def _scatters(gm: fx.GraphModule) -> list[Scatter]:
    matches = [as_scatter(node) for node in _live(gm)]
    return [scatter for scatter in matches if isinstance(scatter, Scatter)]


def _live(gm: fx.GraphModule) -> list[Node]:
    """Return the nodes that the output depends on, in order. Dead nodes stay until the end of the pass."""
    needed: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.op == "output" or node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in gm.graph.nodes if node in needed]


def _raise_scatters(gm: fx.GraphModule, regions: Regions, wanted: Callable[[Node], bool]) -> None:
    for scatter in _scatters(gm):
        if wanted(scatter.node):
            _replace_scatter(scatter, regions)


def _note_leftovers(gm: fx.GraphModule, regions: Regions, ctx: Context) -> None:
    for node, reason in regions.unfit.items():
        ctx.note(node, f"runs on tensors of all edges: {reason}")
    for node, reason in regions.edge_notes.items():
        ctx.note(node, reason)
    structural = _structural(gm)
    for node in gm.graph.nodes:
        reason = as_scatter(node)
        if isinstance(reason, str) and node not in structural:
            ctx.note(node, f"stays ATen: {reason}")


def _structural(gm: fx.GraphModule) -> set[Node]:
    """Return the nodes that depend on the graph alone, which ``hoist`` moves to the structure graph."""
    structural = structural_inputs(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function" and all(
            arg in structural or not holds_tensor(arg) for arg in node.all_input_nodes
        ):
            structural.add(node)
    return structural


def _scatters_of_softmaxes(regions: Regions) -> set[Node]:
    """Return the scatters that are part of an edge softmax: its sum and its maximum."""
    inside = set()
    for softmax in regions.softmaxes.values():
        total = softmax.total
        inside.add(total.node)
        inside.update(
            user
            for user in readers(softmax.logits)
            if isinstance(top := as_scatter(user), Scatter)
            and top.reduce == "max"
            and top.index is total.index
        )
    return inside


def _replace_scatter(scatter: Scatter, regions: Regions) -> None:
    order = regions.order(scatter.index, regions.sizes.of(scatter.base, 0), scatter.node)
    rows = aggregate(regions, scatter.source, order, scatter.reduce, scatter.node)
    result = _with_base(scatter, rows, order, regions)
    scatter.node.replace_all_uses_with(result)


def _with_base(scatter: Scatter, rows: Node, order: Order, regions: Regions) -> Node:
    """Return ``rows`` combined with the scatter's base; ``rows`` is 0 at nodes without edges."""
    base, layer = scatter.base, scatter.node.meta["layer"]
    constant = argument(base, "fill_value") if aten_name(base) == "full.default" else None
    call = regions.builder.call
    if scatter.reduce == "sum":
        return rows if constant == 0 else call(aten.add.Tensor, base, rows, layer=layer)
    if not scatter.include_base and constant == 0:
        return rows
    degree = call(gnnc.degree.default, regions.csr(order).rowptr)
    columns = [1] * (len(shape_of(rows)) - 1)
    degree = call(aten.reshape.default, degree, [-1, *columns]) if columns else degree
    empty = call(aten.eq.Scalar, degree, 0)
    if scatter.include_base and scatter.reduce == "mean":
        total = call(aten.add.Tensor, base, call(aten.mul.Tensor, rows, degree), layer=layer)
        return call(aten.div.Tensor, total, call(aten.add.Tensor, degree, 1), layer=layer)
    if scatter.include_base:
        target = aten.maximum.default if scatter.reduce == "max" else aten.minimum.default
        infinite = isinstance(constant, float) and abs(constant) == float("inf")
        with_base = rows if infinite else call(target, rows, base, layer=layer)
        return call(aten.where.self, empty, base, with_base, layer=layer)
    return call(aten.where.self, empty, base, rows, layer=layer)


def _raise_edge_outputs(
    gm: fx.GraphModule, regions: Regions, ctx: Context, wanted: Callable[[Node], bool]
) -> None:
    """Raise values per edge that are not reduced: computed in CSR order, returned in the caller's."""
    structural = _structural(gm)
    for node in filter(wanted, _edge_outputs(gm, regions)):
        order = _order_for(node, regions)
        if order is None:
            if node not in structural:
                ctx.note(node, _LOOKUP)
            continue
        value = regions.emit(node, order)
        for user in list(node.users):
            if aten_name(user) in _ANY_ORDER:
                user.replace_input_with(node, value)
        if not node.users:
            continue
        back = regions.builder.call(
            aten.index_select.default, value, 0, regions.inverse(order), layer=node.meta["layer"]
        )
        node.replace_all_uses_with(back)


def _order_for(node: Node, regions: Regions) -> Order | None:
    """Return the order to compute an edge value in, or None for a lookup by a single index."""
    indices = regions.table_sizes(node)
    if node in regions.softmaxes:
        total = regions.softmaxes[node].total
        dst, num_dst = total.index, regions.sizes.of(total.base, 0)
    elif len(indices) < 2:
        return None
    else:
        with_order = [index for index, size in indices.items() if (index, size) in regions.orders]
        dst = (with_order or sorted(indices, key=_is_second_row))[-1]
        num_dst = indices[dst]
    is_new = (dst, num_dst) not in regions.orders
    order = regions.order(dst, num_dst, node)
    if is_new:
        order.prefers_nodes = False
    for index, size in indices.items():
        if index is not dst:
            order.sources.setdefault(index, size)
    return order


def _edge_outputs(gm: fx.GraphModule, regions: Regions) -> list[Node]:
    """Return the edge values with a reader that is not row-wise."""
    live = _live(gm)
    readers = {*live, gm.graph.output_node()}
    return [
        node
        for node in live
        if holds_tensor(node)
        and regions.indices(node)
        and any(node not in (row_inputs(user) or ()) for user in node.users if user in readers)
    ]


def _is_second_row(index: Node) -> bool:
    """Return whether an index is ``edge_index[1]``, the destinations by PyG's convention."""
    if is_result(index):
        return aten_name(first_operand(index)) == "unbind.int" and result_index(index) == 1
    return aten_name(index) == "select.int" and unpack(index, "dim", "index") == (0, 1)


def _raise_products(gm: fx.GraphModule, regions: Regions, ctx: Context) -> None:
    for node in _live(gm):
        parts = _product_parts(node)
        if parts is None:
            continue
        x, weight, bias, is_kn = parts
        if not is_of_model(weight):
            ctx.note(node, "stays ATen: a product of two computed tensors, no weight")
            continue
        layer = node.meta["layer"]
        made = regions.builder.call(gnnc.gemm.default, x, weight, bias, is_kn, layer=layer)
        node.replace_all_uses_with(regions.cast(made, node))


def _product_parts(node: Node) -> tuple[Node, Node, Node | None, bool] | None:
    """Return (x ``[..., K]``, weight, bias, whether weight is ``[K, O]``) of a product with a matrix."""
    name = aten_name(node)
    if name == "linear.default":
        x, weight, bias = unpack(node, "input", "weight", "bias")
        parts = x, weight, bias, False
    elif name in ("mm.default", "matmul.default"):
        x, weight = unpack(node, "self", "mat2" if name == "mm.default" else "other")
        parts = _transposed_parts(x, weight, None)
    elif name == "addmm.default" and unpack(node, "beta", "alpha") == (1, 1):
        x, weight, bias = unpack(node, "mat1", "mat2", "self")
        parts = _transposed_parts(x, weight, bias)
    else:
        return None
    x, weight, bias, _ = parts
    ranks = len(shape_of(x)) >= 2 and len(shape_of(weight)) == 2
    vector = bias is None or len(shape_of(bias)) == 1
    floating = value_of(x).is_floating_point()
    return parts if ranks and vector and floating else None


def _transposed_parts(x: Node, weight: Node, bias: Node | None) -> tuple[Any, ...]:
    return (x, first_operand(weight), bias, False) if _is_transposed(weight) else (x, weight, bias, True)


def _is_transposed(weight: Node) -> bool:
    """Return whether a matrix is the transpose of another node."""
    name = aten_name(weight)
    if name == "t.default":
        return True
    if len(shape_of(weight)) != 2:
        return False
    if name == "permute.default":
        return [dim % 2 for dim in argument(weight, "dims")] == [1, 0]
    return name == "transpose.int" and {dim % 2 for dim in unpack(weight, "dim0", "dim1")} == {0, 1}
