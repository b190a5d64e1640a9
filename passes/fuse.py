"""Fuse: group a producer with the row-local ops around it, to run while its rows are in cache.

A group has an *anchor* (a product, an aggregation, an attention, or none for a plain map), the ops
on its operands as they are loaded (scale, quantize, cast), and the row program that
``gnnc.ir.row_local`` matches behind its result: bias, scales, activations, norms, residual adds, and
any number of stores in any precision. Each group becomes a submodule whose graph stays visible
and runs by itself.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.aten import ROW_VIEWS
from gnnc.ir.attention import Attention, match_attention, with_features
from gnnc.ir.attention_backward import ATTENTION_VECTORS
from gnnc.ir.nodes import (
    argument,
    aten_name,
    first_operand,
    is_float,
    result_index,
    set_argument,
    shape_or_none,
    unpack,
)
from gnnc.ir.op import has_body, op_of
from gnnc.ir.qtype import BYTE_DTYPES, QType
from gnnc.ir.row_local import SCALE_TENSOR, RowOp, classify, linearize
from gnnc.ir.row_steps import GRADIENT_STEPS
from gnnc.ir.source import is_weight
from gnnc.passes.base import Context
from gnnc.passes.join_bodies import KIND as BODIES
from gnnc.passes.rewrite.grouping import Group, Partition, contract
from gnnc.passes.rewrite.row_bodies import grow_row_bodies
from gnnc.target import Target
from gnnc.torch_private import statically_known_true

_ANCHORS = ("gemm", "spmm")
"""Kernel families whose ops compute whole rows, so that row-local ops may join them."""

_GEMM = "gnnc.gemm.default"
_GEMMS = (_GEMM, "gnnc.qgemm.default")
_SUM = "aten.sum.dim_IntList"
_SCALED_COPY = "scaled_copy"
"""Key of ``node.meta`` of rows that are computed again, to be multiplied by their power of two."""
_GEMM_TN = "gnnc.gemm_tn.default"
_QUANTIZE = "gnnc.quantize.default"
_SCALE = "gnnc.scale.default"
_CAST = "aten._to_copy.default"
_ATTENTION_BACKWARD = "gnnc.attention_backward.default"
_BODY_ATTENTION_BACKWARD = "gnnc.body_attention_backward.default"
_DEQUANTIZE = "gnnc.dequantize.default"
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ENDS = ("a_dst", "a_src", "x", "grad")
"""Operands of the gradient of attention that its kernel converts to FP32 as it loads them."""


@dataclass(frozen=True, slots=True)
class Fuse:
    """Group producers with the row-local ops around them.

    Attributes:
        min_map_ops: a chain without an anchor becomes a kernel of its own from this many ops on
            (a single one is as good in ATen), or when it quantizes, or makes rows that edges gather.
    """

    min_map_ops: int = 2
    name: ClassVar[str] = "fuse"

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Return the graph with every group as a submodule ``fused_<k>``."""
        _split_bias(gm.graph)
        _copy_shared_weights(gm.graph)
        if ctx.target.fused_gemm_tn:
            _copy_shared_features(gm.graph)
        _copy_scaled_rows(gm.graph)
        if ctx.target.widens_operands:
            _copy_shared_ends(gm.graph, ctx.target)
        partition = Partition()
        for node in gm.graph.nodes:
            if attention := _attention(node, ctx.target):  # a product of edge features may compute its logits
                partition.reserve(attention.covers, "attention")
        for node in gm.graph.nodes:
            _anchor(partition, node, ctx.target)
        bodies = grow_row_bodies(partition, list(gm.graph.nodes), ctx.target)
        for node in gm.graph.nodes:
            self._map(partition, node, ctx.target, is_stored=node in bodies)
            if _has_scaled_copy(node) or _is_scaled(node) or _whole_scale(node):
                self._map(partition, node, ctx.target)
        _drop_useless(partition)
        _explain(gm.graph, partition, ctx)
        return contract(gm, partition)

    def _map(self, partition: Partition, source: Node, target: Target, *, is_stored: bool = False) -> None:
        """Group the row-local ops that read ``source``, unless an anchor computes it as a row."""
        is_free = is_stored or _is_half(source) or _is_scaled(source) or _has_scaled_copy(source)
        is_free = is_free or _whole_scale(source) is not None
        is_grouped = partition.group_of(source) and not is_free
        if not _has_rows(source) or is_grouped or (is_weight(source) and not _is_in_bodies(source)):
            return
        group = partition.start("map", source)
        program = linearize(source, _admission(partition, group, target))
        computed = sum(len(op.covers) for op in program if op.role == "chain")
        pays = computed >= self.min_map_ops and _width_of(source) != 1
        if not pays and not any(op.role == "store" for op in program):
            partition.dissolve(group)


