"""Work of a kernel launch, as sympy expressions of the sizes, and the time that it takes.

The *work* of a launch is a list of terms: the launch itself, rows, edges, bytes that stream in and
out, bytes that edges gather from a table of some size, multiplications, elementwise steps. A machine's
*rates* are the seconds that a unit of each term takes, by kernel family and precision; they are
measured once a machine by ``gnnc.calibrate.calibration``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gnnc.ir import describe
from gnnc.ir.aten import TRANSCENDENTAL
from gnnc.ir.nodes import arguments, is_gnnc, op_name, operand, qtype_of, unpack
from gnnc.ir.op import Cost, Op, nbytes, numel, op_of, size_expr

FAMILIES = ("gemm", "spmm", "attention", "map")
ALONE = "aten"
"""Family of the launches outside of every other family, and of all that was not measured."""

ALIKE = {"attention_backward": "attention", "body_attention_backward": "attention"}
"""Families that no machine is measured for, and the measured one whose kernels do such work."""

LINE = 64
"""Bytes of a cache line: an edge fetches whole lines."""

KNOTS = (2.0**18, 2.0**21, 2.0**24, 2.0**27)
"""Sizes in bytes at which the cost of a byte is measured; between them it follows the logarithm."""

ONE = sympy.Integer(1)


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a launch's work.

    Attributes:
        name: the kind of work, such as ``gather.int8.row``.
        amount: number of units of that work, or of bytes.
        held: bytes of memory that the work touches, which decide the cache that holds them; None where the
            cache does not matter.
    """

    name: str
    amount: Any
    held: Any = None

    def at(self, value: Any) -> "Term":
        """Return the term with numbers for expressions; ``value`` maps one to the other."""
        return Term(self.name, value(self.amount), None if self.held is None else value(self.held))


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds for a unit of each term.

    Attributes:
        families: family to term (with ``@k`` for knot k where it depends on memory) to seconds.
        backend: name of the backend that was measured.
        machine: description of the measured machine, for people.
        measured_in: seconds that measuring took.
        waited: share of the measuring time in which threads were ready and waited for a processor: the
            machine was busy with something else. 0 where the system does not tell.
        measurements: number of times that the machine was measured; the rates that waited least stay.
    """

    families: Mapping[str, Mapping[str, float]]
    backend: str = ""
    machine: str = ""
    measured_in: float = 0.0
    waited: float = 0.0
    measurements: int = 1

    def seconds(self, family: str, terms: Iterable[Term]) -> float:
        """Return the predicted time of a launch; its terms hold numbers.

        A term that the family was not measured with counts as it does for ops that run alone.
        """
        table = self.families.get(family) or self.families.get(ALIKE.get(family, family), {})
        rest = self.families.get(ALONE, {})
        total = 0.0
        for term in terms:
            for name, amount in parts(term):
                rate = _rate(table, name)
                total += amount * ((_rate(rest, name) or 0.0) if rate is None else rate)
        return total


def _rate(table: Mapping[str, float], name: str) -> float | None:
    """Return the rate of a term, at the nearest measured knot, or None if it was not measured at all."""
    if name in table:
        return table[name]
    base, _, knot = name.partition("@")
    near = [(abs(int(knot) - k), f"{base}@{k}") for k in range(len(KNOTS)) if f"{base}@{k}" in table]
    return table[min(near)[1]] if knot and near else None


def parts(term: Term) -> list[tuple[str, float]]:
    """Split a term over the two knots around the memory that it touches."""
    if term.held is None:
        return [(term.name, float(term.amount))]
    logs = [math.log(knot) for knot in KNOTS]
    place = min(max(math.log(max(float(term.held), 1.0)), logs[0]), logs[-1])
    above = next(k for k, log in enumerate(logs) if place <= log)
    if above == 0 or place == logs[above]:
        return [(f"{term.name}@{above}", float(term.amount))]
    share = (place - logs[above - 1]) / (logs[above] - logs[above - 1])
    amounts = (1 - share, share)
    return [(f"{term.name}@{above - 1 + i}", float(term.amount) * s) for i, s in enumerate(amounts)]


@dataclass(slots=True)
class Launch:
    """Nodes of an inlined graph that one kernel runs.

    Attributes:
        name: the node of the lowered graph that launches it.
        nodes: the nodes that the kernel computes, in order.
    """

    name: str
    nodes: list[Node] = field(default_factory=list)

    @property
    def computes(self) -> bool:
        """Return whether it does more than pick, size or view values."""
        return any(not describe.is_free(node) for node in self.nodes)

    @property
    def primitives(self) -> list[Node]:
        """The nodes that compute something of the model."""
        return [node for node in self.nodes if is_gnnc(node) and not describe.changes_precision(node)]

    @property
    def family(self) -> str:
        """The kernel family."""
        block = self.nodes[0].meta["block"]
        if block is not None and block.kind in FAMILIES:
            return block.kind
        return family_of(self.primitives[-1]) if self.primitives else ALONE


def family_of(node: Node) -> str:
    """Return the family of the kernel that runs a primitive by itself."""
    op = op_of(node)
    return op_name(node) if op is None else op.cost_family


def _op(node: Node) -> Op:
    op = op_of(node)
    assert op is not None, node.format_node()
    return op


def launches(graph: Graph) -> list[Launch]:
    """Return the launches of an inlined graph that compute something, in order."""
    found: dict[str, Launch] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        block = node.meta["block"]
        name = block.node if block else node.meta["origin"]
        found.setdefault(name, Launch(name)).nodes.append(node)
    return [launch for launch in found.values() if launch.computes]


def traffic(launch: Launch) -> sympy.Expr:
    """Return the bytes that a launch moves: each tensor once, and a gathered row once an edge."""
    if len(launch.nodes) == 1 and (cost := _cost(launch.nodes[0])):
        return cost.bytes
    return compulsory(launch) + sum(map(_gathered, launch.primitives), start=sympy.Integer(0))


def compulsory(launch: Launch) -> sympy.Expr:
    """Return the bytes of the tensors that enter or leave a launch: it cannot move fewer."""
    return sum(map(held, (*_reads(launch), *_stores(launch))), start=sympy.Integer(0))


def floor_times(compute: GraphModule, values: Sequence[Any], bandwidth: float) -> dict[str, float]:
    """Return the time of each launch's compulsory bytes in seconds, by node name.

    Args:
        compute: the lowered compute graph.
        values: arguments in placeholder order, for their sizes.
        bandwidth: bytes per second of a copy.
    """
    graph = describe.inline(compute)
    sizes = sizes_of(graph.find_nodes(op="placeholder"), values)
    found = {launch.name: evaluate(compulsory(launch), sizes) for launch in launches(graph)}
    return {name: count / bandwidth for name, count in found.items() if count is not None}


def flops(launch: Launch) -> sympy.Expr:
    """Multiplications and additions; an elementwise op computes once an element of its result."""
    total = sympy.Integer(0)
    for node in launch.nodes:
        if cost := _cost(node):
            total += cost.flops
        elif not describe.is_free(node):
            total += elements(node)
    return total


def work(launch: Launch) -> list[Term]:
    """Return the terms of the work of a launch, in expressions of the sizes."""
    terms = [Term("launch", ONE)]
    tables: set[Node] = set()
    for node in launch.primitives:
        terms += op_terms(node, mode_of(node))
        tables.update(tables_of(node))
    terms += [Term("read", held(n), held(n)) for n in _reads(launch) if n not in tables]
    for node in _stores(launch):
        size = padded(node, _element_size(node))
        terms.append(Term("write", size, size))
    steps = (n for n in launch.nodes if n not in launch.primitives and not describe.is_free(n))
    return terms + [Term(_step_name(node), elements(node)) for node in steps]


def op_terms(node: Node, mode: str, element_size: Any = None) -> list[Term]:
    """Return the terms of a primitive beyond streaming its operands and its result.

    Args:
        node: the primitive, in FP32 or in its integer form.
        mode: precision of its operands, and how an integer aggregation adds, as ``mode_of`` says.
        element_size: bytes of a gathered element, where that differs from the graph.
    """
    op = _op(node)
    if op.cost_family == "gemm":
        return [Term(f"dot.{mode}", elements(node) * _summed(node))]
    if not op.gathered:
        return [Term(op.step, elements(node))]
    edges = _edges(node)
    terms = [Term(f"edge.{mode}", edges)]
    if op.kind == "aggregate":
        terms.append(Term("row", size_expr(node.meta["val"].shape[0])))
    if op.has_body:
        terms.append(Term("body", edges * _per_row(node)))
    for table in tables_of(node):
        size = element_size or _element_size(table)
        lines = sympy.ceiling(_per_row(table) * size / LINE) * LINE
        terms.append(Term(f"gather.{mode}", edges * lines, padded(table, size)))
    return terms


def _summed(node: Node) -> sympy.Expr:
    """Return the number of products that a value of a matrix product sums: columns, or all rows."""
    if "x" in _op(node).parameters:
        return size_expr(operand(node, "x").meta["val"].shape[-1])
    rows = operand(node, "a").meta["val"].shape[:-1]
    return sympy.prod([size_expr(size) for size in rows])


def mode_of(node: Node) -> str:
    """Return the precision of a primitive's operands, and how an integer aggregation adds."""
    # rates are measured for operands of the graph: what a kernel dequantizes on its way counts as FP32
    precision = describe.lowest_precision(describe.operands(node)) or "fp32"
    if op_name(node) != "qspmm":
        return precision
    named = arguments(node)
    if named["x_scale"] is not None:
        return f"{precision}.row"
    return f"{precision}.tensor" if named["shift"] is None else f"{precision}.row_pow2"


