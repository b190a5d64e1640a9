"""Simplification of traced gradients: steps without effect go, and steps on rows become steps on one value.

Autograd writes ``2 * x ** 1.0``, expands a mean before it divides it, and negates rows before it adds them.
Every rule keeps the bits of the result, but for overflow and subnormal numbers: the factors that move are
powers of two.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from gnnc.ir.nodes import argument, aten_name, call_key, is_pointwise, op_name

FORWARD = "forward"
"""Key of ``node.meta``: whether a value is computed as the body itself does, step by step.

Comparisons with an extremum read such values, bit by bit; other products may be contracted into other sums.
"""
_ALIASES = ("alias.default", "detach.default", "lift_fresh_copy.default")
_SAME_SHAPE = ("expand.default", "view.default", "_unsafe_view.default", "reshape.default")
_WIDE = (torch.float32, torch.float64)

aten = torch.ops.aten


def simpler(graph: Graph) -> Graph:
    """Return the graph of a traced gradient with fewer and narrower steps; equal steps are merged."""
    writer = _Writer()
    for node in graph.nodes:
        writer.copy(node)
    writer.graph.eliminate_dead_code()
    return writer.graph


class _Writer:
    """Writer of a graph whose calls are simplified as they are added."""

    def __init__(self) -> None:
        self.graph = Graph()
        self._copies: dict[Node, Node] = {}
        self._known: dict[Any, Node] = {}

    def copy(self, node: Node) -> None:
        """Add a node of another graph."""
        meta = {**node.meta, "val": _without_memory(node.meta.get("val"))}
        if node.op != "call_function":
            self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
            self._copies[node].meta = meta
            return
        args, kwargs = map_arg((node.args, node.kwargs), self._copies.__getitem__)
        rules = _NO_EFFECT if node.meta.get(FORWARD) else _RULES
        self._copies[node] = self.add(node.target, args, kwargs, rules, meta)

    def call(self, target: Any, *args: Any) -> Node:
        """Return the value of a call, simplified."""
        return self.add(target, args, {}, _RULES)

    def add(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        rules: "Iterable[_Rule]",
        meta: dict[str, Any] | None = None,
    ) -> Node:
        """Return the value of a call, simplified by rules; ``meta`` is of a node that computes the same."""
        key = call_key(target, args, kwargs)
        if key in self._known:
            return self._known[key]
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {"val": _run(node)} if meta is None else meta
        simple = next(filter(None, (rule(self, node) for rule in rules)), node)
        if simple is not node:
            self.graph.erase_node(node)
        self._known[key] = simple
        return simple


_Rule = Callable[[_Writer, Node], Node | None]


def _without_memory(value: Any) -> Any:
    """Return tensors of the same shapes on the meta device."""
    if isinstance(value, list | tuple):
        return [_without_memory(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _run(node: Node) -> Any:
    """Return what a node computes of tensors without memory."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _alias(writer: _Writer, node: Node) -> Node | None:
    return _operand(node) if aten_name(node) in _ALIASES else None


def _same_shape(writer: _Writer, node: Node) -> Node | None:
    is_same = aten_name(node) in _SAME_SHAPE and _shape(node) == _shape(_operand(node))
    return _operand(node) if is_same else None


def _transposed_twice(writer: _Writer, node: Node) -> Node | None:
    if aten_name(node) not in ("t.default", "transpose.int"):
        return None
    inner = _operand(node)
    is_inverse = inner.target is node.target and inner.args[1:] == node.args[1:]
    return _operand(inner) if is_inverse else None


def _first_power(writer: _Writer, node: Node) -> Node | None:
    if aten_name(node) != "pow.Tensor_Scalar" or node.args[1] != 1:
        return None
    return _operand(node) if _operand(node).meta["val"].dtype == node.meta["val"].dtype else None


def _before_expand(writer: _Writer, node: Node) -> Node | None:
    """Compute elements from operands before they are expanded, and expand the result where need be."""
    if not is_pointwise(node) or not isinstance(node.meta["val"], Tensor):
        return None
    sources = {arg: _operand(arg) for arg in node.all_input_nodes if aten_name(arg) == "expand.default"}
    shapes = [_shape(sources.get(arg, arg)) for arg in node.all_input_nodes]
    if not sources or not all(shapes):  # a scalar would take part in type promotion differently
        return None
    shape, narrow = _shape(node), torch.broadcast_shapes(*shapes)
    if len(narrow) != len(shape) or narrow[0] != shape[0]:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda arg: sources.get(arg, arg))
    value = writer.add(node.target, args, kwargs, _RULES)
    return value if narrow == shape else writer.call(aten.expand.default, value, list(shape))