def _is_in_bodies(weight: Node) -> bool:
    """Return whether bodies, whose kernels quantize no weights, read a weight in another form."""
    readers = [reader for user in weight.users for reader in user.users]
    return any(has_body(reader) or reader.meta.get("kind") == BODIES for reader in readers)


def _has_rows(node: Node) -> bool:
    return len(shape_or_none(node) or ()) in (2, 3)


def _is_half(node: Node) -> bool:
    """Return whether a node casts to 16 bits: a producer's epilogue may store it for other groups."""
    return str(node.target) == _CAST and node.kwargs.get("dtype") in (torch.bfloat16, torch.float16)


def _is_scaled(node: Node) -> bool:
    """Return whether a value is multiplied by a power of two that its producer finds."""
    return any(str(user.target) == "gnnc.fp16_scale.default" for user in node.users)


def _whole_scale(node: Node) -> Node | None:
    """Return the scale that a kernel finds of all rows of a value, before the next one quantizes them."""
    scales = (user for user in node.users if str(user.target) == _SCALE)
    return next((scale for scale in scales if QType.parse(argument(scale, "qtype")).has_one_scale), None)


def _has_scaled_copy(node: Node) -> bool:
    """Return whether rows are multiplied again, for the product with their power of two."""
    return any(_SCALED_COPY in user.meta for user in node.users)


def _width_of(node: Node) -> Any:
    """Return the elements of a row; a kernel over rows of one element is no better than a flat one."""
    return math.prod((shape_or_none(node) or ())[1:])


def _anchor(partition: Partition, node: Node, target: Target) -> None:
    if attention := _attention(node, target):
        _grow(partition, "attention", node, attention.covers, target)
    elif str(node.target) == _GEMM_TN and target.fused_gemm_tn:
        _grow_gemm_tn(partition, node)
    elif str(node.target) == _ATTENTION_BACKWARD:
        _grow_attention_backward(partition, node, target)
    elif str(node.target) == _BODY_ATTENTION_BACKWARD:
        results = {result_index(result) for result in node.users}
        _grow_gradients(partition, "body_attention_backward", node, results, target)
    elif partition.group_of(node) is None and (kind := _anchor_family(node)):
        if kind == "gemm":
            _grow_gemm(partition, node, _siblings(node, target), target)
        else:
            _grow(partition, kind, node, (node,), target)


def _attention(node: Node, target: Target) -> Attention | None:
    """Return the attention that ends in a node, with the conversions to FP32 that its logits alone read."""
    found = match_attention(node, bodies=target.attention_bodies)
    if found is None or found.kind not in ("dot", "body") or not target.attention_bodies:
        return found
    assert found.a_src is not None
    chain = _widening_chain(found.a_src, target)
    if not _reads_alone(chain, {*chain, *found.covers}):
        return found
    found = _attended_features(found, chain, target) or found
    return replace(found, covers=(*chain, *found.covers))


def _attended_features(found: Attention, chain: tuple[Node, ...], target: Target) -> Attention | None:
    """Return an attention with the edge features that its kernel reads, too; None where it reads none."""
    extended = with_features(found)
    if extended is None or target.attention_features is None:
        return None
    assert found.a_src is not None and extended.features is not None
    key, x = first_operand(chain[0]) if chain else found.a_src, argument(found.aggregate, "x")
    shapes = shape_or_none(found.a_src), shape_or_none(extended.features)
    (_, heads, columns), (_, features) = shapes  # type: ignore[misc]
    dtype = x.meta["val"].dtype
    same = key.meta["val"].dtype == dtype and shape_or_none(x) is not None
    return extended if same and target.attention_features(heads, columns, features, dtype) else None


