"""Values of a body that a warp computes once an edge: which they are, by their shapes and their readers."""

from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from gnnc.ir.body import EDGES, body_values, stand_in, tensors_of
from gnnc.ir.nodes import argument, first_operand
from gnnc.runtime.row_program.build import Refusal

Shapes = dict[Any, tuple[int, ...]]

_SHORT = 4
"""Terms of a sum that a thread adds up by itself; then its order is that of a stage, too."""
_LONG = frozenset(
    "exp log tanh sigmoid silu gelu elu softplus sqrt rsqrt reciprocal pow sin cos div bmm matmul sum mean "
    "silu_backward gelu_backward elu_backward softplus_backward".split()
)
"""Ops that take longer than to store their result and to read it."""
_PRODUCTS = ("aten.linear.default", "aten.mm.default", "aten.addmm.default", "gnnc.gemm.default")
_MATRIX_PRODUCT = "aten.matmul.default"
RESHAPES = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten")


def shapes_of(module: Any, names: tuple[str, ...], operands: dict[str, torch.Tensor]) -> Shapes:
    """Run the body on tensors without memory; return the shape of every node."""
    try:
        found = tensors_of(module, [stand_in(name, operands[name], _dtype(operands[name])) for name in names])
    except (RuntimeError, TypeError, ValueError) as error:
        raise Refusal(f"the body's shapes are unknown: {str(error).splitlines()[0]}") from None
    return {node: tuple(int(size) for size in tensor.shape) for node, tensor in found.items()}


def _dtype(operand: torch.Tensor) -> torch.dtype:
    """Return the type that a body has for an operand: it computes in FP32, and selects by masks."""
    return torch.bool if operand.dtype == torch.bool else torch.float32


def edge_shape(node: Node, shapes: Shapes) -> tuple[int, ...]:
    """Return the sizes of an edge's value."""
    shape = shapes[node]
    if not shape or shape[0] != EDGES:
        raise Refusal("the body's value has no edge dimension in front")
    return shape[1:]


def unshaped(value: Node, shapes: Shapes) -> Node:
    """Return the value whose elements another has in the same order, in another shape."""
    while _name(value) in RESHAPES:
        edge_shape(value, shapes)
        value = first_operand(value)
    return value


def low_type(x: Node, operands: dict[str, torch.dtype]) -> torch.dtype | None:
    """Return the type of 16 bits that an operand of a product has; None for FP32."""
    while _name(x) in RESHAPES:
        x = first_operand(x)
    dtype = operands[str(x.target)] if x.op == "placeholder" else None
    dtype = argument(x, "dtype") if _name(x) == "_to_copy" else dtype
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


def reduced_dims(node: Node, shapes: Shapes) -> list[int]:
    """Return the dimensions that a sum or mean reduces; refuse the dimension of edges."""
    dims = argument(node, "dim", None)
    if dims is None or not isinstance(dims, list | tuple) or not dims:
        raise Refusal("the body reduces over everything")
    reduced = sorted(int(dim) % len(shapes[first_operand(node)]) for dim in dims)
    if 0 in reduced:
        raise Refusal("the body reduces over edges")
    return reduced


def is_sum(node: Node, shapes: Shapes) -> bool:
    """Return whether a value is a sum or mean over columns of edges that a warp computes once an edge."""
    return _terms(node, shapes) > _SHORT


def is_product(node: Node, shapes: Shapes) -> bool:
    """Return whether a value is a product of edges with a weight."""
    if str(node.target) == _MATRIX_PRODUCT:
        right = argument(node, "other")
        return len(shapes[right]) == 2 and not _is_of_edges(right, shapes)
    return str(node.target) in _PRODUCTS


def _terms(node: Node, shapes: Shapes) -> int:
    """Return the number of values that are added up for an element of a sum over columns; 1 of other ops."""
    if _name(node) not in ("sum", "mean") or not _is_of_edges(first_operand(node), shapes):
        return 1
    source = shapes[first_operand(node)]
    return prod(source[dim] for dim in reduced_dims(node, shapes))


def has_stages(graph: Graph, shapes: Shapes) -> bool:
    """Return whether a body has products with weights or sums over columns."""
    nodes = [node for node in graph.nodes if _is_of_edges(node, shapes)]
    return any(is_product(node, shapes) or is_sum(node, shapes) for node in nodes)


def long_values(graph: Graph, shapes: Shapes) -> frozenset[Node]:
    """Return the values to store: those that take long, and that would be computed more than once an edge.

    A body without products and sums has none: a thread computes its columns by itself.
    """
    nodes = [node for node in graph.nodes if _is_of_edges(node, shapes)]
    if not has_stages(graph, shapes):
        return frozenset()
    found: set[Node] = set()
    times = dict.fromkeys(nodes, 0)
    for value in filter(times.__contains__, body_values(graph)):
        times[value] += _elements(value, shapes)
    for node in reversed(nodes):
        own = _elements(node, shapes)
        once = is_sum(node, shapes) or is_product(node, shapes)
        if _name(node) in _LONG and times[node] > own and not once:
            found.add(node)
            once = True
        for operand in node.all_input_nodes:
            if operand in times:
                times[operand] += _reads(
                    node, operand, min(times[node], own) if once else times[node], shapes
                )
    return frozenset(found)


def _reads(node: Node, operand: Node, times: int, shapes: Shapes) -> int:
    """Return how often an element of an operand is computed while one of the op is, so many times."""
    if is_product(node, shapes):
        return _elements(operand, shapes)
    if _name(node) == "cat":
        return times * _elements(operand, shapes) // max(_elements(node, shapes), 1)
    if _name(node) in ("bmm", "matmul"):
        return times * shapes[first_operand(node)][-1]
    return times * _terms(node, shapes)


def _is_of_edges(node: Node, shapes: Shapes) -> bool:
    return shapes.get(node, ())[:1] == (EDGES,)


def _elements(node: Node, shapes: Shapes) -> int:
    """Return the elements of an edge's value."""
    return prod(shapes[node][1:])


def _name(node: Node) -> str:
    """Return the name of an ATen op; nothing for other nodes."""
    target = str(node.target)
    return target.removeprefix("aten.").partition(".")[0] if target.startswith("aten.") else ""
