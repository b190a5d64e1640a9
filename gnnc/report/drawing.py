"""A compiled program as a networkx graph, and as a picture of its kernels."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import networkx as nx
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch, Rectangle
from matplotlib.path import Path as Curve
from torch.fx import Node

from gnnc.errors import InputError
from gnnc.ir import describe
from gnnc.ir.nodes import is_gnnc, op_name, qtype_of
from gnnc.ir.parts import FEATURES, STRUCTURE, Parts
from gnnc.ir.source import source_of
from gnnc.paths import writing
from gnnc.report.figure_style import save
from gnnc.report.layered_layout import Layout, layered_layout
from gnnc.report.naming import Named, name_program
from gnnc.report.printing import PART_TITLES

FORMATS = (".svg", ".png", ".pdf")

_FILL = {"int": "#cdeae4", "bf16": "#fde7c1", "fp16": "#fde7c1", "fp32": "#dbe6f5"}
_EDGE = {"int": "#1f7a6b", "bf16": "#a86a00", "fp16": "#a86a00", "fp32": "#3d5f94"}
_STRUCTURE = ("#ece5f5", "#6b4fa0")
_PLAIN = ("#f5f5f3", "#8a8a85")
_INK, _SOFT, _WIRE = "#22252a", "#5c6370", "#9aa1ab"
_STRUCTURE_BOX = "structure"
_CHARACTER, _TITLE_CHARACTER = 0.072, 0.096
_GAP = 0.5
_MARGIN = 0.4
_LINE = 0.19
_MAX_LINE = 44


def to_networkx(parts: Parts) -> nx.DiGraph:
    """Return every value of a program as a node, and every use as an edge.

    Node names are ``<part>.<value>``, part and value named as in ``str(compiled)``. Attributes: ``part``
    (``structure``, ``features``, ``compute`` or ``backward``), ``op``, ``layer``, ``precision``, ``type``
    (``f32[N, 64]``), ``kernel``, ``launch`` (equal for ops that one kernel runs) and ``source`` (kind of an
    input, else empty). Edges carry the ``type`` of the value that flows.
    """
    graph = nx.DiGraph()
    given: dict[tuple[str, str], str] = {}
    for part, named in name_program(parts).items():
        title = PART_TITLES[part]
        nodes = _add_part(graph, title, named, given)
        if part == STRUCTURE:
            given |= {(part, name): nodes[node] for name, node in _outputs(named)}
        elif part == FEATURES:
            given |= {(part, str(i)): nodes[node] for i, (_, node) in enumerate(_outputs(named))}
        else:
            _add_outputs(graph, title, named, nodes)
    return graph


def _add_outputs(graph: nx.DiGraph, part: str, named: Named, nodes: dict[Node, str]) -> None:
    for index, (_, node) in enumerate(_outputs(named)):
        name, text = f"{part}.output{index}", named.type_text(node.meta.get("val"))
        graph.add_node(name, **_output_attributes(part, name, text))
        graph.add_edge(nodes[node], name, type=text)


def draw(
    path: str | Path,
    parts: Parts,
    *,
    title: str = "",
) -> None:
    """Write a picture of a program: one box a kernel launch, data flows from top to bottom.

    Args:
        path: file to write; its suffix chooses SVG, PNG or PDF.
        parts: the graphs of the program; the structure graph is drawn as one box.
        title: a line above the picture.

    Raises:
        InputError: the suffix is none of these, or the file cannot be written.
    """
    with writing("draw", path) as file:
        if file.suffix.lower() not in FORMATS:
            raise InputError(f"draw writes {', '.join(FORMATS)} files, got {str(path)!r}")
        boxes, wires = _launch_boxes(to_networkx(parts))
        save(_figure(boxes, wires, title), file)


def _outputs(named: Named) -> list[tuple[str, Node]]:
    by_name = {text: node for node, text in named.names.items()}
    return [(name, by_name[text]) for name, text in named.outputs.items()]


def _add_part(
    graph: nx.DiGraph, part: str, named: Named, given: dict[tuple[str, str], str]
) -> dict[Node, str]:
    """Add one part's values; those that ``given`` has by kind and name of the source exist already."""
    names: dict[Node, str] = {}
    for node in named.graph.nodes:
        if node.op == "output":
            continue
        source = source_of(node)
        if source is not None and (source.kind, source.name) in given:
            names[node] = given[source.kind, source.name]
            continue
        names[node] = f"{part}.{named.names[node]}"
        graph.add_node(names[node], part=part, **_attributes(node, part, named))
        for operand in node.all_input_nodes:
            text = named.type_text(operand.meta.get("val"), qtype_of(operand))
            graph.add_edge(names[operand], names[node], type=text)
    return names


