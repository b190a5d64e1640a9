"""Times mini-batches of sampled neighbors beside PyG eager, in one run: structure and run of new batches.

    python benchmarks/batches.py --threads 1 --out benchmarks/results/cpu-batches.json

Contenders take turns on the same batches, each batch in new tensors, and take turns in running first.
With one thread the time is that of the thread, in which other programs do not count. ``slower`` counts
the batches on which a contender took longer than PyG eager did; ``growth_mb`` is the growth of the process
between the first quarter of the batches and the last.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import gnnc
from gnnc.runtime.program.device import now

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import graphs
import measure
import models
from sampling import Sampler

FAN_OUT = (10, 10)
WARMUP = 5
PRECISIONS = ("fp32", "int8")


@torch.no_grad()
def rows_of(graph: str, model_name: str, size: int, count: int) -> list[dict[str, Any]]:
    """Measure eager and gnnc on ``count`` batches of ``size`` seeds."""
    data = graphs.load(graph)
    x, edge_index, classes = data["x"], data["edge_index"], data["num_classes"]
    assert isinstance(x, Tensor) and isinstance(edge_index, Tensor) and isinstance(classes, int)
    torch.manual_seed(0)
    model = models.MODELS[model_name](x.shape[1], classes).eval()
    ours = {f"gnnc {precision}": gnnc.compile(model, precision) for precision in PRECISIONS}
    calls: dict[str, Callable[..., Tensor]] = {"eager": model, **ours}
    times: dict[str, list[float]] = {name: [] for name in calls}
    errors = dict.fromkeys(calls, 0.0)
    memory: list[float] = []
    sizes: list[tuple[int, int]] = []
    turns = itertools.cycle(calls)
    batches = Sampler(edge_index, x.shape[0], FAN_OUT).batches(size)
    for nodes, edges in itertools.islice(batches, WARMUP + count):
        features, sizes = x[nodes], [*sizes, (len(nodes), edges.shape[1])]
        results = {}
        for name in itertools.islice(turns, len(calls)):
            arguments = features.clone(), edges.clone()
            start = now()
            results[name] = calls[name](*arguments)
            times[name].append((now() - start) * 1e3)
        next(turns)
        for name, result in results.items():
            off = (result - results["eager"]).norm() / results["eager"].norm()
            errors[name] = max(errors[name], off.item())
        gc.collect()
        memory.append(measure.rss_mb())
    quarter = max(count // 4, 1)
    shared = {"graph": graph, "model": model_name, "seeds": size, "batches": count}
    shared |= {
        "nodes": statistics.median(n for n, _ in sizes),
        "edges": statistics.median(e for _, e in sizes),
    }
    growth = statistics.median(memory[-quarter:]) - statistics.median(memory[WARMUP : WARMUP + quarter])
    rows = []
    for name, taken in times.items():
        taken, eager = taken[WARMUP:], times["eager"][WARMUP:]
        row = shared | {"name": name, "relative_error": errors[name], "growth_mb": growth}
        row["ms"] = {"median": statistics.median(taken), "min": min(taken), "max": max(taken)}
        row["of_eager"] = statistics.median(a / b for a, b in zip(taken, eager, strict=True))
        row["slower"] = sum(a > b for a, b in zip(taken, eager, strict=True))
        row["captures"] = len(ours[name]._dispatch.captures) if name in ours else 0
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [
        [r["graph"], r["model"], r["seeds"], f"{r['nodes']:.0f}", f"{r['edges']:.0f}", r["name"]]
        + [f"{r['ms']['median']:.2f}", f"{r['of_eager']:.2f}", f"{r['slower']} of {r['batches']}"]
        + [r["captures"], f"{r['relative_error']:.1e}", f"{r['growth_mb']:.1f}"]
        for r in rows
    ]
    headers = ["graph", "model", "seeds", "nodes", "edges", "contender", "ms", "of eager", "slower"]
    return tabulate(lines, [*headers, "captures", "error", "growth MB"], tablefmt="github")


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", nargs="*", default=["amazon_computers", "tolokers"])
    parser.add_argument("--models", nargs="*", default=["sage", "gcn"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[64, 512])
    parser.add_argument("--batches", type=int, default=25)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for graph, model, size in itertools.product(args.graphs, args.models, args.seeds):
        measured = rows_of(graph, model, size, args.batches)
        print(json.dumps(measured), file=sys.stderr, flush=True)
        rows += measured
    print(table(rows))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": measure.machine(), "fan_out": FAN_OUT, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
