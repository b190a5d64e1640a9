"""Records of a program: each statement as data, and the line of Python text that is printed from it.

A record holds names, numbers and expressions; the objects that a program uses (functions, dtypes,
launchers of kernels) are looked up by name in the constants of its emitter.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Expr:
    """A Python expression of a program, as text, with the names that it uses.

    Attributes:
        text: the expression.
        reads: names of variables and constants in it, each once, in the order of the text.
        writes: names of tensors whose memory is written by the statement that takes the expression.
        items: the elements of a tuple that is written out; None: the expression is no such tuple.
    """

    text: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    items: tuple["Expr", ...] | None = None

    @property
    def written(self) -> "Expr":
        """The same expression, of a tensor whose memory the statement writes."""
        return Expr(self.text, self.reads, self.reads, self.items)

    def __format__(self, spec: str) -> str:
        """Refuse to lose the names; ``expr`` puts an expression into another.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{self.text!r} is an expression with names: combine expressions by expr()")


Operand = Expr | int | float | None
"""An expression, or a number, a bool or None, which are written as literals."""


def literal(value: Operand) -> Expr:
    """Return an operand as an expression."""
    return value if isinstance(value, Expr) else Expr(repr(value))


def variable(name: str) -> Expr:
    """Return the expression that reads a variable."""
    return Expr(name, (name,))


def expr(template: str, *operands: Operand) -> Expr:
    """Return a template with an operand in the place of each ``{}``, such as ``expr("{}.shape[0]", col)``."""
    return _merged(template.format(*[literal(item).text for item in operands]), operands)


def tuple_of(operands: Iterable[Operand]) -> Expr:
    """Return the expression of a tuple, with a comma behind each element."""
    items = tuple(map(literal, operands))
    return replace(_merged(f"({listed(item.text for item in items)})", items), items=items)


def sequence(operands: Iterable[Operand]) -> Expr:
    """Return operands with commas between them."""
    items = list(operands)
    return _merged(", ".join(literal(item).text for item in items), items)


def listed(texts: Iterable[str]) -> str:
    """Return texts with a comma behind each."""
    return "".join(f"{text}, " for text in texts)


def _shape_text(sizes: Iterable[Expr]) -> str:
    """Return a tuple as Python prints it: with a comma behind the last element only of one."""
    texts = [size.text for size in sizes]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _merged(text: str, operands: Iterable[Operand]) -> Expr:
    parts = [item for item in operands if isinstance(item, Expr)]
    return Expr(text, _names(part.reads for part in parts), _names(part.writes for part in parts))


def _names(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))


@dataclass(frozen=True, slots=True)
class Unpacked:
    """An argument that stands for several: the elements of a tuple.

    Attributes:
        of: the tuple.
        count: number of its elements.
    """

    of: Expr
    count: int


Argument = Operand | Unpacked


def count_of(arguments: Iterable[Argument]) -> int:
    """Return the number of arguments, with all that unpacked ones stand for."""
    return sum(item.count if isinstance(item, Unpacked) else 1 for item in arguments)


class Statement(ABC):
    """A line of a program."""

    __slots__ = ()

    @property
    @abstractmethod
    def text(self) -> str:
        """The line as Python text."""

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """Names of the variables and constants that the line uses, each once."""

    @property
    @abstractmethod
    def writes(self) -> tuple[str, ...]:
        """Names of the variable that the line sets and of the tensors whose memory it writes."""


@dataclass(frozen=True, slots=True)
class Launch(Statement):
    """The launch of a compiled kernel.

    Attributes:
        launcher: name of the constant that launches it.
        grid: number of blocks.
        arguments: its eight-byte arguments.
    """

    launcher: str
    grid: Expr
    arguments: tuple[Expr | Unpacked, ...]

    @property
    def text(self) -> str:
        """The statement that launches the kernel."""
        return f"{self.launcher}({self.grid.text}, stream, {self._arguments})"

    @property
    def recorded(self) -> str:
        """The statement that adds the launch to the list ``recorded`` instead."""
        return f"{self.launcher}.record({self.grid.text}, recorded, {self._arguments})"

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the launcher and of what the grid and the arguments use."""
        return _names([(self.launcher,), self.grid.reads, *[part.reads for part in self._expressions]])

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the tensors that the kernel writes."""
        return _names(part.writes for part in self._expressions)

    @property
    def _arguments(self) -> str:
        return ", ".join(f"*{a.of.text}" if isinstance(a, Unpacked) else a.text for a in self.arguments)

    @property
    def _expressions(self) -> list[Expr]:
        return [a.of if isinstance(a, Unpacked) else a for a in self.arguments]


