"""The Python files of the repository, by folder; links to folders are not followed."""

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files of a folder and of the folders in it, each once."""
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__pycache__", "build")))
        yield from (Path(path) / name for name in sorted(files) if name.endswith(".py"))


SOURCES = {name: tuple(python_files(ROOT / name)) for name in ("gnnc", "passes", "runtime")}
"""The files of the package."""
