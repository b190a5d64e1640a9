"""Guards on values: questions of a model about numbers that it computes from tensors, answered by a guess.

``if index.numel() > 0`` behind a selection, or ``if mask.any()``, has no answer while a model is traced. A
guess decides it, and the numbers that it depends on become outputs of the graph: a call for which another
answer holds is captured again, with the numbers of that call as guesses.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from gnnc.capture.function_mode import Function, FunctionMode
from gnnc.capture.thread_patches import in_this_thread, replaced
from gnnc.torch_private import GuardOnDataDependentSymNode, PythonPrinter, ShapeEnv, raw_expression

_MOST_QUESTIONS = 24
"""Questions of one trace: a loop that ends by a value asks for ever."""
_MOST_STEPS = 256
"""Largest value that forward may take for a number, such as the steps of a loop, which a trace unrolls."""
_FIRST_GUESS = 11
_LARGEST = 2**50
"""Bound of every number that a graph has."""
_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_ASKED = "asked_symbol"
"""Key of a node's metadata: the symbol of its number in the first trace."""
Number = int | float | bool


@dataclass(frozen=True)
class ValueGuard:
    """A condition on numbers that a program computes.

    Attributes:
        condition: the condition, which must hold.
        where: file and line of the question.
    """

    condition: Any
    where: str


class OtherValues(Exception):  # noqa: N818  not an error: another program serves the call
    """Exception of a call for which a guess of its program does not hold.

    Attributes:
        values: the numbers of the call, by the names of their symbols.
        where: file and line of the question.
    """

    def __init__(self, values: dict[str, Number], where: str) -> None:
        super().__init__(f"another answer at {where}")
        self.values, self.where = values, where