@dataclass(frozen=True, slots=True)
class Call(Statement):
    """The call of a function, which may write to some of its arguments.

    Attributes:
        function: name of the constant that is called.
        arguments: its arguments by position.
        keywords: its arguments by name.
        result: name of the variable that holds the returned value; None where that is not used.
    """

    function: str
    arguments: tuple[Expr, ...]
    keywords: tuple[tuple[str, Expr], ...] = ()
    result: str | None = None

    @property
    def text(self) -> str:
        """The statement."""
        arguments = [argument.text for argument in self.arguments]
        arguments += [f"{name}={value.text}" for name, value in self.keywords]
        call = f"{self.function}({', '.join(arguments)})"
        return call if self.result is None else f"{self.result} = {call}"

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the function and of what its arguments use."""
        return _names([(self.function,), *[part.reads for part in self._expressions]])

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the variable and of the tensors that the function writes."""
        result = () if self.result is None else (self.result,)
        return _names([result, *[part.writes for part in self._expressions]])

    @property
    def _expressions(self) -> list[Expr]:
        return [*self.arguments, *[value for _, value in self.keywords]]


@dataclass(frozen=True, slots=True)
class Zero(Statement):
    """A tensor whose elements are set to zero.

    Attributes:
        tensor: its name.
    """

    tensor: str

    @property
    def text(self) -> str:
        """The statement."""
        return f"{self.tensor}.zero_()"

    @property
    def reads(self) -> tuple[str, ...]:
        """The name of the tensor."""
        return (self.tensor,)

    @property
    def writes(self) -> tuple[str, ...]:
        """The name of the tensor."""
        return (self.tensor,)


@dataclass(frozen=True, slots=True)
class Assignment(Statement):
    """A statement that sets one variable and writes nothing else.

    Attributes:
        result: name of the variable.
    """

    result: str

    @property
    @abstractmethod
    def value(self) -> Expr:
        """The expression that the variable is set to."""

    @property
    def text(self) -> str:
        """The statement."""
        return f"{self.result} = {self.value.text}"

    @property
    def reads(self) -> tuple[str, ...]:
        """Names that the expression uses."""
        return self.value.reads

    @property
    def writes(self) -> tuple[str, ...]:
        """The name of the variable."""
        return (self.result,)


@dataclass(frozen=True, slots=True)
class Let(Assignment):
    """A variable for the value of an expression.

    Attributes:
        expression: the expression.
    """

    expression: Expr

    @property
    def value(self) -> Expr:
        """The expression."""
        return self.expression


@dataclass(frozen=True, slots=True)
class Dense(Assignment):
    """A tensor without gaps between its elements: the tensor itself, or a copy where it has gaps.

    Attributes:
        tensor: the tensor.
    """

    tensor: Expr

    @property
    def value(self) -> Expr:
        """The call of the tensor's method."""
        return expr("{}.contiguous()", self.tensor)


@dataclass(frozen=True, slots=True)
class Take(Assignment):
    """An output ``[rows, width]`` from the pool, which the caller keeps.

    Attributes:
        rows: number of rows.
        width: columns of a row.
        dtype: name of the constant with the element type.
    """

    rows: Expr
    width: int
    dtype: str

    @property
    def value(self) -> Expr:
        """The call of the pool."""
        return expr("take(({}, {}), {})", self.rows, self.width, variable(self.dtype))


@dataclass(frozen=True, slots=True)
class Allocate(Assignment):
    """A temporary of uninitialized values, whose size is known only within the program.

    Attributes:
        shape: sizes.
        dtype: name of the constant with the element type.
    """

    shape: tuple[Expr, ...]
    dtype: str

    @property
    def value(self) -> Expr:
        """The call of the allocator."""
        shape = _merged(_shape_text(self.shape), self.shape)
        return expr("empty({}, dtype={})", shape, variable(self.dtype))


@dataclass(frozen=True, slots=True)
class Counters(Assignment):
    """Integers of the arena that are 0 before and after every kernel.

    Attributes:
        count: number of integers.
    """

    count: Expr

    @property
    def value(self) -> Expr:
        """The call of the arena."""
        return expr("counters(arena, {})", self.count)


@dataclass(frozen=True, slots=True)
class View(Assignment):
    """A tensor under another shape, in the same memory.

    Attributes:
        tensor: name of the tensor.
        shape: sizes.
    """

    tensor: str
    shape: tuple[Expr, ...]

    @property
    def value(self) -> Expr:
        """The call of the tensor's method."""
        sizes = "".join([", ".join(size.text for size in self.shape), "," if self.shape else ""])
        return expr("{}.view({})", variable(self.tensor), _merged(f"({sizes})", self.shape))


@dataclass(frozen=True, slots=True)
class Columns(Assignment):
    """The first columns of a matrix, in the same memory.

    Attributes:
        tensor: name of the matrix.
        width: number of columns.
    """

    tensor: str
    width: int

    @property
    def value(self) -> Expr:
        """The slice of the matrix."""
        return expr("{}[:, :{}]", variable(self.tensor), self.width)