def _reads_alone(chain: tuple[Node, ...], covers: set[Node]) -> bool:
    return all(set(node.users) <= covers for node in chain)


def _anchor_family(node: Node) -> str | None:
    """Return the kernel family of an op that computes whole rows, or None for any other node."""
    op = op_of(node)
    if op is None or op.cost_family not in _ANCHORS:
        return None
    if op.cost_family == "gemm" and str(node.target) not in _GEMMS:  # a sum over rows
        return None
    return op.cost_family


def _siblings(gemm: Node, target: Target) -> list[Node]:
    """Return the products of the same matrix that follow ``gemm`` with no other anchor between.

    A product that is combined with one before stays apart: its row program then combines them.
    """
    x = first_operand(gemm)
    columns, dtype = (shape_or_none(x) or (None,))[-1], argument(gemm, "w").meta["val"].dtype
    if not isinstance(columns, int):
        return []
    siblings: list[Node] = []
    widths, covered = [_width_of(gemm)], _row_ops(gemm)[0]
    node = gemm.next
    while node.op != "root":
        if _anchor_family(node):
            if node.target is not gemm.target or first_operand(node) is not x:
                break
            widths.append(_width_of(node))
            if not target.joins_products(dtype, columns, widths):
                break
            own, operands = _row_ops(node)
            if not covered.isdisjoint(operands):
                break
            siblings.append(node)
            covered |= own
        node = node.next
    return siblings


def _row_ops(product: Node) -> tuple[set[Node], set[Node]]:
    """Return a product with the row-local ops behind it, and what else these read."""
    ops = linearize(product, lambda op: True)
    covered = {product, *(node for op in ops for node in op.covers)}
    return covered, {node for op in ops for node in op.operands}


def _grow(partition: Partition, kind: str, anchor: Node, nodes: tuple[Node, ...], target: Target) -> None:
    group = partition.start(kind, anchor)
    if partition.add(group, nodes):
        linearize(anchor, _admission(partition, group, target))
    else:
        partition.dissolve(group)


def _grow_gradients(
    partition: Partition, kind: str, anchor: Node, divided: Collection[int], target: Target
) -> Group:
    """Group a gradient of attention with the row program behind the one of x, its first result.

    Args:
        partition: the groups; the new one is of ``kind``.
        kind: name of the fused op.
        anchor: the op, whose users take its results.
        divided: places of the results whose divisions by a number join.
        target: the backend.
    """
    group = partition.start(kind, anchor)
    partition.add(group, (anchor, *anchor.users))
    for result in anchor.users:
        place = result_index(result)
        if place == 0:
            linearize(result, _admission(partition, group, target))
        elif place in divided:
            _divide(partition, group, result)
    return group


def _grow_attention_backward(partition: Partition, anchor: Node, target: Target) -> None:
    """Group a gradient of attention, as ``_grow_gradients`` does, with casts of its operands to FP32."""
    group = _grow_gradients(partition, "attention_backward", anchor, ATTENTION_VECTORS, target)
    for end in unpack(anchor, *_ENDS) if target.widens_operands else ():
        chain = _widening_chain(end, target)
        if all(set(node.users) <= group.nodes.keys() | set(chain) for node in chain):
            partition.add(group, chain)


def _divide(partition: Partition, group: Group, result: Node) -> None:
    """Add the divisions of a result by a number, which the launch that stores it does."""
    linearize(result, lambda op: op.kind == "div_tensor" and partition.add(group, op.covers))


def _grow_gemm(partition: Partition, gemm: Node, siblings: Sequence[Node], target: Target) -> None:
    """Group all products of one matrix, which read it once, and the row program of each."""
    group = partition.start("gemm", gemm)
    anchors = [node for node in (gemm, *siblings) if partition.add(group, (node,))]
    for anchor in anchors:
        linearize(anchor, _admission(partition, group, target, is_gemm=True))
    for factor in dict.fromkeys(arg for anchor in anchors for arg in unpack(anchor, "x", "w")):
        _load(partition, group, factor)