def tables_of(node: Node) -> list[Node]:
    """Return the operands that a primitive gathers rows of."""
    op = op_of(node)
    found: list[Any] = []
    for value in unpack(node, *op.gathered) if op is not None else ():
        found += value if isinstance(value, list | tuple) else (value,)
    return [table for table in found if isinstance(table, Node)]


def elements(node: Node) -> sympy.Expr:
    """Return the number of elements of a node's tensor."""
    value = node.meta.get("val")
    return numel(value) if isinstance(value, torch.Tensor) else sympy.Integer(0)


def padded(node: Node, element_size: Any) -> sympy.Expr:
    """Return the bytes of a tensor whose rows begin on 16 bytes, in elements of a given size."""
    shape, qtype = node.meta["val"].shape, qtype_of(node)
    if len(shape) < 2:
        return elements(node) * element_size
    if qtype is not None and qtype.row_stride is not None:
        return size_expr(shape[0]) * qtype.row_stride
    return size_expr(shape[0]) * sympy.ceiling(_per_row(node) * element_size / 16) * 16


def held(node: Node) -> sympy.Expr:
    """Return the bytes of a node's value."""
    if qtype_of(node) is not None:
        return elements(node) * _element_size(node)
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return nbytes(*(item for item in values if isinstance(item, torch.Tensor)))


