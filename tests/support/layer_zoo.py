"""Layers that ``benchmarks/layers.py`` times, with their arguments and the products that they need."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch_geometric.nn as pyg
from edge_layers import FEATURES, RELATIONS, WIDTH, MeshBlock, attention, mlp, pna
from torch import Tensor, nn
from torch_geometric.utils import scatter


class MeshNetwork(nn.Module):
    """Two blocks of a MeshGraphNet, behind an encoder of the edge features."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([MeshBlock(), MeshBlock()])

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return the states of the nodes."""
        edges = self.encoder(edge_attr)
        for block in self.blocks:
            x, edges = block(x, edge_index, edges)
        return x


class Twice(nn.Module):
    """Two layers of a kind, with a relu between."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the second layer's result."""
        return self.second(self.first(x, edge_index).relu(), edge_index)


class EGNNBlock(nn.Module):
    """Layer of an E(n)-equivariant network: one edge MLP moves the positions and updates the features."""

    def __init__(self) -> None:
        super().__init__()
        self.edge_mlp = nn.Sequential(*mlp(2 * WIDTH + 1, activation=nn.SiLU), nn.SiLU())
        self.move = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1, bias=False))
        self.node_mlp = mlp(2 * WIDTH, activation=nn.SiLU)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        """Return the new features and positions, side by side."""
        src, dst = edge_index
        way = pos[dst] - pos[src]
        distance = way.square().sum(1, keepdim=True)
        message = self.edge_mlp(torch.cat([x[dst], x[src], distance], 1))
        moved = scatter(way * self.move(message), dst, dim=0, dim_size=x.shape[0], reduce="mean")
        total = scatter(message, dst, dim=0, dim_size=x.shape[0], reduce="sum")
        return torch.cat([x + self.node_mlp(torch.cat([x, total], 1)), pos + moved], 1)


@dataclass(frozen=True, slots=True)
class Layer:
    """Layer, what it takes, and what it has to compute.

    Attributes:
        make: makes it.
        takes: the arguments behind x: the edges alone, or features, types or positions, too.
        node: thousands of multiplications and additions a node needs; 0 where they are not counted.
        edge: thousands that an edge needs; what is computed of one end alone counts for its node.
    """

    make: Callable[[], nn.Module]
    takes: str = ""
    node: float = 0
    edge: float = 0


_P = 2 * WIDTH * WIDTH / 1000
"""Thousands of operations of a product with a square weight."""
_F = 2 * FEATURES * WIDTH / 1000
"""Thousands of operations of a product with the edge features."""

LAYERS = {
    "sum": Layer(pyg.SimpleConv, edge=0.06),
    "PNA": Layer(pna, node=2 * _P + 13 * _P + _P, edge=0.4),
    "CG": Layer(lambda: pyg.CGConv(WIDTH, dim=FEATURES), "attr", node=4 * _P, edge=2 * _F + 1.3),
    "EdgeConv": Layer(lambda: pyg.EdgeConv(mlp(2 * WIDTH)), node=2 * _P, edge=_P + 0.2),
    "PointNet": Layer(lambda: pyg.PointNetConv(mlp(WIDTH + 3), add_self_loops=False), "pos"),
    "NN": Layer(lambda: pyg.NNConv(8, 8, nn.Linear(FEATURES, 64)), "narrow attr"),
    "GEN": Layer(lambda: pyg.GENConv(WIDTH, WIDTH, aggr="softmax", learn_t=True), node=4 * _P, edge=1.3),
    "ARMA": Layer(lambda: pyg.ARMAConv(WIDTH, WIDTH, num_stacks=2, num_layers=2)),
    "GINE": Layer(lambda: pyg.GINEConv(mlp(WIDTH), edge_dim=FEATURES), "attr", node=2 * _P, edge=_F + 0.2),
    "FeaSt": Layer(lambda: pyg.FeaStConv(WIDTH, WIDTH, heads=3)),
    "Transformer edges 4x16": Layer(
        attention(pyg.TransformerConv, 4, edge_dim=FEATURES), "attr", node=4 * _P, edge=_F + 0.4
    ),
    "GMM": Layer(lambda: pyg.GMMConv(WIDTH, WIDTH, dim=2, kernel_size=3), "pseudo"),
    "GATv2 edges 4x16": Layer(
        attention(pyg.GATv2Conv, 4, edge_dim=FEATURES, add_self_loops=False),
        "attr",
        node=2 * _P,
        edge=_F + 0.4,
    ),
    "GAT edges 4x16": Layer(attention(pyg.GATConv, 4, edge_dim=FEATURES, add_self_loops=False), "attr"),
    "GATv2 2x32": Layer(attention(pyg.GATv2Conv, 2), node=2 * _P, edge=0.4),
    "GATv2 4x16": Layer(attention(pyg.GATv2Conv, 4), node=2 * _P, edge=0.4),
    "Transformer 1x64": Layer(attention(pyg.TransformerConv, 1), node=4 * _P, edge=0.3),
    "Transformer 2x32": Layer(attention(pyg.TransformerConv, 2), node=4 * _P, edge=0.3),
    "GATv2 2x32 twice": Layer(lambda: Twice(attention(pyg.GATv2Conv, 2))),
    "Transformer 2x32 twice": Layer(lambda: Twice(attention(pyg.TransformerConv, 2))),
    "RGCN": Layer(lambda: pyg.RGCNConv(WIDTH, WIDTH, RELATIONS), "type"),
    "RGAT": Layer(lambda: pyg.RGATConv(WIDTH, WIDTH, RELATIONS), "type"),
    "PDN": Layer(lambda: pyg.PDNConv(WIDTH, WIDTH, FEATURES, 8), "attr"),
    "MF": Layer(lambda: pyg.MFConv(WIDTH, WIDTH, max_degree=4)),
    "FiLM": Layer(lambda: pyg.FiLMConv(WIDTH, WIDTH)),
    "ResGated": Layer(lambda: pyg.ResGatedGraphConv(WIDTH, WIDTH)),
    "General": Layer(lambda: pyg.GeneralConv(WIDTH, WIDTH)),
    "MixHop": Layer(lambda: pyg.MixHopConv(WIDTH, WIDTH, powers=[0, 1, 2])),
    "GCN": Layer(lambda: pyg.GCNConv(WIDTH, WIDTH)),
    "GIN": Layer(lambda: pyg.GINConv(mlp(WIDTH))),
    "SAGE": Layer(lambda: pyg.SAGEConv(WIDTH, WIDTH)),
    "GAT 4x16": Layer(attention(pyg.GATConv, 4)),
    "mesh network": Layer(MeshNetwork, "attr", node=2 * 5 * _P, edge=2 * (2 * _P + 1) + _F),
    "EGNN": Layer(EGNNBlock, "pos", node=5 * _P, edge=2 * _P + 2.2),
}
"""By name the layers, of width ``WIDTH`` with ``FEATURES`` edge features."""


def arguments(takes: str, edge_index: Tensor, nodes: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return x and the arguments behind it."""
    edges, device = edge_index.shape[1], edge_index.device
    extra = {
        "": lambda: (edge_index,),
        "attr": lambda: (edge_index, torch.randn(edges, FEATURES, device=device)),
        "pseudo": lambda: (edge_index, torch.rand(edges, 2, device=device)),
        "type": lambda: (edge_index, torch.randint(RELATIONS, (edges,), device=device)),
        "pos": lambda: (torch.randn(nodes, 3, device=device), edge_index),
    }[takes.removeprefix("narrow ")]()
    return torch.randn(nodes, 8 if "narrow" in takes else WIDTH, device=device), extra
