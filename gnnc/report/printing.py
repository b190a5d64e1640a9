"""A graph or a whole program as text: Python that runs, one op a line, with typed comments.

Values and symbolic sizes are renamed by first appearance, so the text depends on the graph alone:
no addresses, no paths, no times. ``graph_source`` gives text that ``exec`` accepts with the names
that ``namespace`` provides.
"""

import contextlib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gnnc.ir import describe
from gnnc.ir.exact_reads import EXACT
from gnnc.ir.nodes import is_gnnc, is_result, op_name, outputs_of, qtype_of, result_index, schema_of
from gnnc.ir.parts import BACKWARD, FEATURES, FORWARD, STRUCTURE, Parts
from gnnc.ir.source import source_of
from gnnc.report.crossing import crossing_lines
from gnnc.report.naming import Named, identifier, name_graph, name_program
from gnnc.torch_private import HigherOrderOperator, OpOverload, overload_name, schema

INDENT = "    "
COMMENT_COLUMN = 84
"""Comments line up at most this far right; longer statements push only their own comment."""

_INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    torch.ops.aten.add.Tensor: "+",
    torch.ops.aten.sub.Tensor: "-",
    torch.ops.aten.mul.Tensor: "*",
    torch.ops.aten.div.Tensor: "/",
}
PART_TITLES = {STRUCTURE: "structure", FEATURES: "features", FORWARD: "compute", BACKWARD: "backward"}
"""Names of the printed function of each part."""

_WHEN = {
    STRUCTURE: "runs once per distinct graph; the results are cached",
    FEATURES: "runs once per distinct feature matrix; the results are cached",
    FORWARD: "runs at every call",
    BACKWARD: "runs when gradients are computed",
}
LEGEND = (
    "# comments: type | layer | precision | what shares a scale | kernel, format, remark (no empty columns)",
    "# a with block is one kernel; of its values only those that it stores go to memory",
)
"""Lines that explain the comments of a program."""

_KINDS = (
    "gemm",
    "gemm_tn",
    "spmm",
    "attention",
    "attention_backward",
    "body_attention_backward",
    "bodies",
    "map",
    "graph",
)


def format_graph(gm: GraphModule, *, name: str = "forward", notes: Mapping[str, str] | None = None) -> str:
    """Return a graph as a readable Python function.

    Args:
        gm: any graph of the pipeline; fused submodules are shown as indented blocks.
        name: the function's name.
        notes: a remark for a node, by node name; it ends the node's comment.
    """
    return _Printer(name_graph(gm), notes or {}, {}).function(name)


def graph_source(gm: GraphModule, name: str = "forward") -> str:
    """Return Python source that computes what ``gm`` computes.

    After ``exec(source, names := namespace(gm))``, ``names[name]`` takes the graph's values in
    placeholder order and returns its output.
    """
    return format_graph(gm, name=name)


def namespace(gm: GraphModule | None = None) -> dict[str, Any]:
    """Return the names that printed source refers to."""
    fused = SimpleNamespace(**dict.fromkeys(_KINDS, contextlib.nullcontext))
    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "gnnc": torch.ops.gnnc,
        "operator": operator,
        "math": math,
        "fused": fused,
        "self": gm,
    }


def format_program(parts: Parts, header: Sequence[str] = (), notes: Mapping[str, str] | None = None) -> str:
    """Return a compiled program: header lines and a legend, then each of its parts as a function.

    A message body that two parts compute is defined above the first.

    Args:
        parts: the graphs of the program.
        header: plain lines that come first, such as ``gnnc.report.text.header_lines`` gives.
        notes: a remark for a node of any part, by node name.
    """
    texts = ["\n".join(header), "\n".join(LEGEND)] if header else []
    bodies: dict[str, str] = {}
    for part, named in name_program(parts).items():
        text = _Printer(named, notes or {}, bodies).function(PART_TITLES[part])
        remarks = crossing_lines(named) if part == BACKWARD else []
        texts.append("\n".join([f"# {_WHEN[part]}", *remarks, text]))
    return "\n\n".join(texts)


@dataclass
class _Line:
    """One printed line: code, and the cells of the comment after it."""

    code: str
    cells: tuple[str, ...] = ()
    aligned: bool = field(default=True)


