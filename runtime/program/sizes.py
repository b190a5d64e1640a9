"""Symbolic sizes of a graph, as Python expressions over the shapes of values that a call has at hand."""

from typing import Any

import sympy
import torch

from gnnc.runtime.program.launches import Expr, expr, variable
from gnnc.torch_private import PythonPrinter

_ASSUMED = 4096
"""Value of a size that was never seen."""


def expression(size: Any) -> sympy.Expr:
    """Return a concrete or symbolic size as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def assumed(size: Any) -> int:
    """Return a plausible value of a size: the traced one where known."""
    symbolic = expression(size)
    if symbolic.is_number:
        return int(symbolic)
    hint = getattr(size.node, "_hint", None)
    return int(hint if hint is not None else symbolic.subs(dict.fromkeys(symbolic.free_symbols, _ASSUMED)))


class Sizes:
    """Expressions for the sizes that a program needs.

    Attributes:
        inline: whether a size is written out at each use; else it gets a variable, set at the start.
        variables: the variables so far, and the expressions that set them.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self.inline = inline
        self.variables: dict[str, Expr] = {}
        self._sources: dict[sympy.Expr, Expr] = {}
        self._known: dict[sympy.Expr, Expr] = {}

    def learn(self, source: Expr, value: Any) -> None:
        """Note that the expression ``source`` has the value ``value`` (a tensor's or a size's meta)."""
        if isinstance(value, torch.SymInt):
            self._sources.setdefault(value.node.expr, source)
        if not isinstance(value, torch.Tensor):
            return
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                self._sources.setdefault(size.node.expr, expr("{}.shape[{}]", source, dim))

    def find(self, size: Any) -> Expr | None:
        """Return the expression of a size, or None while a symbol of it is unknown."""
        symbolic = expression(size)
        if symbolic.is_number:
            return Expr(str(int(symbolic)))
        if symbolic in self._known:
            return self._known[symbolic]
        if symbolic in self._sources:
            return self._variable(symbolic)
        if isinstance(symbolic, sympy.Symbol):
            return self._solve(symbolic)
        return self._compose(symbolic)

    def _variable(self, symbolic: sympy.Expr) -> Expr:
        if self.inline:
            return self._sources[symbolic]
        name = f"n{len(self.variables)}"
        self.variables[name] = self._sources[symbolic]
        self._known[symbolic] = variable(name)
        return self._known[symbolic]

    def _compose(self, symbolic: sympy.Expr) -> Expr | None:
        parts = {symbol: self._symbol(symbol) for symbol in sorted(symbolic.free_symbols, key=str)}
        found = {symbol: part for symbol, part in parts.items() if part is not None}
        if len(found) < len(parts):
            return None
        named = symbolic.xreplace({s: sympy.Symbol(e.text, integer=True) for s, e in found.items()})
        reads = dict.fromkeys(name for part in found.values() for name in part.reads)
        self._known[symbolic] = composed = Expr(f"({PythonPrinter().doprint(named)})", tuple(reads))
        return composed

    def _symbol(self, symbol: sympy.Symbol) -> Expr | None:
        if symbol not in self._known and symbol in self._sources:
            return self._variable(symbol)
        return self._known.get(symbol) or self._solve(symbol)

    def _solve(self, symbol: sympy.Symbol) -> Expr | None:
        """Find a symbol that only shows up inside a known size, such as ``E`` of ``E + N``."""
        for known in list(self._sources):
            others = known.free_symbols - {symbol}
            rest = known - symbol
            if symbol not in known.free_symbols or symbol in rest.free_symbols:
                continue
            if all(other in self._sources or other in self._known for other in others):
                self._known[symbol] = solved = expr("({} - {})", self._variable(known), self._rest(rest))
                return solved
        return None

    def _rest(self, symbolic: sympy.Expr) -> Expr | None:
        return Expr(str(int(symbolic))) if symbolic.is_number else self._compose(symbolic)