def _grow_gemm_tn(partition: Partition, node: Node) -> None:
    """Group a product over all rows with the casts of its operands and the division of its result."""
    group = partition.start("gemm_tn", node)
    partition.add(group, (node,))
    _divide(partition, group, node)
    for factor in dict.fromkeys(unpack(node, "a", "b")):
        _load(partition, group, factor)


def _admission(
    partition: Partition, group: Group, target: Target, *, is_gemm: bool = False
) -> Callable[[RowOp], bool]:
    """Return the function that adds a row op to a group if its operands come from outside and it is free.

    Args:
        partition: the groups.
        group: the group to join.
        target: the backend; says whether a row program computes one scale for its whole result, and which
            steps and precisions its kernels lack.
        is_gemm: whether the kernel is that of a product.
    """
    scales: list[RowOp] = []

    def admit(op: RowOp) -> bool:
        if op.kind == SCALE_TENSOR and not _finds_scale(target, is_gemm, bool(scales)):
            return False
        if op.kind.removeprefix("store_") in target.rounded:
            return False
        if op.kind in GRADIENT_STEPS and op.kind not in target.gradient_steps:
            return False
        if op.kind == "col_sum" and target.sums_in_maps and not _sums_rows(group):
            return False
        reads_group = any(operand in group.nodes for operand in op.operands)
        if reads_group:
            return False
        casts = _own_casts(op, group, target) if target.widens_operands else ()
        if not partition.add(group, (*casts, *op.covers)) and not (casts and partition.add(group, op.covers)):
            return False
        if op.kind == SCALE_TENSOR:
            scales.append(op)
        return True

    return admit


def _sums_rows(group: Group) -> bool:
    """Return whether the row program of a group is a launch by itself, with a sum of all rows at most."""
    is_map = group.kind == "map"
    if group.kind == "gemm":
        x, w = unpack(group.anchor, "x", "w")
        is_map = str(group.anchor.target) == _GEMM and is_float(x) and is_float(w)
    sums = [node for node in group.nodes if str(node.target) == _SUM and argument(node, "dim") == [0]]
    return is_map and not sums


def _own_casts(op: RowOp, group: Group, target: Target) -> tuple[Node, ...]:
    """Return the conversions to FP32 that nothing but an op reads, of matrices from outside a group."""
    return tuple(
        operand
        for operand in op.operands
        if set(operand.users) == {op.root}
        and _is_widening(operand, target)
        and group.nodes.keys().isdisjoint(operand.all_input_nodes)
    )


def _is_widening(node: Node, target: Target) -> bool:
    """Return whether a node converts a matrix of 16 bits, or quantized values with a scale a row, to FP32."""
    if str(node.target) == _DEQUANTIZE:
        values, granularity, exponent = unpack(node, "q", "granularity", "exponent")
        is_by_row = granularity == "row" and not exponent
        return is_by_row and values.meta["val"].dtype in BYTE_DTYPES and _has_rows(values)
    if str(node.target) != _CAST or not is_float(node):
        return False
    value = first_operand(node)
    halves = [dtype for name, dtype in _HALVES.items() if name not in target.rounded]
    return is_float(value, *halves) and _has_rows(value)


def _finds_scale(target: Target, is_gemm: bool, has_found: bool) -> bool:
    """Return whether a row program can find one more scale of all rows; that of a product finds one."""
    if not is_gemm:
        return target.epilogue_scales
    return (target.epilogue_scales or target.tensor_scales) and not has_found


def _load(partition: Partition, group: Group, operand: object) -> None:
    """Add the ops that quantize or cast a GEMM's operand, if nothing outside the group reads them."""
    assert isinstance(operand, Node)
    chain = _load_chain(operand)
    inside = group.nodes.keys() | set(chain)
    if all(set(node.users) <= inside for node in chain):
        partition.add(group, chain)


