"""A small share of the random cases of `fuzz.py`, which runs as many as you like."""

import os
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest

EACH = 50


@pytest.mark.first(1)
@pytest.mark.parametrize("part", range(4))
def test_random_graphs_and_primitives(part: int) -> None:
    assert sum(fuzz.run(10_000 + part * EACH, EACH).values()) == EACH


def test_every_case_is_drawn() -> None:
    drawn = {fuzz.kind_of(number).__name__ for number in range(200)}
    assert drawn == {case.__name__ for case in fuzz.EVERY}


def test_a_failure_names_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(d: fuzz.Draw) -> None:
        raise AssertionError("at (0, 0): 1.0 for 2.0")

    monkeypatch.setattr(fuzz, "EVERY", (broken,))
    with pytest.raises(RuntimeError, match=r"case 7, broken: at \(0, 0\)"):
        fuzz.run(7, 1)


@pytest.mark.first(1)
@pytest.mark.parametrize("command", [("fuzz.py", "--count", "1"), ("sanitize.py", "--help")])
def test_scripts_run_by_themselves(command: tuple[str, ...]) -> None:
    """Without the import path that pytest sets."""
    tests = Path(__file__).resolve().parents[1]
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if Path(path, "gnnc").is_dir())}
    script = [sys.executable, "-W", "ignore", str(tests / command[0]), *command[1:]]
    done = subprocess.run(script, capture_output=True, text=True, check=False, env=os.environ | paths)
    assert done.returncode == 0, done.stderr
