"""Steps of ``gnnc_cpu.edge_body``: small programs that run on tiles of edges.

The numbers of steps and kinds are those of `csrc/cpu/edge_body.h`; a test compares the two.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto

import torch
from torch import Tensor

Step = tuple[int, int, int, int, int, int]


class BodyOp(IntEnum):
    """Kinds of steps."""

    LOAD = 0
    MOVE = auto()
    FILL = auto()
    UNARY = auto()
    BINARY = auto()
    WHERE = auto()
    FOLD = auto()
    NARROW = auto()
    PRODUCT = auto()
    MATMUL = auto()
    REDUCE = auto()
    KEEP = auto()
    TOTAL = auto()
    OUTER = auto()
    SCATTER = auto()


class Unary(IntEnum):
    """Functions of one value."""

    RELU = 0
    LEAKY_RELU = auto()
    ELU = auto()
    SIGMOID = auto()
    TANH = auto()
    GELU = auto()
    GELU_TANH = auto()
    SILU = auto()
    EXP = auto()
    LOG = auto()
    SOFTPLUS = auto()
    NEG = auto()
    ABS = auto()
    SQUARE = auto()
    SQRT = auto()
    RSQRT = auto()
    RECIP = auto()
    CLAMP_MIN = auto()
    CLAMP_MAX = auto()
    LOGICAL_NOT = auto()


class Binary(IntEnum):
    """Functions of two values."""

    ADD = 0
    SUB = auto()
    MUL = auto()
    DIV = auto()
    MAXIMUM = auto()
    MINIMUM = auto()
    EQ = auto()
    NE = auto()
    LT = auto()
    LE = auto()
    GT = auto()
    GE = auto()
    THRESHOLD_BACKWARD = auto()
    LEAKY_RELU_BACKWARD = auto()
    SILU_BACKWARD = auto()
    SIGMOID_BACKWARD = auto()
    TANH_BACKWARD = auto()
    SOFTPLUS_BACKWARD = auto()


class Reduction(IntEnum):
    """Reductions over the edges of a row."""

    SUM = 0
    MEAN = auto()
    MAX = auto()
    MIN = auto()
    SOFTMAX = auto()


class Format(IntEnum):
    """Formats of the operands of a product."""

    F32 = 0
    I8 = auto()
    BF16 = auto()


@dataclass(slots=True)
class Steps:
    """Steps of a body, and what their numbers refer to; see `csrc/cpu/edge_body.h`.

    Attributes:
        operands: names of the body's inputs by group (destination, source, edge, constant, ids), in order.
        registers: width, and 1 if it is uniform, of each.
        weights: constant, 1 if that is ``[K, N]``, format, and constant of the scales or -1, of each.
        places: the total of each element of the sums over all edges, one after the other.
    """

    operands: tuple[list[str], ...] = field(default_factory=lambda: ([], [], [], [], []))
    registers: list[tuple[int, int]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    runs: list[tuple[int, int, int, int]] = field(default_factory=list)
    weights: list[tuple[int, int, int, int]] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    @property
    def tables(self) -> set[int]:
        """Return the numbers of the constants whose rows are chosen by ids."""
        return {step[3] for step in self.steps if step[0] == BodyOp.LOAD and step[2] == 4}

    def sums(self, count: int) -> set[int]:
        """Return the numbers, of ``count`` results, of the sums over all edges: no step writes these."""
        writers = (BodyOp.REDUCE, BodyOp.KEEP, BodyOp.SCATTER)
        return set(range(count)) - {step[1] for step in self.steps if step[0] in writers}

    def flat(self) -> dict[str, Tensor | tuple[float, ...]]:
        """Return the arguments of the op behind the operands, by name, in order.

        Integers are tensors: an argument of thousands of Python integers is converted at each call.
        """
        registers, steps = _reused(self.registers, self.steps)
        tables = {"registers": registers, "steps": steps, "runs": self.runs, "weights": self.weights}
        flat = {name: _integers(number for row in rows for number in row) for name, rows in tables.items()}
        return {**flat, "numbers": tuple(self.numbers), "places": _integers(self.places)}


def _integers(numbers: Iterable[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64, device="cpu")


def add_in_products(steps: Sequence[Step], registers: Sequence[tuple[int, int]]) -> list[Step]:
    """Return the steps with each product whose result is only added to a value in the place of that sum.

    The value is added to the finished sum of the product, so that the result has the same bits.
    """
    made = {step[1]: step for step in steps if step[0] == BodyOp.PRODUCT}
    reads = Counter(step[place] for step in steps for place in _READS[BodyOp(step[0])])
    replaced: dict[Step, Step] = {}
    for step in steps:
        if step[0] != BodyOp.BINARY or step[4] != Binary.ADD:
            continue
        _, to, *sides, _, _ = step
        for number, value in (sides, sides[::-1]):
            product = made.get(number)
            if product is None or product in replaced or registers[value][1] or registers[number][1]:
                continue
            _, _, rows, weight, bias, count = product
            if bias == -1 and count == 1 and reads[number] == 1:
                replaced[product] = step
                replaced[step] = (int(BodyOp.PRODUCT), to, rows, weight, value, count)
                break
    dropped = {step for step in replaced if step[0] == BodyOp.PRODUCT}
    return [replaced.get(step, step) for step in steps if step not in dropped]


_READS: dict[BodyOp, tuple[int, ...]] = {
    BodyOp.LOAD: (),
    BodyOp.FILL: (),
    BodyOp.MOVE: (2,),
    BodyOp.UNARY: (2,),
    BodyOp.BINARY: (2, 3),
    BodyOp.WHERE: (2, 3, 4),
    BodyOp.FOLD: (2,),
    BodyOp.NARROW: (2,),
    BodyOp.PRODUCT: (2, 4),
    BodyOp.MATMUL: (2, 3),
    BodyOp.REDUCE: (2, 3),
    BodyOp.KEEP: (2,),
    BodyOp.TOTAL: (2,),
    BodyOp.OUTER: (2, 3),
    BodyOp.SCATTER: (2,),
}
"""Places of the registers that a step reads."""


def _reused(
    registers: Sequence[tuple[int, int]], steps: Sequence[Step]
) -> tuple[list[tuple[int, int]], list[Step]]:
    """Return fewer registers, each of which holds one value of its width after the other."""
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for register in _registers_of(step):
            last[register] = number
    kept: list[tuple[int, int]] = []
    place: dict[int, int] = {}
    free: dict[int, list[int]] = {}
    renamed: list[Step] = []
    for number, step in enumerate(steps):
        written = step[1] if step[0] < BodyOp.REDUCE else -1
        if written >= 0 and written not in place:
            width, uniform = registers[written]
            idle = free.get(width, [])
            if uniform or not idle:
                kept.append((width, uniform))
                place[written] = len(kept) - 1
            else:
                place[written] = idle.pop()
        renamed.append(_renamed(step, place))
        for register in set(_registers_of(step)):
            if last[register] == number and not registers[register][1]:
                free.setdefault(registers[register][0], []).append(place[register])
    return kept, renamed


def _registers_of(step: Step) -> list[int]:
    """Return the registers that a step reads or writes."""
    return [step[place] for place in _places(step) if step[place] >= 0]


def _places(step: Step) -> tuple[int, ...]:
    """Return the places of a step in which registers stand: the one that it writes, if any, comes first."""
    op = BodyOp(step[0])
    return (1, *_READS[op]) if op < BodyOp.REDUCE else _READS[op]


def _renamed(step: Step, place: dict[int, int]) -> Step:
    places = _places(step)
    first, *rest = (
        place[number] if at in places and number >= 0 else number for at, number in enumerate(step)
    )
    a, b, c, d, e = rest
    return first, a, b, c, d, e
