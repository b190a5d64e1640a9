"""Run of forward on fake tensors of the sizes of one call, which finds calls that no trace can serve.

A trace may fail because a size was taken for a constant, or for a variable, so captures try several choices.
If forward fails on the sizes and dtypes of the call itself, as on an edge list of three rows, every choice
would fail. This run finds that out in milliseconds.
"""

import contextlib
from collections.abc import Collection, Sequence
from itertools import chain

import torch
from torch import Tensor

from gnnc.capture.quiet import quiet
from gnnc.capture.recurrent import RecurrentMode
from gnnc.capture.sparse_operand import SparseMode
from gnnc.capture.symbolic_calls import symbolic_calls
from gnnc.capture.tensor_data import DataMode
from gnnc.capture.unrolled import Unrolled
from gnnc.capture.value_guards import EqualMode
from gnnc.errors import CaptureError
from gnnc.torch_private import FakeTensorMode, GuardOnDataDependentSymNode, ShapeEnv

_LIMITS = ("fake", "numpy", "data pointer", "data_ptr", "subclass", "meta ", "storage", "unbacked")
"""Words of messages about what fake tensors cannot do, in lower case."""


def failure_on_own_sizes(
    entry: torch.nn.Module, tensors: Sequence[Tensor], classes: Collection[type]
) -> Exception | None:
    """Return the error of forward on the sizes and dtypes of a call; None where it runs, or values decide.

    Args:
        entry: the module that calls the model from flat tensors; fake tensors take the place of its weights.
        tensors: the flat tensors of the call, of which no value is read.
        classes: classes of arguments, whose methods forward may call.

    Raises:
        CaptureError: forward has an effect that compiled calls would not have.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=True)
    fakes = tuple([mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in tensors])
    # an op on real tensors alone, as on a buffer that counts calls, would run and write them
    held = chain(entry.named_parameters(), entry.named_buffers())
    weights = {name: mode.from_tensor(tensor, static_shapes=True) for name, tensor in held}
    functions = (SparseMode(), RecurrentMode(), DataMode(), EqualMode())
    modes = (mode, *functions, symbolic_calls(entry, classes), quiet())
    try:
        with contextlib.ExitStack() as stack:
            for each in modes:
                stack.enter_context(each)
            torch.func.functional_call(entry, weights, fakes)
    except (CaptureError, Unrolled):
        raise
    except Exception as error:  # forward raises every kind of exception
        return None if _is_of_fakes(error) else error
    return None


def _is_of_fakes(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, is about what fake tensors cannot do."""
    current: BaseException | None = error
    while current is not None:
        is_torchs = type(current).__module__.startswith("torch._subclasses")
        if is_torchs or isinstance(current, (GuardOnDataDependentSymNode, NotImplementedError)):
            return True
        text = str(current).lower()
        if any(word in text for word in _LIMITS):
            return True
        current = current.__cause__ or current.__context__
    return False
