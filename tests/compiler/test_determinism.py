"""The same bits at 1, 2 and 4 threads and in two runs: whole models, on a graph that has a hub."""

import pytest
import torch
from kernel_graphs import threads
from slow import slow_after
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, ResGatedGraphConv, SAGEConv

import gnnc

NODES, EDGES, WIDTH = 2500, 60_000, 48
"""Enough rows and edges that every kernel divides them among threads."""


def graph() -> Tensor:
    """Half of the edges end in one node, some are loops, some nodes have none."""
    src, dst = torch.randint(NODES, (2, EDGES))
    dst[: EDGES // 2] = 5
    dst[-500:] = src[-500:]
    return torch.stack([src, dst.clamp(max=NODES - 50)])


def layers(name: str) -> list[nn.Module]:
    return {
        "gcn": lambda: [GCNConv(WIDTH, 64), GCNConv(64, 7)],
        "sage": lambda: [SAGEConv(WIDTH, 64, aggr="max"), SAGEConv(64, 7)],
        "gin": lambda: [GINConv(nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.Linear(64, 7)))],
        "gat": lambda: [GATConv(WIDTH, 16, heads=4), GATConv(64, 7)],
        "gated": lambda: [ResGatedGraphConv(WIDTH, 7)],
    }[name]()


class Model(nn.Module):
    """Layers with a ReLU between them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(name))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x if number == 0 else x.relu(), edge_index)
        return x


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.int32)


@pytest.mark.first(1)
@pytest.mark.parametrize("precision", slow_after(1, ["int8", "fp32", "bf16"]))
@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "gat", "gated"])
@torch.no_grad()
def test_models(name: str, precision: str) -> None:
    model, x, edge_index = Model(name).eval(), torch.randn(NODES, WIDTH), graph()
    fast = gnnc.compile(model, precision, backend="cpu")
    first = fast(x, edge_index)
    assert first.isfinite().all()
    for count in (1, 2, 4):
        with threads(count):
            fast.clear_cache()  # the structure is built again too
            for _ in range(2):
                assert torch.equal(bits(fast(x, edge_index)), bits(first)), f"{count} threads"
