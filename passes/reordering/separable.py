"""Factorization of edge weights into a value of the destination and a value of the source.

``w_ij = a_i b_j w_e``: GCN's normalization, means, and anything else that a model multiplies into its
edges from its nodes. ``a`` and ``b`` leave the sparse kernel and ``w_e`` stays; where ``w_e`` is provably
1, the kernel sums plain rows.
"""

import operator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Node

from gnnc.ir.body import body_inputs, body_operands, parse_body
from gnnc.ir.nodes import (
    argument,
    first_operand,
    holds_tensor,
    is_result,
    outputs_of,
    result_index,
    same_size,
    shape_of,
    unpack,
)
from gnnc.ir.op import op_of
from gnnc.passes.rewrite.node_builder import NodeBuilder
from gnnc.torch_private import OpOverload

Order = Literal["caller", "csr"]

_aten = torch.ops.aten
_RESHAPES = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "expand", "flatten")
_COPIES = ("clone", "alias", "contiguous", "lift_fresh_copy")
_POWERS = ("pow.Tensor_Scalar", "sqrt.default", "rsqrt.default", "reciprocal.default")
_FILLS = {"ones": 1.0, "zeros": 0.0, "ones_like": 1.0, "zeros_like": 0.0, "new_ones": 1.0, "new_zeros": 0.0}
_SAME_VALUE = (
    *_RESHAPES, *_COPIES, "index_select", "index", "slice", "select", "repeat", "permute",
    "_to_copy", "gather", "t", "transpose",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Factors:
    """Product of factors over the edges.

    Attributes:
        dst: node vectors ``[num_dst]`` read at the destination.
        src: node vectors ``[num_src]`` read at the source.
        edge: edge vectors, each with the order that its edges are in.
        scale: a constant factor.
    """

    dst: tuple[Node, ...] = ()
    src: tuple[Node, ...] = ()
    edge: tuple[tuple[Node, Order], ...] = ()
    scale: float = 1.0

    def __mul__(self, other: "Factors") -> "Factors":
        return Factors(
            self.dst + other.dst, self.src + other.src, self.edge + other.edge, self.scale * other.scale
        )


class Separation:
    """Factorization of the edge tensors of one CSR of a structure graph.

    Vectors that are not in the graph yet (a reciprocal, say) are inserted on the way.
    """

    def __init__(self, builder: NodeBuilder, rowptr: Node, col: Node) -> None:
        self.builder, self.rowptr, self.col = builder, rowptr, col
        producer = first_operand(rowptr) if is_result(rowptr) else None
        op = None if producer is None else op_of(producer)
        self.csr: Node | None = producer if op is not None and op.name == "csr" else None

    def factors(self, value: Node) -> Factors:
        """Return the factors of a tensor over edges in CSR order; without any, the tensor itself."""
        return self._factors(value, "csr")

    def product(self, factors: Factors) -> Node | None:
        """Return the node for the product of the edge factors, in CSR order, or None for 1."""
        products: dict[Order, Node] = {}
        for node, order in factors.edge:
            product = products.get(order)
            products[order] = node if product is None else self.builder.call(_aten.mul.Tensor, product, node)
        if "caller" in products:
            assert self.csr is not None
            ordered = self.builder.call(_aten.index_select.default, products["caller"], 0, self._perm())
            product = products.get("csr")
            products["csr"] = (
                ordered if product is None else self.builder.call(_aten.mul.Tensor, product, ordered)
            )
        return products.get("csr")

    def vector(self, nodes: tuple[Node, ...]) -> Node | None:
        """Return the node for the product of node vectors, or None for 1."""
        result: Node | None = None
        for node in nodes:
            result = node if result is None else self.builder.call(_aten.mul.Tensor, result, node)
        return result

    def _perm(self) -> Node:
        assert self.csr is not None
        for user in self.csr.users:
            if is_result(user) and result_index(user) == 2:
                return user
        return self.builder.call(operator.getitem, self.csr, 2)

    def _factors(self, node: Node, order: Order) -> Factors:
        constant = constant_of(node)
        if constant is not None:
            return Factors(scale=constant)
        op = op_of(node)
        rule = self._of_primitive if op is not None else self._of_aten
        return rule(node, order) or Factors(edge=((node, order),))

    def _of_primitive(self, node: Node, order: Order) -> Factors | None:
        op = op_of(node)
        if order != "csr" or op is None or op.name not in ("edge_map", "sddmm") or not self._is_of_csr(node):
            return None
        if op.name == "edge_map":
            return self._of_body(node)
        a, b, kind = unpack(node, "a", "b", "op")
        if kind == "copy_src":
            return self._gathered(b, "src")
        if kind == "copy_dst":
            return self._gathered(a, "dst")
        sides = self._gathered(a, "dst"), self._gathered(b, "src")
        return sides[0] * sides[1] if kind == "mul" and sides[0] and sides[1] else None

    def _is_of_csr(self, node: Node) -> bool:
        return unpack(node, "rowptr", "col") == (self.rowptr, self.col)

    def _of_aten(self, node: Node, order: Order) -> Factors | None:
        name = _name(node)
        base = name.split(".")[0]
        if name == "mul.Tensor":
            return self._of_product(node, order)
        if name == "div.Tensor":
            return self._of_quotient(node, order)
        if base == "neg":
            return Factors(scale=-1.0) * self._factors(first_operand(node), order)
        if base in _RESHAPES:
            source = first_operand(node)
            return self._factors(source, order) if _one_a_row(node) and _one_a_row(source) else None
        if base in _COPIES or base == "_to_copy" and _is_float(node) and _is_float(first_operand(node)):
            return self._factors(first_operand(node), order)
        if name in ("index_select.default", "index.Tensor"):
            return self._of_gather(node, order)
        return self._of_power(node, order) if name in _POWERS else None

    def _of_product(self, node: Node, order: Order) -> Factors | None:
        left, right = (self._operand(side, node, order) for side in unpack(node, "self", "other"))
        return left * right if left and right else None

    def _operand(self, value: Any, whole: Node, order: Order) -> Factors | None:
        """Return the factors of an operand of ``whole`` if it has one number, or one for each edge."""
        constant = _number(value)
        if constant is not None:
            return Factors(scale=constant)
        if not _one_a_row(value) or not same_size(shape_of(value)[0], shape_of(whole)[0]):
            return None
        return self._factors(value, order)

    def _of_quotient(self, node: Node, order: Order) -> Factors | None:
        above, below = (self._operand(side, node, order) for side in unpack(node, "self", "other"))
        if above is None or below is None or below.edge or below.scale == 0:
            return None
        dst, src = (tuple(self._reciprocal(v) for v in side) for side in (below.dst, below.src))
        return above * Factors(dst, src, scale=1.0 / below.scale)

    def _reciprocal(self, vector: Node) -> Node:
        return self.builder.call(_aten.reciprocal.default, vector)

    def _of_gather(self, node: Node, order: Order) -> Factors | None:
        source, index = first_operand(node), _row_index(node)
        if index is None:
            return None
        if order == "csr" and self.csr is not None and _is_result(index, self.csr, 2):
            return self._factors(source, "caller")
        side = self._side(_plain(index), order)
        return self._gathered(source, side) if side else None

    def _side(self, index: Node, order: Order) -> str | None:
        """Return which end of this CSR's edges an index holds, ``dst`` or ``src``, or None for neither."""
        if order == "caller" and self.csr is not None:
            # A graph whose edges are all loops names both ends by one node: either is right then.
            src, dst = (_plain(end) for end in unpack(self.csr, "src", "dst"))
            return "dst" if index is dst else "src" if index is src else None
        if index is self.col:
            return "src"
        op = op_of(index)
        same = op is not None and op.name == "edge_dst" and self._is_of_csr(index)
        return "dst" if same else None

    def _gathered(self, vector: Any, side: str) -> Factors | None:
        if not holds_tensor(vector) or not _one_a_row(vector) or not _is_float(vector):
            return None
        if len(shape_of(vector)) > 1:
            vector = self.builder.call(_aten.reshape.default, vector, [-1])
        return Factors(dst=(vector,)) if side == "dst" else Factors(src=(vector,))

    def _of_power(self, node: Node, order: Order) -> Factors | None:
        """Return the power of a gathered vector as the gathered power of the vector, or None."""
        inner = self._factors(first_operand(node), order)
        if inner.edge or inner.scale != 1.0 or len(inner.dst) + len(inner.src) != 1:
            return None
        (vector,) = inner.dst or inner.src
        raised = self.builder.call(node.target, vector, *node.args[1:])
        return Factors(dst=(raised,)) if inner.dst else Factors(src=(raised,))

    def _of_body(self, node: Node) -> Factors | None:
        """Return the factors of a body: its ops are inserted over gathered operands and factorized."""
        if not _one_a_row(node):
            return None
        text = argument(node, "body")
        operands = body_operands(node)
        inner = parse_body(text)
        values: dict[Node, Node] = {}
        placeholders = inner.graph.find_nodes(op="placeholder")
        for placeholder, name in zip(placeholders, body_inputs(text), strict=True):
            operand = operands[name]
            values[placeholder] = self._edge_operand(operand, name[0])
        for step in inner.graph.nodes:
            if step.op == "call_function":
                args = torch.fx.map_arg(step.args, values.__getitem__)
                values[step] = self.builder.call(step.target, *args, **step.kwargs)
        return self._factors(values[outputs_of(inner.graph)], "csr")

    def _edge_operand(self, operand: Node, role: str) -> Node:
        sddmm = torch.ops.gnnc.sddmm.default
        if role == "i":
            return self.builder.call(sddmm, self.rowptr, self.col, operand, None, "copy_dst")
        if role == "j":
            return self.builder.call(sddmm, self.rowptr, self.col, None, operand, "copy_src")
        return operand


def constant_of(node: Any) -> float | None:
    """Return the number that every element of a tensor provably is, or None."""
    if not isinstance(node, Node) or node.op != "call_function" or not holds_tensor(node):
        return None
    name = _name(node)
    base = name.split(".")[0]
    if base in _FILLS:
        return _FILLS[base]
    if base in ("full", "full_like", "new_full"):
        fill = argument(node, "fill_value")
        return float(fill) if isinstance(fill, int | float) else None
    if base in _SAME_VALUE:
        return constant_of(first_operand(node))
    if base == "cat":
        return _common([constant_of(part) for part in argument(node, "tensors")])
    if base == "index_put" and not argument(node, "accumulate"):
        return _common([constant_of(part) for part in unpack(node, "self", "values")])
    if base == "where":
        return _common([constant_of(part) for part in unpack(node, "self", "other")])
    if name == "mul.Tensor":
        left, right = (_number(side) for side in unpack(node, "self", "other"))
        return None if left is None or right is None else left * right
    return None


def _row_index(node: Node) -> Node | None:
    """Return the index of a gather along dimension 0, or None for another gather."""
    if _name(node) == "index_select.default":
        dim, index = unpack(node, "dim", "index")
        return index if dim == 0 else None
    indices = argument(node, "indices")
    return indices[0] if len(indices) == 1 else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else constant_of(value)


def _common(values: list[float | None]) -> float | None:
    return values[0] if values and len(set(values)) == 1 else None


def _name(node: Node) -> str:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return ""
    return target.__name__


def _is_float(node: Any) -> bool:
    return holds_tensor(node) and node.meta["val"].is_floating_point()


def _one_a_row(node: Any) -> bool:
    """Return whether a tensor has one element for each index of its first dimension."""
    if not holds_tensor(node) or not shape_of(node):
        return False
    return all(same_size(size, 1) for size in shape_of(node)[1:])


def _plain(node: Node) -> Node:
    """Return the index vector before casts and reshapes."""
    while _name(node).split(".")[0] in (*_COPIES, "_to_copy", "view", "reshape"):
        before = first_operand(node)
        if len(shape_of(before)) != 1:
            return node
        node = before
    return node


def _is_result(node: Node, producer: Node, position: int) -> bool:
    return is_result(node) and first_operand(node) is producer and result_index(node) == position
