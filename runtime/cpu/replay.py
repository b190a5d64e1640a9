"""Replays of a program on the CPU: one call of C++ makes all launches up to a step of another kind.

A launch from Python takes as long as the kernel of a small graph: torch converts each of its arguments. Most
are the same in every call. A replay has them as one tensor of numbers, and takes the tensors of a call in one
list, each once, see ``csrc/cpu/replay.h``.

A statement that is no launch runs before the launches that precede it in the program, unless it reads memory
that these write, or writes any: then it ends their replay.
"""

import ast
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import (
    Allocate,
    Assignment,
    Call,
    Columns,
    Dense,
    Expr,
    Statement,
    Take,
    View,
    Zero,
    listed,
)
from gnnc.torch_private import OpOverload, is_composite, schema

_DENSE, _ZERO = -1, -2
"""Steps of a replay that are no launches; ``csrc/cpu/replay.cpp`` has them, too."""
_ABSENT = -1


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor among the numbers of a replay: the expression of its value."""

    text: str


class _NotFixed(Exception):
    """An argument that is no tensor depends on the call."""


@dataclass
class Replays:
    """The statements of a program in the order in which they run, with replays in place of launches.

    Attributes:
        lines: the statements as Python text.
        launches: number of launches in replays.
        count: number of replays.
        single: names of the kernels that are launched from Python.
    """

    lines: list[str] = field(default_factory=list)
    launches: int = 0
    count: int = 0
    single: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return how a call makes its launches."""
        kernels, calls = _counted(self.launches, "kernel"), _counted(self.count, "C++ call")
        text = f"{kernels}, launched by {calls}"
        if not self.single:
            return text
        names = ", ".join(dict.fromkeys(self.single))
        return f"{text}; {names} from Python, with numbers that depend on the call"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def replays(emitter: Emitter, results: Iterable[Expr]) -> Replays | None:
    """Return the replays of a program; None where it launches no kernel of the CPU.

    Args:
        emitter: has written the program, and the slots of its temporaries are assigned.
        results: the outputs.
    """
    statements = [*emitter.prelude(), *[statement for statement, _ in emitter.body]]
    late = [*results, *[scale for scale, _ in emitter.checks], *[largest for largest, _ in emitter.ranges]]
    writer = _Writer(emitter, _last_reads(statements, late))
    for number, statement in enumerate(statements):
        writer.add(number, statement)
    writer.flush(len(statements))
    return writer.found if writer.found.launches else None


def _last_reads(statements: Sequence[Statement], late: Iterable[Expr]) -> dict[str, int]:
    """Return the last statement that reads each name; those that are read at the end count as one more."""
    found = {name: number for number, statement in enumerate(statements) for name in statement.reads}
    return found | {name: len(statements) for value in late for name in value.reads}


class _Writer:
    """Writes the lines of a program; launches wait until a statement ends their replay."""

    def __init__(self, emitter: Emitter, last_reads: dict[str, int]) -> None:
        self.found = Replays()
        self._emitter = emitter
        self._last_reads = last_reads
        self._parents: dict[str, str] = {}
        self._steps: list[int | _Tensor] = []
        self._written: list[str] = []
        self._dense: dict[str, Dense] = {}
        self._launches = 0
        for name, slot in emitter.memory.slots().items():
            self._join(name, [f"slot {slot}"])

    def add(self, number: int, statement: Statement) -> None:
        """Add statement ``number`` of the program."""
        if isinstance(statement, Dense) and self._is_made_by_replay(statement.tensor):
            self._dense[statement.result] = statement
            self._steps += [_DENSE, _Tensor(statement.tensor.text)]
            self._join(statement.result, statement.reads)
        elif isinstance(statement, Zero):
            self._steps += [_ZERO, _Tensor(statement.tensor)]
            self._written.append(statement.tensor)
        elif not (isinstance(statement, Call) and self._add_launch(number, statement)):
            self._add_line(number, statement)

    def flush(self, number: int) -> None:
        """Write the replay of the launches before statement ``number``, and dense forms that are read yet."""
        if not self._steps:
            return
        inputs = dict.fromkeys(step.text for step in self._steps if isinstance(step, _Tensor))
        values = [text for text in inputs if text not in self._dense]
        places = {text: place for place, text in enumerate([*values, *self._dense])}
        steps = torch.tensor([places[s.text] if isinstance(s, _Tensor) else s for s in self._steps])
        replay = self._emitter.bind(torch.ops.gnnc_cpu_valid.replay.default, "replay")
        self.found.lines.append(
            f"{replay.text}({self._emitter.bind(steps, 'steps').text}, ({listed(values)}))"
        )
        self.found.lines += [
            d.text for name, d in self._dense.items() if self._last_reads.get(name, -1) >= number
        ]
        self.found.count += 1
        self.found.launches += self._launches
        self._steps, self._written, self._dense, self._launches = [], [], {}, 0

    def _add_line(self, number: int, statement: Statement) -> None:
        """Add a statement that runs from Python."""
        if not self._may_run_early(statement):
            self.flush(number)
        self.found.lines.append(statement.text)
        if (
            isinstance(statement, Assignment | Call)
            and statement.result is not None
            and _may_alias(self._emitter, statement)
        ):
            self._join(statement.result, statement.reads)

    def _may_run_early(self, statement: Statement) -> bool:
        """Return whether a statement may run before the launches that wait."""
        result = statement.result if isinstance(statement, Assignment | Call) else None
        if _writes(self._emitter, statement, result) or not self._dense.keys().isdisjoint(statement.reads):
            return False
        return _reads_no_elements(self._emitter, statement) or not self._is_pending(statement.reads)

    def _add_launch(self, number: int, call: Call) -> bool:
        """Add a call to the waiting launches; return False where it is no launch of a kernel of the CPU."""
        op = self._emitter.constants[call.function]
        if not isinstance(op, OpOverload) or call.result is not None or call.keywords:
            return False
        launcher = _launcher(op)
        if launcher is None:
            return False
        try:
            steps = [launcher, *_arguments(op, call, self._emitter.constants)]
        except _NotFixed:
            self.found.single.append(schema(op).name)
            return False
        if any(self._waits(step) for step in steps if isinstance(step, _Tensor)):
            self.flush(number)
        self._steps += steps
        self._written += [name for argument in call.arguments for name in argument.writes]
        self._launches += 1
        return True

    def _waits(self, tensor: _Tensor) -> bool:
        """Return whether the expression of a tensor can be evaluated only behind the launches that wait."""
        if tensor.text.isidentifier():
            return False
        reads = {node.id for node in ast.walk(ast.parse(tensor.text)) if isinstance(node, ast.Name)}
        return not self._dense.keys().isdisjoint(reads) or self._is_pending(reads)

    def _is_made_by_replay(self, tensor: Expr) -> bool:
        """Return whether the dense form of a tensor is a step of the replay that waits."""
        return tensor.text.isidentifier() and (tensor.text in self._dense or self._is_pending(tensor.reads))

    def _is_pending(self, names: Iterable[str]) -> bool:
        """Return whether waiting launches write memory that one of these names may share."""
        written = {self._root(name) for name in self._written}
        return bool(written) and not written.isdisjoint(self._root(name) for name in names)

    def _root(self, name: str) -> str:
        while (parent := self._parents.get(name, name)) != name:
            name = parent
        return name

    def _join(self, name: str, others: Iterable[str]) -> None:
        """Note that a name may share memory with others."""
        for other in others:
            if other not in self._emitter.constants and self._root(other) != self._root(name):
                self._parents[self._root(name)] = self._root(other)


