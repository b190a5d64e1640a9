"""The table of ``compiled.summary()``: one row a kernel launch, with what it moves and how it errs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from tabulate import tabulate
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from gnnc import describe
from gnnc.ir.op import nbytes, numel, op_of
from gnnc.metrics import TensorError, quantization_errors, quantize_key

HEADERS = (
    "op",
    "layer",
    "bits",
    "error (eq. 4)",
    "SQNR dB",
    "clipped",
    "RF gain",
    "bytes",
    "flops",
    "predicted ms",
    "measured ms",
)
UNKNOWN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One launch. None stands for "not measured" and prints as ``-``.

    Attributes:
        op: the primitives that it computes, or the ATen op.
        layer: path of the module that it came from.
        bits: bits of its narrowest operand.
        error: Tango's relative quantization error (equation 4) of its worst quantized operand.
        sqnr: signal-to-quantization-noise ratio of that operand in decibels, the least.
        clipped: elements of its operands that a static scale clipped.
        gain: receptive-field gain.
        bytes: memory traffic: operands and results once each, plus rows gathered over edges.
        flops: multiplications and additions.
        predicted: seconds, from the cost model.
        measured: seconds, from ``profile()``.
    """

    op: str
    layer: str
    bits: int | None = None
    error: float | None = None
    sqnr: float | None = None
    clipped: int | None = None
    gain: float | None = None
    bytes: int | None = None
    flops: int | None = None
    predicted: float | None = None
    measured: float | None = None


def summary_rows(
    compute: GraphModule,
    *,
    values: Sequence[Any] | None = None,
    predicted: Mapping[str, float] | None = None,
    measured: Mapping[str, float] | None = None,
    gains: Mapping[str, float] | None = None,
) -> list[OpRow]:
    """Return a row for every launch of the compute graph, in order.

    Args:
        compute: the lowered (or any quantized) compute graph.
        values: arguments in placeholder order: quantization errors are measured on them, and sizes
            taken from them. Without, errors stay unknown and sizes are those of the capture.
        predicted: seconds by node name.
        measured: seconds by node name.
        gains: receptive-field gain by node name.
    """
    graph = describe.inline(compute)
    errors = quantization_errors(compute, values) if values is not None else {}
    sizes = _sizes(graph.find_nodes(op="placeholder"), values)
    groups = [group for group in _launches(graph.nodes) if _computes(group)]
    tables = (predicted or {}, measured or {}, gains or {})
    return [_row(group, errors, sizes, *tables) for group in groups]


def summary_table(rows: Sequence[OpRow]) -> str:
    """Return the rows as text, with a line of totals."""
    table = [_cells(row) for row in rows]
    if rows:
        table.append(_cells(_total(rows)))
    align = ("left", "left", *["right"] * (len(HEADERS) - 2))
    return tabulate(table, HEADERS, tablefmt="simple", colalign=align, disable_numparse=True)


@dataclass(slots=True)
class _Launch:
    """Nodes of an inlined graph that one kernel runs."""

    name: str
    nodes: list[Node] = field(default_factory=list)


def _launches(nodes: Iterable[Node]) -> list[_Launch]:
    launches: dict[str, _Launch] = {}
    for node in nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        block = node.meta["block"]
        name = block.node if block else node.meta["origin"]
        launches.setdefault(name, _Launch(name)).nodes.append(node)
    return list(launches.values())


def _computes(launch: _Launch) -> bool:
    return any(not describe.is_free(node) for node in launch.nodes)


def _primitives(launch: _Launch) -> list[Node]:
    return [
        node
        for node in launch.nodes
        if describe.is_gnnc(node) and describe.op_name(node) not in describe.PRECISION_OPS
    ]


def _row(
    launch: _Launch,
    errors: Mapping[str, TensorError],
    sizes: Mapping[sympy.Symbol, int],
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    gains: Mapping[str, float],
) -> OpRow:
    anchors = _primitives(launch)
    named = anchors or [n for n in launch.nodes if not describe.is_free(n)]
    found = [errors[key] for key in _quantized_operands(anchors) if key in errors]
    bits = [describe.bits_of(p) for p in map(describe.precision_in, named) if p is not None]
    layers = [layer for layer in map(describe.layer_of, named) if layer]
    origins = [launch.name, *(str(node.meta["origin"]) for node in anchors)]
    return OpRow(
        op=" + ".join(dict.fromkeys(map(describe.op_name, named))),
        layer=layers[0] if layers else "",
        bits=min(bits, default=None),
        error=max((e.relative for e in found), default=None),
        sqnr=min((e.sqnr for e in found), default=None),
        clipped=sum(e.clipped for e in found) if found else None,
        gain=next((gains[name] for name in origins if name in gains), None),
        bytes=_evaluate(_traffic(launch), sizes),
        flops=_evaluate(_flops(launch), sizes),
        predicted=predicted.get(launch.name),
        measured=measured.get(launch.name),
    )


