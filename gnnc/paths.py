"""Paths that a user gives: what is wrong with one is said in gnnc's words."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gnnc.errors import InputError


@contextlib.contextmanager
def writing(what: str, path: Any) -> Iterator[Path]:
    """Give the path of a file to write.

    Args:
        what: the method or variable that takes the path, for messages.
        path: the path as the user gave it.

    Raises:
        InputError: the path is no path, or cannot be written.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{what} takes the path of a file to write, got {type(path).__name__}")
    try:
        yield Path(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{what} cannot write to {str(path)!r}: {error}; name a file or folder that can be written"
        ) from error
