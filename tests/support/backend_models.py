"""Models that every backend's tests compile, and their inputs."""

import torch
from torch import nn
from torch_geometric.nn import (
    AGNNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    SAGEConv,
    SGConv,
    TransformerConv,
    global_add_pool,
    global_max_pool,
)
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

WIDTH, HIDDEN, CLASSES = 24, 64, 7


class Stack(nn.Module):
    """Two layers with what stands between them in practice."""

    def __init__(self, first: nn.Module, second: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.norm = first, second, norm

    def forward(self, x, edge_index):
        hidden = self.norm(self.first(x, edge_index)).relu()
        return self.second(hidden, edge_index).log_softmax(-1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = x + torch.nn.functional.gelu(conv(x, edge_index))
        return x


class Links(nn.Module):
    """Scores pairs of nodes by a dot product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(WIDTH, HIDDEN)

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        return (h[edge_index[0]] * h[edge_index[1]]).sum(-1)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GraphConv(WIDTH, HIDDEN)

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index).relu()
        batch = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        return global_add_pool(h, batch, size=1) + global_max_pool(h, batch, size=1)


MODELS = {
    "GCN": lambda: GCN(WIDTH, HIDDEN, 2, CLASSES, norm="batch_norm"),
    "GCN with layer norm": lambda: GCN(WIDTH, HIDDEN, 2, CLASSES, norm="layer_norm", jk="cat"),
    "GraphSAGE": lambda: GraphSAGE(WIDTH, HIDDEN, 2, CLASSES),
    "GraphSAGE max": lambda: GraphSAGE(WIDTH, HIDDEN, 2, CLASSES, aggr="max"),
    "GIN": lambda: GIN(WIDTH, HIDDEN, 2, CLASSES),
    "GAT": lambda: GAT(WIDTH, HIDDEN, 2, CLASSES, heads=4),
    "GAT with one head": lambda: GAT(WIDTH, HIDDEN, 2, CLASSES),
    "GATv2": lambda: Stack(GATv2Conv(WIDTH, 8, heads=4), GATv2Conv(32, CLASSES), nn.LayerNorm(32)),
    "Transformer": lambda: Stack(
        TransformerConv(WIDTH, 8, heads=4), TransformerConv(32, CLASSES), nn.Identity()
    ),
    "AGNN": lambda: Stack(SGConv(WIDTH, HIDDEN, K=2), AGNNConv(), nn.BatchNorm1d(HIDDEN)),
    "GAT with concatenation off": lambda: Stack(
        GATConv(WIDTH, 32, heads=2, concat=False), GATConv(32, CLASSES, heads=2), nn.Identity()
    ),
    "residual": Residual,
    "link prediction": Links,
    "pooling": Pooled,
}


def given(nodes: int = 90, edges: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    """A graph with a hub, isolated nodes, self loops and duplicate edges."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(nodes - 5, (2, edges), generator=generator)
    edge_index[1, : edges // 5] = 3
    edge_index[:, -3:] = edge_index[:, :3]
    return torch.randn(nodes, WIDTH, generator=generator), edge_index
