"""The tests of the sparse kernels once more, on the instruction set that GNNC_ISA forces."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnnc.runtime.cpu import library

FILES = ("test_spmm.py", "test_attention.py", "test_sddmm.py", "test_edge_softmax.py")


@pytest.mark.slow
@pytest.mark.skipif(library.load() == "generic", reason="the tests run on generic already")
@pytest.mark.parametrize("file", FILES)
def test_generic(file: str) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / file)]
    done = subprocess.run(
        command,
        cwd=here.parents[1],
        env={**os.environ, "GNNC_ISA": "generic"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
