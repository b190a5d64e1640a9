"""The tests that the families name exist."""

import subprocess
import sys
from pathlib import Path

import pytest
from cuda_families import FAMILIES, nodes_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_test_that_is_named_exists() -> None:
    named = [test for family in FAMILIES for test in nodes_of(family)]
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(named) <= set(done.stdout.splitlines())
