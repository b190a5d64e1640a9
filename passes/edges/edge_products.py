"""Place of products with edge features: inside the bodies that read them, or stored for every edge.

``lin(edge_attr)`` is as wide as the messages, and much wider than ``edge_attr``. A body that reads it
can compute it, edge by edge, from the few columns of ``edge_attr``. If several bodies read it, each
computes it again, and storing it may cost less.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import argument, aten_name, first_operand, holds_tensor, operand, shape_of, unpack
from gnnc.ir.source import is_weight
from gnnc.passes.edges.rowwise import as_gather, as_scatter, is_narrow, row_inputs
from gnnc.passes.rewrite.assumed_sizes import FLOAT_BYTES, FLOPS_A_BYTE
from gnnc.passes.rewrite.node_builder import NodeBuilder, is_of_model

aten = torch.ops.aten

_PRODUCTS = ("linear.default", "mm.default", "matmul.default", "addmm.default", "bmm.default")
_STORED_PASSES = 3
"""Memory passes of a stored value: written by the product, read and written by the sort into CSR order."""


@dataclass(frozen=True)
class Verdict:
    """Decision whether bodies compute an edge value, with the reason."""

    inside: bool
    reason: str


READ_OTHERWISE = Verdict(False, "stored for every edge: it is read other than by messages")


class EdgeProducts:
    """Decisions which values of edges alone are computed in the bodies that read them.

    They are based on the graph at the time of construction, before anything is raised.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._has_weight: dict[Node, bool] = {}
        self._has_gather: dict[Node, bool] = {}
        self._readers: dict[Node, frozenset[Node] | None] = {}
        self._verdicts: dict[Node, Verdict] = {}
        for node in gm.graph.nodes:
            self._has_weight[node] = is_weight(node) or any(
                self._has_weight[arg] for arg in node.all_input_nodes
            )
            self._has_gather[node] = as_gather(node) is not None or any(
                self._has_gather[arg] for arg in row_inputs(node) or ()
            )
        for node in reversed(gm.graph.nodes):
            self._readers[node] = self._find_readers(node)

    def verdict(self, node: Node) -> Verdict | None:
        """Return the decision about an edge value, or None for a value computed without weights."""
        if node not in self._verdicts and self._may_be_inside(node):
            self._verdicts[node] = self._judge(node)
        return self._verdicts.get(node)

    def products(self, node: Node) -> list[Node]:
        """Return the matrix products among the steps that compute an edge value."""
        return [step for step in self._cone(node)[0] if aten_name(step) in _PRODUCTS]

    def has_wide_steps(self, node: Node) -> bool:
        """Return whether few columns are computed from wide rows, which an ``edge_map`` need not store."""
        if not self._may_be_inside(node):
            return False
        return any(not is_narrow(step) for step in self._cone(node)[0] if step is not node)

    def _may_be_inside(self, node: Node) -> bool:
        fixed = holds_tensor(node) and all(isinstance(size, int) for size in shape_of(node)[1:])
        return fixed and self._has_weight.get(node, False) and bool(row_inputs(node))

    def _find_readers(self, node: Node) -> frozenset[Node] | None:
        """Return the scatters and the narrow values that are computed from ``node``, row by row.

        None where it has another reader: then it is stored whatever a body does.
        """
        readers: set[Node] = set()
        for user in node.users:
            scatter = as_scatter(user)
            if scatter is not None and not isinstance(scatter, str) and scatter.source is node:
                readers.add(scatter.index)  # the reductions of one message are one body
            elif node not in (row_inputs(user) or ()):
                return None
            elif is_narrow(user):
                readers.add(user)
            elif (further := self._readers[user]) is not None:
                readers |= further
            elif self._has_gather[user]:
                readers.add(user)  # a body computes what is stored
            else:
                return None
        return frozenset(readers)

    def _cone(self, node: Node) -> tuple[list[Node], list[Node]]:
        """Return the row-wise steps that compute ``node``, and the values without weights that they read."""
        steps: list[Node] = []
        sources: list[Node] = []
        pending = [node]
        while pending:
            current = pending.pop()
            if current in steps or current in sources:
                continue
            inside = self._may_be_inside(current)
            (steps if inside else sources).append(current)
            pending += row_inputs(current) or () if inside else ()
        return steps, sources

    def _judge(self, node: Node) -> Verdict:
        readers = frozenset([node]) if is_narrow(node) else self._readers[node]
        if readers is None:
            return READ_OTHERWISE
        steps, sources = self._cone(node)
        flops = sum(map(flops_of, steps))
        width, read = width_of(node), sum(map(width_of, sources))
        stored = FLOAT_BYTES * (width * (_STORED_PASSES + len(readers)) + read)
        inside = len(readers) * FLOAT_BYTES * read + (len(readers) - 1) * flops / FLOPS_A_BYTE
        if inside <= stored:
            return Verdict(True, "computed inside the body that reads it, stored for no edge")
        reason = (
            f"{len(readers)} bodies that compute it cost {inside:.0f} bytes an edge, to store it {stored:.0f}"
        )
        return Verdict(False, f"stored for every edge: {reason}")


