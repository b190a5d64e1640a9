"""Models of two layers without dropout, whose gradients on Cora are compared."""

from collections.abc import Callable

from torch import Tensor, nn
from torch_geometric import nn as pyg


class Net(nn.Module):
    """Two convolutions with an activation between."""

    def __init__(self, first: nn.Module, second: nn.Module, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second, self.activation = first, second, activation or nn.ReLU()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x, edge_index)), edge_index)


def mlp(inputs: int, outputs: int) -> nn.Module:
    """Return a perceptron of two layers with batch norm."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, outputs))


ON_CORA: dict[str, Callable[[int, int], nn.Module]] = {
    "gcn": lambda a, b: Net(pyg.GCNConv(a, 64), pyg.GCNConv(64, b)),
    "sage": lambda a, b: Net(pyg.SAGEConv(a, 64), pyg.SAGEConv(64, b)),
    "gat": lambda a, b: Net(pyg.GATConv(a, 16, heads=4), pyg.GATConv(64, b), nn.ELU()),
    "gin": lambda a, b: Net(pyg.GINConv(mlp(a, 64)), pyg.GINConv(mlp(64, b))),
}
