"""The table of ``compiled.summary()``: one row a kernel launch, with what it moves and how it errs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from tabulate import tabulate
from torch.fx import GraphModule, Node

from gnnc.cost.model import Launch, evaluate, flops, launches, sizes_of, traffic
from gnnc.cost.quantization_error import TensorError, quantization_errors, quantize_key
from gnnc.ir import describe
from gnnc.ir.nodes import is_gnnc, op_name

HEADERS = (
    "op",
    "layer",
    "bits",
    "precision",
    "sensitivity",
    "error (eq. 4)",
    "SQNR dB",
    "clipped",
    "RF gain",
    "bytes",
    "flops",
    "predicted ms",
    "measured ms",
    "floor / time",
    "next best",
)
OPTIONAL = frozenset(("sensitivity", "clipped", "floor / time", "next best"))
"""Columns that a table has only where some row knows more than a dash."""
UNKNOWN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One launch. None stands for "not measured" and prints as ``-``.

    Attributes:
        op: the primitives that it computes, or the ATen op.
        layer: paths of the modules that its ops came from.
        bits: bits of the narrowest operand of each primitive: ``8``, or ``32 + 32 + 8`` where they differ;
            ``32→8`` for a launch that only converts.
        precision: the option that ``auto`` chose, such as ``int8 row_pow2``, or that of these operands.
        sensitivity: relative L2 error of the model's output if this op alone has this precision.
        error: Tango's relative quantization error (equation 4) of its worst quantized operand.
        sqnr: signal-to-quantization-noise ratio of that operand in decibels, the least.
        clipped: elements of its operands that a static scale clipped.
        gain: receptive-field gain.
        bytes: memory traffic: operands and results once each, plus rows gathered over edges.
        flops: multiplications and additions.
        predicted: seconds, from the cost model.
        measured: seconds, from ``profile()``.
        floor: seconds that its compulsory bytes take at copy bandwidth, from ``profile()``.
        alternative: the next best option, what it would add to the time, and its sensitivity.
    """

    op: str
    layer: str
    bits: str | None = None
    precision: str | None = None
    sensitivity: float | None = None
    error: float | None = None
    sqnr: float | None = None
    clipped: int | None = None
    gain: float | None = None
    bytes: int | None = None
    flops: int | None = None
    predicted: float | None = None
    measured: float | None = None
    floor: float | None = None
    alternative: tuple[str, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Knowledge of ``auto`` about one primitive.

    Attributes:
        precision: the option that it took.
        sensitivity: the error of the output that it makes alone.
        alternative: the next best option, see ``OpRow``.
    """

    precision: str
    sensitivity: float | None = None
    alternative: tuple[str, float, float] | None = None


def summary_rows(
    compute: GraphModule,
    *,
    values: Sequence[Any] | None = None,
    predicted: Mapping[str, float] | None = None,
    measured: Mapping[str, float] | None = None,
    floors: Mapping[str, float] | None = None,
    gains: Mapping[str, float] | None = None,
    choices: Mapping[str, Chosen] | None = None,
) -> list[OpRow]:
    """Return a row for every launch of the compute graph, in order.

    Args:
        compute: the lowered (or any quantized) compute graph.
        values: arguments in placeholder order: quantization errors are measured on them, and sizes
            taken from them. Without, errors stay unknown and sizes are those of the capture.
        predicted: seconds by node name.
        measured: seconds by node name.
        floors: seconds by node name.
        gains: receptive-field gain by name of the primitive before it was quantized.
        choices: what ``auto`` knows, by the same name.
    """
    graph = describe.inline(compute)
    errors = quantization_errors(compute, values) if values is not None else {}
    sizes = sizes_of(graph.find_nodes(op="placeholder"), values)
    groups = launches(graph)
    tables = (predicted or {}, measured or {}, floors or {}, gains or {}, choices or {})
    return [_row(group, errors, sizes, *tables) for group in groups]


def summary_table(rows: Sequence[OpRow]) -> str:
    """Return the rows as text, with a line of totals, without columns of ``OPTIONAL`` that are empty."""
    table = [_cells(row) for row in rows]
    if rows:
        table.append(_cells(_total(rows)))
    shown = [
        place
        for place, header in enumerate(HEADERS)
        if header not in OPTIONAL or any(cells[place] != UNKNOWN for cells in table)
    ]
    lines = [[cells[place] for place in shown] for cells in table]
    headers = [HEADERS[place] for place in shown]
    align = ("left", "left", *["right"] * (len(shown) - 2))
    return tabulate(lines, headers, tablefmt="simple", colalign=align, disable_numparse=True)


def _row(
    launch: Launch,
    errors: Mapping[str, TensorError],
    sizes: Mapping[sympy.Symbol, int],
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    floors: Mapping[str, float],
    gains: Mapping[str, float],
    choices: Mapping[str, Chosen],
) -> OpRow:
    anchors = launch.primitives
    named = anchors or [n for n in launch.nodes if not describe.is_free(n)]
    found = [errors[key] for key in _quantized_operands(anchors) if key in errors]
    bits, precision = _precisions(named, is_conversion=not anchors)
    computing = [n for n in launch.nodes if not (describe.is_free(n) or describe.changes_precision(n))]
    layers = dict.fromkeys(filter(None, map(describe.layer_of, computing or named)))
    origins = [describe.assigned_name(node) for node in anchors]
    choice = next((choices[name] for name in origins if name in choices), None)
    return OpRow(
        op=" + ".join(dict.fromkeys(map(op_name, named))),
        layer=", ".join(map(describe.shown_layer, layers)),
        bits=bits,
        precision=precision if choice is None else choice.precision,
        sensitivity=None if choice is None else choice.sensitivity,
        error=max((e.relative for e in found), default=None),
        sqnr=min((e.sqnr for e in found), default=None),
        clipped=sum(e.clipped for e in found) if found else None,
        gain=next((gains[name] for name in origins if name in gains), None),
        bytes=evaluate(traffic(launch), sizes),
        flops=evaluate(flops(launch), sizes),
        predicted=predicted.get(launch.name),
        measured=measured.get(launch.name),
        floor=floors.get(launch.name),
        alternative=None if choice is None else choice.alternative,
    )


def _precisions(named: Sequence[Node], *, is_conversion: bool) -> tuple[str | None, str | None]:
    """Return the bits and the precision of the operands of ops; of a conversion, ``fp32→int8``."""
    found = [p for p in map(describe.precision_in, named) if p is not None]
    after = describe.precision_of(named[-1]) if is_conversion and found else None
    if after is not None and after != found[0]:
        return f"{describe.bits_of(found[0])}→{describe.bits_of(after)}", f"{found[0]}→{after}"
    return _sum_text([str(describe.bits_of(p)) for p in found]), _sum_text(found)


def _sum_text(parts: Sequence[str]) -> str | None:
    """Return ``a + a + b`` for parts that differ, ``a`` for equal ones, None for none."""
    return " + ".join(parts if len(set(parts)) > 1 else parts[:1]) or None


def _quantized_operands(anchors: Sequence[Node]) -> list[str]:
    made = [describe.producer(operand) for node in anchors for operand in describe.operands(node)]
    found = [n for n in made if is_gnnc(n) and op_name(n) == "quantize"]
    return list(dict.fromkeys(quantize_key(node) for node in found))


def _total(rows: Sequence[OpRow]) -> OpRow:
    def total(name: str) -> Any:
        known = [getattr(row, name) for row in rows]
        return None if any(value is None for value in known) else sum(known)

    names = ("bytes", "flops", "predicted", "measured", "floor")
    return OpRow(op="total", layer="", **{name: total(name) for name in names})


def _cells(row: OpRow) -> tuple[str, ...]:
    return (
        row.op,
        row.layer,
        row.bits or UNKNOWN,
        row.precision or UNKNOWN,
        _number(row.sensitivity, 1, ".2g"),
        _number(row.error, 1, ".4f"),
        "exact" if row.sqnr == math.inf else _number(row.sqnr, 1, ".1f"),
        UNKNOWN if row.clipped is None else str(row.clipped),
        _number(row.gain, 1, ".2f"),
        _scaled(row.bytes),
        _scaled(row.flops),
        _number(row.predicted, 1e3, ",.3f"),
        _number(row.measured, 1e3, ",.3f"),
        _fraction(row.floor, row.measured),
        _alternative(row.alternative),
    )


def _fraction(floor: float | None, measured: float | None) -> str:
    """Return the floor as a fraction of the time; a dash where a cache served faster than memory could."""
    is_floor = floor is not None and measured is not None and 0 < floor <= measured
    return format(floor / measured, ".2f") if is_floor else UNKNOWN


def _alternative(value: tuple[str, float, float] | None) -> str:
    if value is None:
        return UNKNOWN
    name, seconds, error = value
    return f"{name}: {seconds * 1e3:+.3f} ms, {error:.2g}"


def _number(value: float | None, factor: float, form: str) -> str:
    return UNKNOWN if value is None else format(value * factor, form)


def _scaled(value: int | None) -> str:
    if value is None or value < 1000:
        return UNKNOWN if value is None else str(value)
    power = min((len(str(value)) - 1) // 3, 4)
    return f"{value / 1000**power:.3g} {'kMGT'[power - 1]}"