def _writes(emitter: Emitter, statement: Statement, result: str | None) -> bool:
    """Return whether a statement writes to memory of others."""
    function = emitter.constants[statement.function] if isinstance(statement, Call) else None
    if isinstance(function, OpOverload) and schema(function).is_mutable:
        return True
    return any(name != result for name in statement.writes)


def _may_alias(emitter: Emitter, statement: Assignment | Call) -> bool:
    """Return whether the result of a statement may share memory with what it reads."""
    if isinstance(statement, Take | Allocate):
        return False
    function = emitter.constants[statement.function] if isinstance(statement, Call) else None
    if not isinstance(function, OpOverload):
        return True
    return is_composite(function) or any(result.alias_info is not None for result in schema(function).returns)


def _reads_no_elements(emitter: Emitter, statement: Statement) -> bool:
    """Return whether a statement reads sizes and addresses alone."""
    if isinstance(statement, View | Columns | Take | Allocate):
        return True
    function = emitter.constants[statement.function] if isinstance(statement, Call) else None
    if not isinstance(function, OpOverload) or is_composite(function):
        return False
    aliases = [result.alias_info for result in schema(function).returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


@cache
def _launcher(op: OpOverload) -> int | None:
    """Return the number of an op's launcher; None where it has none."""
    if not op.namespace.startswith("gnnc_cpu"):
        return None
    number = torch.ops.gnnc_cpu.launcher(schema(op).name)
    return None if number < 0 else number


def _arguments(op: OpOverload, call: Call, constants: dict[str, Any]) -> list[int | _Tensor]:
    """Return the arguments of a launch as numbers and tensors, in the order of the op's schema.

    Raises:
        _NotFixed: an argument that is no tensor depends on the call.
    """
    declared = schema(op).arguments
    given = [*call.arguments, *[argument.default_value for argument in declared[len(call.arguments) :]]]
    return [
        number
        for argument, value in zip(declared, given, strict=True)
        for number in _numbers(str(argument.type), value, constants)
    ]


def _numbers(kind: str, value: Any, constants: dict[str, Any]) -> list[int | _Tensor]:
    """Return a value of a type of torch's schemas as a replay has it."""
    value = _known(value, constants)
    if kind.startswith("Optional["):
        return [_ABSENT] if value is None else _numbers(kind[len("Optional[") : -1], value, constants)
    if kind == "Tensor":
        return [_Tensor(value.text)]
    if kind.startswith("List[") and not isinstance(value, Expr):
        inner = kind[len("List[") : -1]
        return [len(value), *[number for item in value for number in _numbers(inner, item, constants)]]
    if isinstance(value, Expr):
        raise _NotFixed
    return [struct.unpack("q", struct.pack("d", value))[0] if kind == "float" else int(value)]


def _known(value: Any, constants: dict[str, Any]) -> Any:
    """Return the value of an expression where it is the same in every call, and the elements of a tuple."""
    if not isinstance(value, Expr):
        return value
    if value.items is not None:
        return value.items
    if not value.reads:
        return ast.literal_eval(value.text)
    constant = constants.get(value.text, value)
    return value if isinstance(constant, torch.Tensor) else constant
