"""CUDA C++ of a body that gives logits of attention: a sum over the columns of each head.

The terms of the sum are elementwise in the rows at both ends of an edge, so that a thread computes those of
the columns that it gathers (``csrc/cuda/sparse/body_attention.cuh``). The values of rows are arguments; those
of constants are loaded once for each column. The derivatives of a term, and of what follows the sum, are the
vector-Jacobian products of these parts of the body (``body_attention_backward.cuh``).
"""

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from gnnc.errors import UnsupportedError
from gnnc.ir.body import body_text, body_values, parse_body
from gnnc.ir.edge_gradients import GivenCotangent
from gnnc.ir.nodes import argument, first_operand, outputs_of, unpack
from gnnc.ir.vjp import Operand, body_gradients, rename_operands
from gnnc.runtime.cuda.kernels.body_places import Place, broadcast, flat
from gnnc.runtime.cuda.kernels.body_scope import Scope
from gnnc.runtime.cuda.kernels.body_values import edge_shape
from gnnc.runtime.cuda.kernels.edge_body import BodyWriter
from gnnc.runtime.cuda.kernels.epilogue import TYPES, literal, truth
from gnnc.runtime.row_program.build import Refusal

_ROWS = {"i0": "own", "j0": "key"}
"""Names of the rows at both ends, in a body and in its terms."""
_EDGE = "edge_term"
_SUM = "aten.sum.dim_IntList"


@dataclass(frozen=True, slots=True)
class Logit:
    """C++ struct of a logit.

    Attributes:
        text: members and functions.
        constants: names of the operands that the members point to, in order.
    """

    text: str
    constants: tuple[str, ...]


def write_logit(body: str, operands: dict[str, torch.Tensor], scale: float) -> Logit:
    """Return the logit that a body computes, times a scale.

    Args:
        body: text of the body.
        operands: fake tensors of the operands: ``i0`` and ``j0``, ``e0`` with a value a head, constants.
        scale: factor of the result.

    Raises:
        Refusal: the body is no sum over the columns of heads of elementwise terms.
    """
    return _LogitWriter(body, operands, {name: 1 for name in operands}).logit(scale)


def write_differentiable_logit(body: str, operands: dict[str, torch.Tensor], scale: float) -> Logit:
    """Return the logit that a body computes, times a scale, with its derivatives.

    Args:
        body: text of the body.
        operands: fake tensors of the operands: ``i0``, ``j0``, and constants of one value for each column.
        scale: factor of the result.

    Raises:
        Refusal: the body is no sum over the columns of heads of elementwise terms, or has no derivative.
    """
    writer = _LogitWriter(body, operands, {name: 1 for name in operands})
    logit = writer.logit(scale)
    heads, columns = (int(size) for size in operands["i0"].shape[1:])
    if list(writer.loads.values()) != list(range(len(logit.constants))):
        raise Refusal("the body reads a constant in two places")
    try:
        term = _term_derivatives(body, logit.constants, (heads, columns))
        slope = _slope(body, (heads,))
    except UnsupportedError as error:
        raise Refusal(str(error)) from error
    lines = [
        f"static constexpr bool kWeighted = {truth(term.weight is not None)};",
        *_function("weight", "const float* c", ([], term.weight or "1.0f")),
        *_function("left", _TERM, term.factors[0]),
        *_function("right", _TERM, term.factors[1]),
        *_function("of_own", _TERM, term.derivatives["i0"]),
        *_function("of_key", _TERM, term.derivatives["j0"]),
        f"__device__ void of_constants({_TERM}, float* of) const {{",
        *(
            f"  {{ {' '.join(statements)} of[{index}] = {value}; }}"
            for index in range(len(logit.constants))
            for statements, value in [term.derivatives[f"i{index + 1}"]]
        ),
        "}",
        *_function("slope", "float total", (slope[0], f"{slope[1]} * {literal(scale)}")),
    ]
    return Logit(logit.text + "".join(f"  {line}\n" for line in lines), logit.constants)


_Value = tuple[list[str], str]
"""Statements, and the value that they compute."""
_TERM = "float own, float key, const float* c, float g"
"""Parameters of a function of a term; derivatives are multiplied by ``g``."""


@dataclass(frozen=True, slots=True)
class _Term:
    """The derivatives of a term, times ``g``.

    Attributes:
        weight: the constant that the term is a product with, or None: a factor that the derivatives by rows
            leave out, so that sums of them are multiplied once.
        factors: two numbers whose product the term is.
        derivatives: by operand: ``i0``, ``j0``, and ``i1``, ... for the constants.
    """

    weight: str | None
    factors: tuple[_Value, _Value]
    derivatives: dict[str, _Value]


