"""Guards say the same in a microsecond and in words."""

import itertools

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv

import gnnc
from gnnc.capture.export import capture
from gnnc.capture.guards import Guards


class Asks(nn.Module):
    """Related sizes, a fixed one, a restricted one and questions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(4, 3)

    def forward(self, x, edge_index, weight, twice):
        if edge_index.numel() == 0:
            return x
        if x.shape[0] // 3 > 7 and twice.shape[0] % 4 == 2:
            return x * 2
        return self.conv(x, edge_index, weight) + twice.view(-1, 2).sum(1, keepdim=True)


@pytest.fixture(scope="module", params=[(60, 400), (20, 90), (9, 0)])
def guards(request) -> Guards:
    nodes, edges = request.param
    return capture(Asks().eval(), call(nodes, edges)).guards


def call(nodes: int, edges: int, weights: int | None = None, twice: int | None = None, width: int = 4):
    return (
        torch.zeros(nodes, width),
        torch.zeros(2, edges, dtype=torch.long),
        torch.zeros(edges if weights is None else weights),
        torch.zeros(2 * nodes if twice is None else twice),
    )


@pytest.mark.first(1)
def test_both_agree(guards):
    sizes = (0, 1, 2, 3, 7, 9, 20, 23, 24, 25, 60)
    calls = [call(nodes, edges) for nodes, edges in itertools.product(sizes, sizes)]
    calls += [call(60, 400, weights=399), call(60, 400, twice=119), call(60, 400, width=5)]
    answers = [guards.sizes_fit(tensors) for tensors in calls]
    assert answers == [guards.failure(tensors) is None for tensors in calls]
    assert set(answers) == {True, False}


class AsksForEdges(nn.Module):
    """Goes another way without edges."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(4, 4)

    def forward(self, x, edge_index):
        return x * 2 if edge_index.shape[1] == 0 else self.conv(x, edge_index)


def test_what_is_known_is_not_traced_again(monkeypatch):
    shapes, export = [], torch.export.export

    def counted(entry, tensors, **options):
        shapes.append(tuple(tensors[0].shape))
        return export(entry, tensors, **options)

    monkeypatch.setattr(torch.export, "export", counted)
    compiled = gnnc.compile(AsksForEdges().eval(), precision="fp32")
    with torch.no_grad():
        for nodes, edges in ((60, 400), (9, 0), (8, 0), (50, 300)):
            given = call(nodes, edges)[:2]
            assert torch.allclose(compiled(*given), compiled.model(*given))
    stand_in, exact = shapes
    assert stand_in[0] not in (60, 9) and exact == (9, 4)
