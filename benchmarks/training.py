"""Measures a training step on the CPU beside its peers, in one run: time, bytes that must move, memory.

    python benchmarks/training.py --graph arxiv --out benchmarks/results/cpu-training.json

A step is forward, cross-entropy over all nodes, backward and fused Adam. Peers: PyG eager, eager with a
checkpoint around each layer (``--checkpoints``), torch.sparse CSR in FP32 with the adjacency and its
transpose made beforehand (GCN, SAGE, GIN), and PyG under torch.compile (``--compile``). Contenders take
turns, each with a copy of the model and an optimizer of its own; with ``--threads 1`` the time is that
of the process, in which other programs do not count. The floor is the time of a copy of the bytes that
a step must move: every operand and every result of an op once.

    python benchmarks/training.py --batches 1000 --models sage --threads 1

measures steps on mini-batches of sampled neighbors, each in new tensors: a step on a new batch builds the
structure and its transpose, the same step again finds them in the cache, and the difference is their share.
"""

import argparse
import copy
import functools
import gc
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import gnnc
from gnnc.runtime.program.device import now

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import graphs
import measure
import models
from sampling import Sampler

Forward = Callable[[Tensor, Tensor], Tensor]
PEERS = ("eager", "checkpoints", "sparse csr", "torch.compile")
OURS = ("gnnc fp32", "gnnc bf16", "gnnc int8")
ITEM_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
MODELS = ("gcn", "sage", "gin", "gat")


def problem(graph: str, model: str) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Return the model in train mode, x, edge_index and the classes of the nodes."""
    torch.manual_seed(0)
    shape = graphs.SHAPES[graph]
    if graphs.find(graph) is not None:
        data = graphs.load(graph)
        x, edge_index = data["x"], data["edge_index"]
        assert isinstance(x, Tensor) and isinstance(edge_index, Tensor)
    else:
        x, edge_index = torch.randn(shape.nodes, shape.features), graphs.generate(shape)
    y = torch.randint(shape.classes, (x.shape[0],))
    trained = models.MODELS[model](x.shape[1], shape.classes)
    trained.dropout = nn.Identity()  # every contender then computes the same gradients
    return trained.train(), x, edge_index, y


class _CachedTranspose(torch.autograd.Function):
    """Product of a sparse matrix, whose gradient is a product with the transpose that is given."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transpose: Tensor, x: Tensor) -> Tensor:
        ctx.transpose = transpose
        return matrix @ x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.transpose @ grads[0]


def sparse_csr(name: str, model: Any, edge_index: Tensor, num_nodes: int) -> Forward:
    """Return a model of sparse products, with its adjacency and the transpose made beforehand."""
    index, weight = edge_index, torch.ones(edge_index.shape[1], device=edge_index.device)
    if name == "gcn":
        index, weight = gcn_norm(edge_index, None, num_nodes, add_self_loops=True)
    if name == "sage":
        degree = torch.bincount(index[1], minlength=num_nodes).clamp(min=1)
        weight = 1 / degree[index[1]].float()
    assert isinstance(index, Tensor)
    size = (num_nodes, num_nodes)
    matrix = torch.sparse_coo_tensor(index.flip(0), weight, size).coalesce().to_sparse_csr()
    transpose = torch.sparse_coo_tensor(index, weight, size).coalesce().to_sparse_csr()

    def aggregate(x: Tensor) -> Tensor:
        return _CachedTranspose.apply(matrix, transpose, x)  # type: ignore[return-value]

    def layer(conv: Any, x: Tensor) -> Tensor:
        if name == "gcn":
            return aggregate(conv.lin(x)) + conv.bias
        if name == "sage":
            return conv.lin_l(aggregate(x)) + conv.lin_r(x)
        return conv.nn(aggregate(x) + (1 + conv.eps) * x)

    return lambda x, _: layer(model.conv2, model.activation(layer(model.conv1, x)))


