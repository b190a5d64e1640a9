"""Fast path of repeated calls: a few comparisons find the program, without a description of the arguments.

Most calls of a model bring dense tensors by position, in the mode and under the autocast of the call before.
The fast path finds the program of these; any other call is described in full by ``CompiledModel.forward``,
which then makes the fast path of the next such call.

The fast path relies on two facts. ``ModelSnapshot.has_changed`` was asked in this very call, so that layers,
hooks and constants are those of the trace. And ``modes`` is a new object when the mode of a module, or the
model itself, has changed. Its program is the first of the programs for its form, as in a call that is
described in full: which program runs depends on no earlier call.
"""

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from gnnc.capture.model_snapshot import autocast_mode
from gnnc.compiler.program import Program
from gnnc.compiler.training import Wanted


class FastPath(NamedTuple):
    """The program of calls like the last one, and the conditions under which it is that of a call.

    Attributes:
        modes: the modes of the model's modules at the last call.
        autocast: the state of autocast at the last call.
        wanted: which weights and arguments want gradients; None: none.
        are_met: returns whether arguments are dense tensors that the program was captured for.
        run: runs the program on the tensors of a call.
    """

    modes: tuple[bool, ...]
    autocast: tuple[Any, ...]
    wanted: Wanted | None
    are_met: Callable[[Sequence[Any]], bool]
    run: Callable[[Sequence[Tensor]], Any]

    def serves(
        self, args: tuple[Any, ...], modes: tuple[bool, ...], weights: tuple[bool, ...] | None
    ) -> bool:
        """Return whether the program is that of a call with these positional arguments and no others.

        Args:
            args: the arguments.
            modes: the modes of the model's modules.
            weights: which weights want gradients; None: they and the arguments want none.
        """
        if modes is not self.modes or autocast_mode() != self.autocast or not self.are_met(args):
            return False
        if weights is None or self.wanted is None:
            return weights is None and self.wanted is None
        return self.wanted == (weights, tuple([arg.requires_grad for arg in args]))


def fast_path_of(
    program: Program,
    form: tuple[Any, ...],
    args: tuple[Any, ...],
    tensors: Sequence[Tensor],
    weights: tuple[bool, ...] | None,
) -> FastPath | None:
    """Return the fast path of calls like this one; None where an argument is not a plain tensor.

    Args:
        program: the program that the call ran.
        form: the form of the call, which begins with its modes and autocast.
        args: the positional arguments of the call, which has no others.
        tensors: the tensors of the arguments.
        weights: which weights want gradients; None: they and the arguments want none.
    """
    if len(args) != len(tensors) or not all(map(is_, args, tensors)):
        return None
    wanted = None if weights is None else (weights, tuple([tensor.requires_grad for tensor in tensors]))
    return FastPath(form[0], form[1], wanted, program.captured.guards.are_met, program.run)
