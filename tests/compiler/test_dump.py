"""GNNC_DUMP writes numbered stages; python -m gnnc says what this machine runs."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hand_graphs
import pytest

from gnnc import environment
from gnnc.compiler import dump
from gnnc.errors import InputError
from gnnc.ir.parts import Parts

STAGES = [
    ("raise", Parts(forward=hand_graphs.float_layer())),
    ("fuse", Parts(structure=hand_graphs.structure(), forward=hand_graphs.fused_layer())),
]


def test_nothing_is_written_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dump.DUMP, raising=False)
    assert dump.dump("GCN", STAGES) is None


def test_stages_are_numbered_python_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(dump.DUMP, str(tmp_path / "new"))
    folder = dump.dump("GCN", STAGES)
    assert folder == tmp_path / "new" / "000_GCN"
    assert sorted(path.name for path in folder.iterdir()) == ["00_raise.py", "01_fuse.py"]
    for path in folder.iterdir():
        compile(path.read_text(encoding="utf-8"), path.name, "exec")
    assert "def structure(" in (folder / "01_fuse.py").read_text(encoding="utf-8")


def test_each_compilation_has_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(dump.DUMP, str(tmp_path))
    folders = [dump.dump(name, STAGES[:1]) for name in ("GCN", "GCN", "GAT")]
    assert [f.name for f in folders if f] == ["000_GCN", "001_GCN", "002_GAT"]


def test_a_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    monkeypatch.setenv(dump.DUMP, str(path))
    with pytest.raises(InputError, match="GNNC_DUMP must name a folder"):
        dump.dump("GCN", STAGES)


def test_compilations_at_the_same_time_have_folders_and_numbers_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(dump.DUMP, str(tmp_path / "new"))
    names = [f"Model{number % 3}" for number in range(12)]
    with ThreadPoolExecutor(len(names)) as pool:
        folders = list(pool.map(lambda name: dump.dump(name, STAGES[:1]), names))
    assert sorted(folder.name[:3] for folder in folders if folder) == [f"{n:03}" for n in range(12)]
    assert sorted(folder.name[4:] for folder in folders if folder) == sorted(names)
    assert all(len(list(folder.iterdir())) == 1 for folder in (tmp_path / "new").iterdir())


@pytest.mark.parametrize("name", ["L" * 300, "\u00e4" * 200, "a/../b", "..", "", "C[int, str]"])
def test_names_of_any_length_and_letters_are_folders(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(dump.DUMP, str(tmp_path / "new"))
    folder = dump.dump(name, STAGES[:1])
    assert folder is not None and folder.parent == tmp_path / "new" and len(folder.name.encode()) <= 124
    assert [path.name for path in folder.iterdir()] == ["00_raise.py"]


@pytest.mark.parametrize("place", ["file/inside", "\0", "x" * 300])
def test_folders_that_cannot_be_written_are_refused(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(dump, "dump_folder", lambda: tmp_path / place)
    with pytest.raises(InputError, match="GNNC_DUMP cannot write to .*name a file or folder"):
        dump.dump("GCN", STAGES)


def test_every_variable_is_documented_and_read_in_one_place() -> None:
    root = Path(__file__).parents[2]
    readers = [
        path.relative_to(root).as_posix()
        for folder in ("gnnc", "passes", "runtime")
        for path in (root / folder).rglob("*.py")
        if re.search(r"os\.environ|getenv", path.read_text(encoding="utf-8"))
    ]
    assert readers == ["gnnc/environment.py"]
    table = (root / "docs" / "env.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in table for name in (*environment.VARIABLES, "GNNC_ISA"))


@pytest.mark.slow
def test_python_m_gnnc() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gnnc"], capture_output=True, text=True, check=True, timeout=120
    )
    for word in ("gnnc", "torch", "reference", "int8", "cpu", "cuda"):
        assert word in done.stdout
