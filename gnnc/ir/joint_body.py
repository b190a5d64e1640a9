"""Joint bodies: a body that computes the values of several, for one pass over the edges."""

from typing import Any

from torch import fx
from torch.fx import Node

from gnnc.ir.body import KINDS, body_text, body_values, parse_body
from gnnc.ir.nodes import call_key

BY_SOURCE = "by_source"
"""Key of ``node.meta``: whether a body of a group goes over the transpose of the CSR of the others."""


class JointBody:
    """Body that computes the values of several bodies; equal computations are merged.

    Attributes:
        operands: the operands by destination, by source, by edge, and the constants.
        graph: the computations, without an output.
    """

    def __init__(self) -> None:
        self.operands: tuple[list[Node], ...] = ([], [], [], [])
        self.graph = fx.Graph()
        self._known: dict[Any, Node] = {}

    def add(self, text: str, operands: tuple[Any, ...]) -> list[Node]:
        """Add a body with its operands; return its values."""
        graph, copies = parse_body(text).graph, dict[Node, Node]()
        for node in graph.nodes:
            if node.op == "placeholder":
                kind = KINDS.index(str(node.target)[0])
                copies[node] = self._operand(kind, operands[kind][int(str(node.target)[1:])])
            elif node.op == "call_function":
                copies[node] = self._call(node, copies)
        return [copies[value] for value in body_values(graph)]

    def provide(self, operand: Node, value: Node) -> None:
        """Let bodies that are added later read a value of the graph in place of an operand by edge."""
        self._known[KINDS.index("e"), operand] = value

    def _operand(self, kind: int, operand: Node) -> Node:
        if (kind, operand) not in self._known:
            self._known[kind, operand] = self.graph.placeholder(f"{KINDS[kind]}{len(self.operands[kind])}")
            self.operands[kind].append(operand)
        return self._known[kind, operand]

    def operand(self, placeholder: Node) -> tuple[int, Node]:
        """Return the operand that a placeholder of the graph stands for, behind the number of its kind."""
        kind = KINDS.index(str(placeholder.target)[0])
        return kind, self.operands[kind][int(str(placeholder.target)[1:])]

    def _call(self, node: Node, copies: dict[Node, Node]) -> Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        key = call_key(node.target, args, kwargs)
        if key not in self._known:
            self._known[key] = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        return self._known[key]

    def text(self, results: Node | list[Node]) -> str:
        """Return the text of the body that returns ``results``."""
        self.graph.output(results)
        return body_text(self.graph)
