"""Environment variables: those of gnnc, which no other module reads, and those that a model may read.

``docs/env.md`` lists them.
"""

import os
import warnings
from pathlib import Path

DUMP = "GNNC_DUMP"
CACHE = "GNNC_CACHE"
VARIABLES = (DUMP, CACHE, "CUDA_HOME")
OF_PROCESS = os.environ
"""All variables of the process."""
READERS = frozenset(("environ", "getenv"))
"""Names in ``os`` that code reads them by."""


def dump_folder() -> Path | None:
    """Return the folder that ``GNNC_DUMP`` names, or None where it is unset or empty."""
    value = os.environ.get(DUMP, "")
    return Path(value) if value else None


def cache_folder() -> Path | None:
    """Return the folder of rates, times and compiled kernels; None (``GNNC_CACHE=off``) disables it."""
    named = os.environ.get(CACHE, "")
    if named == "off":
        return None
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base:
        return Path(base) / "gnnc"
    try:
        return Path.home() / ".cache" / "gnnc"
    except RuntimeError:  # neither HOME nor a user of this number
        warnings.warn(
            f"no home folder is known, so rates and kernels are not stored: set {CACHE} to a folder or off",
            stacklevel=2,
        )
        return None


def cuda_home() -> Path:
    """Return the folder of the CUDA toolkit; it may not exist."""
    return Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
