"""Guards: the conditions on later arguments under which a captured graph serves them."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from gnnc.capture.arguments import Call
from gnnc.capture.size_guards import Branch
from gnnc.torch_private import PythonPrinter

_TRACED_MIN, _TRACED_MAX = 3, 2**40  # sizes from 2 on; a pointer of N + 1 from 3 on


@dataclass(frozen=True)
class InputGuard:
    """Guard of one flat input: ``shape`` holds ints where fixed, sympy expressions where symbolic.

    ``unrolled`` lists the dimensions whose fixed size forward takes for a number. ``is_int`` says that the
    input stands for an int.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | sympy.Expr, ...]
    unrolled: tuple[int, ...] = ()
    is_int: bool = False

    def place(self, dim: int) -> str:
        """Return what a message calls a dimension."""
        return self.name if self.is_int else f"{self.name} dim {dim}"

    def differs(self, dim: int, shape: Sequence[int]) -> str:
        """Return the message about a size that is not the fixed one."""
        if dim in self.unrolled:
            text = (
                f"{self.place(dim)} is {shape[dim]}, but forward takes it for a number, as in a loop over it"
            )
            return f"{text}, and was captured for {self.shape[dim]}"
        if self.is_int:
            return f"{self.name} is {shape[dim]}, but was captured for {self.shape[dim]}"
        return f"expected {self}, got shape {tuple(shape)}"

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.shape))
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}[{dims}] on {self.device}"


