"""Build backend of gnnc: scikit-build-core, which also requires torch where the environment has none.

The C++ kernels are compiled against the headers of torch. An isolated build that always named torch as a
requirement would download a second copy of it; one that never did would fail in an empty environment.
"""

import subprocess
import sys
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_TORCH = "torch>=2.11"
_FIND_TORCH = "from importlib import util; raise SystemExit(util.find_spec('torch') is None)"


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return the requirements of building a wheel."""
    return [*_build.get_requires_for_build_wheel(config_settings), *_missing_torch()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return the requirements of an editable build."""
    return [*_build.get_requires_for_build_editable(config_settings), *_missing_torch()]


def _missing_torch() -> list[str]:
    """Return torch as a requirement, or nothing where the environment that pip installs into has it."""
    # With -I, Python ignores the variables by which pip hides that environment from an isolated build.
    found = subprocess.run([sys.executable, "-I", "-c", _FIND_TORCH], check=False).returncode == 0
    return [] if found else [_TORCH]