def _function(name: str, parameters: str, value: _Value) -> list[str]:
    statements, result = value
    body = [*statements, f"return {result};"]
    return [f"__device__ float {name}({parameters}) const {{", *(f"  {line}" for line in body), "}"]


def _term_derivatives(body: str, constants: tuple[str, ...], shape: tuple[int, ...]) -> _Term:
    """Return the derivatives of a term.

    Constants stand for rows here, since each thread has their values of its columns.
    """
    names = {name: f"i{index + 1}" for index, name in enumerate(constants)}
    terms = rename_operands(_part_of_body(body, before=True), names)
    inner, weight = _without_weight(terms)
    read = tuple(name for name in ("i0", "j0", *names.values()) if name != weight)
    every = tuple(Operand(name, shape, torch.float32) for name in ("i0", "j0", *names.values(), "e0"))
    operands = tuple(operand for operand in every if operand.name != weight)
    found = body_gradients(inner, GivenCotangent("e0"), operands, read)
    texts = {"i0": "own", "j0": "key", "e0": "g"}
    texts |= {name: f"c[{index}]" for index, name in enumerate(names.values())}
    place = ("edge", "head", "column")
    derivatives = {name: _derivative(found.get(name), operands, place, texts) for name in read}
    factor = None if weight is None else texts[weight]
    for name in set(derivatives) - {"i0", "j0"}:
        statements, value = derivatives[name]
        derivatives[name] = statements, f"{factor or '1.0f'} * {value}"
    if weight is not None:
        statements, value = _derivative(inner, operands, place, texts)
        derivatives[weight] = statements, f"g * {value}"
    left, *right = (_derivative(part, every, place, texts) for part in _factors(terms))
    return _Term(factor, (left, right[0] if right else ([], "1.0f")), derivatives)


def _factors(terms: str) -> list[str]:
    """Return the bodies of both factors of terms that are products, or that of the terms alone."""
    graph = _copied(terms)
    factors = _factors_of(outputs_of(graph))
    return [terms] if factors is None else [_pruned(_copied(terms), factor.name) for factor in factors]


def _without_weight(terms: str) -> tuple[str, str | None]:
    """Return terms without the constant that they are a product with, and its name; None: there is none."""
    left, right = _factors_of(outputs_of(_copied(terms))) or (None, None)
    for weight, inner in ((right, left), (left, right)):
        if weight is None or inner is None or weight.op != "placeholder" or len(weight.users) != 1:
            continue
        if weight.target not in _ROWS:
            return _pruned(_copied(terms), inner.name), str(weight.target)
    return terms, None


def _factors_of(product: object) -> tuple[Node, Node] | None:
    """Return the factors of a product of two values, or None."""
    if not isinstance(product, Node) or str(product.target) != "aten.mul.Tensor":
        return None
    left, right = unpack(product, "self", "other")
    return (left, right) if isinstance(left, Node) and isinstance(right, Node) else None


def _slope(body: str, shape: tuple[int, ...]) -> _Value:
    """Return the derivative of a logit by the sum over its columns."""
    behind = _part_of_body(body, before=False)
    operands = tuple(Operand(name, shape, torch.float32) for name in ("i0", "e0"))
    found = body_gradients(behind, GivenCotangent("e0"), operands, ("i0",))
    return _derivative(found.get("i0"), operands, ("edge", "head"), {"i0": "total", "e0": "1.0f"})


def _derivative(
    body: str | None, operands: tuple[Operand, ...], place: Place, texts: dict[str, str]
) -> _Value:
    if body is None:
        return [], "0.0f"
    values = {operand.name: operand.stand_in(1) for operand in operands}
    return _DerivativeWriter(body, values, {name: 1 for name in values}).derivative(place, texts)


def _part_of_body(body: str, *, before: bool) -> str:
    """Return what a body computes before its sum, or behind it, from the sum as ``i0``."""
    graph = _copied(body)
    (total,) = (node for node in graph.nodes if str(node.target) == _SUM)
    if before:
        return _pruned(graph, first_operand(total).name)
    with graph.inserting_before(total):
        given = graph.placeholder("i0")
    total.replace_all_uses_with(given)
    result = outputs_of(graph)
    assert isinstance(result, Node)
    return _pruned(graph, result.name)


def _copied(body: str) -> Graph:
    """Return a copy of the graph of a body."""
    graph = Graph()
    graph.output(graph.graph_copy(parse_body(body).graph, {}))
    return graph


