"""Measures inference on a CUDA device beside its peers, in one run: time, memory, compile time, kernels.

    python benchmarks/cuda_inference.py --cases gcn:products --out benchmarks/results/cuda-inference.json

Peers: PyG eager, PyG under torch.compile, and (GCN) cuSPARSE CSR in FP32 with the normalized
adjacency precomputed. Calls take one of several x tensors in turn, never that of the call before;
a time is that of a loop of calls, from CUDA events, divided by their number. Memory is the peak above the
caller's tensors (the model, x and edge_index): of the first call, which compiles and sorts the graph, and of
the timed calls, with the memory that stays between calls (the graph's structure, temporaries, a result).
With ``--tune`` our models are timed once more, with the fastest cuts that ``tune`` measures.
"""

import argparse
import copy
import gc
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import gnnc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import cuda_kernels
import graphs
import models
from inference import Call, two_products

PEERS = ("eager", "torch.compile", "cusparse csr")
OURS = ("gnnc fp32", "gnnc fp16", "gnnc int8", "gnnc int8 static", "gnnc fp8")
CASES = {
    "gcn:cora": (*PEERS, *OURS),
    "gcn:arxiv": (*PEERS, *OURS),
    "gcn:products": (*PEERS, *OURS),
    "gcn:reddit": ("eager", "cusparse csr", *OURS),
    "gat:arxiv": ("eager", "torch.compile", *OURS),
    "gat:reddit": OURS,
    "sage:reddit": OURS,
    "gin:reddit": OURS,
}
"""Contenders by model and graph; PyG eager would write hundreds of gigabytes for the last three."""

_ROUNDS = 5
_BUDGET_S = 0.4
"""Approximate seconds of one contender's loop."""


