"""Statements of C++ functions of a body, and the names of the values that they define."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from gnnc.runtime.cuda.kernels.body_places import Place, is_column

EVERY, NO = -1, -2
"""Numbers of parts of a result for a block of statements that is of all parts, or of some columns."""


@dataclass(slots=True)
class Scope:
    """Statements of one C++ block, and the names of the values that they define.

    Attributes:
        outer: the block around it.
        own_part: the part of the result that it computes; None: that of the block around it.
        lines: its statements.
        known: names of values, by node and place.
    """

    outer: "Scope | None" = None
    own_part: int | None = None
    lines: list[str] = field(default_factory=list)
    known: dict[tuple[Node, Place], str] = field(default_factory=dict)

    def find(self, key: tuple[Node, Place]) -> str | None:
        """Return the name of a value that is visible here."""
        return self.known.get(key) or (self.outer.find(key) if self.outer else None)

    @property
    def part(self) -> int:
        """The number of the part of the result that the block computes, ``EVERY`` or ``NO``."""
        if self.own_part is not None:
            return self.own_part
        return self.outer.part if self.outer else EVERY


def operator(arguments: str, lines: Sequence[str]) -> list[str]:
    """Return the C++ of the call operator of a body, given its statements."""
    head = f"__device__ void operator()({arguments}, int column, float* values) const {{"
    return [head, *(f"  {line}" for line in lines), "}"]


def statements(write: Callable[[Scope], str]) -> str:
    """Return the statements of a function, given what writes its result into a scope."""
    scope = Scope()
    value = write(scope)
    return " ".join([*scope.lines, f"return {value};"])


@dataclass(slots=True)
class Neighbors:
    """Loads and parts of a body that is called for four neighboring columns at a time.

    Attributes:
        ends: the first columns behind the parts of a concatenated result; all neighbors lie in one part.
        loads: loads of four elements, in front of the computation of all columns.
    """

    ends: list[int] = field(default_factory=list)
    loads: dict[str, str] = field(default_factory=dict)

    def cut(self, index: str, ends: Sequence[int], scope: Scope) -> bool:
        """Return whether the result becomes parts that end where those of a concatenation do."""
        if self.ends or scope.part != EVERY or not is_column(index) or any(end % 4 for end in ends):
            return False
        self.ends += ends
        return True

    def load(self, row: str, index: str, scope: Scope) -> str:
        """Return column ``k`` of a load of four, or one load where the scope is a branch of some columns."""
        if scope.part == NO:
            return f"step::as_float(({row})[{index}])"
        condition = "true" if scope.part == EVERY else f"kPart == {scope.part}"
        call = f"four_if<{condition}>({row}, {index})"
        return f"step::as_float({self.loads.setdefault(call, f'w{len(self.loads)}')}.v[k])"

    def operator(self, arguments: str, lines: Sequence[str]) -> list[str]:
        """Return the C++ of the call operator, given the statements that set ``values[0]`` of a column."""
        ends = "".join(f"part == {number} ? {end} : " for number, end in enumerate(self.ends))
        return [
            f"static constexpr int kParts = {len(self.ends) or 1};",
            f"__device__ static constexpr int end(int part) {{ return {ends}0; }}",
            f"template <int kPart> __device__ void operator()({arguments}, int first, float* all) const {{",
            *(
                f"  const auto {name} = {call.replace('column', 'first')};"
                for call, name in self.loads.items()
            ),
            "  #pragma unroll",
            "  for (int k = 0; k < 4; ++k) {",
            "    const int column = first + k;",
            "    float* const values = all + k;",
            *(f"    {line}" for line in lines),
            "  }",
            "}",
        ]