def _quantized_operands(anchors: Sequence[Node]) -> list[str]:
    made = [describe.producer(operand) for node in anchors for operand in describe.operands(node)]
    found = [n for n in made if describe.is_gnnc(n) and describe.op_name(n) == "quantize"]
    return list(dict.fromkeys(quantize_key(node) for node in found))


def _cost(node: Node) -> Any:
    op = op_of(node)
    if op is None:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return op.cost(*args, **kwargs)


def _flops(launch: _Launch) -> sympy.Expr:
    total = sympy.Integer(0)
    for node in launch.nodes:
        if cost := _cost(node):
            total += cost.flops
        elif not describe.is_free(node):
            total += _elements(node)
    return total


def _elements(node: Node) -> sympy.Expr:
    """An elementwise op computes once an element of its result."""
    value = node.meta.get("val")
    return numel(value) if isinstance(value, torch.Tensor) else sympy.Integer(0)


def _traffic(launch: _Launch) -> sympy.Expr:
    """Each tensor that enters or leaves once; a sparse op reads a row again for every edge."""
    if len(launch.nodes) == 1 and (cost := _cost(launch.nodes[0])):
        return cost.bytes
    inside = set(launch.nodes)
    read = {n for node in launch.nodes for n in node.all_input_nodes if n not in inside}
    stored = {n for n in launch.nodes if any(user not in inside for user in n.users)}
    crossing = sum((_held(n) for n in (*read, *stored)), start=sympy.Integer(0))
    return crossing + sum((_gathered(n) for n in _primitives(launch)), start=sympy.Integer(0))


def _gathered(node: Node) -> sympy.Expr:
    """Bytes of a sparse op beyond reading its operands and writing its result once."""
    once = sum((_held(n) for n in (*node.all_input_nodes, node)), start=sympy.Integer(0))
    return sympy.Max(0, _cost(node).bytes - once)


def _held(node: Node) -> sympy.Expr:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return nbytes(*(item for item in values if isinstance(item, torch.Tensor)))


def _sizes(inputs: Sequence[Node], values: Sequence[Any] | None) -> dict[sympy.Symbol, int]:
    """Return what each size symbol is: from the arguments, else from the captured example."""
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


def _evaluate(expr: Any, sizes: Mapping[sympy.Symbol, int]) -> int | None:
    result = sympy.sympify(expr).subs(dict(sizes))
    return int(result) if result.is_number else None


def _total(rows: Sequence[OpRow]) -> OpRow:
    def total(name: str) -> Any:
        known = [getattr(row, name) for row in rows]
        return None if any(value is None for value in known) else sum(known)

    names = ("bytes", "flops", "predicted", "measured")
    return OpRow(op="total", layer="", **{name: total(name) for name in names})


def _cells(row: OpRow) -> tuple[str, ...]:
    return (
        row.op,
        row.layer,
        UNKNOWN if row.bits is None else str(row.bits),
        _number(row.error, 1, ".4f"),
        "exact" if row.sqnr == math.inf else _number(row.sqnr, 1, ".1f"),
        UNKNOWN if row.clipped is None else str(row.clipped),
        _number(row.gain, 1, ".2f"),
        _scaled(row.bytes),
        _scaled(row.flops),
        _number(row.predicted, 1e3, ",.3f"),
        _number(row.measured, 1e3, ",.3f"),
    )


def _number(value: float | None, factor: float, form: str) -> str:
    return UNKNOWN if value is None else format(value * factor, form)


def _scaled(value: int | None) -> str:
    if value is None or value < 1000:
        return UNKNOWN if value is None else str(value)
    power = min((len(str(value)) - 1) // 3, 4)
    return f"{value / 1000**power:.3g} {'kMGT'[power - 1]}"
