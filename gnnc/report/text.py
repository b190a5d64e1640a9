"""Texts of a compiled model: the header of ``str()``, ``explain()``, ``summary()``."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

from torch.fx import Graph, Node

from gnnc.ir import describe
from gnnc.ir.aten import PRODUCTS, RENAMINGS
from gnnc.ir.nodes import argument, arguments, first_operand, is_gnnc, op_name
from gnnc.ir.op import Counted, op_of
from gnnc.ir.parts import BACKWARD, FORWARD, Parts
from gnnc.ir.source import is_weight
from gnnc.ir.thread_bits import depends_on_threads
from gnnc.report.crossing import saved_values, total_bytes
from gnnc.report.naming import name_program
from gnnc.report.printing import format_program
from gnnc.report.summary import Chosen, summary_rows, summary_table

EAGER_METHODS = "Methods in eager PyTorch"
"""Title of the section of methods that are not compiled."""
_STAYS = "stays FP32: "
_ALONE = "runs by itself"


class Remark(Protocol):
    """A note of a pass; ``gnnc.passes.base.Note`` has this form."""

    @property
    def kind(self) -> str:
        """``declined`` or ``decision``."""
        ...

    @property
    def pass_name(self) -> str:
        """Name of the pass."""
        ...

    @property
    def node(self) -> str:
        """Name of the node, or empty."""
        ...

    @property
    def layer(self) -> str:
        """Module path, or empty."""
        ...

    @property
    def text(self) -> str:
        """The remark."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramReport:
    """Everything that the texts about one compiled program are made from.

    Attributes:
        model: class name of the model.
        precision: the precision asked for.
        backend: name of the backend.
        parts: the lowered graphs.
        notes: remarks of the passes, in order.
        captures: why each capture was made, in order; the first is the first call.
        predicted: seconds from the cost model, by name of the graph and of the node.
        measured: seconds by name of a graph and of its node, from ``profile()``.
        floors: seconds that its compulsory bytes take at copy bandwidth, by the same names.
        gains: receptive-field gain of each primitive, by its name before it was quantized.
        choices: knowledge of ``auto`` about each primitive, by the same name.
        chosen: lines of the report of ``auto`` on its choice.
        eager: names of methods that were taken from the compiled model, and are not compiled.
        gradient_errors: relative L2 errors of a step on the example inputs, where a pass asks for them.
        launches: how calls make their launches, as replays or a CUDA graph; None: one by one.
        cuts: what ``tune()`` measured last, a line for each table of that graph; None: nothing was measured.
    """

    model: str
    precision: str
    backend: str
    parts: Parts
    notes: Sequence[Remark] = ()
    captures: Sequence[str] = ()
    predicted: Mapping[tuple[str, str], float] = field(default_factory=dict)
    measured: Mapping[tuple[str, str], float] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)
    gains: Mapping[str, float] = field(default_factory=dict)
    choices: Mapping[str, Chosen] = field(default_factory=dict)
    chosen: Sequence[str] = ()
    eager: Sequence[str] = ()
    launches: str | None = None
    cuts: Sequence[str] | None = None
    gradient_errors: Sequence[tuple[str, float]] | None = None


@dataclass(frozen=True, slots=True)
class Quantized:
    """Share of a program that runs on integers.

    Attributes:
        ops: kind of op to (how many are quantized, how many there are).
        weights: (how many weights of GEMMs are quantized, how many there are).
        halved: number of ops that run in a 16-bit float, by the name of the float.
    """

    ops: dict[str, tuple[int, int]]
    weights: tuple[int, int]
    halved: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> tuple[int, int]:
        """Return how many ops of all kinds are quantized, and how many there are."""
        return sum(done for done, _ in self.ops.values()), sum(total for _, total in self.ops.values())

    def __str__(self) -> str:
        done, total = self.total
        kinds = ", ".join(f"{kind} {k}/{n}" for kind, (k, n) in self.ops.items())
        ops = f"quantized {done} of {total} ops" + (f" ({kinds})" if kinds else "")
        halved = "".join(f", {n} ops in {name}" for name, n in self.halved.items())
        return f"{ops}, {self.weights[0]} of {self.weights[1]} weights{halved}"


def program_text(report: ProgramReport) -> str:
    """Return the text of ``str(compiled)``."""
    return format_program(report.parts, header_lines(report))


def summary_text(report: ProgramReport, values: Sequence[Any] | None = None) -> str:
    """Return the text of ``compiled.summary()``.

    ``values``: arguments of the forward graph on the example inputs, in placeholder order, or None.
    """
    rows = [
        row
        for part, gm in report.parts.per_call()
        for row in summary_rows(
            gm,
            values=values if part == FORWARD else None,
            predicted=_of_part(report.predicted, part),
            measured=_of_part(report.measured, part),
            floors=report.floors if part == FORWARD else None,
            gains=report.gains,
            choices=report.choices,
        )
    ]
    launches = [f"Launches: {report.launches}"] if report.measured and report.launches else []
    return "\n".join([summary_table(rows), *launches, *_error_lines(report)])


