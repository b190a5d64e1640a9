"""Ops on tensors whose rows are the entries of another dimension than the first.

A dimension *passes through* an op if entry k of the result along it depends on entry k of some operands and
on no other. ``operand_dims`` says which dimension of which operands that is, ``call_on_rows`` inserts the
same op on operands that have rows for it (``gnnc.passes.edges.row_layouts``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.nodes import (
    argument,
    aten_name,
    first_operand,
    holds_tensor,
    is_pointwise,
    is_random,
    same_size,
    shape_of,
    unpack,
    value_of,
    with_arguments,
)
from gnnc.passes.edges.row_layouts import RowLayout, Values
from gnnc.passes.edges.rowwise import index_vector
from gnnc.passes.rewrite.node_builder import is_of_model

aten = torch.ops.aten

Dims = dict[Node, int]
"""The operands that a dimension passes through from, and which of their dimensions it is."""

_REMOVING = frozenset(
    """
    sum.dim_IntList mean.dim amax.default amin.default prod.dim_int any.dim all.dim norm.ScalarOpt_dim
    linalg_vector_norm.default logsumexp.default argmax.default argmin.default var.correction squeeze.dim
    squeeze.dims select.int
    """.split()
)
_KEEPING = frozenset(
    """
    slice.Tensor softmax.int _softmax.default log_softmax.int _log_softmax.default cumsum.default
    cat.default
    """.split()
)
_SCATTERS = frozenset("scatter_add.default scatter.reduce scatter_reduce.two index_add.default".split())


def is_scatter(node: Node) -> bool:
    """Return whether a node reduces slices into a tensor along one dimension by a vector of indices."""
    return scatter_index(node) is not None


def operand_dims(node: Node, dim: int) -> Dims | None:
    """Return the operands that a dimension of the result passes through from; None where it does not."""
    rule = _rule(node)
    return None if rule is None else rule.dims(node, dim)


def call_on_rows(node: Node, dim: int, layout: RowLayout, values: Values) -> Node:
    """Insert the op of ``node`` with rows for a dimension of its result that passes through it."""
    rule = _rule(node)
    assert rule is not None
    return rule.call(_OnRows(node, dim, layout, values))


def is_elementwise(node: Node) -> bool:
    """Return whether an op broadcasts its operands."""
    return _rule(node) in (_ELEMENTWISE, _EXPAND)


@dataclass(frozen=True, slots=True)
class _OnRows:
    """Op of a graph that is inserted again, with rows for a dimension of its result."""

    node: Node
    dim: int
    layout: RowLayout
    values: Values

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.values.builder.call(target, *args, layer=self.node.meta["layer"], **kwargs)

    def again(self, changes: dict[str, Any]) -> Node:
        args, kwargs = with_arguments(self.node, **changes)
        return self.call(self.node.target, *args, **kwargs)

    def operand(self, node: Node, own: int) -> Node:
        return self.values.with_rows(node, own)

    def shape(self, sizes: list[Any]) -> list[Any]:
        return self.layout.shape(sizes, self.dim, self.values)


@dataclass(frozen=True, slots=True)
class _Rule:
    dims: Callable[[Node, int], Dims | None]
    call: Callable[[_OnRows], Node]


# elementwise


def _aligned_dim(operand: Node, node: Node, dim: int) -> int | None:
    """Return the dimension of an operand that is ``dim`` of the result; None where it is broadcast there."""
    own = dim - (len(shape_of(node)) - len(shape_of(operand)))
    return own if own >= 0 and same_size(shape_of(operand)[own], shape_of(node)[dim]) else None


def _elementwise_dims(node: Node, dim: int) -> Dims | None:
    tensors = [arg for arg in node.all_input_nodes if holds_tensor(arg)]
    found = {arg: own for arg in tensors if (own := _aligned_dim(arg, node, dim)) is not None}
    return found or None


def _elementwise_call(op: _OnRows) -> Node:
    def operand(arg: Node) -> Node:
        return op.layout.broadcast(arg, op.node, op.dim, op.values) if holds_tensor(arg) else arg

    args, kwargs = torch.fx.map_arg((op.node.args, op.node.kwargs), operand)
    return op.call(op.node.target, *args, **kwargs)


def _expanded_call(op: _OnRows) -> Node:
    source = op.layout.broadcast(first_operand(op.node), op.node, op.dim, op.values)
    sizes = [op.values.sizes.of(op.node, k) for k in range(len(shape_of(op.node)))]
    return op.call(aten.expand.default, source, op.shape(sizes))


# reductions, softmaxes, slices


def _dims_of(node: Node) -> set[int] | None:
    dims = argument(node, "dim")
    dims = dims if isinstance(dims, list | tuple) else [dims]
    return set(dims) if dims and all(isinstance(dim, int) for dim in dims) else None


def _removing_dims(node: Node, dim: int) -> Dims | None:
    source, dims = first_operand(node), _dims_of(node)
    if dims is None:
        return None
    if len(shape_of(source)) == len(shape_of(node)):
        return None if dim in dims else {source: dim}
    left = [k for k in range(len(shape_of(source))) if k not in dims]
    return {source: left[dim]} if len(left) == len(shape_of(node)) else None


def _keeping_dims(node: Node, dim: int) -> Dims | None:
    dims = _dims_of(node)
    if dims is None or dim in dims:
        return None
    parts = argument(node, "tensors") if aten_name(node) == "cat.default" else [first_operand(node)]
    rank = len(shape_of(node))
    return dict.fromkeys(parts, dim) if all(len(shape_of(part)) == rank for part in parts) else None


def _along_call(op: _OnRows) -> Node:
    name = aten_name(op.node)
    dims = (_removing_dims if name in _REMOVING else _keeping_dims)(op.node, op.dim)
    assert dims is not None
    own = next(iter(dims.values()))
    old = argument(op.node, "dim")
    new = (
        [op.layout.place(k, own) for k in old] if isinstance(old, list | tuple) else op.layout.place(old, own)
    )
    if name == "cat.default":
        return op.again(
            {"tensors": [op.operand(part, own) for part in argument(op.node, "tensors")], "dim": new}
        )
    return op.again({"self": op.operand(first_operand(op.node), own), "dim": new})


# changes of rank and order


def _unsqueezed_dims(node: Node, dim: int) -> Dims | None:
    new = argument(node, "dim")
    return None if dim == new else {first_operand(node): dim - (new < dim)}


def _unsqueezed_call(op: _OnRows) -> Node:
    source, new = first_operand(op.node), argument(op.node, "dim")
    value = op.operand(source, op.dim - (new < op.dim))
    return op.call(aten.unsqueeze.default, value, op.layout.place(new, op.dim))


def _order(node: Node) -> list[int]:
    """Return which dimension of its operand each dimension of a permutation is."""
    if aten_name(node) == "permute.default":
        return list(argument(node, "dims"))
    order = list(range(len(shape_of(node))))
    a, b = unpack(node, "dim0", "dim1")
    order[a], order[b] = b, a
    return order


def _permuted_dims(node: Node, dim: int) -> Dims | None:
    return {first_operand(node): _order(node)[dim]}


def _permuted_call(op: _OnRows) -> Node:
    order = _order(op.node)
    own = order[op.dim]
    value = op.operand(first_operand(op.node), own)
    places = {op.layout.place(k, op.dim): op.layout.place(old, own) for k, old in enumerate(order)}
    new = [places[k] for k in sorted(places)]
    return value if new == sorted(new) else op.call(aten.permute.default, value, new)


def _filled_dims(node: Node, dim: int) -> Dims | None:
    return {}


def _filled_call(op: _OnRows) -> Node:
    return op.again({"size": op.shape(list(argument(op.node, "size")))})


# products


def _linear_dims(node: Node, dim: int) -> Dims | None:
    x = first_operand(node)
    return {x: dim} if dim < len(shape_of(x)) - 1 else None


def _linear_call(op: _OnRows) -> Node:
    return op.again({"input": op.operand(first_operand(op.node), op.dim)})


def is_stacked_product(node: Node) -> bool:
    """Return whether a node is ``x [1, N, K] @ weights [S, K, O]``: each weight multiplies the same rows."""
    if aten_name(node) != "matmul.default":
        return False
    x, weight = unpack(node, "self", "other")
    if not len(shape_of(x)) == len(shape_of(weight)) == 3 or not is_of_model(weight):
        return False
    return same_size(shape_of(x)[0], 1) and all(isinstance(size, int) for size in shape_of(weight))


def _matmul_dims(node: Node, dim: int) -> Dims | None:
    x, weight = unpack(node, "self", "other")
    if is_stacked_product(node):
        return {x: 1} if dim == 1 else None
    one_weight = len(shape_of(weight)) == 2 and len(shape_of(x)) > 2
    return {x: dim} if one_weight and dim < len(shape_of(node)) - 1 else None


def _matmul_call(op: _OnRows) -> Node:
    x, weight = unpack(op.node, "self", "other")
    if not is_stacked_product(op.node):
        return op.again({"self": op.operand(x, op.dim)})
    stacks, columns, outputs = map(int, shape_of(weight))
    rows = op.call(aten.select.int, op.operand(x, 1), 1, 0)
    together = op.call(aten.permute.default, weight, [1, 0, 2])
    together = op.call(aten.reshape.default, together, [columns, stacks * outputs])
    product = op.call(aten.mm.default, rows, together)
    return op.call(aten.reshape.default, product, [op.values.sizes.of(rows, 0), stacks, outputs])


def _layer_norm_dims(node: Node, dim: int) -> Dims | None:
    x, normalized = unpack(node, "input", "normalized_shape")
    return {x: dim} if dim < len(shape_of(x)) - len(normalized) else None


# gathers and scatters


def gathered_index(node: Node) -> tuple[int, Node] | None:
    """Return (dimension, vector of indices) of a gather of slices, or None for another op."""
    name = aten_name(node)
    if name == "index_select.default":
        dim, index = unpack(node, "dim", "index")
    elif name == "index.Tensor":
        used = [(k, index) for k, index in enumerate(argument(node, "indices")) if index is not None]
        if len(used) != 1:
            return None
        dim, index = used[0]
    else:
        return None
    is_vector = len(shape_of(index)) == 1 and value_of(index).dtype in (torch.int64, torch.int32)
    return (dim, index) if is_vector else None


def _gather_dims(node: Node, dim: int) -> Dims | None:
    gather = gathered_index(node)
    return None if gather is None else {first_operand(node): dim}


def _gather_call(op: _OnRows) -> Node:
    table, gather = first_operand(op.node), gathered_index(op.node)
    assert gather is not None
    dim, index = gather
    if dim == op.dim:
        index = op.layout.index(index, table, dim, op.values)
    place = op.layout.place(dim, op.dim)
    return op.call(aten.index_select.default, op.operand(table, op.dim), place, index)


def _source(node: Node) -> Any:
    return argument(node, "source" if aten_name(node) == "index_add.default" else "src")


def scatter_index(node: Node) -> Node | None:
    """Return the vector of destinations of a scatter; None where they are none, or for another op."""
    if aten_name(node) not in _SCATTERS or not holds_tensor(_source(node)):
        return None
    index, dim = unpack(node, "index", "dim")
    if aten_name(node) == "index_add.default":
        return index if len(shape_of(index)) == 1 else None
    same = all(map(same_size, shape_of(index), shape_of(_source(node))))
    return index_vector(index, dim) if same else None


def _scatter_dims(node: Node, dim: int) -> Dims | None:
    return {first_operand(node): dim, _source(node): dim} if is_scatter(node) else None


def _scatter_call(op: _OnRows) -> Node:
    node, dim = op.node, argument(op.node, "dim")
    base, source = op.operand(first_operand(node), op.dim), op.operand(_source(node), op.dim)
    index = scatter_index(node)
    assert index is not None
    if dim == op.dim:
        index = op.layout.index(index, first_operand(node), dim, op.values)
    place = op.layout.place(dim, op.dim)
    if aten_name(node) == "index_add.default":
        return op.again({"self": base, "dim": place, "index": index, "source": source})
    sizes = [op.values.sizes.of(source, k) for k in range(len(shape_of(source)))]
    alone = [-1 if k == place else 1 for k in range(len(sizes))]
    expanded = op.call(aten.expand.default, op.call(aten.reshape.default, index, alone), sizes)
    return op.again({"self": base, "dim": place, "index": expanded, "src": source})


_ELEMENTWISE = _Rule(_elementwise_dims, _elementwise_call)
_EXPAND = _Rule(_elementwise_dims, _expanded_call)
_NAMED: Mapping[str, _Rule] = {
    **dict.fromkeys(_REMOVING, _Rule(_removing_dims, _along_call)),
    **dict.fromkeys(_KEEPING, _Rule(_keeping_dims, _along_call)),
    **dict.fromkeys(_SCATTERS, _Rule(_scatter_dims, _scatter_call)),
    "index_select.default": _Rule(_gather_dims, _gather_call),
    "index.Tensor": _Rule(_gather_dims, _gather_call),
    "_to_copy.default": _ELEMENTWISE,
    "expand.default": _EXPAND,
    "full.default": _Rule(_filled_dims, _filled_call),
    "unsqueeze.default": _Rule(_unsqueezed_dims, _unsqueezed_call),
    "permute.default": _Rule(_permuted_dims, _permuted_call),
    "transpose.int": _Rule(_permuted_dims, _permuted_call),
    "linear.default": _Rule(_linear_dims, _linear_call),
    "layer_norm.default": _Rule(_layer_norm_dims, _linear_call),
    "matmul.default": _Rule(_matmul_dims, _matmul_call),
}


def _rule(node: Node) -> _Rule | None:
    if not holds_tensor(node) or is_random(node):
        return None
    name = aten_name(node)
    return _NAMED.get(name) or (_ELEMENTWISE if name and is_pointwise(node) else None)
