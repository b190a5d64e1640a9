"""Text of traced tensors and sizes, and whether a program depends on it.

``len(repr(x))`` and ``hash(str(x))`` make a number of what a tensor prints as. A trace prints stand-ins, so
that the number would be a constant of the program. Text that is only printed or logged does no harm: a
forward that makes text is traced once more with other text, and refused where the two programs differ.
"""

import contextlib
import os
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.export import ExportedProgram

from gnnc.capture.thread_patches import in_this_thread, replaced

_TORCH = str(Path(torch.__file__).parent)
_PRINTERS = tuple(str(Path(_TORCH, name)) for name in ("__init__.py", "_tensor.py", "nn/parameter.py"))
"""Files of torch whose functions make text for their callers."""
_OTHER = f" inf nan True False None -1.5e+05 {string.printable}"
"""Text beside the usual one in a second trace: it is longer, and has each word that a model may look for."""


@contextlib.contextmanager
def printed(*, other: bool = False) -> Iterator[list[str]]:
    """Collect file and line of each text that the model makes of a tensor or size in this thread.

    Args:
        other: make another text than usual.
    """
    places: list[str] = []

    def noting(original: Callable[..., str], spell: Callable[..., str]) -> Callable[..., str]:
        def text(value: Any, *args: Any, **kwargs: Any) -> str:
            place = _place(sys._getframe(2))  # behind this function and the one of ``in_this_thread``
            if place is None:
                return original(value, *args, **kwargs)
            places.append(place)
            return spell(value) + (_OTHER if other else "")

        return in_this_thread(text, original)

    with contextlib.ExitStack() as stack:
        for owner in (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool):
            spell = owner.__repr__
            for name in ("__repr__", "__format__"):
                stack.enter_context(replaced(owner, name, noting(getattr(owner, name), spell)))
        yield places


def _place(frame: FrameType | None) -> str | None:
    """Return file and line of the code that makes a text; None for code of torch, which makes its own."""
    while frame is not None and frame.f_code.co_filename in _PRINTERS:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_TORCH + os.sep):
        return None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def same_programs(first: ExportedProgram, second: ExportedProgram) -> bool:
    """Return whether two programs have the same calls, constants and form of the result."""
    if str(first.graph) != str(second.graph) or first.call_spec.out_spec != second.call_spec.out_spec:
        return False
    if first.constants.keys() != second.constants.keys():
        return False
    return all(_same(value, second.constants[name]) for name, value in first.constants.items())


def _same(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return one is other or (both and one.dtype == other.dtype and torch.equal(one, other))