def checkpointed(model: nn.Module) -> Forward:
    """Return a model of two layers of which each is computed again in the backward pass."""
    for name in ("conv1", "conv2"):
        layer = getattr(model, name)
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def contender(name: str, model_name: str, model: nn.Module, x: Tensor, edge_index: Tensor) -> Forward:
    """Return the forward pass of a contender."""
    if name == "eager":
        return model
    if name == "checkpoints":
        return checkpointed(model)
    if name == "torch.compile":
        torch._dynamo.reset()
        return torch.compile(model)
    if name == "sparse csr":
        return sparse_csr(model_name, model, edge_index, x.shape[0])
    return gnnc.compile(model, precision=name.split()[1])


def step_of(forward: Forward, model: nn.Module, edge_index: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a training step on the rows of x, which returns the loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x, edge_index), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def rows_of(graph: str, model_name: str, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Measure the contenders on one model, in turns."""
    model, x, edge_index, y = problem(graph, model_name)
    steps, rows, expected = {}, [], None
    for name in names:
        own = copy.deepcopy(model)
        forward = contender(name, model_name, own, x, edge_index)
        steps[name] = step_of(forward, own, edge_index, y)
        start = time.perf_counter()
        steps[name](x)
        first = time.perf_counter() - start
        grads = torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None]).double()
        expected = grads if expected is None else expected
        cosine = F.cosine_similarity(grads, expected, dim=0).item()
        rows.append({"model": model_name, "name": name, "cosine": cosine, "first_step_s": first})
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    timings = measure.median_ms_in_turns(steps, x, repeats=repeats, warmup=1, clock=clock)
    for row in rows:
        row["ms"] = timings[row["name"]]
        if row["name"].startswith("gnnc"):
            itemsize = ITEM_SIZES[row["name"].split()[1]]
            row["bytes"] = step_bytes(model_name, x, edge_index, int(y.max()) + 1, itemsize)
    return rows


_WIDTHS = {
    "gcn": (2, 8, 4),
    "sage": (3, 9, 4),
    "gin": (4, 21, 4),
    "gat": (2, 10, 6),
}
"""Matrices that a step reads or writes: of the width of the features, of the hidden layer, of the classes."""


def step_bytes(model: str, x: Tensor, edge_index: Tensor, classes: int, itemsize: int) -> int:
    """Return the bytes that a step must move: each operand and result of the products and sums once.

    Features, activations and their gradients have ``itemsize`` bytes, in int8 also those of the last layer,
    which stay FP32. The loss reads the logits and writes
    their gradient in FP32; each layer reads the structure and its transpose, GAT also the logits of 4 heads.
    """
    nodes, edges, hidden = x.shape[0], edge_index.shape[1], 64
    widths = sum(n * w for n, w in zip(_WIDTHS[model], (x.shape[1], hidden, classes), strict=True))
    structure = 2 * 2 * (4 * edges + 8 * nodes)
    attention = 4 * nodes * 2 * (4 + 1) * 4 if model == "gat" else 0
    return nodes * (widths * itemsize + 3 * classes * 4) + structure + attention


def memory(graph: str, model_name: str, name: str) -> float:
    """Return the peak MiB of a step above the caller's tensors, after a warm-up on a small graph."""
    model, x, edge_index, y = problem(graph, model_name)
    forward = contender(name, model_name, model, x, edge_index)
    if name != "sparse csr":
        small = edge_index[:, :64] % 64
        step_of(forward, model, small, y[:64])(x[:64].clone())
    step = step_of(forward, model, edge_index, y)
    return measure.peak_rss_mb(lambda: step(x))


def batches(graph: str, model_name: str, name: str, count: int, seeds: int = 512) -> dict[str, Any]:
    """Measure steps on ``count`` mini-batches of sampled neighbors, after a tenth as many to warm up.

    Returns:
        Median milliseconds of a step on a new batch and of the same step again, the median share of the
        structure, growth of the process in MiB from the first quarter to the last, and the captures.
    """
    model, x, edge_index, y = problem(graph, model_name)
    forward: Any = contender(name, model_name, model, x, edge_index)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    taken: list[tuple[float, float]] = []
    memory: list[float] = []
    sampled = Sampler(edge_index, x.shape[0], (10, 10)).batches(seeds)
    for nodes, edges in itertools.islice(sampled, count + count // 10):
        times = []
        features, edges, classes = x[nodes], edges.clone(), y[nodes[:seeds]]
        for _ in range(2):
            start = now()
            optimizer.zero_grad()
            F.cross_entropy(forward(features, edges)[:seeds], classes).backward()
            optimizer.step()
            times.append((now() - start) * 1e3)
        taken.append((times[0], times[1]))
        if len(taken) % 20 == 0:
            gc.collect()
        memory.append(measure.rss_mb())
    taken, memory = taken[count // 10 :], memory[count // 10 :]
    quarter = max(count // 4, 1)
    return {
        "model": model_name,
        "name": name,
        "batches": count,
        "new_ms": statistics.median(new for new, _ in taken),
        "known_ms": statistics.median(known for _, known in taken),
        "structure_share": statistics.median(1 - known / new for new, known in taken),
        "growth_mb": statistics.median(memory[-quarter:]) - statistics.median(memory[:quarter]),
        "captures": len(forward._dispatch.captures) if name in OURS else None,
    }


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", default="arxiv", choices=[*graphs.SHAPES])
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="threads of torch; default: all cores")
    parser.add_argument("--checkpoints", action="store_true", help="measure eager with checkpoints, too")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile, too")
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument(
        "--batches", type=int, help="measure this many mini-batches instead of the whole graph"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", nargs=2, metavar=("MODEL", "NAME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support.*")
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.memory:
        print(memory(args.graph, *args.memory))
        return
    if args.batches:
        found = [batches(args.graph, model, name, args.batches) for model in args.models for name in OURS]
        print(tabulate(found, "keys", tablefmt="github", floatfmt=".2f"))
        return
    wanted = {"torch.compile": args.compile, "checkpoints": args.checkpoints}
    skipped = {*args.skip, *(name for name, measured in wanted.items() if not measured)}
    rows, machine = [], measure.machine()
    for model in args.models:
        names = [name for name in (*PEERS, *OURS) if name not in skipped]
        names = [name for name in names if name != "sparse csr" or model != "gat"]
        measured = rows_of(args.graph, model, names, args.repeats)
        for row in measured:
            if "bytes" in row:
                row["floor_ms"] = row["bytes"] / machine["copy_gbs"] / 1e6
            if row["name"] != "torch.compile" and not args.no_memory:
                row["peak_mb"] = measure.memory_in_new_process(__file__, args.graph, model, row["name"])
            print(json.dumps(row), file=sys.stderr, flush=True)
        rows += measured
    print(table(rows))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine, "graph": args.graph, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, each time with its ratio to the peers of the same model and to the floor."""
    lines = []
    for r in rows:
        peers = {p["name"]: p["ms"]["median"] for p in rows if p["model"] == r["model"]}
        ms = r["ms"]["median"]
        ratios = [f"{peers[peer] / ms:.1f}x" if peer in peers else "-" for peer in PEERS]
        floor = f"{100 * r['floor_ms'] / ms:.0f}%" if "floor_ms" in r else "-"
        lines.append(
            [r["model"], r["name"], f"{ms:.1f}", f"{r['ms']['min']:.1f}", *ratios, floor]
            + [f"{r['cosine']:.5f}", f"{r['first_step_s']:.1f}"]
            + [f"{r['peak_mb']:.0f}" if "peak_mb" in r else "-"]
        )
    headers = ["model", "contender", "ms", "min", *(f"vs {p}" for p in PEERS)]
    headers += ["floor / ms", "cosine", "first s", "peak MB"]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    main()
