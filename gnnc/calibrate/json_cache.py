"""Files of the cache folder that hold what was measured: there whole or not, measured again where damaged."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")


def load(path: Path | None, parse: Callable[[Any], _T], again: str) -> _T | None:
    """Return what ``store`` kept, or None.

    Args:
        path: of the file; None where nothing is kept.
        parse: makes a value of the JSON, or raises where that is not what was stored.
        again: what is done again where it is damaged, for the warning.
    """
    if path is None:
        return None
    try:
        text = path.read_text()
    except OSError:
        return None
    try:
        return parse(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError):
        warnings.warn(f"{path} is damaged: {again} again", stacklevel=3)
        return None


def store(path: Path | None, data: Any, what: str) -> None:
    """Keep data as JSON; a warning says of ``what`` that it cannot be kept."""
    if path is None:
        return
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(path)  # whoever reads meanwhile sees the old file or the new one
    except OSError as error:
        warnings.warn(f"{what} cannot be kept, every process measures anew: {error}", stacklevel=3)
