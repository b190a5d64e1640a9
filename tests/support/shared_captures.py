"""Traces that are shared by all precisions of a model: most of the time of a compile is its trace."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import nn

from gnnc.compiler import build


@contextlib.contextmanager
def shared_captures() -> Iterator[None]:
    """Trace each call of a model once for all precisions: a call is a model and its argument objects."""
    traced: dict[Any, Any] = {}
    kept = []  # an object that is freed would give its id to another
    capture_call = build.capture_call

    def remembered(
        model: nn.Module, args: Any, kwargs: Any, known: Any, guesses: Any = None, **options: Any
    ) -> Any:
        values = (model, *args, *kwargs.values())
        asked = (*(guesses or {}).items(), *options.items())
        key = tuple(map(id, values)), tuple(kwargs), len(known), asked
        if key not in traced:
            traced[key] = capture_call(model, args, kwargs, known, guesses, **options)
            kept.append(values)
        return traced[key]

    with mock.patch.object(build, "capture_call", remembered):
        yield
