"""Calls like the one before: known by a few comparisons, without a description of their arguments.

Most calls of a model bring dense tensors by position, in the mode and under the autocast of the call before.
For these the program is found here; any other call takes the way of ``CompiledModel.forward`` that describes
all arguments, and leaves what the next such call is compared with.

What this relies on: ``Watch.has_changed`` was asked in this very call, so that the layers, hooks and
constants are those that were traced, and ``modes`` is a new object whenever the mode of a module, or the
model itself, has changed. The program is the first of those for its form, as it is when found the long way:
which one runs depends on no earlier call.
"""

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from gnnc.capture.model_snapshot import autocast_mode
from gnnc.compiler.program import Program


class Steady(NamedTuple):
    """The program of calls like the last one.

    Attributes:
        modes: those of the watch at that call.
        autocast: what autocast did to it.
        are_met: whether arguments are dense tensors that the program was captured for.
        run: the program.
    """

    modes: tuple[bool, ...]
    autocast: tuple[Any, ...]
    are_met: Callable[[Sequence[Any]], bool]
    run: Callable[[Sequence[Tensor]], Any]

    def serves(self, args: tuple[Any, ...], modes: tuple[bool, ...]) -> bool:
        """Return whether the program is that of a call with these positional arguments and no others."""
        return modes is self.modes and autocast_mode() == self.autocast and self.are_met(args)


def steady(
    program: Program, form: tuple[Any, ...], args: tuple[Any, ...], tensors: Sequence[Tensor]
) -> Steady | None:
    """Values that a call without keywords leaves; None where an argument is not a plain tensor.

    Args:
        program: what it ran.
        form: begins with the modes and autocast of the call.
        args: its arguments.
        tensors: those that they are made of.
    """
    if len(args) != len(tensors) or not all(map(is_, args, tensors)):
        return None
    return Steady(form[0], form[1], program.captured.guards.are_met, program.run)
