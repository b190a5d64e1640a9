"""Boundary between structure graph and compute graph: the shapes of its values, and the examples' values."""

import re
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import fake_mode_of, placeholders
from gnnc.ir.nodes import outputs_of
from gnnc.ir.op import size_expr
from gnnc.ir.parts import Parts
from gnnc.ir.source import Source, is_structure, source_of
from gnnc.passes.base import Context
from gnnc.torch_private import ConstantSource, DimDynamic, ShapeEnv

_ASSUMED_EDGES = 4096


def expression(size: Any) -> sympy.Expr:
    """Return a size, or a node that holds one, as a sympy expression."""
    return size_expr(size.meta["val"] if isinstance(size, Node) else size)


class Boundary:
    """Shapes of the boundary values without data-dependent symbols.

    Inside the structure graph the number of edges may be known only after it has run (self loops were
    removed: an unbacked symbol). To the compute graph it is the size of an input like any other.
    Numbers that are no tensor's size, such as the ends of a slice, keep their symbols: a backed symbol
    would specialize comparisons on its example.
    """

    def __init__(self, gm: fx.GraphModule, nodes: list[Node]) -> None:
        self._mode = fake_mode_of(gm)
        self._env: ShapeEnv | None = getattr(self._mode, "shape_env", None)
        self._equal = _equal_sizes(self._env)
        self._known: dict[sympy.Expr, sympy.Expr] = {}
        tensors = [value for node in nodes if isinstance(value := node.meta["val"], torch.Tensor)]
        self._symbols = {s for value in tensors for size in value.shape for s in _unbacked(self._expr(size))}
        for expr in _independent(self._unbacked_sizes(nodes)):
            self._known[expr] = self._fresh(expr)

    def value(self, node: Node) -> Any:
        """Return the meta value of the compute graph's placeholder for ``node``."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and self._mode is not None:
            with self._mode:
                sizes = [self._size(size) for size in value.shape]
                return torch.empty(sizes, dtype=value.dtype, device=value.device)
        return self._size(value) if isinstance(value, torch.SymInt) else value

    def _unbacked_sizes(self, nodes: list[Node]) -> set[sympy.Expr]:
        exprs = set[sympy.Expr]()
        for node in nodes:
            value = node.meta["val"]
            sizes = value.shape if isinstance(value, torch.Tensor) else [value]
            exprs |= {self._expr(s) for s in sizes if isinstance(s, torch.SymInt)}
        return {expr for expr in exprs if not _unbacked(expr).isdisjoint(self._symbols)}

    def _size(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt) or self._env is None:
            return size
        expr = self._expr(size)
        if _unbacked(expr).isdisjoint(self._symbols):
            return size
        fresh: Any = expr.subs(self._known)  # pyright: ignore[reportCallIssue]  sympy has no types
        return self._env.create_symintnode(fresh, hint=self._hint(fresh))

    def _expr(self, size: Any) -> sympy.Expr:
        """Return a size as an expression; sizes that the model needs equal are one expression."""
        expr = size_expr(size)
        while not self._equal.keys().isdisjoint(expr.free_symbols):
            expr = expr.xreplace(self._equal)
        return expr

    def _fresh(self, expr: sympy.Expr) -> sympy.Symbol:
        assert self._env is not None
        name = f"edges_{len(self._known)}_{expr}"
        return self._env.create_symbol(self._hint(expr), ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)

    def _hint(self, expr: sympy.Expr) -> int:
        assert self._env is not None
        # torch 2.13 renamed the table.
        name = "backed_var_to_val" if hasattr(self._env, "backed_var_to_val") else "var_to_val"
        hints = getattr(self._env, name)
        values = {symbol: hints.get(symbol, _ASSUMED_EDGES) for symbol in expr.free_symbols}
        return int(expr.xreplace({s: sympy.Integer(v) for s, v in values.items()}))


def _equal_sizes(env: ShapeEnv | None) -> dict[sympy.Symbol, sympy.Expr]:
    """Return data-dependent symbols that traced steps assert to equal expressions of earlier ones."""
    equal: dict[sympy.Symbol, sympy.Expr] = {}
    for asserts in getattr(env, "deferred_runtime_asserts", {}).values():
        for condition in (each.expr for each in asserts):
            if isinstance(condition, sympy.Eq):
                for symbol, other in (condition.args, condition.args[::-1]):
                    if symbol in _unbacked(symbol) and _is_earlier(other, symbol):
                        equal.setdefault(symbol, other)
    return equal


def _is_earlier(expr: sympy.Expr, symbol: sympy.Symbol) -> bool:
    """Return whether all data-dependent symbols of an expression were made before a symbol."""
    numbers = [int(re.sub(r"\D", "", each.name)) for each in (symbol, *_unbacked(expr))]
    return all(number < numbers[0] for number in numbers[1:])


def _unbacked(expr: sympy.Expr) -> set[sympy.Symbol]:
    return {s for s in expr.free_symbols if str(s).startswith(("u", "zuf"))}


def _independent(sizes: set[sympy.Expr]) -> list[sympy.Expr]:
    """Return the expressions to rename: a whole size if no other size has its symbols, else its symbols."""
    named: dict[sympy.Expr, None] = {}
    for expr in sorted(sizes, key=str):
        symbols = _unbacked(expr)
        shared = any(symbols & _unbacked(other) for other in sizes if other != expr)
        named |= dict.fromkeys(sorted(symbols, key=str) if shared else [expr])
    return list(named)


def run_structure(
    gm: fx.GraphModule, compute: fx.GraphModule, structure: fx.GraphModule, ctx: Context
) -> None:
    """Replace ``ctx.examples``, the values of ``gm``'s placeholders, by the values of ``compute``'s."""
    if ctx.examples is None:
        return
    values = dict(zip(placeholders(gm), ctx.examples, strict=True))
    named = {source_of(node): value for node, value in values.items()}
    inputs = tuple(_example(node, named) for node in placeholders(structure))
    structure.meta["examples"] = inputs
    refresh_examples(compute, structure, named, ctx)


def refresh_examples(
    compute: fx.GraphModule,
    structure: fx.GraphModule,
    named: dict[Source | None, Any],
    ctx: Context,
) -> None:
    """Run the structure graph on its examples, and set ``ctx.examples`` to the compute graph's values."""
    values = {**named, **_structure_values(structure, ctx)}
    ctx.examples = tuple(values[source_of(node)] for node in placeholders(compute))


