"""JSON files in the cache folder for measurements; written atomically, measured again if damaged."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gnnc.private_files import UntrustedError, read_private, write_private

_T = TypeVar("_T")


def load(path: Path | None, parse: Callable[[Any], _T], again: str) -> _T | None:
    """Return the data that ``store`` wrote, or None.

    Args:
        path: path of the file; None where nothing is stored.
        parse: converts the JSON to a value; raises if the JSON has another form.
        again: for the warning about a damaged file, the action that is repeated.
    """
    if path is None:
        return None
    try:
        text = read_private(path)
    except UntrustedError as error:
        warnings.warn(f"{error}; {again} again", stacklevel=3)
        return None
    except OSError:
        return None
    try:
        return parse(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError):
        warnings.warn(f"{path} is damaged: {again} again", stacklevel=3)
        return None


def store(path: Path | None, data: Any, what: str) -> None:
    """Write data as JSON; a warning names ``what`` if it cannot be stored."""
    if path is None:
        return
    try:
        write_private(path, (json.dumps(data, indent=1) + "\n").encode())
    except OSError as error:
        warnings.warn(f"{what} cannot be kept, every process measures anew: {error}", stacklevel=3)