def _factors(writer: _Writer, node: Node) -> Node | None:
    """Multiply by one number instead of two, one of which is a power of two."""
    outer = _factor(node)
    if outer is None:
        return None
    if outer == (1, 1):
        return _operand(node)
    inner = _factor(_operand(node))
    if inner is None or not (_is_exact(inner) or _is_exact(outer)):
        return None
    return _scaled(writer, _operand(_operand(node)), _product(inner, outer))


def _factor_of_product(writer: _Writer, node: Node) -> Node | None:
    """Multiply the narrower operand of a product by a number, or the result where none is narrower."""
    if aten_name(node) != "mul.Tensor" or not isinstance(node.args[1], Node) or not _is_wide(node):
        return None
    for value, other in (node.args, node.args[::-1]):
        factor = _factor(value)  # type: ignore[arg-type]
        if factor is None or not _is_exact(factor) or not isinstance(other, Node):
            continue
        source = _operand(value)  # type: ignore[arg-type]
        if _size(source) < _size(node):
            continue
        if _size(other) < _size(node):
            return writer.call(aten.mul.Tensor, _scaled(writer, other, factor), source)
        return _scaled(writer, writer.call(aten.mul.Tensor, source, other), factor)
    return None


def _factor_of_sum(writer: _Writer, node: Node) -> Node | None:
    """Multiply a sum over columns instead of the columns."""
    if aten_name(node) not in ("sum.dim_IntList", "mean.dim") or node.kwargs:
        return None
    factor, dims = _factor(_operand(node)), argument(node, "dim")
    rank = len(_shape(_operand(node)))
    if factor is None or not _is_exact(factor) or not dims or any(dim % rank == 0 for dim in dims):
        return None
    return _scaled(writer, writer.call(node.target, _operand(_operand(node)), *node.args[1:]), factor)


def _negated_term(writer: _Writer, node: Node) -> Node | None:
    """Subtract a value instead of adding its negative, and the other way around."""
    other = {"add.Tensor": aten.sub.Tensor, "sub.Tensor": aten.add.Tensor}.get(aten_name(node))
    if (
        other is None
        or node.kwargs
        or not all(isinstance(arg, Node) for arg in node.args)
        or not _is_wide(node)
    ):
        return None
    left, right = node.args
    if _factor(right) == (-1, 1):  # type: ignore[arg-type]
        return writer.call(other, left, _operand(right))  # type: ignore[arg-type]
    if other is aten.sub.Tensor and _factor(left) == (-1, 1):  # type: ignore[arg-type]
        return writer.call(other, right, _operand(left))  # type: ignore[arg-type]
    return None


_NO_EFFECT: tuple[_Rule, ...] = (_alias, _same_shape, _transposed_twice, _first_power)
_RULES: tuple[_Rule, ...] = (
    *_NO_EFFECT,
    _before_expand,
    _factors,
    _factor_of_product,
    _factor_of_sum,
    _negated_term,
)


def _factor(node: Node) -> tuple[float, float] | None:
    """Return factor and divisor, one of which is 1, of a value that a node multiplies by a number."""
    if node.op != "call_function" or not _is_wide(node):
        return None
    if op_name(node) == "neg":
        return -1, 1
    if aten_name(node) not in ("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar") or node.kwargs:
        return None
    number = node.args[1]
    if not isinstance(number, int | float) or not math.isfinite(number) or number == 0:
        return None
    return (number, 1) if op_name(node) == "mul" else (1, number)


def _product(inner: tuple[float, float], outer: tuple[float, float]) -> tuple[float, float]:
    """Return factor and divisor of a value that two numbers scale, one of which is a power of two."""
    first, second = (outer, inner) if _is_exact(inner) else (inner, outer)
    exact = second[0] / second[1]
    return (first[0] * exact, 1) if first[1] == 1 else (1, first[1] / exact)


def _scaled(writer: _Writer, value: Node, factor: tuple[float, float]) -> Node:
    multiplier, divisor = factor
    if factor in ((1, 1), (-1, 1), (1, -1)):
        return value if multiplier == divisor else writer.call(aten.neg.default, value)
    op = aten.mul.Tensor if divisor == 1 else aten.div.Tensor
    return writer.call(op, value, float(multiplier if divisor == 1 else divisor))


def _is_exact(factor: tuple[float, float]) -> bool:
    """Return whether a product with a factor has the bits of the other operand, but for sign and exponent."""
    return all(abs(math.frexp(number)[0]) == 0.5 for number in factor)


def _is_wide(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dtype in _WIDE


def _operand(node: Node) -> Node:
    return node.args[0]  # type: ignore[return-value]


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _size(node: Node) -> int:
    return math.prod(_shape(node))
