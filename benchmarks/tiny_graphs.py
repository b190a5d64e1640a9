"""Times calls on tiny graphs beside PyG eager: the cost of a call itself, from Python to the launches.

    python benchmarks/tiny_graphs.py --out benchmarks/results/cpu-tiny-graphs.json

Models have two layers of width 16. The time is that of the thread, in which other programs do not count, the
least of several rounds. A graph is the same in all calls (its structure is cached), or new in each.

Further tables are of single layers of width 64 at 300 nodes and 2500 edges, of the size of a molecule or a
small mesh: calls in inference of layers with a network on each edge (``--layers``), and steps of training
(``--training``), which are a forward pass, a loss and a backward pass.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import gnnc
from gnnc.runtime.program.device import now

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import measure
from edge_layers import EDGE_LAYERS, HEADS, WIDTH, EdgeLayer, arguments_of, mlp

NODES = (4, 20, 100)
DEGREE = 4
WIDTHS = (8, 16, 4)
PRECISIONS = ("fp32", "int8")
CALLS, ROUNDS = 200, 15
MESH = 300, 2500
"""Nodes and edges of the graph of single layers."""
MESH_CALLS = 40
TRAINED: dict[str, EdgeLayer] = {
    "GCN": EdgeLayer(functools.partial(GCNConv, WIDTH, WIDTH)),
    "SAGE": EdgeLayer(functools.partial(SAGEConv, WIDTH, WIDTH)),
    "GIN": EdgeLayer(lambda: GINConv(mlp(WIDTH))),
    "GAT": EdgeLayer(functools.partial(GATConv, WIDTH, WIDTH // HEADS, heads=HEADS)),
    **{name: EDGE_LAYERS[name] for name in ("GINE", "EdgeConv")},
}
"""Layers that are trained, by name."""


def _gin(width: int, out: int) -> nn.Module:
    return GINConv(nn.Sequential(nn.Linear(width, out), nn.ReLU(), nn.Linear(out, out)))


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GCN": GCNConv,
    "SAGE": SAGEConv,
    "GIN": _gin,
    "GAT": GATConv,
}


class TwoLayers(nn.Module):
    """Two layers of one kind."""

    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = layer(*WIDTHS[:2]), layer(*WIDTHS[1:])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return [nodes, classes]."""
        return self.last(self.first(x, edge_index).relu(), edge_index)


def microseconds(call: Callable[[Tensor, Tensor], Any], x: Tensor, graphs: list[list[Tensor]]) -> float:
    """Return the time of a call in the fastest of the rounds; each round has its own list of graphs."""
    times = []
    for edges in graphs:
        start = now()
        for edge_index in edges:
            call(x, edge_index)
        times.append(now() - start)
    return min(times) / len(graphs[0]) * 1e6


@torch.no_grad()
def rows_of(name: str, calls: int, rounds: int) -> list[dict[str, Any]]:
    """Measure eager and gnnc for each size, on one graph and on new graphs."""
    torch.manual_seed(0)
    model = TwoLayers(LAYERS[name]).eval()
    contenders = {"eager": model, **{p: gnnc.compile(model, p) for p in PRECISIONS}}
    rows = []
    for nodes in NODES:
        x, edge_index = torch.randn(nodes, WIDTHS[0]), torch.randint(nodes, (2, DEGREE * nodes))
        for call in contenders.values():
            call(x, edge_index)
        for graph in ("same", "new"):
            row: dict[str, Any] = {"model": name, "nodes": nodes, "graph": graph}
            for contender, call in contenders.items():
                copy = edge_index.clone if graph == "new" else lambda: edge_index  # noqa: B023
                graphs = [[copy() for _ in range(calls)] for _ in range(rounds)]
                row[f"{contender}_us"] = microseconds(call, x, graphs)
            rows.append(row)
    return rows


def best_of(call: Callable[[], Any], rounds: int) -> float:
    """Return the microseconds of a call in the fastest of the rounds."""
    times = []
    for _ in range(rounds):
        start = now()
        for _ in range(MESH_CALLS):
            call()
        times.append(now() - start)
    return min(times) / MESH_CALLS * 1e6


@torch.no_grad()
def layer_row(name: str, rounds: int) -> dict[str, Any]:
    """Measure calls of a layer in inference, on one graph."""
    torch.manual_seed(0)
    layer = EDGE_LAYERS[name]
    model, args = layer.build().eval(), tuple(arguments_of(layer, *MESH).values())
    contenders = {"eager": model, **{p: gnnc.compile(model, p) for p in PRECISIONS}}
    for call in contenders.values():
        call(*args)
    return {
        "layer": name,
        **{f"{key}_us": best_of(lambda: call(*args), rounds) for key, call in contenders.items()},  # noqa: B023
    }


def training_row(name: str, rounds: int) -> dict[str, Any]:
    """Measure steps of training of a layer: forward pass, loss and backward pass, without an optimizer."""
    torch.manual_seed(0)
    layer = TRAINED[name]
    model, args = layer.build().train(), tuple(arguments_of(layer, *MESH).values())
    parameters = list(model.parameters())
    contenders = {"eager": model, **{p: gnnc.compile(model, p) for p in PRECISIONS}}

    def step(call: Callable[..., Tensor]) -> None:
        call(*args).square().mean().backward()
        for parameter in parameters:
            parameter.grad = None

    for call in contenders.values():
        step(call)
    return {
        "layer": name,
        **{f"{key}_us": best_of(lambda: step(call), rounds) for key, call in contenders.items()},  # noqa: B023
    }


def layer_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of single layers, with how many times faster than eager each is."""
    lines = [
        [
            row["layer"],
            f"{row['eager_us']:.0f}",
            *(f"{row[f'{p}_us']:.0f} ({row['eager_us'] / row[f'{p}_us']:.1f})" for p in PRECISIONS),
        ]
        for row in rows
    ]
    headers = ["layer", "eager, µs", *(f"{p}, µs (times eager)" for p in PRECISIONS)]
    return tabulate(lines, headers, tablefmt="github")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of all rows."""
    lines = [
        [
            *(row[key] for key in ("model", "nodes", "graph")),
            f"{row['eager_us']:.0f}",
            *(f"{row[f'{p}_us']:.0f} ({row[f'{p}_us'] / row['eager_us']:.2f})" for p in PRECISIONS),
        ]
        for row in rows
    ]
    headers = ["model", "nodes", "graph", "eager, µs", *(f"{p}, µs (of eager)" for p in PRECISIONS)]
    return tabulate(lines, headers, tablefmt="github")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--layers", nargs="*", choices=EDGE_LAYERS, default=list(EDGE_LAYERS))
    parser.add_argument("--training", nargs="*", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in args.models for row in rows_of(name, args.calls, args.rounds)]
    layers = [layer_row(name, args.rounds) for name in args.layers]
    training = [training_row(name, args.rounds) for name in args.training]
    print(table(rows), layer_table(layers), layer_table(training), sep="\n\n")
    if args.out is not None:
        results = {"machine": measure.machine(), "rows": rows, "layers": layers, "training": training}
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