def _error_lines(report: ProgramReport) -> list[str]:
    """Return the relative errors of a step on the example inputs, a line for each output and gradient."""
    if not report.gradient_errors:
        return []
    title = "relative L2 error of a training step on the example inputs, against FP32:"
    return ["", title, *(f"  {name}: {error:.2%}" for name, error in report.gradient_errors)]


def _of_part(seconds: Mapping[tuple[str, str], float], part: str) -> dict[str, float]:
    return {node: each for (graph, node), each in seconds.items() if graph == part}


def header_lines(report: ProgramReport) -> list[str]:
    """Return "quantized k of n", what was compiled, and a line for each op that stayed FP32."""
    graphs = _graphs(report)
    stayed = stayed_fp32(report, graphs)
    return [*_head(report, graphs), *(f"stayed FP32: {line}" for line in stayed)]


def _head(report: ProgramReport, graphs: Sequence[Graph]) -> list[str]:
    """Return "quantized k of n", of a program with gradients also by direction, and what was compiled."""
    counts = str(count_quantized(graphs))
    if report.parts.backward is not None:
        (k, n), (k_back, n_back) = (count_quantized([graph]).total for graph in graphs)
        counts += f"; forward {k} of {n}, backward {k_back} of {n_back}"
    return [counts, f"{report.model}, {report.precision} on backend {report.backend}"]


def explain_text(report: ProgramReport) -> str:
    """Return the text of ``compiled.explain()``: what is not low precision or not ours, and why."""
    graphs = _graphs(report)
    declined = [n for n in report.notes if n.kind == "declined"]
    formats = [n for n in report.notes if n.kind == "format"]
    alone = {node.meta["origin"] for node in _aten_nodes(graphs)}
    stayed = [n for n in report.notes if n.text.startswith(_STAYS) or (_is_alone(n) and n.node in alone)]
    told = {*declined, *formats, *stayed}
    others = [f"{n.pass_name}: {_note_line(n)}" for n in report.notes if n not in told]
    choice = {"Precision choice": list(report.chosen)} if report.chosen else {}
    cuts = {} if report.cuts is None else {"Cuts of the graph, measured": report.cuts}
    threads = thread_dependent(report)
    sections = {
        **({EAGER_METHODS: eager_methods(report.eager)} if report.eager else {}),
        **choice,
        **cuts,
        **({} if report.launches is None else {"Launches": [report.launches]}),
        "Stayed FP32": stayed_fp32(report, graphs),
        "Stayed ATen": stayed_aten(report, graphs),
        **(
            {}
            if report.parts.backward is None
            else {"Saved for the backward graph": _saved_lines(report.parts)}
        ),
        **({"Last bits depend on the number of threads": threads} if threads else {}),
        "Kernels that declined": [_note_line(note) for note in declined],
        **({"Formats": [_note_line(note) for note in formats]} if formats else {}),
        "Decisions of the passes": others,
        "Captures": [f"{i}. {reason}" for i, reason in enumerate(report.captures, 1)],
    }
    return "\n".join(_head(report, graphs)) + "".join(_section(*section) for section in sections.items())


def uncaptured_text(model: str, methods: Sequence[str]) -> str:
    """Return the text of ``compiled.explain()`` before a capture: the methods that were used meanwhile."""
    return f"{model}, not captured yet: forward was not called" + _section(
        EAGER_METHODS, eager_methods(methods)
    )


def eager_methods(names: Sequence[str]) -> list[str]:
    """Return a line for each method of the model that was taken, which runs in eager PyTorch."""
    return [f"{name}: only forward is compiled; compile the submodule that it calls" for name in names]


def _saved_lines(parts: Parts) -> list[str]:
    values = saved_values(name_program(parts)[BACKWARD])
    return [*map(str, values), *([f"together: {total_bytes(values)} bytes"] if len(values) > 1 else [])]


def _graphs(report: ProgramReport) -> list[Graph]:
    """Return the inlined graphs of the parts that run at every call."""
    return [describe.inline(gm) for _, gm in report.parts.per_call()]


def _nodes(graphs: Iterable[Graph]) -> Iterator[Node]:
    return (node for graph in graphs for node in graph.nodes)


def _section(title: str, lines: Sequence[str]) -> str:
    shown = [f"  {line}" for line in _collapse(lines)] or ["  none"]
    return "\n\n" + "\n".join([title, *shown])


def _collapse(lines: Sequence[str]) -> list[str]:
    return [f"{line} (×{n})" if n > 1 else line for line, n in Counter(lines).items()]


def _note_line(note: Remark) -> str:
    # Numbered node names mean nothing to the reader of a printed program; the op does.
    op = re.sub(r"(_default)?(_\d+)?$", "", note.node)
    layer = note.layer and describe.shown_layer(note.layer)
    where = " ".join(part for part in (layer, op) if part)
    return f"{where}: {note.text}" if where else note.text