def _pruned(graph: Graph, name: str) -> str:
    """Return the body of a node of a graph, with the operands that it reads."""
    (result,) = (node for node in graph.nodes if node.name == name)
    graph.output_node().args = (result,)
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.erase_node(node)
    return body_text(graph)


class _DerivativeWriter(BodyWriter):
    """Writer of a value that is elementwise in its operands."""

    def derivative(self, place: Place, texts: dict[str, str]) -> _Value:
        """Return the value at a place, from texts for the values of its operands there."""
        self.long, self.rows = frozenset(), {}
        self.texts, (result,) = texts, body_values(self.module.graph)
        self.index = flat(place[1:], edge_shape(result, self.shapes))
        scope = Scope()
        value = self.value(result, place, scope)
        if self.stages:
            raise Refusal("a derivative of the body has a sum, or a product with a weight")
        return scope.lines, value

    def _load(self, name: str, place: Place, scope: Scope) -> str:
        if flat(place[1:], tuple(int(size) for size in self.operands[name].shape[1:])) != self.index:
            raise Refusal(f"a derivative of the body reads {name} elsewhere than in its own column")
        return self.texts[name]


class _LogitWriter(BodyWriter):
    """Writer of the terms of the sum, and of what follows it."""

    def __init__(self, text: str, operands: dict[str, torch.Tensor], strides: dict[str, int]) -> None:
        super().__init__(text, operands, strides)
        self.long, self.rows = frozenset(), {}  # a thread computes its columns by itself

    def logit(self, scale: float) -> Logit:
        """Return the struct."""
        (result,) = body_values(self.module.graph)
        total = self._sum_behind(result)
        terms = first_operand(total)
        shape = edge_shape(terms, self.shapes)
        dims = [dim % (len(shape) + 1) for dim in argument(total, "dim")]
        if len(shape) not in (1, 2) or dims != [len(shape)] or argument(total, "keepdim"):
            raise Refusal("the body sums over other dimensions than the columns of heads")
        self.place: Place = ("head", "column")[-len(shape) :]
        self.row_index = flat(self.place, shape)
        self.loads: dict[str, int] = {}
        inner = Scope()
        term = self.value(terms, ("edge", *self.place), inner)
        whole: Place = ("edge", *self.place[:-1])  # ops read one head at its place, too
        outer = Scope(known={(total, at): "total" for at in (whole, broadcast(whole, self.shapes[total]))})
        self.place = self.place[:-1]
        value = self.value(result, ("edge", *self.place), outer)
        if scale != 1.0:
            value = f"{value} * {literal(scale)}"
        if self.stages:
            raise Refusal("the body has more than one sum, or a product with a weight")
        names = tuple(name for name in self.names if name[0] == "c")
        lines = [
            f"static constexpr int kConstants = {len(self.loads)};",
            *(f"const {TYPES[self.operands[name].dtype]}* {name};" for name in names),
            *([] if names else ["int64_t nothing;"]),
            "__device__ void constants(int head, int column, float* c) const {",
            *(f"  c[{index}] = {load};" for load, index in self.loads.items()),
            "}",
            "__device__ float term(float own, float key, const float* c) const {",
            *(f"  {line}" for line in [*inner.lines, f"return {term};"]),
            "}",
            f"__device__ float finish(float total, float {_EDGE}) const {{",
            *(f"  {line}" for line in [*outer.lines, f"return {value};"]),
            "}",
        ]
        return Logit("".join(f"  {line}\n" for line in lines), names)

    def _sum_behind(self, result: Node) -> Node:
        sums = [node for node in self.module.graph.nodes if str(node.target) == _SUM]
        if len(sums) != 1 or not isinstance(result, Node):
            raise Refusal("the body is not one sum")
        return sums[0]

    def _load(self, name: str, place: Place, scope: Scope) -> str:
        """Return a value that a thread has: of its column of both rows, of the edge, or of a constant."""
        is_term = len(self.place) > 0 and self.place[-1] == "column"
        if name[0] == "c":
            if not is_term:
                raise Refusal("a constant is behind the sum of the body")
            load = super()._load(name, place, scope)
            return f"c[{self.loads.setdefault(load, len(self.loads))}]"
        index = flat(place[1:], tuple(int(size) for size in self.operands[name].shape[1:]))
        if name in _ROWS and is_term and index == self.row_index:
            return _ROWS[name]
        if name == "e0" and not is_term and index in ("0", "head"):
            return _EDGE
        raise Refusal(f"the body reads {name} elsewhere than in the column of a term")