def problem(graph: str, model: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model in eval mode, x and edge_index, on the device."""
    torch.manual_seed(0)
    shape = graphs.SHAPES[graph]
    edge_index = graphs.generate(shape, device="cuda")
    x = torch.randn(shape.nodes, shape.features, device="cuda")
    return models.MODELS[model](shape.features, shape.classes).eval().cuda(), x, edge_index


def cusparse(model: nn.Module, edge_index: Tensor, num_nodes: int) -> Call:
    """Return GCN as two sparse products with a normalized adjacency computed beforehand."""
    index, weight = gcn_norm(edge_index, None, num_nodes, add_self_loops=True)
    order = (index[1] * num_nodes + index[0]).argsort()
    rows = torch.arange(num_nodes + 1, device=index.device)
    rowptr = torch.searchsorted(index[1][order].contiguous(), rows).int()
    shape = (num_nodes, num_nodes)
    return two_products(model, torch.sparse_csr_tensor(rowptr, index[0][order].int(), weight[order], shape))


def contender(name: str, model: nn.Module, x: Tensor, edge_index: Tensor) -> tuple[Call, Any]:
    """Return the call of a contender, and its compiled model if it is gnnc's."""
    if name == "eager":
        return lambda x: model(x, edge_index), None
    if name == "torch.compile":
        torch._dynamo.reset()
        compiled = torch.compile(copy.deepcopy(model))
        return lambda x: compiled(x, edge_index), None
    if name == "cusparse csr":
        return cusparse(model, edge_index, x.shape[0]), None
    words = name.split()
    examples = (x, edge_index) if words[-1] == "static" else None
    ours = gnnc.compile(model, precision=words[1], example_inputs=examples)
    return lambda x: ours(x, edge_index), ours


def loop_ms(call: Call, inputs: list[Tensor]) -> dict[str, float]:
    """Return the time of a call: median and least over rounds of a loop of calls."""
    call(inputs[0])
    torch.cuda.synchronize()
    start = time.perf_counter()
    call(inputs[-1])
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    calls = max(3, min(200, int(_BUDGET_S / _ROUNDS / max(once, 1e-6))))
    times = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for i in range(calls):
            call(inputs[i % len(inputs)])
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return {"median": statistics.median(times), "min": min(times), "calls": calls}


@torch.no_grad()
def row(
    case: str, name: str, model: nn.Module, x: Tensor, edge_index: Tensor, *, tune: bool
) -> dict[str, Any]:
    """Measure one contender on one model and graph; ``tune``: also with measured cuts."""
    model_name, graph = case.split(":")
    result: dict[str, Any] = {"graph": graph, "model": model_name, "name": name}
    try:
        inputs = [x, *(x.clone() for _ in range(2))]
        gc.collect()  # free the memory of earlier contenders
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        call, ours = contender(name, model, x, edge_index)
        got = call(x)
        torch.cuda.synchronize()
        result["first_s"] = time.perf_counter() - start
        result["first_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
        torch.cuda.reset_peak_memory_stats()
        result["ms"] = loop_ms(call, inputs)
        result["peak_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
        result["norm"] = float(got.double().norm())
        if ours is not None:
            result |= _ours(ours, x, edge_index)
        if ours is not None and tune:
            result |= _tuned(ours, call, inputs, edge_index)
    except torch.cuda.OutOfMemoryError:
        result["error"] = "out of memory"
    return result


def _ours(ours: Any, x: Tensor, edge_index: Tensor) -> dict[str, Any]:
    ours.profile(x, edge_index)
    timings = ours._dispatch.last.timings
    kernels = dict(ours._dispatch.last.executable.kernels)
    return {
        "kernels": {f"{node} ({kernels.get(node, '')})": round(s * 1e3, 4) for node, s in timings.items()}
    }


def _tuned(ours: Any, call: Call, inputs: list[Tensor], edge_index: Tensor) -> dict[str, Any]:
    start = time.perf_counter()
    ours.tune(inputs[0], edge_index)
    seconds = time.perf_counter() - start
    return {
        "tune_s": seconds,
        "cuts": list(map(str, ours._dispatch.last.tuned)),
        "tuned_ms": loop_ms(call, inputs),
    }


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out")
    parser.add_argument("--seconds", type=float, default=540, help="start nothing new after so long")
    parser.add_argument("--tune", action="store_true", help="also with cuts of the graph that are measured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    header = cuda_kernels.machine()
    begin, rows = time.perf_counter(), []
    for case in args.cases:
        inputs = problem(*reversed(case.split(":")))
        for name in CASES[case]:
            if name in args.skip or time.perf_counter() - begin > args.seconds:
                continue
            rows.append(row(case, name, *inputs, tune=args.tune))
            torch.cuda.empty_cache()
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if args.out:
                _write(args.out, header, rows)
        del inputs
    print(table(rows))


def _write(path: Path, header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": header, "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, each time with its ratio to the peers of the same model."""
    lines = []
    tuned = ["tuned, ms"] if any("tuned_ms" in r for r in rows) else []
    for r in rows:
        if "ms" not in r:
            lines.append([r["graph"], r["model"], r["name"], r["error"]])
            continue
        contenders = [p for p in rows if (p["graph"], p["model"]) == (r["graph"], r["model"]) and "ms" in p]
        peers = {p["name"]: p["ms"]["median"] for p in contenders}
        ratios = [f"{peers[peer] / r['ms']['median']:.1f}x" if peer in peers else "-" for peer in PEERS]
        lines.append(
            [r["graph"], r["model"], r["name"], f"{r['ms']['median']:.3f}", f"{r['ms']['min']:.3f}", *ratios]
            + [f"{r[key]:.2f}" if key in r else "-" for key in ("peak_gb", "first_gb")]
            + [f"{r['first_s']:.1f}"]
            + [f"{r['tuned_ms']['median']:.3f}" if "tuned_ms" in r else "-" for _ in tuned]
        )
    headers = ["graph", "model", "contender", "ms", "min", *(f"vs {p}" for p in PEERS)]
    headers += ["peak GB", "first call, GB", "first call, s", *tuned]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    main()
