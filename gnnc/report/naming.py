"""Readable, deterministic names for the values and the symbolic sizes of a graph."""

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from gnnc.ir.describe import changes_precision, dtype_text, element_text, inline, returns_many
from gnnc.ir.nodes import arguments, first_operand, is_result, outputs_of, result_index
from gnnc.ir.op import op_of
from gnnc.ir.parts import BACKWARD, FEATURES, FORWARD, SAVED, STRUCTURE, Parts
from gnnc.ir.qtype import QType
from gnnc.ir.source import Source, is_weight, source_of
from gnnc.torch_private import schema

Sizes = tuple[sympy.Expr, ...]

_FLOATS = {STRUCTURE: "g", FEATURES: "f", FORWARD: "h", BACKWARD: "d"}
"""First letter of the names of floating-point values, by part."""


@dataclass(frozen=True, slots=True)
class Named:
    """A flat graph with names for its values and sizes.

    Attributes:
        graph: the graph, every fused submodule inlined.
        symbols: names of its sizes.
        names: names of its values.
        outputs: the name of each output, by the output node's name before inlining.
    """

    graph: Graph
    symbols: "Symbols"
    names: dict[Node, str]
    outputs: dict[str, str]

    def type_text(self, value: Any, qtype: QType | None = None) -> str:
        """Return a value's type, such as ``f32[N, 64]`` or ``i4[N, 64]``; a tuple's are joined by commas.

        Args:
            value: the value.
            qtype: the type of its quantized values, or None.
        """
        if isinstance(value, tuple | list):
            return ", ".join(filter(None, (self.type_text(item) for item in value)))
        if isinstance(value, torch.Tensor):
            element = dtype_text(value.dtype) if qtype is None else element_text(qtype)
            return f"{element}[{', '.join(self.symbols.shape(value))}]"
        if isinstance(value, int | torch.SymInt):
            return "int"
        return type(value).__name__ if value is not None else ""


def name_graph(gm: GraphModule) -> Named:
    """Name the values and sizes of a graph by first appearance."""
    return _named(gm, {}, {}, "h")


def name_program(parts: Parts) -> dict[str, Named]:
    """Name the parts of a program: a value or size that goes from one to another keeps its name.

    A structure graph that computes nothing is left out.
    """
    named: dict[str, Named] = {}
    values: dict[Source, str] = {}
    sizes: dict[Source, Sizes] = {}
    for part, gm in parts:
        if part == STRUCTURE and not any(n.op == "call_function" for n in gm.graph.nodes):
            continue
        named[part] = _named(gm, values, sizes, _FLOATS[part])
        for source, node in _handed_over(part, gm, named[part].graph):
            values[source] = named[part].names[node]
            sizes[source] = named[part].symbols.sizes(node.meta.get("val"))
    return named


def _handed_over(part: str, gm: GraphModule, inlined: Graph) -> list[tuple[Source, Node]]:
    """Return the outputs of a part that other parts read, each with the source that they read it from."""
    if part == STRUCTURE:
        return [(Source("structure", name), node) for name, node in _named_outputs(gm, inlined)]
    if part == FEATURES:
        return [(Source("features", str(i)), node) for i, node in enumerate(_flat(outputs_of(inlined)))]
    outputs = outputs_of(inlined)
    return [(Source("saved", name), outputs[place]) for name, place in gm.meta.get(SAVED, {}).items()]


def _named(
    gm: GraphModule,
    values: Mapping[Source, str],
    sizes: Mapping[Source, Sizes],
    floats: str,
) -> Named:
    graph = inline(gm)
    symbols = Symbols(graph, sizes)
    names = value_names(graph, symbols, values, floats)
    outputs = {name: names[node] for name, node in _named_outputs(gm, graph)}
    return Named(graph, symbols, names, outputs)


def _named_outputs(gm: GraphModule, inlined: Graph) -> list[tuple[str, Node]]:
    before, after = _flat(outputs_of(gm.graph)), _flat(outputs_of(inlined))
    return [(node.name, new) for node, new in zip(before, after, strict=True)]


def _flat(values: Any) -> list[Node]:
    if isinstance(values, Node):
        return [values]
    if isinstance(values, tuple | list):
        return [node for value in values for node in _flat(value)]
    return []