def _load_chain(operand: Node) -> tuple[Node, ...]:
    """Return the quantization or cast that computes ``operand``, back to a floating-point value."""
    target = str(operand.target)
    if _is_half(operand):
        return () if _is_scaled_product(first_operand(operand)) else (operand,)
    if target != _QUANTIZE:
        return (operand,) if _is_transposed_weight(operand) else ()
    value, scale = unpack(operand, "x", "scale")
    if argument(operand, "seed") is not None or argument(operand, "shift") is not None:
        return ()
    is_dynamic = str(scale.target) == "gnnc.scale.default" and first_operand(scale) is value
    transposed = (value,) if _is_transposed_weight(value) else ()
    return (*transposed, *((scale,) if is_dynamic else ()), operand)


def _is_scaled_product(node: Node) -> bool:
    """Return whether a value is a gradient times its power of two, which is stored in 16 bits."""
    return any(str(arg.target) == "gnnc.fp16_scale.default" for arg in node.all_input_nodes)


def _is_transposed_weight(node: Node) -> bool:
    return str(node.target) == "aten.t.default" and is_weight(node.all_input_nodes[0])


def _copy_shared_weights(graph: fx.Graph) -> None:
    """Copy the quantization of a weight for each GEMM that reads it: every kernel quantizes as it loads."""
    for gemm in [node for node in graph.nodes if str(node.target) in _GEMMS]:
        weight = argument(gemm, "w")
        if any(str(user.target) in _GEMMS and user is not gemm for user in weight.users):
            _copy_load(graph, gemm, weight)


def _copy_scaled_rows(graph: fx.Graph) -> None:
    """Multiply rows once more where they are multiplied by their power of two, if their factor is in memory.

    A gradient times a factor for each row is then not stored in FP32: one kernel finds its power of two, and
    the next computes it again.
    """
    for power in graph.find_nodes(op="call_function", target=torch.ops.gnnc.fp16_scale.default):
        rows = first_operand(power)
        products = [user for user in rows.users if user is not power]
        if len(products) != 1 or not _is_scaled_product(products[0]) or not _is_cheap_product(rows):
            continue
        with graph.inserting_before(products[0]):
            copied = graph.node_copy(rows)
        copied.meta[_SCALED_COPY] = True
        products[0].replace_input_with(rows, copied)


def _is_cheap_product(node: Node) -> bool:
    """Return whether a value is the product of rows that are in memory and a factor for each."""
    for source in node.all_input_nodes:
        in_memory = source.op == "placeholder" or any(
            str(user.target) == "aten.sum.dim_IntList" for user in source.users
        )
        op = classify(node, source)
        if in_memory and op is not None and [step.kind for step in op.steps] == ["mul_row"]:
            return True
    return False


def _copy_shared_features(graph: fx.Graph) -> None:
    """Copy the cast of an input for each product over all rows that reads it: they round as they load."""
    for product in [node for node in graph.nodes if str(node.target) == _GEMM_TN]:
        value = argument(product, "b")
        others = [user for user in value.users if user is not product]
        of_input = _is_half(value) and first_operand(value).op == "placeholder"
        if of_input and others and all(str(user.target) == _GEMM_TN for user in value.users):
            with graph.inserting_before(product):
                set_argument(product, "b", graph.node_copy(value))


