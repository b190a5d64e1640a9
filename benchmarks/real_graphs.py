"""Times inference on seven real graphs beside its peers, on the CPU, and draws the times.

    python benchmarks/real_graphs.py --out benchmarks/results/cpu-real-graphs.json --plot docs/real-graphs.svg

The command writes the JSON after each case; ``--resume`` keeps the cases of the JSON, ``--report`` only
draws it. Twitter and NotreDame are topologies: their 128 features are random. Contenders take turns, and
every call gets a new x. *sparse csr* is PyG on a ``torch.sparse`` CSR adjacency (GCN: with normalized
weights computed beforehand).
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tabulate import tabulate
from torch import Tensor, nn
from torch_geometric.utils import to_torch_csr_tensor

from gnnc.report.figure_style import MUTED, plain_log_ticks, save, tidy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import graphs
import inference
import measure
import models
from inference import Call

GRAPHS = {
    "cora": "Cora",
    "pubmed": "PubMed",
    "coauthor_cs": "Coauthor CS",
    "amazon_computers": "Amazon Computers",
    "facebook_pages": "Facebook",
    "topo_ego_twitter": "Twitter",
    "topo_web_notredame": "NotreDame",
}
MODELS = ("gcn", "sage", "gin", "gat")
PEERS = ("eager", "torch.compile", "sparse csr")
OURS = ("gnnc fp32", "gnnc bf16", "gnnc int8")
_COLORS = dict(
    zip((*PEERS, *OURS), ("#9a6700", "#bf8700", "#d4a72c", "#0550ae", "#218bff", "#80ccff"), strict=True)
)
_FEATURES, _CLASSES = 128, 10
"""Number of random features of graphs without features."""


def problem(graph: str, model: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model in eval mode, x and edge_index."""
    torch.manual_seed(0)
    data = graphs.load(graph)
    x, classes = data.get("x"), data.get("num_classes", _CLASSES)
    if x is None:
        x = torch.randn(int(data["num_nodes"]), _FEATURES)
    assert isinstance(x, Tensor)
    edge_index = data["edge_index"]
    assert isinstance(edge_index, Tensor)
    return models.MODELS[model](x.shape[1], int(classes)).eval(), x, edge_index


def contender(name: str, model_name: str, model: nn.Module, x: Tensor, edge_index: Tensor) -> Call:
    """Return the call of a contender."""
    if name != "sparse csr" or model_name == "gcn":
        return inference.contender(name, model, x, edge_index)
    adjacency = to_torch_csr_tensor(edge_index.flip(0), size=(x.shape[0], x.shape[0]))
    return lambda x: model(x, adjacency)


@torch.no_grad()
def case(graph: str, model_name: str, skip: list[str], repeats: int) -> list[dict[str, Any]]:
    """Measure the contenders on one model and graph, in turns."""
    model, x, edge_index = problem(graph, model_name)
    expected = model(x, edge_index).double()
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    for name in (*PEERS, *OURS):
        if name in skip or (name == "sparse csr" and model_name == "gat"):
            continue
        calls[name] = contender(name, model_name, model, x, edge_index)
        errors[name] = float((calls[name](x).double() - expected).norm() / expected.norm())
    times = measure.median_ms_in_turns(calls, x, repeats=repeats)
    sizes = {"nodes": x.shape[0], "edges": edge_index.shape[1], "features": x.shape[1]}
    return [
        {"graph": graph, "model": model_name, "name": name, "ms": times[name], "relative_error": errors[name]}
        | sizes
        for name in calls
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return one line for each graph and model: milliseconds by contender."""
    names = [name for name in (*PEERS, *OURS) if any(row["name"] == name for row in rows)]
    lines = []
    for graph, model in dict.fromkeys((row["graph"], row["model"]) for row in rows):
        contenders = {row["name"]: row for row in rows if (row["graph"], row["model"]) == (graph, model)}
        times = [f"{contenders[name]['ms']['median']:.2f}" if name in contenders else "-" for name in names]
        lines.append([GRAPHS[graph], model.upper(), f"{next(iter(contenders.values()))['edges']:,}", *times])
    return tabulate(lines, ["graph", "model", "edges", *names], tablefmt="github", disable_numparse=True)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a panel for every model: groups of bars for the graphs, shorter is faster."""
    figure = Figure(figsize=(12, 2.5 * len(MODELS)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, model in enumerate(MODELS, 1):
        axes = figure.add_subplot(len(MODELS), 1, number)
        _panel(axes, model, [row for row in rows if row["model"] == model])
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper right", ncols=len(names), fontsize=8, frameon=False)
    save(figure, path)


def _panel(axes: Axes, model: str, rows: list[dict[str, Any]]) -> None:
    graphs = [graph for graph in GRAPHS if any(row["graph"] == graph for row in rows)]
    names = [name for name in (*PEERS, *OURS) if any(row["name"] == name for row in rows)]
    width = 0.8 / max(len(names), 1)
    for place, name in enumerate(names):
        times = {row["graph"]: row["ms"]["median"] for row in rows if row["name"] == name}
        xs = [graphs.index(graph) + (place + 0.5) * width - 0.4 for graph in times]
        axes.bar(xs, list(times.values()), width * 0.92, color=_COLORS[name], label=name, zorder=3)
    axes.set_yscale("log")
    plain_log_ticks(axes.yaxis)
    axes.set_xticks(range(len(graphs)), [GRAPHS[graph] for graph in graphs])
    tidy(axes, model.upper(), grid="y")
    axes.set_ylabel("ms a call", fontsize=8.5, color=MUTED)


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", nargs="*", default=list(GRAPHS), choices=list(GRAPHS))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep the cases that are in --out already")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support.*")
    resumes = args.out.exists() and (args.resume or args.report)
    report = json.loads(args.out.read_text()) if resumes else {"machine": measure.machine(), "rows": []}
    finished = {(row["graph"], row["model"]) for row in report["rows"]}
    for graph, model in ((g, m) for g in args.graphs for m in args.models):
        if args.report or (graph, model) in finished:
            continue
        start = time.perf_counter()
        report["rows"] += case(graph, model, args.skip, args.repeats)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{graph} {model}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print(table(report["rows"]))
    if args.plot:
        plot(report["rows"], args.plot)


if __name__ == "__main__":
    main()