def _attributes(node: Node, part: str, named: Named) -> dict[str, Any]:
    block, source = node.meta["block"], source_of(node)
    before, after = describe.precision_in(node), describe.precision_of(node)
    changes = None not in (before, after) and before != after and node.op != "placeholder"
    return {
        "op": op_name(node),
        "layer": describe.layer_of(node),
        "precision": f"{before}→{after}" if changes else after or "",
        "type": named.type_text(node.meta.get("val"), qtype_of(node)),
        "kernel": (block.kernel if block else node.meta.get("kernel")) or "",
        "launch": f"{part}.{block.node}" if block else f"{part}.{named.names[node]}",
        "source": source.kind if source else "",
        "label": source.name if source else named.names[node],
        "primitive": is_gnnc(node) and not describe.changes_precision(node),
        "free": node.op == "call_function" and describe.is_free(node),
    }


def _output_attributes(part: str, name: str, text: str) -> dict[str, Any]:
    return {
        "part": part,
        "op": "output",
        "layer": "",
        "precision": "",
        "type": text,
        "kernel": "",
        "launch": name,
        "source": "output",
        "label": "output",
        "primitive": False,
        "free": False,
    }


@dataclass(frozen=True, slots=True)
class _Box:
    lines: tuple[str, ...]
    fill: str
    edge: str

    @property
    def width(self) -> float:
        title, *rest = self.lines
        widest = max((len(line) * _CHARACTER for line in rest), default=0.0)
        return max(1.3, widest + 0.3, len(title) * _TITLE_CHARACTER + 0.3)


def _launch_boxes(graph: nx.DiGraph) -> tuple[dict[str, _Box], dict[tuple[str, str], str]]:
    """Merge each launch's nodes into a box; views and sizes join what they look at."""
    home = _homes(graph)
    members: dict[str, list[dict[str, Any]]] = {}
    for node, data in graph.nodes(data=True):
        members.setdefault(home[node], []).append(data)
    boxes = {name: _box(name, data) for name, data in members.items() if not _hidden(data)}
    wires: dict[tuple[str, str], str] = {}
    for start, end, data in graph.edges(data=True):
        pair = (home[start], home[end])
        if pair[0] != pair[1] and boxes.keys() >= set(pair) and data["type"] != "int":
            wires.setdefault(pair, data["type"])
    return boxes, wires


def _homes(graph: nx.DiGraph) -> dict[str, str]:
    home: dict[str, str] = {}
    for node in nx.topological_sort(graph):
        data = graph.nodes[node]
        first = next(iter(graph.predecessors(node)), None)
        if data["part"] == "structure" and data["source"] != "input":
            home[node] = _STRUCTURE_BOX
        elif data["free"] and first is not None and data["launch"] == node:
            home[node] = home[first]
        else:
            home[node] = data["launch"]
    return home


def _hidden(data: Sequence[dict[str, Any]]) -> bool:
    """Weights and constants are named in the box that reads them, not drawn."""
    return all(d["source"] in ("parameter", "buffer", "constant", "size") for d in data)


def _box(name: str, data: Sequence[dict[str, Any]]) -> _Box:
    first = data[0]
    if name == _STRUCTURE_BOX:
        return _structure_box(data)
    if first["source"]:
        return _Box((first["label"], first["type"] or first["source"]), *_PLAIN)
    named = [d for d in data if d["primitive"]] or [d for d in data if not d["free"]] or list(data)
    title = " + ".join(_runs(d["op"] for d in named))
    rest = " · ".join(_runs(d["op"] for d in data if d not in named and not d["free"]))
    precision = min((d["precision"] for d in named if d["precision"]), key=_width, default="")
    where = "  ".join(filter(None, (named[0]["layer"], precision)))
    stored = data[-1]["type"]
    lines = [title, *_wrap(rest), where, stored, first["kernel"]]
    return _Box(tuple(filter(None, lines)), *_colors(precision))


def _structure_box(data: Sequence[dict[str, Any]]) -> _Box:
    ops = _runs(d["op"] for d in data if not d["free"] and not d["source"])
    return _Box(("structure, once per graph", *_wrap(" · ".join(ops))), *_STRUCTURE)


def _runs(ops: Iterable[str]) -> list[str]:
    """Return the ops in order, equal neighbors merged: ``quantize ×2``."""
    counted = [(op, len(list(run))) for op, run in groupby(ops)]
    return [f"{op} ×{count}" if count > 1 else op for op, count in counted]


def _wrap(text: str) -> list[str]:
    lines: list[str] = []
    for word in text.split(" · ") if text else []:
        if lines and len(lines[-1]) + len(word) + 3 <= _MAX_LINE:
            lines[-1] += f" · {word}"
        else:
            lines.append(word)
    return lines


def _width(precision: str) -> int:
    return describe.bits_of(precision.split("→")[0])


def _colors(precision: str) -> tuple[str, str]:
    low = precision.split("→")[0]
    key = "int" if low.startswith("int") else low
    return _FILL.get(key, _PLAIN[0]), _EDGE.get(key, _PLAIN[1])


