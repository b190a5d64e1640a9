"""``GNNC_DUMP``: every stage of a compilation as a file."""

import os
import re
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from gnnc.environment import DUMP, dump_folder
from gnnc.errors import InputError
from gnnc.ir.parts import Parts
from gnnc.paths import writing
from gnnc.report.printing import format_graph, format_program

_LONGEST = 120
"""Bytes of a class name in the name of a folder; file systems take 255."""


def dump_directory() -> Path | None:
    """Return the folder that ``GNNC_DUMP`` names, or None where it is unset or empty.

    Raises:
        InputError: the name is that of a file.
    """
    path = dump_folder()
    if path is not None and os.path.exists(path) and not os.path.isdir(path):  # pathlib's may raise
        raise InputError(f"{DUMP} must name a folder, and {str(path)!r} is a file")
    return path


def dump(name: str, stages: Iterable[tuple[str, Parts]]) -> Path | None:
    """Write every stage of a compilation, where ``GNNC_DUMP`` asks for it.

    The files are ``<GNNC_DUMP>/<nnn>_<name>/<nn>_<pass>.py``, numbered in order; an earlier
    compilation's folder is never written again.

    Args:
        name: name of the compiled thing, such as the model's class.
        stages: pass names with the graphs after each.

    Returns:
        The folder written, or None.

    Raises:
        InputError: the folder cannot be written.
    """
    parent = dump_directory()
    if parent is None:
        return None
    with writing(DUMP, parent):
        folder = _new_folder(parent, _file_name(name))
        for index, (stage, parts) in enumerate(stages):
            file = folder / f"{index:02}_{_file_name(stage)}.py"
            file.write_text(f"{_stage_text(parts)}\n", encoding="utf-8")
    return folder


def _file_name(text: str) -> str:
    """Return the text as part of a file name, cut to what every file system takes."""
    return re.sub(r"[^\w.-]+", "_", text).encode()[:_LONGEST].decode(errors="ignore")


def _stage_text(parts: Parts) -> str:
    graphs = list(parts)
    return format_program(parts) if len(graphs) > 1 else format_graph(parts.forward)


def _new_folder(parent: Path, name: str) -> Path:
    """Make the folder with the next number; compilations at the same time get numbers of their own."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in count():
        claim = parent / f".{number:03}"
        try:
            claim.mkdir()
        except FileExistsError:
            continue
        if any(parent.glob(f"{number:03}_*")):
            claim.rmdir()
            continue
        return claim.rename(parent / f"{number:03}_{name}")
    raise AssertionError("count() does not end")
