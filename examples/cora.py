"""Cora, a GCN and a GAT for it, and their training: plain PyG, nothing of gnnc."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv
from tqdm import trange

FILE = Path(__file__).resolve().parent.parent / "tests" / "data" / "cora.npz"
FEATURES, CLASSES, EPOCHS = 1433, 7, 100


def load() -> Data:
    """Return Cora with features whose rows sum to one."""
    arrays = np.load(FILE)
    rows = np.repeat(np.arange(arrays["num_nodes"]), np.diff(arrays["x_indptr"]))
    x = torch.zeros(*arrays["x_shape"])
    x[rows, arrays["x_indices"]] = torch.from_numpy(arrays["x_data"]).float()
    masks = {name: torch.from_numpy(arrays[name]) for name in ("train_mask", "val_mask", "test_mask")}
    return Data(
        x=x / x.sum(1, keepdim=True).clamp(min=1),
        edge_index=torch.from_numpy(arrays["edge_index"]).long(),
        y=torch.from_numpy(arrays["y"]),
        **masks,
    )


class TwoLayers(nn.Module):
    """Two convolutions with an activation and dropout between them."""

    def __init__(self, first: nn.Module, second: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.conv1, self.conv2, self.activation = first, second, activation
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return one row of logits a node."""
        x = self.dropout(self.activation(self.conv1(x, edge_index)))
        return self.conv2(x, edge_index)


def gcn() -> nn.Module:
    """Return a GCN of two layers, 64 wide."""
    return TwoLayers(GCNConv(FEATURES, 64), GCNConv(64, CLASSES), nn.ReLU())


def gat() -> nn.Module:
    """Return a GAT of two layers: four heads of 16, then one of 7."""
    return TwoLayers(GATConv(FEATURES, 16, heads=4), GATConv(64, CLASSES), nn.ELU())


def train(model: nn.Module, data: Data, title: str) -> nn.Module:
    """Train a model on Cora; return it in eval mode, with the weights of its best epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    best, best_weights = -1.0, {}
    for epoch in trange(EPOCHS, desc=f"training {title} in PyG", unit="epoch"):
        model.train()
        optimizer.zero_grad()
        logits = model(data.x, data.edge_index)
        nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
        if epoch % 5 == 4 and (score := accuracy(model.eval(), data, data.val_mask)) > best:
            best = score
            best_weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best_weights)
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: Data, mask: Tensor) -> float:
    """Return the percentage of the nodes in ``mask`` whose class is predicted right."""
    hits = model(data.x, data.edge_index).argmax(-1) == data.y
    return 100.0 * hits[mask].float().mean().item()