def _figure(boxes: dict[str, _Box], wires: dict[tuple[str, str], str], title: str) -> Figure:
    graph = nx.DiGraph()
    graph.add_nodes_from(boxes)
    graph.add_edges_from(wires)
    layout = layered_layout(graph, {name: box.width for name, box in boxes.items()})
    heights = _layer_heights(boxes, layout)
    tops = [sum(heights[:i]) for i in range(len(heights) + 1)]
    head, foot = 0.55 if title else 0.15, 0.45
    figure = Figure(figsize=(max(layout.width, 4.5) + 2 * _MARGIN, tops[-1] + head + foot))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    slack = max(0.0, 4.5 - layout.width) / 2
    axes.set_xlim(-_MARGIN - slack, layout.width + slack + _MARGIN)
    axes.set_ylim(tops[-1] + foot, -head)
    axes.axis("off")
    if title:
        axes.text(-slack, -0.25, title, fontsize=12, fontweight="bold", color=_INK, va="center")
    for edge in wires:
        _draw_wire(axes, boxes, layout, tops, edge)
    for name, box in boxes.items():
        x, layer = layout.position[name]
        _draw_box(axes, box, x, _middle(tops, layer))
    _draw_legend(axes, boxes.values(), (-slack, tops[-1] + foot / 2))
    return figure


def _middle(tops: Sequence[float], layer: float) -> float:
    return (tops[round(layer)] + tops[round(layer) + 1]) / 2


def _layer_heights(boxes: dict[str, _Box], layout: Layout) -> list[float]:
    heights = [0.0] * layout.layers
    for name, (_, layer) in layout.position.items():
        needed = _box_height(boxes[str(name)]) + _GAP
        heights[round(layer)] = max(heights[round(layer)], needed)
    return heights


def _box_height(box: _Box) -> float:
    return len(box.lines) * _LINE + 0.2


def _draw_box(axes: Axes, box: _Box, x: float, y: float) -> None:
    width, height = box.width, _box_height(box)
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.09"
    axes.add_patch(FancyBboxPatch(corner, width, height, style, fc=box.fill, ec=box.edge, lw=1.2, zorder=2))
    for index, line in enumerate(box.lines):
        at = corner[1] + 0.1 + (index + 0.5) * _LINE
        first = index == 0
        style = {"fontsize": 9.5 if first else 8, "fontweight": "bold" if first else "normal"}
        color = _INK if first else _SOFT
        axes.text(x, at, line, ha="center", va="center", color=color, zorder=3, **style)


def _draw_wire(
    axes: Axes,
    boxes: dict[str, _Box],
    layout: Layout,
    tops: Sequence[float],
    edge: tuple[Hashable, Hashable],
) -> None:
    (start_x, start), *between, (end_x, end) = layout.routes[edge]
    leave, enter = (_box_height(boxes[str(name)]) / 2 for name in edge)
    path = [((start_x, _middle(tops, start) + leave), Curve.MOVETO)]
    for x, layer in between:
        path += _bend(path[-1][0], (x, tops[round(layer)] + _GAP / 2))
        path.append(((x, tops[round(layer) + 1] - _GAP / 2), Curve.LINETO))
    x, y = end_x, _middle(tops, end) - enter
    path += _bend(path[-1][0], (x, y))
    vertices, codes = zip(*path, strict=True)
    axes.add_patch(PathPatch(Curve(vertices, codes), fc="none", ec=_WIRE, lw=1.1, zorder=1))
    tip = [(x, y), (x - 0.05, y - 0.1), (x + 0.05, y - 0.1), (x, y)]
    axes.add_patch(PathPatch(Curve(tip), fc=_WIRE, ec="none", zorder=1))


def _bend(start: tuple[float, float], end: tuple[float, float]) -> list[tuple[Any, Any]]:
    half = (start[1] + end[1]) / 2
    points = [(start[0], half), (end[0], half), end]
    return [(point, Curve.CURVE4) for point in points]


def _draw_legend(axes: Axes, boxes: Iterable[_Box], at: tuple[float, float]) -> None:
    used = {box.fill for box in boxes}
    meaning = {
        _FILL["int"]: ("integer", _EDGE["int"]),
        _FILL["bf16"]: ("16-bit float", _EDGE["bf16"]),
        _FILL["fp32"]: ("FP32", _EDGE["fp32"]),
        _STRUCTURE[0]: ("cached per graph", _STRUCTURE[1]),
        _PLAIN[0]: ("input, output", _PLAIN[1]),
    }
    x, y = at
    for fill, (label, edge) in meaning.items():
        if fill in used:
            axes.add_patch(Rectangle((x, y - 0.06), 0.2, 0.12, fc=fill, ec=edge, lw=1))
            axes.text(x + 0.28, y, label, fontsize=8, color=_SOFT, va="center")
            x += len(label) * _CHARACTER + 0.5
