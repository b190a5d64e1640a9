"""Kernels of structure graphs: functions that a structure program calls in place of an op's reference."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import fx
from torch.fx import Graph, Node

from gnnc.runtime.registry import STRUCTURE, Choice, kernel

_Function = TypeVar("_Function", bound=Callable[..., Any])


class PartEmitter:
    """Graph of one part of a structure graph, built call by call.

    Attributes:
        graph: the part.
        operands: nodes of the structure graph whose values are the part's placeholders, in order.
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.operands: list[Node] = []
        self._values: dict[Node, Node] = {}

    def value(self, node: Node) -> Node:
        """Return the part's node for the value of a node of the structure graph."""
        if node not in self._values:
            with self.graph.inserting_before():
                self._values[node] = self.graph.placeholder(node.name)
            self.operands.insert(0, node)
        return self._values[node]

    def call(self, node: Node, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Add a call of ``function`` that computes ``node``; arguments are nodes of the structure graph."""
        arguments = fx.map_arg((args, kwargs), self.value)
        self._values[node] = self.graph.call_function(function, *arguments)

    def copy(self, node: Node) -> None:
        """Add a copy of ``node``."""
        self._values[node] = self.graph.node_copy(node, self.value)

    def finish(self, results: list[Node]) -> None:
        """Return the values of ``results`` from the part; drop unused nodes."""
        self.graph.output(tuple(map(self.value, results)))
        self.graph.eliminate_dead_code()


def choice_of(node: Node) -> Choice | None:
    """Return the kernel that ``lower`` chose for a node, or None."""
    choice = node.meta.get("choice")
    return choice if isinstance(choice, Choice) else None


def structure_kernel(op: str, *, backend: str, name: str) -> Callable[[_Function], _Function]:
    """Register a function that takes an op's arguments as its kernel in structure graphs.

    Args:
        op: the op, such as ``gnnc.csr``.
        backend: name of the backend.
        name: unique within the backend.
    """

    def register(function: _Function) -> _Function:
        @kernel(f"{STRUCTURE}{op}", backend=backend, name=name)
        class FunctionKernel:
            """Calls the function with the arguments of the op."""

            @staticmethod
            def plan(node: Node) -> None:
                """Take any node."""

            @staticmethod
            def emit(plan: None, node: Node, emitter: PartEmitter) -> None:
                """Add the call."""
                # By position: the function has the op's parameters in their order, whatever the op.
                emitter.call(node, function, *node.args, **node.kwargs)

        return function

    return register