def width_of(node: Node) -> int:
    """Return the columns of a row, as far as their number is fixed."""
    return math.prod(size for size in shape_of(node)[1:] if isinstance(size, int))


def flops_of(node: Node) -> int:
    """Return the multiplications and additions of a row."""
    if aten_name(node) not in _PRODUCTS:
        return width_of(node)
    x = operand(node, "mat1") if aten_name(node) == "addmm.default" else first_operand(node)
    return 2 * int(shape_of(x)[-1]) * width_of(node)


@dataclass(frozen=True)
class Folded:
    """Product ``linear(x, weight, bias)`` with few columns that replaces a sum over a wide product.

    Attributes:
        x: the rows.
        weight: ``[H, K]``.
        bias: ``[H]`` or None.
        product: the wide product, which is no longer computed.
    """

    x: Node
    weight: Node
    bias: Node | None
    product: Node


def fold(node: Node, builder: NodeBuilder) -> Folded | None:
    """Read ``(lin(x).view(-1, H, C) * a).sum(-1)`` as a product of ``x`` with H columns, or None."""
    if (
        aten_name(node) != "sum.dim_IntList"
        or list(argument(node, "dim")) != [2]
        or argument(node, "keepdim")
    ):
        return None
    scaled = first_operand(node)
    if aten_name(scaled) != "mul.Tensor":
        return None
    constants = [arg for arg in scaled.all_input_nodes if is_of_model(arg)]
    wide = [arg for arg in scaled.all_input_nodes if not is_of_model(arg)]
    if len(constants) != 1 or len(wide) != 1 or aten_name(wide[0]) != "reshape.default":
        return None
    product = first_operand(wide[0])
    heads, columns = shape_of(scaled)[1:]
    fits = tuple(shape_of(constants[0])) == (1, heads, columns) and len(shape_of(product)) == 2
    alone = all(len(step.users) == 1 for step in (product, wide[0], scaled))
    if (
        aten_name(product) != "linear.default"
        or not fits
        or not alone
        or not is_of_model(operand(product, "weight"))
    ):
        return None

    def summed(tensor: Any, rest: list[int]) -> Node:
        by_head = builder.call(
            aten.reshape.default, tensor, [heads, columns, *rest], layer=product.meta["layer"]
        )
        factor = builder.call(aten.reshape.default, constants[0], [heads, columns, *([1] * len(rest))])
        scaled = builder.call(aten.mul.Tensor, by_head, factor, layer=product.meta["layer"])
        return builder.call(aten.sum.dim_IntList, scaled, [1], layer=product.meta["layer"])

    x, weight, bias = unpack(product, "input", "weight", "bias")
    narrow = summed(weight, [int(shape_of(weight)[1])])
    return Folded(x, narrow, None if bias is None else summed(bias, []), product)