def _copy_shared_ends(graph: fx.Graph, target: Target) -> None:
    """Copy the conversions of an operand of attention's gradient that other ops read, too."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.gnnc.attention_backward.default):
        for name in _ENDS:
            end = argument(node, name)
            chain = _widening_chain(end, target)
            if all(set(each.users) <= {node, *chain} for each in chain):
                continue
            copies: dict[Any, Node] = {}
            with graph.inserting_before(node):
                for each in chain:
                    copies[each] = graph.node_copy(each, lambda arg, copies=copies: copies.get(arg, arg))
            set_argument(node, name, copies[end])


def _widening_chain(end: Node, target: Target) -> tuple[Node, ...]:
    """Return the conversion of rows to FP32 and the views between it and an operand; none: they are FP32."""
    chain = [end]
    while aten_name(chain[0]) in ROW_VIEWS:
        chain.insert(0, first_operand(chain[0]))
    if not _is_widening(chain[0], target):
        return ()
    before, after = (shape_or_none(node) for node in (first_operand(chain[0]), end))
    keeps_rows = before and after and statically_known_true(before[0] == after[0])
    return tuple(chain) if keeps_rows else ()


def _copy_load(graph: fx.Graph, gemm: Node, operand: Node) -> None:
    copies: dict[Any, Node] = {}
    with graph.inserting_before(gemm):
        for node in _load_chain(operand):
            copies[node] = graph.node_copy(node, lambda arg: copies.get(arg, arg))
    for node in (gemm, *_dequantizes(gemm)):
        node.args = tuple(copies.get(arg, arg) for arg in node.args)


def _dequantizes(node: Node) -> list[Node]:
    direct = [user for user in node.users if str(user.target) == "gnnc.dequantize.default"]
    return direct + [inner for user in direct for inner in _dequantizes(user)]


def _split_bias(graph: fx.Graph) -> None:
    """Rewrite gemm(x, w, bias) as gemm(x, w) + bias, whose sum is row-local."""
    for node in [node for node in graph.nodes if str(node.target) == "gnnc.gemm.default"]:
        bias = argument(node, "bias")
        if bias is None or len(shape_or_none(node) or ()) != 2:
            continue
        with graph.inserting_after(node):
            total = graph.call_function(torch.ops.aten.add.Tensor, (node, bias))
        total.meta = dict(node.meta)
        node.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)
        set_argument(node, "bias", None)


def _drop_useless(partition: Partition) -> None:
    """Remove views that no group member reads, and dissolve groups of one op that gains nothing."""
    for group in list(partition.groups):
        for node in sorted(group.nodes, reverse=True):
            if _is_spare_view(group, node):
                partition.remove(group, node)
        pays_alone = any(str(n.target) == _QUANTIZE or _is_gathered(n) for n in group.nodes)
        if len(group.nodes) < 2 and not pays_alone:
            partition.dissolve(group)


def _is_gathered(node: Node) -> bool:
    """Return whether edges gather the rows of a cast: our kernels align them for gathers."""
    return str(node.target) == _CAST and any(map(_gathers, node.users))


def _gathers(node: Node) -> bool:
    return _anchor_family(node) == "spmm" or str(node.target) == _ATTENTION_BACKWARD


def _is_spare_view(group: Group, node: Node) -> bool:
    """Return whether a node is a view, read outside the group only, of a value that is stored anyway."""
    if node.users.keys() & group.nodes.keys() or node is group.anchor:
        return False
    source = node.args[0]
    if not isinstance(source, Node):
        return False
    op = classify(node, source)
    if op is None or op.role != "view":
        return False
    return source not in group.nodes or bool(source.users.keys() - group.nodes.keys())


def _explain(graph: fx.Graph, partition: Partition, ctx: Context) -> None:
    """Note every op on rows that reads a group's result without being in a group."""
    for node in graph.nodes:
        produced = [arg for arg in node.all_input_nodes if partition.group_of(arg)]
        rows = len(shape_or_none(node) or ()) > 1
        if node.op != "call_function" or partition.group_of(node) or not (rows and produced):
            continue
        if reason := _reason(partition, node, produced):
            ctx.note(node, f"runs by itself: {reason}")


def _reason(partition: Partition, node: Node, produced: list[Node]) -> str | None:
    """Return why ``node`` is no part of its producers' row programs, or None for a free view."""
    ops = [op for arg in produced if (op := classify(node, arg))]
    if not ops:
        return "it is not local to a row"
    if any(op.role == "view" for op in ops):
        return None
    if any(partition.would_cycle(partition.group_of(arg), node) for arg in produced):
        return "it needs a value that is made from the whole of its producer's result"
    if len(produced) > 1 and len({partition.group_of(arg) for arg in produced}) == 1:
        return "a row program keeps no value but the latest"
    return "another op continues the same row"
