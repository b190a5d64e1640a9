"""Detection of sizes that a model takes for numbers, such as the steps of a loop over a dimension.

A trace on a stand-in size of 37 would run such a loop 37 times before it fails, because the size was to stay
symbolic. So it is stopped where the size first becomes a number, and the size of the call is traced instead.
"""

import contextlib
from collections.abc import Iterator, Sequence

import sympy
import torch

from gnnc.capture.thread_patches import in_this_thread, replaced
from gnnc.torch_private import SymNode


class Unrolled(Exception):  # noqa: N818  not an error: the trace begins again
    """Exception that stops a trace in which a stand-in size becomes a number.

    Attributes:
        dimensions: tensor and dimension of each input that had this size.
    """

    def __init__(self, dimensions: frozenset[tuple[int, int]]) -> None:
        super().__init__("a size becomes a number")
        self.dimensions = dimensions


class Watch:
    """Record of the sizes of a trace's inputs, and of the first that became a number.

    Args:
        stand_ins: shapes of the inputs of the trace.
        shapes: shapes of the inputs of the call.

    Attributes:
        found: the exception that stopped the trace, or None.
    """

    def __init__(self, stand_ins: Sequence[torch.Size], shapes: Sequence[torch.Size]) -> None:
        self.found: Unrolled | None = None
        self._stand_ins, self._shapes = stand_ins, shapes
        self._places: dict[sympy.Basic, tuple[int, int]] = {}
        self._symbolic: set[tuple[int, int]] = set()

    def learn(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note the symbols of the sizes of the traced inputs."""
        for number, tensor in enumerate(tensors):
            for dim, size in enumerate(tensor.shape):
                if isinstance(size, torch.SymInt):
                    self._places[size.node.expr] = number, dim
                    self._symbolic.add((number, dim))

    def stop(self, expression: sympy.Expr) -> None:
        """Stop the trace: the value of an expression would be taken for a number."""
        places = [self._places[symbol] for symbol in expression.free_symbols]
        sizes = {self._stand_ins[number][dim] for number, dim in places}
        alike = {(number, dim) for number, dim in self._symbolic if self._stand_ins[number][dim] in sizes}
        self.found = Unrolled(frozenset(alike))
        raise self.found

    def actual(self, expression: sympy.Expr) -> int | None:
        """Return the value of an expression for the sizes of the call; None where a symbol is no input's."""
        if not expression.free_symbols <= self._places.keys():
            return None
        sizes: dict[sympy.Basic, sympy.Basic] = {}
        for symbol in expression.free_symbols:
            number, dim = self._places[symbol]
            sizes[symbol] = sympy.Integer(self._shapes[number][dim])
        value = expression.xreplace(sizes)
        return int(value) if value.is_number else None


@contextlib.contextmanager
def stopped_at_numbers(watch: Watch) -> Iterator[None]:
    """Stop a trace of this thread where a size becomes a number that is another for the call's own sizes."""
    original = SymNode.guard_int

    def guard_int(this: SymNode, file: str, line: int) -> int:
        expression = this.expr
        actual = watch.actual(expression) if expression.free_symbols else None
        value = original(this, file, line)
        if actual is not None and actual != value:
            watch.stop(expression)
        return value

    with replaced(SymNode, "guard_int", in_this_thread(guard_int, original)):
        yield
