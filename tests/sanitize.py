"""Runs tests of every kernel family under NVIDIA's compute-sanitizer; needs a CUDA device.

    pip install nvidia-cuda-sanitizer-api
    python tests/sanitize.py [--tools racecheck memcheck initcheck] [--only structure spmm] [--jobs 4]

The tests run once without a tool, many at a time, and leave their compiled kernels to the runs under a
tool, of which there are as many at a time as --jobs says. Each tensor is memory of its own (torch's
caching allocator is off), so that a read past the end of one is an error and not its neighbor. memcheck
and racecheck look at kernels of gnnc only. The tests fill what torch.empty returns with NaN, which
initcheck takes for written: that such values are never used is what the tests themselves show.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent / "support"))

from cuda_families import FAMILIES, nodes_of

ROOT = Path(__file__).resolve().parents[1]
FOUND = 77
"""What the sanitizer exits with where it found something."""


def sanitizer() -> str | None:
    """Return compute-sanitizer: on the path, or of the package that brings it."""
    package = importlib.util.find_spec("nvidia")
    folders = (package.submodule_search_locations or ()) if package else ()
    brought = [str(path) for folder in folders for path in Path(folder).glob("cu*/bin/compute-sanitizer")]
    return shutil.which("compute-sanitizer") or next(iter(brought), None)


def pytest_of(tests: list[str], kernels: Path, *arguments: str) -> list[str]:
    """Return the command that runs tests, with a folder for compiled kernels."""
    return [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "--kernels", str(kernels), *arguments, *tests]


def run(program: str, tool: str, tests: list[str], kernels: Path) -> tuple[int, str]:
    """Run tests under a tool; return the exit status and what was written."""
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND)]
    if tool != "initcheck":  # which has to see what torch's kernels write
        command += ["--kernel-name", "kernel_substring=gnnc"]
    return text_of(command + pytest_of(tests, kernels), PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def text_of(command: list[str], **environment: str) -> tuple[int, str]:
    """Run a command; return the exit status and what was written."""
    given = os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def summary(text: str) -> str:
    """Return the lines that say how it went."""
    wanted = ("SUMMARY", " passed", " failed", " skipped")
    return "; ".join(line.strip() for line in text.splitlines() if any(word in line for word in wanted))


def main() -> int:
    """Run what the command line asks for; return 0 where nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", nargs="+", default=["racecheck", "memcheck", "initcheck"])
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--jobs", type=int, default=1, help="how many runs under a tool at a time")
    parser.add_argument("--sanitizer", default=sanitizer(), help="the program, if it is not found by itself")
    args = parser.parse_args()
    if args.sanitizer is None:
        parser.error("there is no compute-sanitizer: pip install nvidia-cuda-sanitizer-api")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device: the tests would all be skipped")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        kernels = Path(folder)
        tests = [test for family in args.only for test in nodes_of(family)]
        alone = pytest_of(tests, kernels, "--numprocesses", "auto")
        statuses = [report("no tool", lambda: text_of(alone))]

        def check(pair: tuple[str, str]) -> int:
            tool, test = pair
            name = test.rpartition("/")[2]
            return report(f"{tool} {name}", lambda: run(args.sanitizer, tool, [test], kernels))

        statuses += pool.map(check, [(tool, test) for tool in args.tools for test in tests])
    return int(any(statuses))  # one that a signal ended is below 0


def report(title: str, call: Callable[[], tuple[int, str]]) -> int:
    """Print how something went; return its exit status."""
    start = time.monotonic()
    status, text = call()
    failure = f"\n{text[-6000:]}" if status else ""
    print(f"{title}: exit {status}, {time.monotonic() - start:.0f} s: {summary(text)}{failure}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
