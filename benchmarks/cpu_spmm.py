"""Times the CPU's SpMM in each precision, out of cache, in one run.

    python benchmarks/cpu_spmm.py --out benchmarks/results/cpu-spmm.json

Unweighted sums over F columns on graphs with ogbn-arxiv's skew and mean degree, the larger ones so that no
precision's x fits a cache of 32 MB. ``near`` draws sources with the locality of ``graphs.generate``, ``far``
draws each from all nodes. Precisions take turns; ``speedup`` divides the least time of fp32 by the least
of the other, which other programs on the machine disturb least. Results are stored in FP32.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from gnnc.runtime.backend import get_backend
from gnnc.runtime.cpu.structure import csr
from gnnc.runtime.row_program.opcodes import Op

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import measure
from graphs import SHAPES, generate

STORE = (Op.STORE_F32, 0, 0, 0)
SUM = 0


def rows_of(scale: int, near: bool, width: int, repeats: int) -> list[dict[str, Any]]:
    """Measure every precision on one graph."""
    shape = SHAPES["arxiv"]
    shape = dataclasses.replace(shape, nodes=shape.nodes * scale, edges=shape.edges * scale)
    src, dst = generate(shape)
    if not near:
        src = torch.randint(shape.nodes, src.shape, generator=torch.Generator().manual_seed(1))
    rowptr, col, _ = csr(src, dst, shape.nodes, shape.nodes)
    x, out = torch.randn(shape.nodes, width), torch.empty(shape.nodes, width)
    quantized = torch.zeros(shape.nodes, -(-width // 64) * 64, dtype=torch.int8)[:, :width]
    operands = {"fp32": x, "bf16": x.bfloat16(), "int8": quantized.copy_(x.mul(32).clamp(-127, 127))}
    times: dict[str, list[float]] = {name: [] for name in operands}
    for _, (name, operand) in itertools.product(range(repeats + 1), operands.items()):
        start = time.perf_counter()
        torch.ops.gnnc_cpu.spmm(rowptr, col, None, operand, None, None, SUM, 1, STORE, (), (), (out,))
        times[name].append((time.perf_counter() - start) * 1e3)
    shared = {
        "nodes": shape.nodes,
        "edges": shape.edges,
        "width": width,
        "sources": "near" if near else "far",
    }
    rows = []
    for name, (_, *taken) in times.items():  # the first turn warms up
        row = shared | {"precision": name, "x_mb": operands[name].nbytes / 1e6}
        row["ms"] = {"median": statistics.median(taken), "min": min(taken), "max": max(taken)}
        rows.append(row | {"speedup": min(times["fp32"][1:]) / min(taken)})
    return rows


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scales", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    isa = get_backend("cpu").description
    rows = []
    for scale, near, threads in itertools.product(args.scales, (True, False), args.threads):
        torch.set_num_threads(threads)
        rows += [row | {"threads": threads} for row in rows_of(scale, near, args.width, args.repeats)]
    keys = ("nodes", "edges", "sources", "threads", "precision")
    lines = [
        [*(r[key] for key in keys), f"{r['x_mb']:.0f}", f"{r['ms']['min']:.1f}", f"{r['speedup']:.2f}"]
        for r in rows
    ]
    print(tabulate(lines, [*keys, "x MB", "least ms", "speedup"], tablefmt="github"))
    if args.out:
        report = {"machine": measure.machine(), "kernels": isa, "rows": rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