class _Printer:
    def __init__(self, named: Named, notes: Mapping[str, str], bodies: dict[str, str]) -> None:
        self._graph = named.graph
        self._names = named.names
        self._named = named
        self._notes = notes
        self._bodies = bodies
        self._defined = len(bodies)
        self._folded = _unpacked(named.graph)

    def function(self, name: str) -> str:
        """Return the whole function as text."""
        lines = self._statements()
        signature = self._signature(name)
        return self._body_definitions() + "\n".join(_render(signature) + _render(lines))

    def _signature(self, name: str) -> list[_Line]:
        inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        if not inputs:
            return [_Line(f"def {name}():")]
        arguments = [
            _Line(f"{INDENT}{self._names[node]},", (self._type(node), _origin(node))) for node in inputs
        ]
        return [_Line(f"def {name}("), *arguments, _Line("):")]

    def _statements(self) -> list[_Line]:
        lines: list[_Line] = []
        block = None
        for node in self._graph.nodes:
            if node.op == "placeholder" or node in self._folded:
                continue
            if node.op == "output":
                lines.append(_Line(f"{INDENT}return {self._literal(outputs_of(self._graph))}"))
                continue
            if node.meta["block"] != block:
                block = node.meta["block"]
                lines += self._block_header(block)
            lines.append(self._statement(node, INDENT * (2 if block else 1)))
        return lines

    def _block_header(self, block: describe.Block | None) -> list[_Line]:
        if block is None:
            return []
        stored = [self._names[node] for node in self._graph.nodes if _leaves(node, block)]
        remarks = [f"one kernel{f' ({block.kernel})' if block.kernel else ''}"]
        remarks += [block.format] if block.format else []
        remarks += [f"stores {', '.join(stored)}"] if stored else []
        remarks += [self._notes[block.node]] if block.node in self._notes else []
        kind = block.kind if block.kind in _KINDS else "graph"
        header = _Line(f"{INDENT}with fused.{kind}():", ("; ".join(remarks),), aligned=False)
        return [header]

    def _statement(self, node: Node, indent: str) -> _Line:
        code = f"{indent}{self._target(node)} = {self._expression(node)}"
        return _Line(code, self._cells(node))

    def _target(self, node: Node) -> str:
        results = self._results(node)
        if results == [node]:
            return self._names[node]
        by_index = {result_index(part): self._names[part] for part in results}
        named = [by_index.get(index, "_") for index in range(len(node.meta["val"]))]
        return ", ".join(named) + ("," if len(named) == 1 else "")

    def _cells(self, node: Node) -> tuple[str, ...]:
        return (
            self._type(node),
            describe.layer_of(node),
            _precision(node, self._results(node)[0]),
            describe.granularity_of(node),
            self._remarks(node),
        )

    def _remarks(self, node: Node) -> str:
        remarks: list[str] = []
        if op_name(node) == "quantize" and len(node.users) > 1:
            remarks.append(f"used {len(node.users)} times")
        if EXACT in node.meta:
            remarks.append("exact")
        if (kernel := node.meta.get("kernel")) and not describe.is_free(node):
            remarks.append(str(kernel))
        if formats := describe.format_text(node):
            remarks.append(formats)
        if note := self._notes.get(node.meta["origin"]):
            remarks.append(note)
        return "; ".join(remarks)

    def _type(self, node: Node) -> str:
        return ", ".join(self._named.type_text(n.meta.get("val"), qtype_of(n)) for n in self._results(node))

    def _results(self, node: Node) -> list[Node]:
        """Return what a line makes: the parts of a tuple that is taken apart, else the node."""
        parts = _parts(node) if describe.returns_many(node) else []
        if not parts or parts[0] not in self._folded:
            return [node]
        return sorted(parts, key=result_index)

    def _expression(self, node: Node) -> str:
        if node.op == "get_attr":
            return f"self.{node.target}"
        arguments = [self._argument(node, index) for index in range(len(node.args))]
        if node.target in _INFIX and len(arguments) == 2 and not node.kwargs:
            return f"{arguments[0]} {_INFIX[node.target]} {arguments[1]}"
        if node.target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        if node.target is torch.ops.aten.sym_size.int:
            return f"{arguments[0]}.size({arguments[1]})"
        arguments += [f"{key}={self._literal(value)}" for key, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
        return f"{_callee(node)}({', '.join(arguments)})"

    def _argument(self, node: Node, index: int) -> str:
        # Text repeats the arguments of any op as they were given, by position or by keyword.
        value = node.args[index]
        if is_gnnc(node) and isinstance(value, str):
            if schema_of(node).arguments[index].name in ("body", "logit"):
                return self._bodies.setdefault(value, f"body{len(self._bodies)}")
        return self._literal(value)

    def _literal(self, value: Any) -> str:
        if isinstance(value, Node):
            return self._names[value]
        if isinstance(value, tuple):
            items = [self._literal(item) for item in value]
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(self._literal(item) for item in value)}]"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(self._literal(part) for part in parts)})"
        return _constant(value)

    def _body_definitions(self) -> str:
        new = list(self._bodies.items())[self._defined :]
        return "".join(f"{_body(name, text)}\n\n" for text, name in new)


