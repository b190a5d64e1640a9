"""Train a GCN and a GAT on Cora in plain PyG, compile each to int8, and compare.

Run it by ``make demo``. It uses the CPU only and the copy of Cora that comes with the tests.
"""

import ctypes
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import cora
import torch
from tabulate import tabulate
from torch import Tensor
from torch_geometric.data import Data

import gnnc

COLUMNS = ["model", "run by", "test accuracy", "ms a call", "peak MB a call", "speed-up"]


def milliseconds(run: Callable[[Tensor, Tensor], Tensor], data: Data) -> float:
    """Return the median time of 30 calls, each with new features, after five that warm up."""
    times = []
    for _ in range(35):
        x = data.x.clone()
        start = time.perf_counter()
        run(x, data.edge_index)
        times.append(time.perf_counter() - start)
    return statistics.median(times[5:]) * 1e3


def peak_megabytes(run: Callable[[Tensor, Tensor], Tensor], data: Data) -> float:
    """Return by how much resident memory rises at most during a call (Linux, glibc)."""

    def status(key: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # give freed memory back, or the call could use it unseen
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    run(data.x, data.edge_index)
    return status("VmHWM") - before


def main() -> None:
    """Train, compile and print."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    data = cora.load()
    table = []
    for name, make in (("GCN", cora.gcn), ("GAT", cora.gat)):
        torch.manual_seed(0)
        model = cora.train(make(), data, name)
        fast = gnnc.compile(model, precision="int8")
        contenders = {
            "PyG eager, fp32": model,
            "torch.compile, fp32": torch.compile(model),
            "gnnc, int8": fast,
        }
        eager_ms = 0.0
        for contender, run in contenders.items():
            score = cora.accuracy(run, data, data.test_mask)
            with torch.no_grad():
                ms = milliseconds(run, data)
                if run is fast:
                    fast.clear_cache()  # its buffers and its copy of the graph count
                megabytes = peak_megabytes(run, data)
            eager_ms = eager_ms or ms
            row = [f"{score:.1f}%", f"{ms:.2f}", f"{megabytes:.1f}", f"{eager_ms / ms:.1f}x"]
            table.append([name, contender, *row])
        if name == "GCN":
            print(f"\nThe GCN as gnnc runs it:\n\n{fast}\n")
    print()
    print(tabulate(table, COLUMNS, tablefmt="github", disable_numparse=True))
    print("\nfast.explain() says what was and was not quantized, and why.")


if __name__ == "__main__":
    main()
