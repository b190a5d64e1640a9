"""Measures single layers on a CUDA device beside PyG eager and torch.compile: time, memory, error, kernels.

    python benchmarks/cuda_layers.py --layers PNA CG --out benchmarks/results/cuda-layers.json

Layers of width 64 with 16 edge features, in inference, on a graph shaped like ogbn-arxiv. Calls take one
of several x tensors in turn; a time is that of a loop of calls, from CUDA events, divided by their number.
Memory is the peak of the timed calls above the caller's tensors. An error is that of the result against
eager FP32, relative, in the L2 norm. Ratios are to our own unweighted sum of
the precision. torch.compile, which takes most of the time, comes last, as far as ``--seconds`` go.
"""

import argparse
import copy
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_geometric.nn as pyg
from tabulate import tabulate
from torch import Tensor, nn

import gnnc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import cuda_kernels
import graphs
from cuda_inference import loop_ms

WIDTH, FEATURES, HEADS, RELATIONS = 64, 16, 4, 4
OURS = ("gnnc fp32", "gnnc fp16", "gnnc int8")
CONTENDERS = ("eager", *OURS, "torch.compile")


def _mlp(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def _pna() -> nn.Module:
    scalers = ["identity", "amplification", "attenuation"]
    return pyg.PNAConv(WIDTH, WIDTH, ["mean", "min", "max", "std"], scalers, torch.ones(40, dtype=torch.long))


def _attention(conv: Any, heads: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: conv(WIDTH, WIDTH // heads, heads=heads, **options)


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sum": (pyg.SimpleConv, ""),
    "PNA": (_pna, ""),
    "CG": (lambda: pyg.CGConv(WIDTH, dim=FEATURES), "attr"),
    "EdgeConv": (lambda: pyg.EdgeConv(_mlp(2 * WIDTH)), ""),
    "PointNet": (lambda: pyg.PointNetConv(_mlp(WIDTH + 3), add_self_loops=False), "pos"),
    "NN": (lambda: pyg.NNConv(8, 8, nn.Linear(FEATURES, 64)), "narrow attr"),
    "GEN": (lambda: pyg.GENConv(WIDTH, WIDTH, aggr="softmax", learn_t=True), ""),
    "ARMA": (lambda: pyg.ARMAConv(WIDTH, WIDTH, num_stacks=2, num_layers=2), ""),
    "GINE": (lambda: pyg.GINEConv(_mlp(WIDTH), edge_dim=FEATURES), "attr"),
    "FeaSt": (lambda: pyg.FeaStConv(WIDTH, WIDTH, heads=3), ""),
    "Transformer edges 4x16": (_attention(pyg.TransformerConv, 4, edge_dim=FEATURES), "attr"),
    "GMM": (lambda: pyg.GMMConv(WIDTH, WIDTH, dim=2, kernel_size=3), "pseudo"),
    "GATv2 edges 4x16": (_attention(pyg.GATv2Conv, 4, edge_dim=FEATURES, add_self_loops=False), "attr"),
    "GAT edges 4x16": (_attention(pyg.GATConv, 4, edge_dim=FEATURES, add_self_loops=False), "attr"),
    "GATv2 2x32": (_attention(pyg.GATv2Conv, 2), ""),
    "GATv2 4x16": (_attention(pyg.GATv2Conv, 4), ""),
    "Transformer 1x64": (_attention(pyg.TransformerConv, 1), ""),
    "Transformer 2x32": (_attention(pyg.TransformerConv, 2), ""),
    "RGCN": (lambda: pyg.RGCNConv(WIDTH, WIDTH, RELATIONS), "type"),
    "RGAT": (lambda: pyg.RGATConv(WIDTH, WIDTH, RELATIONS), "type"),
    "PDN": (lambda: pyg.PDNConv(WIDTH, WIDTH, FEATURES, 8), "attr"),
    "MF": (lambda: pyg.MFConv(WIDTH, WIDTH, max_degree=4), ""),
    "FiLM": (lambda: pyg.FiLMConv(WIDTH, WIDTH), ""),
    "ResGated": (lambda: pyg.ResGatedGraphConv(WIDTH, WIDTH), ""),
    "General": (lambda: pyg.GeneralConv(WIDTH, WIDTH), ""),
    "MixHop": (lambda: pyg.MixHopConv(WIDTH, WIDTH, powers=[0, 1, 2]), ""),
    "GCN": (lambda: pyg.GCNConv(WIDTH, WIDTH), ""),
    "GIN": (lambda: pyg.GINConv(_mlp(WIDTH)), ""),
    "SAGE": (lambda: pyg.SAGEConv(WIDTH, WIDTH), ""),
    "GAT 4x16": (_attention(pyg.GATConv, 4), ""),
}
"""By name the layer, and what it takes behind x: the edges alone, or features, types or positions, too."""


def arguments(kind: str, edge_index: Tensor, nodes: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return x and the arguments behind it."""
    edges, device = edge_index.shape[1], edge_index.device
    extra = {
        "": lambda: (edge_index,),
        "attr": lambda: (edge_index, torch.randn(edges, FEATURES, device=device)),
        "pseudo": lambda: (edge_index, torch.rand(edges, 2, device=device)),
        "type": lambda: (edge_index, torch.randint(RELATIONS, (edges,), device=device)),
        "pos": lambda: (torch.randn(nodes, 3, device=device), edge_index),
    }[kind.removeprefix("narrow ")]()
    return torch.randn(nodes, 8 if "narrow" in kind else WIDTH, device=device), extra


@torch.no_grad()
def row(layer: str, name: str, model: nn.Module, x: Tensor, extra: tuple[Tensor, ...]) -> dict[str, Any]:
    """Measure one contender on one layer."""
    result: dict[str, Any] = {"layer": layer, "name": name}
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    call: Any = model
    if name == "torch.compile":
        torch._dynamo.reset()
        call = torch.compile(copy.deepcopy(model))
    elif name != "eager":
        call = gnnc.compile(model, precision=name.split()[1])
    try:
        got = call(x, *extra)
        torch.cuda.synchronize()
        result["first_s"] = round(time.perf_counter() - start, 2)
        if name != "eager":
            want = model(x, *extra)
            result["error"] = float((got.double() - want.double()).norm() / want.double().norm())
            del want
        del got
        inputs = [x, *(x.clone() for _ in range(2))]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        result["ms"] = loop_ms(lambda x: call(x, *extra), inputs)
        result["peak_mb"] = round((torch.cuda.max_memory_allocated() - before) / 1e6)
        if name in OURS:
            result["kernels"] = kernels(call, x, extra)
    except (RuntimeError, gnnc.GnncError) as error:
        result["failed"] = str(error).splitlines()[0][:200]
    return result


def kernels(compiled: Any, x: Tensor, extra: tuple[Tensor, ...]) -> dict[str, float]:
    """Return the milliseconds of every launch of one call, the longest first, below 1% left out."""
    compiled.profile(x, *extra)
    timings, names = compiled._dispatch.last.timings, dict(compiled._dispatch.last.executable.kernels)
    found = {f"{node} ({names.get(node, '')})": round(s * 1e3, 4) for node, s in timings.items()}
    least = sum(found.values()) / 100
    return {key: ms for key, ms in sorted(found.items(), key=lambda item: -item[1]) if ms >= least}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the times by layer, in brackets as multiples of our own sum; then memory and errors."""
    found = {(row["layer"], row["name"]): row for row in rows}

    def time_of(layer: str, name: str) -> str:
        one, unit = found.get((layer, name), {}), found.get(("sum", name), {})
        if "ms" not in one:
            return "failed" if "failed" in one else "-"
        ms = one["ms"]["median"]
        return f"{ms:.3f} [{ms / unit['ms']['median']:.0f}]" if "ms" in unit and name in OURS else f"{ms:.3f}"

    lines = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        ours = [found.get((layer, name), {}) for name in OURS]
        memory = [f"{one['peak_mb']}" if "peak_mb" in one else "-" for one in ours]
        errors = [f"{one['error']:.0e}" if "error" in one else "-" for one in ours]
        times = [time_of(layer, name) for name in CONTENDERS]
        lines.append([layer, *times, "/".join(memory), "/".join(errors)])
    headers = ["layer, ms", *CONTENDERS, "MB fp32/fp16/int8", "errors"]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--skip", nargs="*", default=[], choices=CONTENDERS, help="contenders to leave out")
    parser.add_argument("--seconds", type=float, default=140, help="start nothing new after so long")
    parser.add_argument("--graph", default="arxiv", choices=list(graphs.SHAPES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    header, begin = cuda_kernels.machine(), time.perf_counter()
    rows: list[dict[str, Any]] = []
    shape = graphs.SHAPES[args.graph]
    torch.manual_seed(0)
    edge_index = graphs.generate(shape, device="cuda")
    layers = list(dict.fromkeys(["sum", *args.layers]))
    for names in (CONTENDERS[:-1], CONTENDERS[-1:]):
        for layer in layers:
            make, kind = LAYERS[layer]
            torch.manual_seed(0)
            model = make().eval().cuda()
            x, extra = arguments(kind, edge_index, shape.nodes)
            for name in names:
                if name in args.skip or time.perf_counter() - begin > args.seconds:
                    continue
                rows.append(row(layer, name, model, x, extra))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": header, "graph": args.graph, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(header))
    print(table(rows))


if __name__ == "__main__":
    main()
