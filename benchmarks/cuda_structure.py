"""Times the structure of a new graph on a CUDA device: CSR and transpose, beside one sort of its edges.

    python benchmarks/cuda_structure.py [--graphs arxiv reddit products]

The sort is ``torch.sort`` (CUB's radix sort) of the destinations as int32, stable. "csr" is the CSR and
the tables of sums, as a model's call builds them; "csr alone" and the transpose have no tables. Memory is the
peak above the caller's tensors and the result, in bytes an edge.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from gnnc.runtime.cuda.formats.csr import csr, csr_transpose, sorted_edges

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import cuda_kernels
from cuda_kernels import median_ms
from graphs import SHAPES, generate

RESULTS = Path(__file__).resolve().parent / "results" / "cuda-structure.json"


def workspace(build: Callable[[], Any]) -> int:
    """Return the bytes that ``build`` takes beside its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = build()
    result_bytes = torch.cuda.memory_allocated() - before
    del result
    return torch.cuda.max_memory_allocated() - before - result_bytes


def row(name: str) -> dict[str, Any]:
    """Measure one graph."""
    nodes = SHAPES[name].nodes
    src, dst = generate(name, device="cuda")
    keys = dst.int()
    rowptr, col, _ = csr(src, dst, nodes, nodes)
    builds = {
        "csr alone": lambda: sorted_edges(src, dst, nodes, nodes, cuts=False),
        "csr": lambda: csr(src, dst, nodes, nodes),
        "transpose": lambda: csr_transpose(rowptr, col, nodes),
    }
    sort = median_ms(lambda: torch.sort(keys, stable=True), 31)
    times = {what: median_ms(build, 31) for what, build in builds.items()}
    result: dict[str, Any] = {"graph": name, "edges": dst.numel(), "sort ms": sort}
    result |= {f"{what} ms": time for what, time in times.items()}
    result["times the sort"] = (times["csr alone"] + times["transpose"]) / sort
    result["with tables"] = (times["csr"] + times["transpose"]) / sort
    return result | {f"{what} B/edge": workspace(build) / dst.numel() for what, build in builds.items()}


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", nargs="+", default=["arxiv", "reddit", "products"], choices=list(SHAPES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for name in args.graphs:
        rows.append(row(name))
        torch.cuda.empty_cache()
    print(tabulate(rows, headers="keys", floatfmt=".3g"))
    args.out.write_text(json.dumps({"machine": cuda_kernels.machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
