"""Measures a training step on a CUDA device beside its peers, in one run: time, bytes that must move, memory.

    python benchmarks/cuda_training.py --cases gcn:arxiv gat:arxiv --out benchmarks/results/cuda-training.json

A step is forward, cross-entropy over the train nodes, backward and fused Adam; dropout is off, so that all
contenders compute the same gradients. The loss sums the losses of the nodes, since PyTorch's kernel of their
mean is one block, a third of a step on arxiv. Peers: PyG eager (for GAT on reddit under autocast, too), PyG
under torch.compile, and cuSPARSE CSR in FP32 with the adjacency and its transpose made beforehand (GCN, SAGE,
GIN). A time is that of a loop of steps, from CUDA events, divided by their number. Memory is the peak of the
timed steps above the caller's tensors (model, x, edge_index and classes). *graph*: forward, loss, backward
and capturable Adam are one CUDA graph. In *last layer low* the last product and sum are int8, too. The floor
is the time of a copy of the bytes that a step must move: every operand and result of an op once, nothing
for an edge but its ids.
"""

import argparse
import copy
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import cuda_kernels
import graphs
import models
from cuda_inference import loop_ms
from training import ITEM_SIZES, Forward, sparse_csr, step_bytes
from training_accuracy import compiled

PEERS = ("eager", "torch.compile", "cusparse csr")
LOW = "gnnc int8, last layer low"
OURS = ("gnnc fp32", "gnnc bf16", "gnnc fp16", "gnnc int8", LOW, "gnnc fp8")
GRAPHS = (f"{LOW} graph", "gnnc int8 graph", "gnnc fp8 graph", "gnnc fp16 graph", "gnnc fp32 graph")
_CSR_ALONE = ("cusparse csr", *OURS)
CASES = {
    "gcn:arxiv": (*PEERS, *OURS, *GRAPHS),
    "gcn:reddit": ("eager", *_CSR_ALONE),
    "gcn:products": ("eager", *_CSR_ALONE),
    "gat:arxiv": ("eager", "torch.compile", *OURS, *GRAPHS),
    "gat:reddit": ("eager", "eager autocast", *OURS),
    "gat:products": OURS,
    "sage:arxiv": (*PEERS, *OURS),
    "sage:reddit": _CSR_ALONE,
    "sage:products": _CSR_ALONE,
    "gin:arxiv": (*PEERS, *OURS),
    "gin:reddit": _CSR_ALONE,
    "gin:products": _CSR_ALONE,
}
"""Contenders by model and graph; eager writes hundreds of gigabytes where it is left out."""

_TRAIN_SHARE = {"arxiv": 0.54, "reddit": 0.66, "products": 0.08}
_SETTLING = 15
"""Steps after which a program has decided whether its calls are CUDA graphs."""
_NO_CLASS = -100
"""Class of the nodes that are not in the training set: the loss leaves them out."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A model in train mode, and its data on the device."""

    model: nn.Module
    x: Tensor
    edge_index: Tensor
    y: Tensor
    classes: int


def problem(name: str, graph: str, *, shuffled: bool) -> Problem:
    """Return a model and a generated graph; ``shuffled`` renumbers the nodes at random."""
    torch.manual_seed(0)
    shape = graphs.SHAPES[graph]
    edge_index = graphs.generate(shape, device="cuda")
    if shuffled:
        edge_index = torch.randperm(shape.nodes, device="cuda")[edge_index]
    x = torch.randn(shape.nodes, shape.features, device="cuda")
    y = torch.randint(shape.classes, (shape.nodes,), device="cuda")
    y[torch.rand(shape.nodes, device="cuda") >= _TRAIN_SHARE.get(graph, 1.0)] = _NO_CLASS
    model: Any = models.MODELS[name](shape.features, shape.classes)
    model.dropout = nn.Identity()
    return Problem(model.train().cuda(), x, edge_index, y, shape.classes)


def contender(name: str, model_name: str, model: nn.Module, data: Problem) -> Forward:
    """Return the forward pass of a contender."""
    if name == "eager":
        return model
    if name == "eager autocast":
        return torch.autocast("cuda", torch.float16)(model)
    if name == "torch.compile":
        torch._dynamo.reset()
        return torch.compile(model)
    if name == "cusparse csr":
        return sparse_csr(model_name, model, data.edge_index, data.x.shape[0])
    return compiled(model, name.removesuffix(" graph"))


