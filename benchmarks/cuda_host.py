"""Times the host's work for a model on a CUDA device: compiling it, calling it, launching a kernel.

    python benchmarks/cuda_host.py [--cases gcn:int8 gat:int8] [--out benchmarks/results/cuda-host.json]

A model is compiled in a process of its own, first with an empty cache of kernels on disk, then with
the cache that the first process left. The clock starts when torch, PyG and gnnc are imported and the
device is awake. ``seconds`` is the time from the first call's arguments to a program that can run
(capture, passes, kernels compiled or loaded); ``first call`` holds the run and the graph's CSR too.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from compile_process import in_a_new_process, problem
from cuda_launch import Module

SOURCE = """
template <int kCount>
struct Values {
  long long v[kCount];
};
template <int kCount>
__global__ void nothing(Values<kCount> values) {}
"""
COUNTS = (4, 16, 32)


def compiling(case: str, again: int = 2) -> list[dict[str, Any]]:
    """Return the times with an empty cache, and the median of ``again`` processes with the filled one."""
    with tempfile.TemporaryDirectory() as folder:
        cold = in_a_new_process(case, Path(folder))
        runs = [in_a_new_process(case, Path(folder)) for _ in range(again)]
    warm = {key: statistics.median(run[key] for run in runs) for key in cold}
    return [{"case": case, "cache": "empty", **cold}, {"case": case, "cache": "filled", **warm}]


def host_us(call: Callable[[], Any], batch: int = 100, rounds: int = 30) -> float:
    """Return the median microseconds that the host takes for a call; the host never waits for the device."""
    times = []
    for turn in range(rounds + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        if turn >= 3:
            times.append((time.perf_counter() - start) / batch * 1e6)
    return statistics.median(times)


def launching() -> dict[str, float]:
    """Return the microseconds that one launch takes, by the number of the kernel's arguments."""
    module = Module(SOURCE, tuple(f"nothing<{count}>" for count in COUNTS))
    stream = torch.cuda.current_stream().cuda_stream
    results = {}
    for count in COUNTS:
        launch, values = module.launcher(f"nothing<{count}>", 32, count), tuple(range(count))
        results[f"{count} arguments"] = host_us(lambda: launch(1, stream, *values))  # noqa: B023
    return results


@torch.no_grad()
def calling(case: str) -> list[dict[str, Any]]:
    """Return the microseconds that a call on a known graph takes, launch by launch and as a CUDA graph."""
    import gnnc

    name, precision = case.split(":")
    rows = []
    for cuda_graph in (False, True):
        model, x, edge_index = problem(name)
        compiled = gnnc.compile(model, precision, cuda_graph=cuda_graph)
        compiled(x, edge_index)
        program = compiled._dispatch.last.executable
        rows.append(
            {
                "case": case,
                "cuda graph": cuda_graph,
                "launches": program.source.count("launch_"),
                "us": host_us(lambda: compiled(x, edge_index), batch=30),  # noqa: B023
            }
        )
    return rows


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=["gcn:int8", "gat:int8"], help="model:precision")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    compiled = [row for case in args.cases for row in compiling(case)]
    print(tabulate(compiled, headers="keys", floatfmt=".2f"))
    called = [row for case in args.cases for row in calling(case)]
    print(tabulate(called, headers="keys", floatfmt=".1f"))
    launched = launching()
    print(tabulate(launched.items(), headers=["one launch", "us"], floatfmt=".2f"))
    if args.out:
        import cuda_kernels

        results = {"machine": cuda_kernels.machine(), "compile": compiled, "call": called, "launch": launched}
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
