"""Statements of C++ functions of a body, and the names of the values that they define."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.fx import Node

from gnnc.runtime.cuda.kernels.body_places import Place


@dataclass(slots=True)
class Scope:
    """Statements of one C++ block, and the names of the values that they define."""

    outer: "Scope | None" = None
    lines: list[str] = field(default_factory=list)
    known: dict[tuple[Node, Place], str] = field(default_factory=dict)

    def find(self, key: tuple[Node, Place]) -> str | None:
        """Return the name of a value that is visible here."""
        return self.known.get(key) or (self.outer.find(key) if self.outer else None)


def statements(write: Callable[[Scope], str]) -> str:
    """Return the statements of a function, given what writes its result into a scope."""
    scope = Scope()
    value = write(scope)
    return " ".join([*scope.lines, f"return {value};"])
