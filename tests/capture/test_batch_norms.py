"""Batch norms in train(): what reads their statistics in the same call."""

import copy

import torch
from torch import Tensor, nn

import gnnc


class ReadAfterwards(nn.Module):
    """A batch norm that is applied twice, and its statistics after each time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.norm(x)
        mean = self.norm.running_mean.cumsum(0)
        return self.norm(first.relu()), mean, self.norm.running_var.sort()[0]


def test_statistics_are_read_as_the_last_norm_has_left_them() -> None:
    model = ReadAfterwards().train()
    expected, compiled = copy.deepcopy(model), gnnc.compile(model, "fp32")
    for rows in (5, 9):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), expected(x))
        torch.testing.assert_close(model.state_dict(), expected.state_dict())
