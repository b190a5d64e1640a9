"""The models of the benchmarks, the demo and the accuracy tests, in plain PyG, and their training."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv


class TwoLayer(nn.Module):
    """Two convolutions with an activation and dropout between them."""

    def __init__(self, first: nn.Module, second: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.conv1, self.conv2, self.activation = first, second, activation
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return one row of logits a node."""
        x = self.dropout(self.activation(self.conv1(x, edge_index)))
        return self.conv2(x, edge_index)


def gcn(features: int, classes: int, hidden: int = 64) -> nn.Module:
    """Return a GCN (Kipf and Welling, 2017)."""
    return TwoLayer(GCNConv(features, hidden), GCNConv(hidden, classes), nn.ReLU())


def sage(features: int, classes: int, hidden: int = 64) -> nn.Module:
    """Return a GraphSAGE with the mean aggregator (Hamilton et al., 2017)."""
    return TwoLayer(SAGEConv(features, hidden), SAGEConv(hidden, classes), nn.ReLU())


def gin(features: int, classes: int, hidden: int = 64) -> nn.Module:
    """Return a GIN with two-layer perceptrons and batch norm (Xu et al., 2019)."""

    def mlp(width: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, out)
        )

    first = GINConv(mlp(features, hidden), train_eps=True)
    return TwoLayer(first, GINConv(mlp(hidden, classes), train_eps=True), nn.ReLU())


def gat(features: int, classes: int, hidden: int = 64, heads: int = 4) -> nn.Module:
    """Return a GAT (Velickovic et al., 2018): ``heads`` heads of ``hidden / heads``, one head at the end."""
    first = GATConv(features, hidden // heads, heads=heads)
    return TwoLayer(first, GATConv(hidden, classes), nn.ELU())


class ResidualGCN(nn.Module):
    """Four graph convolutions of one width, each with layer norm and a residual, and a linear head."""

    def __init__(self, features: int, classes: int, hidden: int, layers: int = 4) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(features, hidden), nn.Linear(hidden, classes)
        self.convs = nn.ModuleList(GCNConv(hidden, hidden) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return one row of logits a node."""
        x = self.encoder(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + conv(norm(x).relu(), edge_index)
        return self.head(x)


def residual_gcn(features: int, classes: int, hidden: int = 64) -> nn.Module:
    """Return a GCN of four layers with layer norm and residuals (after Li et al., 2020)."""
    return ResidualGCN(features, classes, hidden)


MODELS: dict[str, Callable[..., nn.Module]] = {"gcn": gcn, "sage": sage, "gin": gin, "gat": gat}


def train(
    model: nn.Module,
    x: Tensor,
    edge_index: Tensor,
    y: Tensor,
    train_mask: Tensor,
    val_mask: Tensor,
    *,
    epochs: int = 200,
    lr: float = 0.01,
    weight_decay: float = 5e-4,
    evaluate_every: int = 5,
    progress: Callable[[int], object] = lambda epoch: None,
) -> nn.Module:
    """Train ``model`` on the nodes of ``train_mask``; return it in eval mode at its best epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
    best, best_state = -1.0, model.state_dict()
    for epoch in range(epochs):
        model.train()
        optimizer.zero_grad()
        logits = model(x, edge_index)
        nn.functional.cross_entropy(logits[train_mask], y[train_mask]).backward()
        optimizer.step()
        progress(epoch)
        if (epoch + 1) % evaluate_every:
            continue
        score = accuracy(model, x, edge_index, y, val_mask)
        if score > best:
            best = score
            best_state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(best_state)
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, edge_index: Tensor, y: Tensor, mask: Tensor) -> float:
    """Return the share of the nodes of ``mask`` whose class is predicted right, in percent."""
    model.eval()
    hits = model(x, edge_index).argmax(-1)[mask] == y[mask]
    return 100.0 * hits.float().mean().item()
