"""Pooling of graphs whose number, size and nodes only values tell: one program for all batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from compare import capture_count
from torch import Tensor, nn
from torch_2_11 import NOT_IN_2_11
from torch_geometric.data import Data
from torch_geometric.utils import scatter, to_dense_batch

import gnnc

WIDTH = 8
SIZES = ((5, 7, 6), (9, 4), (8, 8, 8, 8), (3, 6, 5, 4, 9))
Step = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """A layer, then a step that may use a module."""

    def __init__(self, step: Step, inner: nn.Module) -> None:
        super().__init__()
        self.conv, self.step, self.inner = pyg.GCNConv(WIDTH, 16), step, inner

    def forward(self, x, edge_index, batch):
        return self.step(self.inner, self.conv(x, edge_index).relu(), edge_index, batch)


class OfData(Net):
    def forward(self, data):
        return super().forward(data.x, data.edge_index, data.batch)


def masked(_: Any, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
    dense, mask = to_dense_batch(x, batch)
    return (dense * mask.unsqueeze(-1)).sum(1)


def by_count(_: Any, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
    sums = torch.zeros(int(batch[-1]) + 1, x.size(1)).index_add(0, batch, x)
    return sums / batch.bincount().clamp(min=1).unsqueeze(1)


STEPS: dict[str, Step] = {
    "global_mean_pool": lambda _, x, e, batch: pyg.global_mean_pool(x, batch),
    "global_max_pool": lambda _, x, e, batch: pyg.global_max_pool(x, batch),
    "int(batch.max()) + 1": lambda _, x, e, batch: scatter(x, batch, 0, dim_size=int(batch.max()) + 1),
    "batch.max().item()": lambda _, x, e, batch: scatter(x, batch, 0, dim_size=batch.max().item() + 1),
    "counts": by_count,
    "to_dense_batch": masked,
}
SELECTIONS: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "TopK": (lambda: pyg.TopKPooling(16), lambda pool, x, e, batch: pool(x, e, batch=batch)[0]),
    "TopK of 3": (lambda: pyg.TopKPooling(16, ratio=3), lambda pool, x, e, batch: pool(x, e, batch=batch)[0]),
    "SAG": (lambda: pyg.SAGPooling(16), lambda pool, x, e, batch: pool(x, e, batch=batch)[0]),
}


def arguments(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    starts = torch.tensor((0, *sizes)).cumsum(0)[:-1]
    edges = [
        torch.randint(size, (2, 4 * size), generator=generator) + start
        for size, start in zip(sizes, starts, strict=True)
    ]
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return torch.randn(sum(sizes), WIDTH, generator=generator), torch.cat(edges, 1), batch


@pytest.mark.first(1)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("as_data", [False, True])
@torch.no_grad()
def test_pooling_without_sizes(name: str, as_data: bool):
    torch.manual_seed(0)
    model = (OfData if as_data else Net)(STEPS[name], nn.Identity()).eval()
    compiled = gnnc.compile(model, "fp32")
    for sizes in SIZES:
        x, edge_index, batch = arguments(sizes)
        inputs = (Data(x=x, edge_index=edge_index, batch=batch),) if as_data else (x, edge_index, batch)
        torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    assert capture_count(compiled) == 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", SELECTIONS)
@torch.no_grad()
def test_pooling_that_selects_or_pads(name: str, precision: str, request: pytest.FixtureRequest):
    if name == "SAG":
        request.applymarker(NOT_IN_2_11)
    torch.manual_seed(0)
    make, step = SELECTIONS[name]
    model = Net(step, make()).eval()
    compiled = gnnc.compile(model, precision)
    for sizes in SIZES:
        inputs = arguments(sizes)
        expected, actual = model(*inputs), compiled(*inputs)
        assert actual.shape == expected.shape
        if precision == "fp32":  # a rounded score may select another node
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert capture_count(compiled) <= 2