def step_of(forward: Forward, model: nn.Module, data: Problem, *, capturable: bool) -> Callable[..., Any]:
    """Return a training step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True, capturable=capturable)

    count = int((data.y != _NO_CLASS).sum())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = forward(x, data.edge_index).float()
        loss = F.cross_entropy(logits, data.y, ignore_index=_NO_CLASS, reduction="none").sum() / count
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def captured(step: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Any]:
    """Return a step that replays one CUDA graph of forward, loss, backward and optimizer."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(15):
            step(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step(x)
    return lambda x: graph.replay()


def row(case: str, name: str, data: Problem, expected: Tensor | None) -> dict[str, Any]:
    """Measure one contender on one model and graph."""
    model_name, graph = case.split(":")
    result: dict[str, Any] = {"graph": graph, "model": model_name, "name": name}
    model = copy.deepcopy(data.model)
    gc.collect()  # free the memory of earlier contenders
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    is_graph = name.endswith(" graph")
    try:
        start = time.perf_counter()
        forward = contender(name, model_name, model, data)
        step = step_of(forward, model, data, capturable=is_graph)
        step(data.x)
        torch.cuda.synchronize()
        result["first_s"] = time.perf_counter() - start
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()
        result["gradients"] = grads
        if expected is not None:
            result["cosine"] = F.cosine_similarity(grads, expected, dim=0).item()
        for _ in range(_SETTLING if name in OURS else 0):
            step(data.x)
        torch.cuda.reset_peak_memory_stats()
        result["ms"] = loop_ms(captured(step, data.x) if is_graph else step, [data.x])
        result["peak_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
        result["host_ms"] = None if is_graph else host_ms(step, data.x)
    except torch.cuda.OutOfMemoryError:
        result["error"] = "out of memory"
    if name in OURS:
        itemsize = ITEM_SIZES[name.split()[1].rstrip(",")]
        result["bytes"] = step_bytes(model_name, data.x, data.edge_index, data.classes, itemsize)
    return result


def host_ms(step: Callable[[Tensor], Any], x: Tensor) -> float:
    """Return the time that the host takes for a step, least of several that wait for the device before."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(x)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def profile(case: str, name: str, data: Problem) -> str:
    """Return the kernels of a step by device time, from torch's profiler."""
    model = copy.deepcopy(data.model)
    step = step_of(contender(name, case.split(":")[0], model, data), model, data, capturable=False)
    for _ in range(15):
        step(data.x)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(4):
            step(data.x)
        torch.cuda.synchronize()
    events = [e for e in found.key_averages() if e.device_type.name == "CUDA"]
    events.sort(key=lambda event: -event.self_device_time_total)
    lines = [[f"{e.self_device_time_total / 4:.1f}", e.count / 4, e.key[:150]] for e in events]
    total = sum(event.self_device_time_total for event in events) / 4
    return f"{case} {name}: {total:.1f} us a step\n{tabulate(lines, ['us', 'launches', 'kernel'])}\n"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, each time with its ratio to the peers of the same model and to the floor."""
    lines = []
    for r in rows:
        if "ms" not in r:
            lines.append([r["graph"], r["model"], r["name"], r["error"]])
            continue
        near = [p for p in rows if (p["graph"], p["model"]) == (r["graph"], r["model"])]
        peers = {p["name"]: p for p in near if "ms" in p}
        ms = r["ms"]["median"]
        ratios = [f"{peers[p]['ms']['median'] / ms:.1f}x" if p in peers else "-" for p in PEERS]
        floor = f"{r['floor_ms']:.3f}" if "floor_ms" in r else "-"
        host = "-" if r["host_ms"] is None else f"{r['host_ms']:.2f}"
        saved = f"{peers['eager']['peak_gb'] / r['peak_gb']:.1f}x" if "eager" in peers else "-"
        cosine = f"{r['cosine']:.5f}" if "cosine" in r else "-"
        lines.append(
            [r["graph"], r["model"], r["name"], f"{ms:.3f}", f"{r['ms']['min']:.3f}", *ratios]
            + [floor, host, f"{r['peak_gb']:.3f}", saved, cosine, f"{r['first_s']:.1f}"]
        )
    headers = ["graph", "model", "contender", "ms", "min", *(f"vs {p}" for p in PEERS)]
    headers += ["floor, ms", "host, ms", "peak GB", "eager's peak", "cosine", "first step, s"]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out")
    parser.add_argument("--shuffled", action="store_true", help="renumber the nodes of a graph at random")
    parser.add_argument("--seconds", type=float, default=540, help="start nothing new after so long")
    parser.add_argument("--profile", nargs="*", default=[], help="contenders whose kernels are listed, too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    header = cuda_kernels.machine()
    begin, rows, profiles = time.perf_counter(), list[dict[str, Any]](), list[str]()
    for case in args.cases:
        data, expected = problem(*case.split(":"), shuffled=args.shuffled), None
        for name in CASES[case]:
            if name in args.skip or time.perf_counter() - begin > args.seconds:
                continue
            rows.append(row(case, name, data, expected))
            expected = rows[-1].pop("gradients", None) if expected is None else expected
            rows[-1].pop("gradients", None)
            if "bytes" in rows[-1]:
                rows[-1]["floor_ms"] = rows[-1]["bytes"] / header["copy_gbs"] / 1e6
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if name in args.profile:
                profiles.append(profile(case, name, data))
            if args.out:
                _write(args.out, header, rows, profiles, shuffled=args.shuffled)
        del data
    print(table(rows))


def _write(
    path: Path, header: dict[str, Any], rows: list[dict[str, Any]], profiles: list[str], *, shuffled: bool
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": header, "shuffled": shuffled, "rows": rows}
    path.write_text(json.dumps(report, indent=1) + "\n")
    if profiles:
        path.with_suffix(".kernels.txt").write_text("\n".join(profiles))


if __name__ == "__main__":
    main()
