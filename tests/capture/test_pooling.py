"""Pooling of graphs whose number, size and nodes only values tell: one program for all batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from compare import capture_count
from shared_captures import shared_captures
from torch import Tensor, nn
from torch_2_11 import NOT_IN_2_11
from torch_geometric.data import Data
from torch_geometric.nn.pool.connect import FilterEdges
from torch_geometric.nn.pool.select import SelectTopK
from torch_geometric.utils import degree, scatter, to_dense_batch

import gnnc
from gnnc.errors import InputError

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


def by_parts(pool: Any, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
    selected = pool(x, batch)
    connected = FilterEdges()(selected, edge_index, None, batch)
    x = x[selected.node_index] * selected.weight.view(-1, 1)
    assert connected.batch is not None
    return torch.cat(
        [
            pyg.global_mean_pool(x, connected.batch),
            degree(connected.edge_index[0], len(x)).amax(0).expand(1, 16),
        ]
    )


def own_batch(_: Any, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
    tens = torch.div(torch.arange(len(x)), 10, rounding_mode="floor")
    return to_dense_batch(x, tens)[0].sum(1)


def own_counts(_: Any, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
    counts = degree(batch, dtype=torch.long)
    return to_dense_batch(x, torch.arange(len(counts)).repeat_interleave(counts))[0].amax(1)


def pooled(pool: Any, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
    x, edges, batch, _ = pool(x, edge_index, batch)
    neighbors = scatter(x[edges[0]], edges[1], 0, len(x), "sum")
    return pyg.global_mean_pool(x + neighbors, batch)


MERGING: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "EdgePooling": (lambda: pyg.EdgePooling(16), pooled),
    "EdgePooling of tanh": (lambda: pyg.EdgePooling(16, pyg.EdgePooling.compute_edge_score_tanh), pooled),
    "ClusterPooling": (lambda: pyg.ClusterPooling(16), pooled),
    "ClusterPooling of log_softmax": (lambda: pyg.ClusterPooling(16, "log_softmax"), pooled),
    "SelectTopK and FilterEdges": (lambda: SelectTopK(16), by_parts),
    "batch of ten nodes": (nn.Identity, own_batch),
    "batch from counts": (nn.Identity, own_counts),
    "ASAPooling": (lambda: pyg.ASAPooling(16), lambda pool, x, e, batch: pool(x, e, batch=batch)[0]),
    "MemPooling": (lambda: pyg.MemPooling(16, 8, 2, 4), lambda pool, x, e, batch: pool(x, batch)[0]),
    "GraphUNet": (lambda: pyg.GraphUNet(16, 8, 4, 2), lambda net, x, e, batch: net(x, e, batch)),
    "SGFormer": (lambda: pyg.SGFormer(16, 8, 4), lambda net, x, e, batch: net(x, e, batch)),
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
@pytest.mark.parametrize("name", SELECTIONS)
@torch.no_grad()
def test_pooling_that_selects_or_pads(name: str, request: pytest.FixtureRequest):
    if name == "SAG":
        request.applymarker(NOT_IN_2_11)
    torch.manual_seed(0)
    make, step = SELECTIONS[name]
    model = Net(step, make()).eval()
    given = [arguments(sizes) for sizes in SIZES]
    with shared_captures():
        for precision in ("fp32", "int8"):
            compiled = gnnc.compile(model, precision)
            for inputs in given:
                expected, actual = model(*inputs), compiled(*inputs)
                assert actual.shape == expected.shape
                if precision == "fp32":  # a rounded score may select another node
                    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            assert capture_count(compiled) <= 2


@pytest.mark.parametrize("name", MERGING)
@pytest.mark.first(1)
@torch.no_grad()
def test_pooling_that_merges(name: str, request: pytest.FixtureRequest):
    if name == "ASAPooling":
        request.applymarker(NOT_IN_2_11)
    torch.manual_seed(0)
    make, step = MERGING[name]
    model = Net(step, make()).eval()
    given = [arguments(sizes) for sizes in SIZES]
    with shared_captures():
        for precision, limit in (("fp32", 1e-4), ("int8", 0.05)):
            compiled = gnnc.compile(model, precision)
            for inputs in given:
                expected, actual = model(*inputs), compiled(*inputs)
                assert (actual - expected).abs().max() <= limit * expected.abs().max(), precision


def test_edges_that_a_pooling_merges_are_checked():
    order, edges = torch.arange(2), torch.tensor([[0, 1], [1, 5]])
    with pytest.raises(InputError, match="nodes outside"):
        torch.ops.gnnc_pooling.match(order, edges, 5)
    with pytest.raises(InputError, match="nodes outside"):
        torch.ops.gnnc_pooling.components(-edges, 6)
