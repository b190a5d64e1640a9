"""The training example runs as a user starts it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "train.py"


@pytest.mark.slow
def test_the_training_example_has_the_losses_of_eager() -> None:
    command = [sys.executable, str(EXAMPLE), "--epochs", "4", "--precision", "fp32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    eager, compiled = re.findall(r"last loss ([\d.]+)", done.stdout)
    assert abs(float(eager) - float(compiled)) <= 0.002
