"""Outputs of the parts of PyG's poolings are results and arguments like tensors."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn.pool.connect import FilterEdges
from torch_geometric.nn.pool.connect.base import ConnectOutput
from torch_geometric.nn.pool.select import SelectTopK
from torch_geometric.nn.pool.select.base import SelectOutput

import gnnc


def assert_same(got: object, want: object) -> None:
    """Check the class and every field of an output."""
    assert type(got) is type(want)
    for name, value in vars(want).items():
        found = getattr(got, name)
        if isinstance(value, Tensor):
            torch.testing.assert_close(found, value)
        else:
            assert found == value


@torch.no_grad()
@pytest.mark.parametrize("ratio", [0.5, 2])
def test_a_selection_is_the_result(ratio: float) -> None:
    torch.manual_seed(0)
    model = SelectTopK(16, ratio=ratio).eval()
    compiled = gnnc.compile(model, "fp32")
    for nodes in (8, 13):
        args = torch.randn(nodes, 16), torch.arange(nodes) % 2
        assert_same(compiled(args[0], args[1].sort().values), model(args[0], args[1].sort().values))


class Connected(nn.Module):
    """The edges between selected nodes, with a layer on their features."""

    def __init__(self) -> None:
        super().__init__()
        self.connect, self.lin = FilterEdges(), nn.Linear(3, 4)

    def forward(self, selected: SelectOutput, edge_index: Tensor, edge_attr: Tensor) -> ConnectOutput:
        """Return the edges."""
        return self.connect(selected, edge_index, self.lin(edge_attr), None)


@torch.no_grad()
def test_a_selection_is_an_argument() -> None:
    model = Connected().eval()
    compiled = gnnc.compile(model, "fp32")
    for nodes in (6, 9):
        chosen = torch.randperm(nodes)[:4]
        selected = SelectOutput(chosen, nodes, torch.arange(4), 4, torch.rand(4))
        args = selected, torch.randint(nodes, (2, 30)), torch.randn(30, 3)
        assert_same(compiled(*args), model(*args))
