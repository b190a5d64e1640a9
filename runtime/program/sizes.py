"""Symbolic sizes of a graph as Python text over the shapes of values that a call has at hand."""

from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

_TYPICAL = 4096


def expression(size: Any) -> sympy.Expr:
    """Return a concrete or symbolic size as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def typical(size: Any) -> int:
    """Return a plausible value of a size: the traced one where known."""
    expr = expression(size)
    if expr.is_number:
        return int(expr)
    hint = getattr(size.node, "_hint", None)
    return int(hint) if hint is not None else int(expr.subs(dict.fromkeys(expr.free_symbols, _TYPICAL)))


class Sizes:
    """Names the sizes that a program needs.

    Attributes:
        inline: write a size out at each use; else give it a variable, to be set at the start.
        variables: the variables so far, and what sets them.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self.inline = inline
        self.variables: dict[str, str] = {}
        self._sources: dict[sympy.Expr, str] = {}
        self._texts: dict[sympy.Expr, str] = {}

    def learn(self, name: str, value: Any) -> None:
        """Note that the variable ``name`` holds ``value`` (a tensor's or a size's meta)."""
        if isinstance(value, torch.SymInt):
            self._sources.setdefault(value.node.expr, name)
        if not isinstance(value, torch.Tensor):
            return
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                self._sources.setdefault(size.node.expr, f"{name}.shape[{dim}]")

    def text(self, size: Any) -> str | None:
        """Return Python text for a size, or None while a symbol of it is unknown."""
        expr = expression(size)
        if expr.is_number:
            return str(int(expr))
        if expr in self._texts:
            return self._texts[expr]
        if expr in self._sources:
            return self._variable(expr)
        if isinstance(expr, sympy.Symbol):
            return self._solve(expr)
        return self._compose(expr)

    def _variable(self, expr: sympy.Expr) -> str:
        if self.inline:
            return self._sources[expr]
        name = f"n{len(self.variables)}"
        self.variables[name] = self._sources[expr]
        self._texts[expr] = name
        return name

    def _compose(self, expr: sympy.Expr) -> str | None:
        parts = {symbol: self._symbol(symbol) for symbol in sorted(expr.free_symbols, key=str)}
        if any(text is None for text in parts.values()):
            return None
        named = expr.xreplace({s: sympy.Symbol(t, integer=True) for s, t in parts.items()})
        self._texts[expr] = text = f"({PythonPrinter().doprint(named)})"
        return text

    def _symbol(self, symbol: sympy.Symbol) -> str | None:
        if symbol not in self._texts and symbol in self._sources:
            return self._variable(symbol)
        return self._texts.get(symbol) or self._solve(symbol)

    def _solve(self, symbol: sympy.Symbol) -> str | None:
        """Find a symbol that only shows up inside a known size, such as ``E`` of ``E + N``."""
        for known in list(self._sources):
            others = known.free_symbols - {symbol}
            rest = known - symbol
            if symbol not in known.free_symbols or symbol in rest.free_symbols:
                continue
            if all(other in self._sources or other in self._texts for other in others):
                self._texts[symbol] = text = f"({self._variable(known)} - {self._rest(rest)})"
                return text
        return None

    def _rest(self, expr: sympy.Expr) -> str | None:
        return str(int(expr)) if expr.is_number else self._compose(expr)
