"""Runs tests of every kernel family under NVIDIA's compute-sanitizer; needs a CUDA device.

    pip install nvidia-cuda-sanitizer-api
    python tests/sanitize.py [--tools memcheck racecheck initcheck] [--only structure spmm]

Each tensor is memory of its own (torch's caching allocator is off), so that a read past the end of one
is an error and not its neighbour. memcheck and racecheck look at kernels of gnnc only. The tests fill
what torch.empty returns with NaN, which initcheck takes for written: that such values are never used is
what the tests themselves show.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

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


def run(program: str, tool: str, tests: list[str]) -> tuple[int, str]:
    """Run tests under a tool; return the exit status and what was written."""
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND)]
    if tool != "initcheck":  # which has to see what torch's kernels write
        command += ["--kernel-name", "kernel_substring=gnnc"]
    command += [sys.executable, "-m", "pytest", "-q", "-m", "cuda", *tests]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def summary(text: str) -> str:
    """Return the lines that say how it went."""
    wanted = ("SUMMARY", " passed", " failed")
    return "; ".join(line.strip() for line in text.splitlines() if any(word in line for word in wanted))


def main() -> int:
    """Run what the command line asks for; return 0 where nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck", "initcheck"])
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--sanitizer", default=sanitizer(), help="the program, if it is not found by itself")
    args = parser.parse_args()
    if args.sanitizer is None:
        parser.error("there is no compute-sanitizer: pip install nvidia-cuda-sanitizer-api")
    worst = 0
    for tool in args.tools:
        for family in args.only:
            start = time.monotonic()
            status, text = run(args.sanitizer, tool, nodes_of(family))
            seconds = time.monotonic() - start
            print(f"{tool} {family}: exit {status}, {seconds:.0f} s: {summary(text)}", flush=True)
            if status:
                print(text[-6000:])
            worst = max(worst, status)
    return worst


if __name__ == "__main__":
    sys.exit(main())