@contextlib.contextmanager
def guessed(values: Mapping[str, Number]) -> Iterator[list[ValueGuard]]:
    """Answer questions about values in this thread; yields the list of the answers.

    Args:
        values: guesses by the names of symbols; others get a small number, or true.
    """
    found: list[ValueGuard] = []
    asked: set[Any] = set()
    original = ShapeEnv.evaluate_expr

    def evaluate(env: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(env, expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            answer = expr.xreplace({symbol: _guess(env, symbol, values) for symbol in expr.free_symbols})
            if answer.is_Integer and answer <= _MOST_STEPS:
                condition = sympy.Eq(expr, answer)
            elif answer in (sympy.true, sympy.false):
                condition = expr if answer is sympy.true else sympy.Not(expr)
            else:
                raise
            if condition not in asked:
                if len(asked) >= _MOST_QUESTIONS:
                    raise
                asked.add(condition)
                found.append(ValueGuard(condition, _asker()))
                _keep(env, condition)
            return answer

    with replaced(ShapeEnv, "evaluate_expr", in_this_thread(evaluate, original)):
        yield found


_READS: dict[Callable[..., Any], Callable[[bool], Any]] = {
    torch.Tensor.__bool__: bool,
    torch.Tensor.item: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__index__: int,
}
"""Methods that read the one value of a tensor, with the type of the result for a bool."""


class EqualMode(FunctionMode):
    """Mode in which ``torch.equal`` and ``torch.allclose`` ask about a value, as ``(a == b).all()`` does.

    A bool is asked about as an integer where it is read: torch 2.11 loses track of the symbols of bools, and
    no bound tells them from integers that are 0 or 1. ``apply_`` is refused as torch refuses ``map_``: on the
    absent memory of a stand-in it crashes the process.
    """

    def _call(self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is torch.Tensor.apply_:
            raise TypeError(".apply_ is not supported for tensor subclasses")
        compare = _COMPARISONS.get(func)
        if compare is not None:
            return compare(*args, **kwargs)
        if func in _READS and args[0].dtype is torch.bool:
            return _READS[func](_is_true(args[0]))
        return func(*args, **kwargs)


def _is_true(value: torch.Tensor) -> bool:
    return bool(value.to(torch.int64).item() != 0)


def _equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    return input.shape == other.shape and _is_true((input == other).all())


def _all_close(input: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return _is_true(torch.isclose(input, other, *args, **kwargs).all())


_COMPARISONS: dict[Callable[..., Any], Callable[..., bool]] = {
    torch.equal: _equal,
    torch.Tensor.equal: _equal,
    torch.allclose: _all_close,
    torch.Tensor.allclose: _all_close,
}
"""Functions that compare all elements of two tensors."""


def asked_symbols(graph: Graph) -> list[Any]:
    """Return for each number that a graph reads from a tensor the symbol that questions about it have."""
    return [_symbol(raw_expression(node.meta["val"])) for node in _readings(graph)]


def keep_symbols(graph: Graph, symbols: Sequence[Any]) -> None:
    """Note the symbols of ``asked_symbols`` on the numbers of a graph that was traced again.

    A second trace names numbers anew, and the names of bools lead nowhere: their values are known by then.
    """
    readings = _readings(graph)
    if len(readings) == len(symbols):
        for node, symbol in zip(readings, symbols, strict=True):
            node.meta[_ASKED] = symbol


def _readings(graph: Graph) -> list[Node]:
    symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
    found = graph.find_nodes(op="call_function", target=torch.ops.aten.item.default)
    return [node for node in found if isinstance(node.meta.get("val"), symbolic)]


def add_values(graph: Graph, found: Sequence[ValueGuard]) -> tuple[dict[str, Node], list[ValueGuard]]:
    """Return the nodes of the numbers in the conditions, by symbol, and the conditions over these.

    Sizes of tensors become nodes; a number that the graph does not compute is absent.
    """
    wanted = {symbol for guard in found for symbol in guard.condition.free_symbols}
    nodes: dict[str, Node] = {}
    for node in list(graph.nodes) if wanted else ():
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            symbols = map(_symbol, (raw_expression(value), value.node.expr))
            for symbol in (node.meta.get(_ASKED), *symbols):
                if symbol in wanted:
                    nodes.setdefault(str(symbol), node)
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            symbol = raw_expression(size) if isinstance(size, torch.SymInt) else None
            if symbol in wanted and str(symbol) not in nodes:
                with graph.inserting_before(graph.output_node()):
                    made = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                made.meta = {"val": size, "layer": ""}
                nodes[str(symbol)] = made
    return nodes, list(dict.fromkeys(found))


def test_of(guards: Sequence[ValueGuard], names: Sequence[str]) -> Callable[[Sequence[Any]], None]:
    """Return a function that takes the values of symbols, and raises OtherValues where a guard fails."""
    printer = PythonPrinter()
    text = [f"lambda {', '.join(names)}: bool({printer.doprint(guard.condition)})" for guard in guards]
    tests = [(eval(each), guard.where) for each, guard in zip(text, guards, strict=True)]

    def check(values: Sequence[Any]) -> None:
        for test, where in tests:
            if not test(*values):
                raise OtherValues(dict(zip(names, values, strict=True)), where)

    return check


def _keep(env: ShapeEnv, condition: Any) -> None:
    """Keep the computation of the numbers in a condition in the graph, by an assertion about each.

    To assert the condition would make some symbols numbers, which passes fold: the guard would always hold.
    """
    for symbol in condition.free_symbols:
        env.guard_or_defer_runtime_assert(sympy.Le(symbol, _LARGEST), "kept")


def _guess(env: ShapeEnv, symbol: Any, values: Mapping[str, Number]) -> Any:
    """Return the guess for a symbol: a given one, the size of a stand-in, true, or a small number."""
    known = values.get(str(symbol))
    if known is not None:
        return sympy.sympify(int(known) if isinstance(known, bool) else known)
    # torch 2.13 renamed the table.
    name = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"
    size = getattr(env, name).get(symbol)
    if size is not None:
        return size
    bounds = env.var_to_range.get(symbol)
    if bounds is not None and bounds.upper == 1:
        return sympy.Integer(1)
    digits = "".join(filter(str.isdigit, str(symbol)))
    guess = sympy.Integer(_FIRST_GUESS + int(digits or 0))
    return guess if symbol.is_integer else sympy.Float(guess)


def _symbol(expression: Any) -> Any:
    """Return the symbol that an expression is; that of a bool ``b`` is the ``u`` of ``Eq(u, 1)``."""
    if isinstance(expression, sympy.Eq) and 1 in expression.args:
        expression = next(side for side in expression.args if side != 1)
    return expression if expression.is_Symbol else None


def _asker() -> str:
    """Return file and line of the code that asked: the first frame outside torch and gnnc, or in PyG."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_FOREIGN) or "torch_geometric" in name:
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "a step of torch"
