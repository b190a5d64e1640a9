"""Runs tests of every kernel family under NVIDIA's compute-sanitizer; needs a CUDA device.

    pip install nvidia-cuda-sanitizer-api
    python tests/cuda/sanitize.py [--tools memcheck racecheck initcheck] [--only structure spmm]

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

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {
    "structure": (
        "structure.py::test_csr_is_that_of_the_reference[8193-dtype0]",
        "structure.py::test_csr_is_that_of_the_reference[50000-dtype1]",
        "structure.py::test_the_transpose_is_that_of_the_reference",
        "structure.py::test_an_id_out_of_range_is_named[src-1099511627776]",
    ),
    "spmm": (
        "spmm.py::test_integer_reductions_are_exact[47-sum]",
        "spmm.py::test_integer_reductions_are_exact[602-max]",
        "spmm.py::test_integer_weights_are_exact[47]",
        "spmm.py::test_integer_rows_with_real_weights[7]",
        "spmm.py::test_integer_rows_with_real_weights[47]",
        "spmm.py::test_integer_rows_with_real_weights[602]",
        "spmm.py::test_float_sums[7-fp32-False]",
        "spmm.py::test_float_sums[47-fp16-False]",
        "spmm.py::test_float_sums[602-bf16-True]",
        "spmm.py::test_weights_a_head[3-7-dtype2]",
    ),
    "staged": (
        "staged.py::test_words_hold_the_sources[cut1-several stretches]",
        "spmm.py::test_staged_sums_of_integers_are_exact[16-sum]",
        "spmm.py::test_staged_sums_of_integers_are_exact[47-sum]",
        "spmm.py::test_staged_sums_of_integers_are_exact[128-mean]",
        "spmm.py::test_staged_sums_with_row_scales[64]",
        "spmm.py::test_staged_sums_of_floats[fp16-64-sum]",
        "spmm.py::test_staged_sums_of_floats[fp32-64-sum]",
    ),
    "sddmm": (
        "sddmm.py::test_integer_dots_are_exact[47]",
        "sddmm.py::test_float_products[47-dtype1-dot]",
        "sddmm.py::test_float_products[602-dtype0-add]",
        "sddmm.py::test_dots_a_head[4-16-dtype2]",
    ),
    "attention": (
        "attention.py::test_attention[1.0-4-16-dtype2]",
        "attention.py::test_attention[1.0-3-47-dtype1]",
        "attention.py::test_attention[1.0-1-602-dtype0]",
    ),
    "gemm": (
        "gemm.py::test_products_equal_the_reference[47-int8]",
        "gemm.py::test_products_equal_the_reference[602-fp16]",
        "gemm.py::test_products_equal_the_reference[1433-bf16]",
    ),
    "models": (
        "models.py::test_cuda_computes_what_eager_and_the_reference_compute[GCN-int8]",
        "models.py::test_cuda_computes_what_eager_and_the_reference_compute[GAT-int8]",
        "models.py::test_cuda_computes_what_eager_and_the_reference_compute[GATv2-fp32]",
        "models.py::test_cuda_computes_what_eager_and_the_reference_compute[GraphSAGE max-fp16]",
    ),
}
"""Tests by kernel family: odd widths, rows of several passes, split rows, epilogues, bodies."""
FOUND = 77
"""What the sanitizer exits with where it found something."""


def tests_of(family: str) -> list[str]:
    """Return the node ids of a family's tests."""
    return [f"tests/cuda/test_{name}" for name in FAMILIES[family]]


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
            status, text = run(args.sanitizer, tool, tests_of(family))
            seconds = time.monotonic() - start
            print(f"{tool} {family}: exit {status}, {seconds:.0f} s: {summary(text)}", flush=True)
            if status:
                print(text[-6000:])
            worst = max(worst, status)
    return worst


if __name__ == "__main__":
    sys.exit(main())
