"""Guards on sizes: the questions of a model's own code about sizes while it is traced, and the answers.

Tracing assumes sizes of at least 2, so ``if edge_index.numel() == 0`` is answered without leaving a trace:
a program for large graphs would then serve an empty one, wrongly. So the questions are recorded here and
become guards: a call with another answer is captured by itself.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import BooleanFunction
from torch.fx import Graph

from gnnc.capture.thread_patches import ThreadFlag, replaced
from gnnc.ir.nodes import argument, first_operand, shape_of, unpack
from gnnc.torch_private import SIZE_CHECKS, PythonPrinter, SymNodeVariable

_TORCH = str(Path(torch.__file__).parent)
_GNNC = str(Path(__file__).parents[1])
_OPERATORS = str(Path(torch.__file__))
"""File in which ``SymInt`` turns ``if n:`` into ``if n != 0:``."""
_DYNAMO = str(Path(_TORCH) / "_dynamo" / "utils.py")
"""File in which Dynamo runs an operator that it met in the model."""
_STRIDES = str(Path(_TORCH) / "_prims_common")
"""Folder in which torch computes strides, and whether a tensor is contiguous."""
_DIVISIONS = ("FloorDiv", "CleanDiv", "Mod", "PythonMod")
"""Classes of torch's own divisions of sizes."""
_CHECKS = frozenset(check.__code__ for check in SIZE_CHECKS)
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "__eq__": sympy.Eq,
    "__ne__": sympy.Ne,
    "__lt__": sympy.Lt,
    "__le__": sympy.Le,
    "__gt__": sympy.Gt,
    "__ge__": sympy.Ge,
}


@dataclass(frozen=True)
class Branch:
    """A question about sizes and its answer.

    Attributes:
        condition: the condition, over the symbols of the sizes.
        answer: the answer that the model got.
        where: file and line of the question.
    """

    condition: sympy.Basic
    answer: bool
    where: str

    def test(self) -> Callable[[Mapping[sympy.Symbol, int]], bool]:
        """Return a function that says whether graphs of given sizes get the same answer."""
        symbols = sorted(self.condition.free_symbols, key=str)
        text = PythonPrinter().doprint(self.condition)
        ask = eval(f"lambda {', '.join(map(str, symbols))}: bool({text})")
        return lambda sizes: ask(*(sizes[symbol] for symbol in symbols)) == self.answer


@contextlib.contextmanager
def watched() -> Iterator[list[Branch]]:
    """Collect the questions of this thread that are not torch's own; complete after the block.

    Questions of torch that refuse a size are collected, too.
    """
    branches: list[Branch] = []
    notes = _Notes()
    patches: list[tuple[type, str, Any]] = [
        (torch.SymInt, name, notes.comparison(getattr(torch.SymInt, name), relation))
        for name, relation in _COMPARISONS.items()
    ]
    patches.append((torch.SymBool, "__bool__", notes.decision(torch.SymBool.__bool__)))
    patches.append((SymNodeVariable, "evaluate_expr", notes.dynamo(SymNodeVariable.evaluate_expr)))
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: branches.extend(notes.found))
        for patch in patches:
            stack.enter_context(replaced(*patch))
        yield branches


def at_least_two(symbols: Iterable[sympy.Symbol]) -> list[Branch]:
    """Return the guards that Dynamo assumes without a recorded question: sizes of at least 2."""
    return [
        Branch(sympy.Ge(symbol, 2, evaluate=False), True, "a step traced for two rows or more")
        for symbol in symbols
    ]


def assumed_sizes(env: Any) -> list[Branch]:
    """Return the guards that torch assumed about sizes: ``x[:n]``, the number of parts of ``x.split(5)``.

    A size such as ``n - m`` is assumed to be 2 or more where torch computes strides, and neither 1 nor 0
    where it broadcasts, as sizes of arguments are: no guards, because the graph is the same for smaller ones.
    """
    found = [guard.expr for guard in getattr(env, "guards", ()) if not _is_of_strides(guard)]
    parts = (part for expr in found for part in sympy.preorder_traversal(expr))
    divisors = [part.args[1] for part in parts if type(part).__name__ in _DIVISIONS]
    nonzero = [sympy.Ne(divisor, 0, evaluate=False) for divisor in divisors if not divisor.is_number]
    guards = dict.fromkeys([*nonzero, *found])
    return [Branch(expr, True, "a step that depends on the sizes") for expr in guards]


