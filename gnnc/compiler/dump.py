"""``GNNC_DUMP``: every stage of a compilation as a file."""

import re
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from gnnc.environment import DUMP, dump_folder
from gnnc.errors import InputError
from gnnc.ir.parts import Parts
from gnnc.report.printing import format_graph, format_program


def dump_directory() -> Path | None:
    """Return the folder that ``GNNC_DUMP`` names, or None where it is unset or empty.

    Raises:
        InputError: the name is that of a file.
    """
    path = dump_folder()
    if path is not None and path.exists() and not path.is_dir():
        raise InputError(f"{DUMP} must name a folder, and {str(path)!r} is a file")
    return path


def dump(name: str, stages: Iterable[tuple[str, Parts]]) -> Path | None:
    """Write every stage of a compilation, where ``GNNC_DUMP`` asks for it.

    The files are ``<GNNC_DUMP>/<nnn>_<name>/<nn>_<pass>.py``, numbered in order; an earlier
    compilation's folder is never written again.

    Args:
        name: what was compiled, such as the model's class.
        stages: pass names with the graphs after each.

    Returns:
        The folder written, or None.
    """
    parent = dump_directory()
    if parent is None:
        return None
    folder = _new_folder(parent, _file_name(name))
    for index, (stage, parts) in enumerate(stages):
        file = folder / f"{index:02}_{_file_name(stage)}.py"
        file.write_text(f"{_stage_text(parts)}\n", encoding="utf-8")
    return folder


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)


def _stage_text(parts: Parts) -> str:
    graphs = list(parts)
    return format_program(parts) if len(graphs) > 1 else format_graph(parts.forward)


def _new_folder(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for number in count():
        if any(parent.glob(f"{number:03}_*")):
            continue
        folder = parent / f"{number:03}_{name}"
        folder.mkdir()
        return folder
    raise AssertionError("count() does not end")
