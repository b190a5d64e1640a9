"""Variances stay FP32: the mean of squares and the square of the mean nearly cancel."""

import pytest
import torch
from slow import slow_after
from torch import Tensor, nn
from torch_geometric import nn as pyg

import gnnc
from gnnc.ir.op import op_of

WIDTH, NODES = 64, 40


class ByHand(nn.Module):
    """Writes the variance over neighbors as two sums."""

    def __init__(self, power: bool) -> None:
        super().__init__()
        self.lin, self.power = nn.Linear(WIDTH, WIDTH), power

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        source, target = edge_index
        zeros = torch.zeros_like(x)
        degree = zeros[:, :1].index_add(0, target, x.new_ones(source.shape[0], 1)).clamp(min=1)
        mean = zeros.index_add(0, target, x[source]) / degree
        squares = x.pow(2) if self.power else x * x
        mean_of_squares = zeros.index_add(0, target, squares[source]) / degree
        return (mean_of_squares - mean * mean).clamp(min=1e-5).sqrt()


VARIANCES = {
    "SAGE, variance": lambda: pyg.SAGEConv(WIDTH, WIDTH, aggr="var"),
    "SAGE, deviation": lambda: pyg.SAGEConv(WIDTH, WIDTH, aggr="std"),
    "EGConv": lambda: pyg.EGConv(WIDTH, WIDTH, aggregators=["std", "var"]),
    "by hand": lambda: ByHand(power=False),
    "by hand, power": lambda: ByHand(power=True),
}


def equal_neighbors() -> tuple[Tensor, Tensor]:
    """Return x and a graph in which every row has one neighbor, three times: all variances are zero."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(NODES, (NODES,), generator=generator)
    edge_index = torch.stack([source, torch.arange(NODES)]).repeat(1, 3)
    return torch.randn(NODES, WIDTH, generator=generator).abs() + 3, edge_index


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("precision", slow_after(1, ["bf16", "int8"]))
@pytest.mark.parametrize("name", VARIANCES)
def test_the_variance_of_equal_values_is_none(name: str, precision: str) -> None:
    torch.manual_seed(0)
    model = VARIANCES[name]().eval()
    for bias in ("lin_r", "bases_lin"):  # all else that a layer adds
        if hasattr(model, bias):
            getattr(model, bias).weight.zero_()
    compiled = gnnc.compile(model, precision)
    arguments = equal_neighbors()
    assert (compiled(*arguments) - model(*arguments)).abs().max() < 2e-3
    assert "a part of a variance" in compiled.explain()


class Squares(nn.Module):
    """Squares a sum over neighbors, of which nothing is subtracted that has the same source."""

    def forward(self, x: Tensor, edge_index: Tensor, other: Tensor) -> Tensor:
        total = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        return other - total * total


@torch.no_grad()
def test_a_square_alone_is_no_variance() -> None:
    x, edge_index = equal_neighbors()
    compiled = gnnc.compile(Squares(), "bf16")
    compiled(x, edge_index, torch.ones_like(x))
    assigned = dict(compiled.stages)["assign"].graph.nodes
    assert {str(n.meta["precision"]) for n in assigned if (op := op_of(n)) and op.name == "spmm"} == {"bf16"}