def slices_within(graph: Graph) -> list[Branch]:
    """Return the guards that constant ends of slices lie within the tensor; in a smaller one they are others.

    Tracing assumes sizes of at least 2 without a question, so ``x[:2]`` would have two rows of one. That a
    traced size is smaller was a question.
    """
    found: dict[Branch, None] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        size = shape_of(first_operand(node))[argument(node, "dim")]
        ends = [abs(end) for end in unpack(node, "start", "end") if type(end) is int and end != sys.maxsize]
        if isinstance(size, torch.SymInt) and any(ends) and (size.node.hint or 0) >= max(ends):
            within = sympy.Ge(size.node.expr, max(ends), evaluate=False)
            found[Branch(within, True, "a slice with constant ends")] = None
    return list(found)


def in_final_symbols(branches: Iterable[Branch], env: Any) -> list[Branch]:
    """Return questions in the symbols that a trace ends with: it may have found two sizes to be one since.

    Args:
        branches: the questions; those that one size for two answers are left out.
        env: the shape environment of the trace, or None.
    """
    found = getattr(env, "replacements", {})
    renamed = [replace(branch, condition=_renamed(branch.condition, found)) for branch in branches]
    return [branch for branch in renamed if branch.condition.free_symbols]


def _renamed(condition: sympy.Basic, symbols: Mapping[Any, Any]) -> sympy.Basic:
    """Return a condition in other symbols; unevaluated, since sympy takes each size for positive."""
    if not condition.free_symbols & symbols.keys():
        return condition
    if isinstance(condition, BooleanFunction):
        return condition.func(*(_renamed(part, symbols) for part in condition.args))
    relation: Any = condition.func
    sides = [side.xreplace(symbols) for side in condition.args]
    if len(set(sides)) < len(sides):
        return relation(*sides)
    return _renamed(relation(*sides, evaluate=False), symbols)


def _is_of_strides(guard: Any) -> bool:
    expr = guard.expr
    if isinstance(expr, sympy.Ne) and expr.rhs in (-1, 0, 1):
        return True
    if isinstance(expr, sympy.Ge) and expr.rhs == 2 and not isinstance(expr.lhs, sympy.Symbol):
        return True  # whether so many elements are contiguous
    frame = guard.sloc.framework_loc
    return getattr(frame, "filename", "").startswith(_STRIDES) and not isinstance(expr, sympy.Eq)


class _Notes:
    """Recorder of the questions about sizes that the thread which created it asks, each once.

    Its functions count frames, so that none of them is wrapped in ``in_this_thread``.
    """

    def __init__(self) -> None:
        self.here = ThreadFlag()
        self.found: dict[Branch, None] = {}

    def comparison(self, original: Callable[..., Any], relation: Callable[..., Any]) -> Callable[..., Any]:
        """Record comparisons that tracing answers at once, because every size is positive."""

        def compare(this: Any, other: Any) -> Any:
            result = original(this, other)
            answer = _known(result) if self.here else None
            if answer is not None:
                sides = _expression(this), _expression(other)
                if sides[0] != sides[1]:
                    self._note(relation(*sides, evaluate=False), answer, _asker(sys._getframe(1)))
            return result

        return compare

    def decision(self, original: Callable[..., bool]) -> Callable[..., bool]:
        """Record every other condition where it is decided."""

        def decide(this: Any) -> bool:
            answer = original(this)
            if self.here:
                self._note(this.node.expr, answer, _asker(sys._getframe(1)))
            return answer

        return decide

    def dynamo(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Record every condition that Dynamo decides for the model."""

        def decide(this: Any, *args: Any) -> Any:
            answer = original(this, *args)
            if self.here and isinstance(answer, bool) and isinstance(this.sym_num, torch.SymBool):
                self._note(this.sym_num.node.expr, answer, sys._getframe(0))
            return answer

        return decide

    def _note(self, condition: Any, answer: bool, frame: FrameType | None) -> None:
        if frame is None or not condition.free_symbols:
            return
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self.found.setdefault(Branch(condition, bool(answer), where))


def _known(result: Any) -> bool | None:
    """Return the answer of a comparison that is settled already; None otherwise."""
    if isinstance(result, bool):
        return result
    expression = result.node.expr if isinstance(result, torch.SymBool) else None
    return bool(expression) if expression in (sympy.true, sympy.false) else None


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.sympify(value)


def _asker(frame: FrameType | None) -> FrameType | None:
    """Return the frame that asked, in the model's code or a check of torch; None for other code of torch."""
    while frame is not None and frame.f_code.co_filename == _OPERATORS:
        frame = frame.f_back
    if frame is None:
        return None
    if frame.f_code in _CHECKS:
        return frame
    name = frame.f_code.co_filename
    ours = name == _DYNAMO or "torch_geometric" in name or not name.startswith((_TORCH, _GNNC, "<"))
    return frame if ours else None