def drop_structure(compute: fx.GraphModule, ctx: Context) -> None:
    """Replace the structure's values in ``ctx.examples`` by meta tensors: they are as large as the graph."""
    if ctx.examples is None:
        return
    pairs = zip(placeholders(compute), ctx.examples, strict=True)
    ctx.examples = tuple(_as_meta(value) if is_structure(node) else value for node, value in pairs)


def whole_examples(parts: Parts, ctx: Context) -> tuple[Any, ...] | None:
    """Return ``ctx.examples`` with the values of the structure graph, computed again."""
    if ctx.examples is None or parts.structure is None:
        return ctx.examples
    computed = _structure_values(parts.structure, ctx)
    pairs = zip(placeholders(parts.forward), ctx.examples, strict=True)
    return tuple(computed[source_of(node)] if is_structure(node) else value for node, value in pairs)


def _structure_values(structure: fx.GraphModule, ctx: Context) -> dict[Source | None, Any]:
    lowering = ctx.target.lowering
    run = structure if lowering is None else lowering.structure_program(structure)
    with torch.no_grad():
        outputs = run(*structure.meta["examples"])
    names = [node.name for node in outputs_of(structure.graph)]
    return {Source("structure", n): v for n, v in zip(names, outputs, strict=True)}


def _as_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _example(node: Node, named: dict[Source | None, Any]) -> Any:
    source = source_of(node)
    assert source is not None
    if source.kind != "size" or source in named:
        return named[source]
    name, dim = source.name[:-1].rsplit(".shape[", 1)
    return next(
        value.shape[int(dim)]
        for key, value in named.items()
        if key is not None and key.name == name and isinstance(value, torch.Tensor)
    )