def _element_size(node: Node) -> sympy.Expr:
    """Return the bytes of an element; a fraction for quantized values of fewer than 8 bits."""
    qtype, value = qtype_of(node), node.meta.get("val")
    if qtype is not None:
        return sympy.Rational(qtype.bits, 8)
    return sympy.Integer(value.element_size() if isinstance(value, torch.Tensor) else 0)


def _step_name(node: Node) -> str:
    if op := op_of(node):
        return op.step
    return "exp" if op_name(node) in TRANSCENDENTAL else "step"


def _edges(node: Node) -> sympy.Expr:
    named = arguments(node)
    for name in ("col", "perm", "logits"):
        if isinstance(value := named.get(name), Node):
            return size_expr(value.meta["val"].shape[0])
    return size_expr(node.meta["val"].shape[0])


def _per_row(node: Node) -> sympy.Expr:
    result = ONE
    for size in node.meta["val"].shape[1:]:
        result *= size_expr(size)
    return result


def _reads(launch: Launch) -> Sequence[Node]:
    inside = set(launch.nodes)
    return list(dict.fromkeys(n for node in launch.nodes for n in node.all_input_nodes if n not in inside))


def _stores(launch: Launch) -> Sequence[Node]:
    inside = set(launch.nodes)
    stored = (n for n in launch.nodes if any(user not in inside for user in n.users))
    return [n for n in stored if isinstance(n.meta.get("val"), torch.Tensor)]


def _cost(node: Node) -> Any:
    op = op_of(node)
    if op is None:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    cost = op.cost(*args, **kwargs)
    return Cost(cost.bytes - _bytes_packed(node), cost.flops)


def _bytes_packed(node: Node) -> sympy.Expr:
    """Return the bytes by which an op's cost rule, which sees dtypes, overstates its quantized operands."""
    tables = tables_of(node)
    total = sympy.Integer(0)
    for source in filter(qtype_of, describe.operands(node)):
        spare = source.meta["val"].element_size() - _element_size(source)
        total += spare * (_edges(node) * _per_row(source) if source in tables else elements(source))
    return total


def _gathered(node: Node) -> sympy.Expr:
    """Return the bytes of a sparse op beyond reading its operands and writing its result once."""
    once = sum((held(n) for n in (*node.all_input_nodes, node)), start=sympy.Integer(0))
    return sympy.Max(0, _cost(node).bytes - once)


def sizes_of(inputs: Sequence[Node], values: Sequence[Any] | None) -> dict[sympy.Symbol, int]:
    """Return the value of each size symbol: from the arguments, else from the captured example."""
    sizes: dict[sympy.Symbol, int] = {}
    for node in inputs:
        for size in _symbolic(node.meta.get("val")):
            if size.node.hint is not None and isinstance(size.node.expr, sympy.Symbol):
                sizes[size.node.expr] = int(size.node.hint)
    for node, value in zip(inputs, values or (), strict=False):
        for size, actual in zip(_all_sizes(node.meta.get("val")), _all_sizes(value), strict=False):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                sizes[size.node.expr] = int(actual)
    return sizes


def _all_sizes(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return (value,) if isinstance(value, int | torch.SymInt) else ()


def _symbolic(value: Any) -> list[torch.SymInt]:
    return [size for size in _all_sizes(value) if isinstance(size, torch.SymInt)]


def evaluate(expr: Any, sizes: Mapping[sympy.Symbol, int]) -> int | None:
    """Return the value of an expression, or None where a size is not known."""
    result = sympy.sympify(expr).subs(dict(sizes))
    return int(result) if result.is_number else None