def _body(name: str, text: str) -> str:
    """Return the definition of a message body: its text, a statement a line."""
    statements = text.split("; ")
    pieces = [f"{statement}; " for statement in statements[:-1]] + statements[-1:]
    lines = "\n".join(f"{INDENT}{_constant(piece)}" for piece in pieces)
    legend = "for every edge: i* rows of its destination, j* of its source, e* its own"
    return f"{name} = (  # {legend}\n{lines}\n)"


def _constant(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    return repr(value)


def _callee(node: Node) -> str:
    target = node.target
    if node.op == "call_module":
        return f'self.get_submodule("{target}")'
    if isinstance(target, OpOverload):
        space, name = schema(target).name.split("::")
        root = space if space in ("aten", "gnnc") else f"torch.ops.{space}"
        overload = overload_name(target)
        return f"{root}.{name}" if overload == "default" else f"{root}.{name}.{overload}"
    if isinstance(target, HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}"
    module = str(getattr(target, "__module__", "torch")).removeprefix("_")
    return f"{module}.{op_name(node)}"


def _precision(node: Node, result: Node) -> str:
    before, after = describe.precision_in(node), describe.precision_of(result)
    if before is None or after is None:
        return ""
    return after if before == after else f"{before}→{after}"


def _origin(node: Node) -> str:
    source = source_of(node)
    if source is None:
        return ""
    named = source.kind in ("parameter", "buffer") and identifier(source.name) != source.name
    return f"{source.kind} {source.name}" if named else source.kind


def _parts(node: Node) -> list[Node]:
    return [user for user in node.users if is_result(user)]


def _unpacked(graph: Graph) -> set[Node]:
    """Return the ``getitem`` nodes that print as the targets of their tuple's own line."""
    folded: set[Node] = set()
    for node in graph.nodes:
        parts = _parts(node) if describe.returns_many(node) else []
        indices = [result_index(part) for part in parts]
        plain = all(isinstance(index, int) and index >= 0 for index in indices)
        if parts and plain and len(parts) == len(node.users) == len(set(indices)):
            folded.update(parts)
    return folded


def _leaves(node: Node, block: describe.Block) -> bool:
    if node.op == "output" or node.meta["block"] != block or describe.returns_many(node):
        return False
    return any(user.meta.get("block") != block for user in node.users)


def _render(lines: Sequence[_Line]) -> list[str]:
    aligned = [line for line in lines if line.aligned and any(line.cells)]
    widths = _column_widths(line.cells for line in aligned)
    fitting = [len(line.code) for line in aligned if len(line.code) <= COMMENT_COLUMN]
    column = max(fitting, default=0)
    return [_join(line, column, widths) for line in lines]


def _column_widths(rows: Iterable[tuple[str, ...]]) -> list[int]:
    widths: list[int] = []
    for row in rows:
        widths += [0] * (len(row) - len(widths))
        widths = [max(width, len(cell)) for width, cell in zip(widths, row, strict=True)]
    return widths


def _join(line: _Line, column: int, widths: Sequence[int]) -> str:
    if not any(line.cells):
        return line.code
    widths = widths if line.aligned else [0] * len(line.cells)
    kept = [cell.ljust(w) for cell, w in zip(line.cells, widths, strict=True) if w or cell]
    return f"{line.code.ljust(column)}  # {'  '.join(kept)}".rstrip()