class Symbols:
    """Names of size symbols by first appearance: ``N`` for nodes, ``E`` for edges.

    Args:
        graph: the graph whose placeholders and values introduce the symbols.
        given: sizes of what other parts hand over, in their names, by source. Placeholders of these sources
            take them over, so that all parts of a program call the same size by the same name.
    """

    def __init__(self, graph: Graph, given: Mapping[Source, Sizes] | None = None) -> None:
        self._names: dict[sympy.Symbol, sympy.Expr] = {}
        self._taken: set[str] = set()
        nodes = list(graph.nodes)
        for node in (*nodes, *nodes):  # a size of two symbols waits for the placeholder that gives one
            self._adopt(node, given or {})
        for node in sorted(nodes, key=_appearance):
            self._name_sizes(node.meta.get("val"), _counts_nodes(node))

    def text(self, size: Any) -> str:
        """Return a concrete or symbolic size as text, such as ``64`` or ``E + N``."""
        return str(self._named(size))

    def shape(self, value: torch.Tensor) -> tuple[str, ...]:
        """Return the sizes of a tensor as text."""
        return tuple(self.text(size) for size in value.shape)

    def sizes(self, value: Any) -> Sizes:
        """Return the sizes of a tensor, or a size itself, as expressions of the names."""
        return tuple(self._named(size) for size in _all_sizes(value))

    def is_symbol(self, name: str) -> bool:
        """Return whether ``name`` is the name of a size."""
        return name in self._taken

    def _named(self, size: Any) -> sympy.Expr:
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return sympy.sympify(size)
        self._name_free(size, "N")
        return size.node.expr.xreplace(self._names)

    def _adopt(self, node: Node, given: Mapping[Source, Sizes]) -> None:
        source = source_of(node)
        if source is None or source not in given:
            return
        for size, known in zip(_all_sizes(node.meta.get("val")), given[source], strict=False):
            symbol = self._only_unknown(size)
            if symbol is not None:
                # size = symbol + rest, and it is ``known`` in the other part
                self._names[symbol] = known - (size.node.expr - symbol).xreplace(self._names)
                self._taken.update(str(name) for name in known.free_symbols)

    def _only_unknown(self, size: Any) -> sympy.Symbol | None:
        """Return the symbol without a name of a size that is this symbol and something else, added up."""
        if not isinstance(size, torch.SymInt):
            return None
        unknown = [symbol for symbol in size.node.expr.free_symbols if symbol not in self._names]
        is_sum = len(unknown) == 1 and unknown[0] not in (size.node.expr - unknown[0]).free_symbols
        return unknown[0] if is_sum else None

    def _name_sizes(self, value: Any, counts_nodes: bool = False) -> None:
        if isinstance(value, tuple | list):
            for item in value:
                self._name_sizes(item)
        elif isinstance(value, torch.SymInt):
            self._name_free(value, "N")
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    self._name_free(size, "N" if counts_nodes else _letter(value, dim))

    def _name_free(self, size: Any, letter: str) -> None:
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return
        for symbol in sorted(size.node.expr.free_symbols, key=str):
            self._name(symbol, letter)

    def _name(self, symbol: sympy.Symbol, letter: str) -> None:
        if symbol not in self._names:
            name = _first_free(letter, self._taken)
            self._names[symbol] = sympy.Symbol(name, integer=True)
            self._taken.add(name)


