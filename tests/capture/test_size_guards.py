"""Sizes that a check of torch refuses, such as one row in a batch norm that trains."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import gnnc

ONE_NODE = torch.randn(1, 6), torch.zeros(2, 1, dtype=torch.int64)


class Normed(nn.Module):
    """A layer with a batch norm behind it."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm = pyg.GCNConv(6, 4), norm(4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.norm(self.conv(x, edge_index))


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, pyg.BatchNorm])
def test_statistics_of_one_row_are_refused(norm: type[nn.Module], is_first: bool) -> None:
    model = Normed(norm).train()
    compiled = gnnc.compile(model, "fp32")
    if not is_first:
        compiled(torch.randn(9, 6), torch.randint(9, (2, 20)))
    before = copy.deepcopy(dict(model.named_buffers()))
    with pytest.raises(gnnc.GnncError, match="more than 1 value per channel"):
        compiled(*ONE_NODE)
    for path, buffer in model.named_buffers():
        assert torch.equal(buffer, before[path]), path


def test_one_row_has_the_running_statistics_in_evaluation() -> None:
    model = Normed(nn.BatchNorm1d).eval()
    compiled = gnnc.compile(model, "fp32")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*ONE_NODE), model(*ONE_NODE))
