"""Quantization that is shared and kept: what a training step quantizes, and its time, without.

GCN and SAGE train in int8 on the CPU, on random graphs whose features have 128, 602 and 1433 columns. The
programs are the default one, the one without ``static_features`` (features are quantized in each step), and
the one without ``cache`` as well (each reader quantizes for itself). Steps of the programs take turns.

    python benchmarks/quantized_once.py --nodes 40000 --edges 600000
"""

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv

import gnnc
from gnnc.ir import describe
from gnnc.ir.nodes import op_name
from gnnc.passes.pipeline import PIPELINE

WITHOUT = {"default": (), "without static_features": ("static_features",)}
WITHOUT["without cache too"] = ("static_features", "cache")
LAYERS = {"GCN": GCNConv, "SAGE": SAGEConv}


class Net(nn.Module):
    """Two layers of 64 columns."""

    def __init__(self, layer: Callable[[int, int], nn.Module], width: int) -> None:
        super().__init__()
        self.first, self.second = layer(width, 64), layer(64, 40)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the logits."""
        return self.second(self.first(x, edge_index).relu(), edge_index)


@dataclass(frozen=True)
class Program:
    """A model that trains, with the times of its steps in ms."""

    compiled: gnnc.CompiledModel
    optimizer: torch.optim.Optimizer
    times: list[float]

    def step(self, x: Tensor, edge_index: Tensor) -> None:
        """Run a step."""
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        self.compiled(x, edge_index).square().mean().backward()
        self.optimizer.step()
        self.times.append((time.perf_counter() - start) * 1000)


def program(layer: Callable[[int, int], nn.Module], width: int, left_out: tuple[str, ...]) -> Program:
    """Return a model compiled without some passes."""
    model = Net(layer, width).train()
    passes = [step for step in PIPELINE if step.name not in left_out]
    compiled = gnnc.compile(model, "int8", pipeline=passes)
    return Program(compiled, torch.optim.Adam(model.parameters(), fused=True), [])


def quantizations(compiled: gnnc.CompiledModel) -> int:
    """Return how many matrices of nodes a step quantizes: weights, and what is kept, left out."""
    parts = (compiled.graph_module, compiled.backward_graph_module)
    nodes = [node for gm in parts if gm is not None for node in describe.inline(gm).nodes]
    return sum(op_name(n) == "quantize" and isinstance(n.meta["val"].shape[0], torch.SymInt) for n in nodes)


def rows(name: str, width: int, nodes: int, edges: int, steps: int) -> list[str]:
    """Return the lines of the table for one model and features of one width."""
    torch.manual_seed(0)
    x, edge_index = torch.randn(nodes, width), torch.randint(nodes, (2, edges))
    programs = {key: program(LAYERS[name], width, left_out) for key, left_out in WITHOUT.items()}
    lines = []
    fastest: dict[str, list[str]] = {key: [] for key in programs}
    for features in (lambda: x, x.clone):
        for each in programs.values():
            each.step(features(), edge_index)
            each.times.clear()
        for _ in range(steps):
            for each in programs.values():
                each.step(features(), edge_index)
        for key, each in programs.items():
            fastest[key].append(f"{min(each.times):.1f}")
    for key, each in programs.items():
        count = quantizations(each.compiled)
        lines.append(f"| {name} | {width} | {key} | {count} | {' | '.join(fastest[key])} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=40_000)
    parser.add_argument("--edges", type=int, default=600_000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 602, 1433])
    parser.add_argument("--models", nargs="+", default=[*LAYERS], choices=[*LAYERS])
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    size = f"{given.nodes} nodes, {given.edges} edges, 64 hidden columns"
    print(f"{size}, {given.threads} thread(s), ms of the fastest step")
    print("| model | columns | program | quantized matrices a step | same features | new features |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, width in itertools.product(given.models, given.widths):
        print(*rows(name, width, given.nodes, given.edges, given.steps), sep="\n", flush=True)


if __name__ == "__main__":
    main()
