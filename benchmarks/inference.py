"""Measures inference on the CPU beside its peers, in one run: time, memory, compile time.

    python benchmarks/inference.py --graph arxiv --out benchmarks/results/cpu-arxiv.json

Peers: PyG eager, PyG under torch.compile, and (GCN) torch.sparse CSR in FP32 with the normalized
adjacency precomputed. Contenders take turns, and every call gets a new x. ``static`` scales come
from example_inputs.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import gnnc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import graphs
import measure
import models

Call = Callable[[Tensor], Tensor]
PEERS = ("eager", "torch.compile", "sparse csr")
OURS = ("gnnc fp32", "gnnc bf16", "gnnc int8", "gnnc int8 static")


def problem(graph: str, model: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model in eval mode, x and edge_index."""
    torch.manual_seed(0)
    if graphs.find(graph) is not None:
        data = graphs.load(graph)
        x, edge_index, classes = data["x"], data["edge_index"], data["num_classes"]
        assert isinstance(x, Tensor) and isinstance(edge_index, Tensor) and isinstance(classes, int)
    else:
        shape = graphs.SHAPES[graph]
        edge_index, classes = graphs.generate(shape), shape.classes
        x = torch.randn(shape.nodes, shape.features)
    return models.MODELS[model](x.shape[1], classes).eval(), x, edge_index


def sparse_csr(model: nn.Module, edge_index: Tensor, num_nodes: int) -> Call:
    """Return GCN as two sparse products with a normalized adjacency computed beforehand."""
    index, weight = gcn_norm(edge_index, None, num_nodes, add_self_loops=True)
    adjacency = torch.sparse_coo_tensor(index.flip(0), weight, (num_nodes, num_nodes))
    return two_products(model, adjacency.coalesce().to_sparse_csr())


def two_products(model: nn.Module, csr: Tensor) -> Call:
    """Return GCN on a normalized adjacency."""

    def call(x: Tensor) -> Tensor:
        for conv in (model.conv1, model.conv2):
            x = csr @ conv.lin(x) + conv.bias
            x = x.relu() if conv is model.conv1 else x
        return x

    return call


def contender(name: str, model: nn.Module, x: Tensor, edge_index: Tensor) -> Call:
    """Return the call of a contender."""
    if name == "eager":
        return lambda x: model(x, edge_index)
    if name == "torch.compile":
        torch._dynamo.reset()
        compiled = torch.compile(model)
        return lambda x: compiled(x, edge_index)
    if name == "sparse csr":
        return sparse_csr(model, edge_index, x.shape[0])
    words = name.split()
    examples = (x, edge_index) if words[-1] == "static" else None
    ours = gnnc.compile(model, precision=words[1], example_inputs=examples)
    return lambda x: ours(x, edge_index)


@torch.no_grad()
def rows_of(graph: str, model_name: str, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Measure the contenders on one model, in turns."""
    model, x, edge_index = problem(graph, model_name)
    expected = model(x, edge_index).double()
    calls, rows = {}, []
    for name in names:
        start = time.perf_counter()
        calls[name] = contender(name, model, x, edge_index)
        error = (calls[name](x).double() - expected).norm() / expected.norm()
        first = time.perf_counter() - start
        row = {"model": model_name, "name": name, "relative_error": error.item()}
        rows.append(row | {"capture_to_first_result_s": first})
    timings = measure.median_ms_in_turns(calls, x, repeats=repeats)
    for row in rows:
        row["ms"] = timings[row["name"]]
        if row["name"].startswith("gnnc"):
            row["new_graph_ms"] = _new_graph_ms(model, x, edge_index.clone(), row["name"])
    return rows


def _new_graph_ms(model: nn.Module, x: Tensor, edge_index: Tensor, name: str) -> float:
    """Return the milliseconds of a compiled model's first call on a new graph."""
    ours = gnnc.compile(model, precision=name.split()[1])
    small = edge_index[:, :64] % 64
    ours(x[:64].contiguous(), small)
    start = time.perf_counter()
    ours(x, edge_index)
    return (time.perf_counter() - start) * 1e3


@torch.no_grad()
def memory(graph: str, model_name: str, name: str) -> float:
    """Return the peak MiB above the caller's tensors, after a warm-up on a small graph."""
    model, x, edge_index = problem(graph, model_name)
    small_x, small = x[:64].clone(), edge_index[:, :64] % 64
    if name.startswith("gnnc"):
        ours = gnnc.compile(model, precision=name.split()[1])
        ours(small_x, small)
        return measure.peak_rss_mb(lambda: ours(x, edge_index))
    model(small_x, small)
    return measure.peak_rss_mb(lambda: model(x, edge_index))


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", default="arxiv")
    parser.add_argument("--models", nargs="*", default=["gcn", "sage", "gat", "gin"])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", nargs=2, metavar=("MODEL", "NAME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support.*")
    if args.memory:
        print(memory(args.graph, *args.memory))
        return
    rows = []
    for model in args.models:
        names = [name for name in (*PEERS, *OURS) if name not in args.skip]
        names = [name for name in names if name != "sparse csr" or model == "gcn"]
        measured = rows_of(args.graph, model, names, args.repeats)
        for row in measured:
            if row["name"] in ("eager", "gnnc fp32", "gnnc int8"):
                row["peak_mb"] = measure.memory_in_new_process(__file__, args.graph, model, row["name"])
            print(json.dumps(row), file=sys.stderr, flush=True)
        rows += measured
    print(table(rows))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": measure.machine(), "graph": args.graph, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, each time with its ratio to the peers of the same model."""
    lines = []
    for r in rows:
        peers = {p["name"]: p["ms"]["median"] for p in rows if p["model"] == r["model"]}
        ratios = [f"{peers[peer] / r['ms']['median']:.1f}x" if peer in peers else "-" for peer in PEERS]
        lines.append(
            [r["model"], r["name"], f"{r['ms']['median']:.2f}", f"{r['ms']['min']:.2f}", *ratios]
            + [f"{r['relative_error']:.1e}", f"{r['capture_to_first_result_s']:.1f}"]
            + [f"{r[key]:.0f}" if key in r else "-" for key in ("new_graph_ms", "peak_mb")]
        )
    headers = ["model", "contender", "ms", "min", *(f"vs {p}" for p in PEERS)]
    headers += ["error", "first s", "new graph ms", "peak MB"]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    main()
