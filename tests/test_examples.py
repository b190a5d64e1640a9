"""The training example runs as a user starts it."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_training_example_has_the_losses_of_eager() -> None:
    done = run(str(EXAMPLES / "train.py"), "--epochs", "4", "--precision", "fp32")
    assert done.returncode == 0, done.stderr
    eager, compiled = re.findall(r"last loss ([\d.]+)", done.stdout)
    assert abs(float(eager) - float(compiled)) <= 0.002


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="PyTorch Lightning is not installed")
def test_the_lightning_example_trains() -> None:
    done = run(str(EXAMPLES / "train_lightning.py"), "--epochs", "30")
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"test\D+([\d.]+)", done.stdout)
    assert accuracy is not None and float(accuracy[1]) > 70


@pytest.mark.slow
def test_the_lightning_example_says_what_is_missing() -> None:
    without = f"""
import runpy, sys
sys.modules["pytorch_lightning"] = None
sys.path.insert(0, {str(EXAMPLES)!r})
runpy.run_path({str(EXAMPLES / "train_lightning.py")!r}, run_name="__main__")
"""
    done = run("-c", without)
    assert done.returncode == 1
    assert 'pip install ".[examples]"' in done.stderr and "Traceback" not in done.stderr