def count_quantized(graphs: Iterable[Graph]) -> Quantized:
    """Count the ops of inlined graphs, and the matrices among their weights, once each.

    The ops are the primitives on features and the products of matrices that stayed ATen ops. A weight
    counts as quantized if every op that reads it reads it quantized.
    """
    ops: dict[str, tuple[int, int]] = dict.fromkeys(get_args(Counted), (0, 0))
    weights: dict[str, bool] = {}
    halved: dict[str, int] = {}
    for node in _nodes(graphs):
        kind = _counted_kind(node)
        if kind is None:
            continue
        quantized = describe.is_quantized(node)
        if (precision := describe.precision_in(node)) in ("bf16", "fp16"):
            halved[precision] = halved.get(precision, 0) + 1
        done, total = ops.get(kind, (0, 0))
        ops[kind] = (done + quantized, total + 1)
        for weight in _weights_of(node):
            weights[weight] = weights.get(weight, True) and quantized
    ops = {kind: counts for kind, counts in ops.items() if counts[1]}
    return Quantized(ops, (sum(weights.values()), len(weights)), halved)


def _counted_kind(node: Node) -> str | None:
    """Return the kind that an op counts as, or None where it does not count."""
    op = op_of(node)
    if op is not None:
        return op.counted_as
    is_product = node.op == "call_function" and op_name(node) in PRODUCTS
    return op_name(node).removeprefix("_") if is_product else None


def _weights_of(node: Node) -> list[str]:
    """Return the names of the matrices among the parameters that an op multiplies by or reads as features."""
    found: dict[str, None] = {}
    computed = argument(node, "w") if op_of(node) and "w" in arguments(node) else None
    pending, seen = [(operand, operand is computed) for operand in _low_operands(node)], set()
    while pending:
        operand, is_computed = pending.pop()
        if operand in seen:
            continue
        seen.add(operand)
        if is_weight(operand) and operand.meta["val"].dim() > 1:
            found[operand.name] = None
        elif is_computed:
            pending += [(above, True) for above in operand.all_input_nodes]
        elif describe.changes_precision(operand) or op_name(operand) in RENAMINGS:
            pending.append((first_operand(operand), False))
    return list(found)


def _low_operands(node: Node) -> list[Node]:
    """Return the operands of an op that may be held in fewer bits; all, of an op that names none."""
    op = op_of(node)
    if op is None or not op.low_operands:
        return describe.operands(node)
    return [value for value in map(arguments(node).get, op.low_operands) if isinstance(value, Node)]


def stayed_fp32(report: ProgramReport, graphs: Iterable[Graph]) -> list[str]:
    """Return a line for each op on features that computes in FP32, with the reason."""
    lines: list[str] = []
    for node in _nodes(graphs):
        op, kind = op_of(node), _counted_kind(node)
        if kind is None and (op is None or op.kind in ("precision", "structure")):
            continue
        if describe.precision_in(node) == "fp32":
            reason = _reason_aten(report, node) if op is None else _reason_fp32(report, node)
            lines.append(f"{_where(node)}: {reason}")
    return _collapse(lines)


def _where(node: Node) -> str:
    return f"{describe.shown_layer(describe.layer_of(node))} {op_name(node)}"


def _reason_fp32(report: ProgramReport, node: Node) -> str:
    notes = [note for note in report.notes if note.text.startswith(_STAYS)]
    same_node = [note for note in notes if note.node == node.meta["origin"]]
    for note in same_node:
        return note.text.removeprefix(_STAYS)
    return "fp32 was asked for" if report.precision == "fp32" else "no reason was recorded"


def stayed_aten(report: ProgramReport, graphs: Iterable[Graph]) -> list[str]:
    """Return a line for each op that PyTorch runs."""
    return [f"{_where(node)}: {_reason_aten(report, node)}" for node in _aten_nodes(graphs)]


def _aten_nodes(graphs: Iterable[Graph]) -> list[Node]:
    """Return the ATen ops outside of fused kernels that no kernel of a backend takes alone."""
    return [
        node
        for node in _nodes(graphs)
        if node.op in ("call_function", "call_method", "call_module")
        and not (is_gnnc(node) or describe.is_free(node) or _has_own_kernel(node))
    ]


def _has_own_kernel(node: Node) -> bool:
    """Return whether a kernel of the backend computes a node, alone or with others."""
    return bool(node.meta["block"]) or node.meta.get("kernel") not in (None, "reference")


def _is_alone(note: Remark) -> bool:
    """Return whether a note says why an op is in no fused kernel."""
    return note.text.startswith(f"{_ALONE}: ")


def thread_dependent(report: ProgramReport) -> list[str]:
    """Return a line for each ATen op whose last bits depend on the number of threads; none on a GPU."""
    if report.backend not in ("cpu", "reference"):
        return []
    graphs = [describe.inline(gm) for _, gm in report.parts]
    return [
        f"{_where(node)}: ATen divides it among threads in a way that changes its rounding"
        for node in _nodes(graphs)
        if node.op == "call_function"
        and (report.backend == "reference" or not _has_own_kernel(node))
        and depends_on_threads(node)
    ]


def _reason_aten(report: ProgramReport, node: Node) -> str:
    texts = [note.text for note in report.notes if note.node == node.meta["origin"]]
    return "; ".join(dict.fromkeys(texts)) or f"{_ALONE}, in its own precision"
