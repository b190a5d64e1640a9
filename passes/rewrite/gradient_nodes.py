"""Rewrites of gradients that autograd computes with more memory than they need.

The gradient of a ReLU reads a mask of one bit in place of the matrix; that of an ELU reads the result, which
other gradients read as well; a scatter through a permutation becomes a gather; the sum of a whole matrix is
taken from the sums of its columns.
"""

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import (
    argument,
    first_operand,
    is_float,
    is_result,
    outputs_of,
    result_index,
    same_shape,
    shape_of,
    unpack,
)
from gnnc.ir.source import source_of
from gnnc.passes.rewrite.node_builder import NodeBuilder

_aten = torch.ops.aten
_gnnc = torch.ops.gnnc


def simplify_gradients(gm: fx.GraphModule, structure: fx.GraphModule | None) -> None:
    """Rewrite the gradients of a joint graph, in place.

    Args:
        gm: the joint graph, simplified.
        structure: the graph that computes the permutations of edges which it reads.
    """
    builder = NodeBuilder(gm)
    orders = _Permutations.of(builder, gm, structure)
    for node in list(gm.graph.nodes):
        new = _rewritten(node, builder, orders)
        if new is None:
            continue
        new.meta["layer"] = node.meta.get("layer", "")
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


def _rewritten(node: Node, builder: NodeBuilder, orders: "_Permutations") -> Node | None:
    name = str(node.target)
    if name == "aten.threshold_backward.default":
        return _relu_backward(node, builder)
    if name == "aten.elu_backward.default":
        return _elu_backward(node, builder)
    if name == "aten.sum.dim_IntList":
        return _sum_of_all(node, builder)
    return _permuted(node, builder, orders) if name == "aten.index_add.default" else None


def _sum_of_all(node: Node, builder: NodeBuilder) -> Node | None:
    """Return the sum of a whole matrix, such as the gradient of a number, by way of the sums of its columns.

    The sum of rows is a step of the kernel that computes them, which then need not be stored.
    """
    x, dims, dtype = unpack(node, "self", "dim", "dtype")
    shape = shape_of(x)
    is_matrix = len(shape) == 2 and isinstance(shape[1], int) and not isinstance(shape[0], int)
    if not is_matrix or sorted(dims or ()) != [0, 1] or dtype is not None or not is_float(x):
        return None
    layer = str(node.meta.get("layer", ""))
    columns = builder.call(_aten.sum.dim_IntList, x, [0], True, layer=layer)
    total = builder.call(_aten.sum.dim_IntList, columns, [1], True, layer=layer)
    keepdim = argument(node, "keepdim")
    return total if keepdim else builder.call(_aten.reshape.default, total, [], layer=layer)


def _relu_backward(node: Node, builder: NodeBuilder) -> Node | None:
    """Return the gradient of a ReLU from one bit for each value, also through the dropout behind it."""
    grad, result, threshold = unpack(node, "grad_output", "self", "threshold")
    shape = shape_of(result)
    is_plain = is_float(result) and same_shape(shape, shape_of(grad)) and len(shape) > 1
    if threshold != 0 or not is_plain or not isinstance(shape[-1], int) or not shape[-1]:
        return None
    dropped = _dropped(grad, result)
    if dropped is None:
        return _masked(grad, result, builder)
    grad, scale = unpack(grad, "grad_output", "scale")
    masked = _masked(grad, dropped, builder)
    return builder.call(_aten.mul.Tensor, masked, scale, layer=str(masked.meta["layer"]))


def _masked(grad: Node, value: Node, builder: NodeBuilder) -> Node:
    mask = builder.call(_gnnc.relu_mask.default, value, layer=value.meta.get("layer", ""))
    return builder.call(_gnnc.relu_backward.default, grad, mask, layer=str(grad.meta.get("layer", "")))


def _dropped(grad: Node, result: Node) -> Node | None:
    """Return what dropout makes of a ReLU's result, where ``grad`` is the gradient of that alone."""
    if str(grad.target) != "aten.native_dropout_backward.default" or len(grad.users) > 1:
        return None
    mask = argument(grad, "mask")
    dropout = first_operand(mask) if is_result(mask) else mask
    if str(dropout.target) != "aten.native_dropout.default" or first_operand(dropout) is not result:
        return None
    return next((user for user in dropout.users if result_index(user) == 0), None)


def _elu_backward(node: Node, builder: NodeBuilder) -> Node | None:
    """Return the gradient of an ELU from its result, which other gradients read as well."""
    grad, alpha, scale, input_scale, from_result, value = unpack(
        node, "grad_output", "alpha", "scale", "input_scale", "is_result", "self_or_result"
    )
    if from_result or alpha < 0 or scale <= 0 or input_scale <= 0:
        return None
    factors = (alpha, scale, input_scale)
    made = [
        user
        for user in value.users
        if str(user.target) == "aten.elu.default"
        and unpack(user, "alpha", "scale", "input_scale") == factors
        and user < node
    ]
    if not made:
        return None
    return builder.call(_aten.elu_backward.default, grad, *factors, True, made[0])


def _permuted(node: Node, builder: NodeBuilder, orders: "_Permutations") -> Node | None:
    """Return ``zeros.index_add(0, perm, x)`` of a permutation as the rows of ``x`` in the other order."""
    zeros, dim, index, source, alpha = unpack(node, "self", "dim", "index", "source", "alpha")
    is_zero = str(zeros.target) == "aten.full.default" and argument(zeros, "fill_value") == 0
    if dim != 0 or alpha != 1 or not is_zero:
        return None
    if not same_shape(shape_of(zeros), shape_of(source)):
        return None
    inverse = orders.inverse(index)
    return None if inverse is None else builder.call(_aten.index_select.default, source, 0, inverse)


@dataclass(slots=True)
class _Permutations:
    """Permutations of edges that a structure graph makes, and their inverses.

    Attributes:
        producers: the structure node of each placeholder of the joint graph that is a permutation.
    """

    builder: NodeBuilder
    producers: dict[Node, Node]

    @classmethod
    def of(
        cls, builder: NodeBuilder, gm: fx.GraphModule, structure: fx.GraphModule | None
    ) -> "_Permutations":
        """Return the permutations that a joint graph reads."""
        results = {node.name: node for node in outputs_of(structure.graph)} if structure is not None else {}
        read = [(node, source_of(node)) for node in placeholders(gm)]
        taken = {
            node: results[source.name]
            for node, source in read
            if source is not None and source.kind == "structure"
        }
        return cls(builder, {node: made for node, made in taken.items() if _is_permutation(made)})

    def inverse(self, node: Node) -> Node | None:
        """Return the inverse of what a node holds; None where that is not known to be a permutation."""
        made = self.producers.get(node)
        if made is None:
            return None
        for other, producer in self.producers.items():
            if _inverted(producer) is made or _inverted(made) is producer:
                return other
        return self.builder.call(_aten.argsort.default, node)


def _is_permutation(node: Node) -> bool:
    """Return whether a structure node is the order of the edges of a CSR, or its inverse."""
    order = _inverted(node)
    if order is not None:
        return _is_permutation(order)
    if not is_result(node) or result_index(node) != 2:
        return False
    return str(first_operand(node).target) in ("gnnc.csr.default", "gnnc.csr_transpose.default")


def _inverted(node: Node) -> Node | None:
    return first_operand(node) if str(node.target) == "aten.argsort.default" else None