def _all_sizes(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return (value,) if isinstance(value, int | torch.SymInt) else ()


def _appearance(node: Node) -> int:
    """Sort key: inputs that say what their sizes mean come first, then the order of the graph."""
    value = node.meta.get("val")
    if node.op != "placeholder" or not isinstance(value, torch.Tensor):
        return 3
    if value.dim() == 2 and _is_index(value):
        return 0
    return 1 if value.dim() == 1 and value.dtype == torch.int32 else 2


def _counts_nodes(node: Node) -> bool:
    """Return whether a vector of integers is one of nodes, by its name; others are of edges."""
    source, value = source_of(node), node.meta.get("val")
    if source is None or not isinstance(value, torch.Tensor):
        return False
    return value.dim() == 1 and "batch" in source.name


def _letter(value: torch.Tensor, dim: int) -> str:
    if not _is_index(value):
        return "N" if dim == 0 else "F"
    size = value.shape[0]
    if value.dim() == 1 and isinstance(size, torch.SymInt):
        symbols = size.node.expr.free_symbols
        if len(symbols) == 1 and size.node.expr not in symbols:
            return "N"  # rowptr: N + 1, unlike the columns with loops: E1 + N
    return "E"


def _is_index(value: torch.Tensor) -> bool:
    return value.dtype in (torch.int64, torch.int32)


def _first_free(letter: str, taken: set[str]) -> str:
    if letter not in taken:
        return letter
    count = 1
    while f"{letter}{count}" in taken:
        count += 1
    return f"{letter}{count}"


def value_names(
    graph: Graph,
    symbols: Symbols,
    given: Mapping[Source, str] | None = None,
    floats: str = "h",
) -> dict[Node, str]:
    """Name every value of a flat graph by what it is, in order of appearance.

    Parameters and inputs keep their own names, ``h0, h1, …`` are float results, a value made from
    another one says so (``h1_scale``, ``h1_q``), and a size is called by its symbol.

    Args:
        graph: a graph without fused submodules (see ``gnnc.ir.describe.inline``).
        symbols: names of the sizes.
        given: names that other parts use for the values that they pass to this one, by source.
        floats: prefix of the names of float results that are not edge tensors.
    """
    namer = _Namer(symbols, given or {}, floats)
    return {node: namer.name(node) for node in graph.nodes if node.op != "output"}


class _Namer:
    def __init__(self, symbols: Symbols, given: Mapping[Source, str], floats: str) -> None:
        self._floats = floats
        self._symbols = symbols
        self._given = given
        self._taken: set[str] = {"torch", "aten", "gnnc", "fused", "self", "_"}
        self._counts: dict[str, int] = {}
        self._weights: dict[Node, str] = {}
        self._names: dict[Node, str] = {}

    def name(self, node: Node) -> str:
        self._names[node] = result = self._choose(node)
        self._taken.add(result)
        return result

    def _choose(self, node: Node) -> str:
        if symbol := self._size_symbol(node):
            return self._unique(symbol)
        if node.op == "placeholder":
            return self._unique(self._placeholder(node))
        if node.op == "get_attr":
            return self._unique(identifier(str(node.target)))
        if part := self._part(node):
            return self._unique(part)
        op = op_of(node)
        if op is None or op.label is None:
            return self._numbered(self._kind(node))
        return self._labeled(node, op.label)

    def _labeled(self, node: Node, label: str) -> str:
        """Return the name that an op's label asks for, see ``gnnc.ir.op.Op``."""
        if label.endswith("{n}"):
            prefix = label.removesuffix("{n}")
            return self._numbered(self._floats if prefix == _FLOATS[FORWARD] else prefix)
        bases = {name: self._base(made) for name, made in arguments(node).items() if f"{{{name}}}" in label}
        return self._unique(label.format(**bases))

    def _base(self, node: Node) -> str:
        """Return what derived names start with: ``w0`` for a weight, whose own name is long."""
        if not is_weight(node):
            return self._names[node]
        return self._weights.setdefault(node, f"w{len(self._weights)}")

    def _size_symbol(self, node: Node) -> str | None:
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            return None
        text = self._symbols.text(value)
        return text if text.isidentifier() else None

    def _placeholder(self, node: Node) -> str:
        source = source_of(node)
        if source is None:
            return identifier(str(node.target))
        if source.kind == "constant" and _is_scale(node):
            return self._numbered("scale")
        if source.kind == "tangent":
            return f"tangent{source.name}"
        if source in self._given:
            return identifier(self._given[source])
        return identifier(source.name)

    def _part(self, node: Node) -> str | None:
        """Name one result of an op with several by its role."""
        if not is_result(node):
            return None
        op, index = op_of(first_operand(node)), result_index(node)
        return None if op is None else schema(op.target).returns[index].name

    def _kind(self, node: Node) -> str:
        value = node.meta.get("val")
        if returns_many(node):
            return "t"
        if not isinstance(value, torch.Tensor):
            return "n"
        if value.dtype == torch.bool:
            return "mask"
        if not value.dtype.is_floating_point:
            return "i"
        first = self._symbols.text(value.shape[0]) if value.dim() else ""
        return "e" if first.startswith("E") else self._floats

    def _numbered(self, prefix: str) -> str:
        while True:
            count = self._counts.get(prefix, 0)
            self._counts[prefix] = count + 1
            if f"{prefix}{count}" not in self._taken:
                return f"{prefix}{count}"

    def _unique(self, name: str) -> str:
        result, count = name, 2
        while result in self._taken or (self._symbols.is_symbol(result) and result != name):
            result, count = f"{name}_{count}", count + 1
        return result


def _is_scale(node: Node) -> bool:
    """Return whether a constant only scales quantized values: a static scale."""
    return all(changes_precision(user) for user in node.users)


def identifier(text: str) -> str:
    """Return ``text`` as a Python identifier: ``conv1.lin.weight`` becomes ``conv1_lin_weight``."""
    result = re.sub(r"\W+", "_", text).strip("_") or "v"
    if result[0].isdigit():
        result = f"v{result}"
    return f"{result}_" if keyword.iskeyword(result) else result
