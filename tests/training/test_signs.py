"""Gradients past ``torch.sgn``, whose own is zero for real values."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.utils import scatter
from training_steps import EDGES, WIDTH, X, compare

import gnnc


class OfMessages(nn.Module):
    """Messages with the sign of a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.dense(x)
        src, dst = edge_index
        return scatter(torch.sgn(h[src] - h[dst]) * h[dst], dst, 0, x.shape[0], "sum")


class OfNodes(OfMessages):
    """Nodes with the sign of a sum of messages."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.dense(x)
        src, dst = edge_index
        return torch.sgn(scatter(h[src], dst, 0, x.shape[0], "sum")) * h


@pytest.mark.parametrize("kind", [OfMessages, OfNodes])
def test_the_gradient_past_a_sign_is_that_of_eager(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    compare(model, gnnc.compile(model, "fp32"), lambda call, _: call(X, EDGES).square().sum().backward())
