"""A model with a layer that low precision ruins."""

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from zoo import FEATURES


class Outliers(nn.Module):
    """Two inputs of the middle layer have weights of 1000 that cancel: what is left are small differences."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.middle = GCNConv(FEATURES, 64), nn.Linear(64, 64)
        self.conv2 = GCNConv(64, 5)
        with torch.no_grad():
            self.middle.weight[:, 0], self.middle.weight[:, 1] = 1000.0, -1000.0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.conv1(x, edge_index).relu()
        same = h[:, :1]
        return self.conv2(self.middle(torch.cat([same, same * 1.001, h[:, 2:]], 1)).relu(), edge_index)