@dataclass(frozen=True)
class Guards:
    """The guards of a capture.

    Attributes:
        inputs: one for each flat input tensor.
        ranges: (symbol, least, greatest) where the model's own code restricts a size.
        branches: the questions of the model's own code about sizes, with the answers.
    """

    inputs: tuple[InputGuard, ...]
    ranges: tuple[tuple[sympy.Symbol, int, int], ...] = ()
    branches: tuple[Branch, ...] = ()
    sizes_fit: Callable[[Sequence[torch.Tensor]], bool] = field(init=False, repr=False, compare=False)
    """Function that returns whether the sizes of tensors of the right ranks, dtypes and devices pass.

    It takes a microsecond; ``failure`` says in words why not.
    """
    are_met: Callable[[Sequence[Any]], bool] = field(init=False, repr=False, compare=False)
    """Function that returns whether values are dense tensors, one an input, and ``failure`` finds nothing."""
    _tests: tuple[tuple[Branch, Callable[..., bool]], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        answerable = [branch for branch in self.branches if branch.condition.free_symbols <= self.symbols]
        object.__setattr__(self, "_tests", tuple((branch, branch.test()) for branch in answerable))
        for name, function in _compiled(self).items():
            object.__setattr__(self, name, function)

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """Return the symbols of the sizes that may differ between calls."""
        return {size for guard in self.inputs for size in guard.shape if isinstance(size, sympy.Symbol)}

    def failure(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Return the first guard that ``tensors`` break, as a sentence; None where all hold."""
        sizes: dict[sympy.Symbol, tuple[int, str]] = {}
        derived: list[tuple[str, int, sympy.Expr]] = []
        for guard, tensor in zip(self.inputs, tensors, strict=True):
            if tensor.dtype != guard.dtype or tensor.device != guard.device:
                return f"expected {guard}, got {tensor.dtype} on {tensor.device}"
            if tensor.dim() != len(guard.shape):
                return f"expected {guard}, got shape {tuple(tensor.shape)}"
            for dim, (size, expected) in enumerate(zip(tensor.shape, guard.shape, strict=True)):
                if isinstance(expected, int):
                    if size != expected:
                        return guard.differs(dim, tensor.shape)
                elif isinstance(expected, sympy.Symbol):
                    known, owner = sizes.setdefault(expected, (size, guard.place(dim)))
                    if known != size:
                        return f"{guard.place(dim)} is {size}, but {owner} is {known}"
                else:
                    derived.append((guard.place(dim), size, expected))
        return _broken_relation(sizes, derived) or self._out_of_range(sizes) or self._other_branch(sizes)

    def serves(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Return whether sizes lie in the ranges, and the model's questions about them get the noted answers.

        The inputs' own shapes may be those of stand-ins.
        """
        sizes = {
            expected: (size, guard.name)
            for guard, shape in zip(self.inputs, shapes, strict=True)
            for size, expected in zip(shape, guard.shape, strict=True)
            if isinstance(expected, sympy.Symbol)
        }
        return self._out_of_range(sizes) is None and self._other_branch(sizes) is None

    def _other_branch(self, sizes: dict[sympy.Symbol, tuple[int, str]]) -> str | None:
        values = {symbol: size for symbol, (size, _) in sizes.items()}
        for branch, test in self._tests:
            if not test(values):
                return f"the model asks about sizes at {branch.where}, and goes another way here"
        return None

    def _out_of_range(self, sizes: dict[sympy.Symbol, tuple[int, str]]) -> str | None:
        for symbol, low, high in self.ranges:
            if symbol in sizes and not low <= sizes[symbol][0] <= high:
                size, owner = sizes[symbol]
                return f"{owner} is {size}, but was captured for {low} to {high}"
        return None


def guards_of(program: ExportedProgram, call: Call, unrolled: Collection[tuple[str, int]] = ()) -> Guards:
    """Return the guards of the placeholders that tracing left.

    Args:
        program: the exported program.
        call: the call that was traced.
        unrolled: the (tensor, dimension) pairs whose size forward takes for a number.
    """
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = program.graph_signature.input_specs
    placeholders = [
        node for node, spec in zip(nodes, specs, strict=True) if spec.kind is InputKind.USER_INPUT
    ]
    inputs = tuple(
        InputGuard(
            name,
            tensor.dtype,
            tensor.device,
            _shape(node.meta["val"]),
            tuple(dim for dim in range(tensor.dim()) if (name, dim) in unrolled),
            name in call.ints,
        )
        for name, tensor, node in zip(call.names, call.tensors, placeholders, strict=True)
    )
    return Guards(inputs, tuple(_narrowed(program)))


def _compiled(guards: Guards) -> dict[str, Callable[[Sequence[Any]], bool]]:
    """Compile ``Guards.sizes_fit`` and ``Guards.are_met`` into straight-line Python."""
    tensors = [f"t{number}" for number in range(len(guards.inputs))]
    unpack = [f"{', '.join(tensors)}, = tensors"] if tensors else []
    sizes, test = _sizes_text(guards)
    kinds = [f"type({name}) is Tensor and {name}.layout is strided" for name in tensors]
    scope: dict[str, Any] = {"math": math, "Tensor": torch.Tensor, "strided": torch.strided}
    for name, guard in zip(tensors, guards.inputs, strict=True):
        scope |= {f"dtype_{name}": guard.dtype, f"device_{name}": guard.device}
        kinds += [f"{name}.dtype is dtype_{name}", f"{name}.device == device_{name}"]
        kinds += [f"{name}.ndim == {len(guard.shape)}"]
    bodies = {
        "sizes_fit": [*unpack, *sizes, f"return {test}"],
        "are_met": [
            f"if len(tensors) != {len(tensors)}: return False",
            *unpack,
            f"if not ({' and '.join(kinds) or 'True'}): return False",
            *sizes,
            f"return {test}",
        ],
    }
    for name, lines in bodies.items():
        exec(f"def {name}(tensors):\n" + "".join(f"    {line}\n" for line in lines), scope)
    return {name: scope[name] for name in bodies}


def _sizes_text(guards: Guards) -> tuple[list[str], str]:
    """Return statements that name the sizes of tensors ``t0``, ``t1``, ..., and their test."""
    lines, known, derived = [], dict[sympy.Symbol, str](), list[tuple[str, sympy.Expr]]()
    for number, guard in enumerate(guards.inputs):
        if guard.shape:
            names = [f"d{number}_{dim}" for dim in range(len(guard.shape))]
            lines.append(f"{', '.join(names)}, = t{number}.shape")
            for name, expected in zip(names, guard.shape, strict=True):
                if isinstance(expected, sympy.Symbol) and expected not in known:
                    known[expected] = name
                else:
                    derived.append((name, sympy.sympify(expected)))
    printer = PythonPrinter()

    def text(expression: sympy.Basic) -> str:
        renamed = {symbol: sympy.Symbol(known[symbol], integer=True) for symbol in expression.free_symbols}
        return printer.doprint(expression.xreplace(renamed))

    tests = [f"{name} == {text(size)}" for name, size in derived if size.free_symbols <= known.keys()]
    tests += [f"{low} <= {known[symbol]} <= {high}" for symbol, low, high in guards.ranges if symbol in known]
    tests += [
        f"bool({text(branch.condition)}) is {branch.answer}"
        for branch in guards.branches
        if branch.condition.free_symbols <= guards.symbols
    ]
    return lines, " and ".join(f"({test})" for test in tests) or "True"


def _shape(value: torch.Tensor) -> tuple[int | sympy.Expr, ...]:
    return tuple(map(_size, value.shape))


def _size(size: int | torch.SymInt) -> int | sympy.Expr:
    expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
    return int(expression) if expression.is_number else expression


def _narrowed(program: ExportedProgram) -> list[tuple[sympy.Symbol, int, int]]:
    """Return the ranges that the model's code restricts further than tracing did."""
    narrowed = []
    for symbol, values in program.range_constraints.items():
        unbacked = not isinstance(symbol, sympy.Symbol) or symbol.name.startswith("u")
        low = int(values.lower) if values.lower > _TRACED_MIN else 0
        high = int(values.upper) if values.upper < _TRACED_MAX else _TRACED_MAX
        if not unbacked and (low > 0 or high < _TRACED_MAX):
            narrowed.append((symbol, low, high))
    return narrowed


def _broken_relation(
    sizes: dict[sympy.Symbol, tuple[int, str]], derived: list[tuple[str, int, sympy.Expr]]
) -> str | None:
    values = {symbol: size for symbol, (size, _) in sizes.items()}
    for owner, size, expression in derived:
        if expression.free_symbols <= values.keys() and expression.subs(list(values.items())) != size:
            return f"{owner} is {size}, but must be {expression} = {expression.subs(list(values.items()))}"
    return None
