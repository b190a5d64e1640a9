"""Times the first call on a new graph on a CUDA device, as in every mini-batch; counts the waits of the host.

    python benchmarks/cuda_new_graphs.py [--graphs batch arxiv] [--models gcn gat] [--precision int8]

The peers are PyG eager on the same graph, which has no first call, and our call on a known graph. Waits are
those that torch warns of (``torch.cuda.set_sync_debug_mode``), and waits for events and streams.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tabulate import tabulate
from torch import Tensor

import gnnc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import cuda_kernels
from graphs import SHAPES, generate
from models import MODELS

RESULTS = Path(__file__).resolve().parent / "results" / "cuda-new-graphs.json"
BATCH = 10_000, 60_000, 128, 40
"""Nodes, edges, features and classes of a mini-batch as neighbor sampling makes it."""
SIZES = {name: (s.nodes, s.edges, s.features, s.classes) for name, s in SHAPES.items()} | {"batch": BATCH}


def inputs(name: str) -> tuple[Tensor, Tensor]:
    """Return features and edges of a graph."""
    nodes, edges, features, _ = SIZES[name]
    if name in SHAPES:
        edge_index = generate(name, device="cuda")
    else:
        edge_index = torch.randint(nodes, (2, edges), device="cuda")
    return torch.randn(nodes, features, device="cuda"), edge_index


def wall_ms(call: Callable[[], Any]) -> float:
    """Return the milliseconds of a call, until the device has finished."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def waits(call: Callable[[], Any]) -> int:
    """Return how often the host waits in a call."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any) -> Any:
            nonlocal count
            count += 1
            return function(*args)

        return wait

    kinds = [
        (torch.cuda, "synchronize"),
        (torch.cuda.Stream, "synchronize"),
        (torch.cuda.Event, "synchronize"),
    ]
    patches = [patch.object(owner, name, counted(getattr(owner, name))) for owner, name in kinds]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            for mocked in patches:
                mocked.start()
            call()
    finally:
        for mocked in patches:
            mocked.stop()
        torch.cuda.set_sync_debug_mode("default")
    return count + sum(
        "called a synchronizing CUDA operation" in str(message.message) for message in messages
    )


def row(name: str, kind: str, precision: str, repeats: int) -> dict[str, Any]:
    """Measure one model on one graph."""
    x, edge_index = inputs(name)
    _, _, features, classes = SIZES[name]
    model = MODELS[kind](features, classes).cuda().eval()
    compiled = gnnc.compile(model, precision=precision)
    for _ in range(3):  # compiles, and records the fast path
        for _ in range(12):
            compiled(x, edge_index)
        edge_index = edge_index.clone()
    new, eager = [], []
    for _ in range(repeats):
        graph = edge_index.clone()
        new.append(wall_ms(lambda: compiled(x, graph)))  # noqa: B023
        if name != "reddit":  # messages of reddit do not fit
            eager.append(wall_ms(lambda: model(x, graph)))  # noqa: B023
    known = [wall_ms(lambda: compiled(x, edge_index)) for _ in range(repeats)]
    graph = edge_index.clone()
    result: dict[str, Any] = {"graph": name, "model": kind, "precision": precision}
    result |= {"new ms": statistics.median(new), "known ms": statistics.median(known)}
    result["eager ms"] = statistics.median(eager) if eager else None
    return result | {
        "waits": waits(lambda: compiled(x, graph)),
        "waits known": waits(lambda: compiled(x, graph)),
    }


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--graphs", nargs="+", default=["batch", "cora", "arxiv", "reddit"], choices=list(SIZES)
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    with torch.no_grad():
        for name in args.graphs:
            for kind in args.models:
                rows.append(row(name, kind, args.precision, args.repeats))
                torch.cuda.empty_cache()
    print(tabulate(rows, headers="keys", floatfmt=".3g"))
    args.out.write_text(json.dumps({"machine": cuda_kernels.machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
