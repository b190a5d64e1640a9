"""Times calls on tiny graphs beside PyG eager: the cost of a call itself, from Python to the launches.

    python benchmarks/tiny_graphs.py --out benchmarks/results/cpu-tiny-graphs.json

Models have two layers of width 16. The time is that of the thread, in which other programs do not count, the
least of several rounds. A graph is the same in all calls (its structure is cached), or new in each.
"""

import argparse
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

NODES = (4, 20, 100)
DEGREE = 4
WIDTHS = (8, 16, 4)
PRECISIONS = ("fp32", "int8")
CALLS, ROUNDS = 200, 15


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
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in args.models for row in rows_of(name, args.calls, args.rounds)]
    print(table(rows))
    if args.out is not None:
        args.out.write_text(json.dumps({"machine": measure.machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
