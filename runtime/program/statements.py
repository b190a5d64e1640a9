"""The statements of a program under construction, and the constants that they use."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from gnnc.runtime.program.launches import Call, Dense, Expr, Let, Operand, Statement, literal, variable

_NO_KEYWORDS: Mapping[str, Operand] = MappingProxyType({})


class StatementList:
    """Statements and constants of one program.

    Attributes:
        body: the statements, each with the node of the graph that it belongs to.
        constants: the objects that statements use, by name.
    """

    def __init__(self) -> None:
        self.body: list[tuple[Statement, Node | None]] = []
        self.constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._count = 0
        self._step = 0
        self._node: Node | None = None

    def enter(self, step: int, node: Node) -> None:
        """Start the statements of a node, the graph's node number ``step``."""
        self._step, self._node = step, node

    def append(self, statement: Statement) -> None:
        """Append a statement that belongs to the present node."""
        self.body.append((statement, self._node))

    def fresh(self, hint: str) -> str:
        """Return a name that nothing else in the program has."""
        self._count += 1
        return f"{hint}_{self._count}"

    def bind(self, value: Any, hint: str = "k") -> Expr:
        """Return the constant that holds ``value``; ``hint`` begins its name."""
        key = id(value)
        if key not in self._names:
            self._names[key] = self.fresh(hint)
            self.constants[self._names[key]] = value
        return variable(self._names[key])

    def let(self, hint: str, value: Expr) -> Expr:
        """Return a new variable that holds the value of an expression."""
        name = self.fresh(hint)
        self.append(Let(name, value))
        return variable(name)

    def as_dense(self, hint: str, value: Expr) -> Expr:
        """Return a new variable for a tensor without gaps between its elements; ``hint`` begins its name."""
        name = self.fresh(hint)
        self.append(Dense(name, value))
        return variable(name)

    def call(
        self,
        function: Expr,
        arguments: Iterable[Operand],
        keywords: Mapping[str, Operand] = _NO_KEYWORDS,
        *,
        result: str | None = None,
    ) -> None:
        """Append the call of a function.

        Args:
            function: the constant that is called.
            arguments: its arguments; tensors that it writes to are given as ``Expr.written``.
            keywords: its arguments by name.
            result: name of the variable that holds the returned value; None where that is not used.
        """
        by_name = tuple((name, literal(value)) for name, value in keywords.items())
        self.append(Call(function.text, tuple(map(literal, arguments)), by_name, result))

    def let_call(self, hint: str, function: Expr, arguments: Iterable[Operand]) -> Expr:
        """Return a new variable that holds what a function returns; ``hint`` begins its name."""
        name = self.fresh(hint)
        self.call(function, arguments, result=name)
        return variable(name)
