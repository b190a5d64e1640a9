"""Values that are read outside of regions are computed once, and have one rounding."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GraphNorm, GraphSizeNorm, NNConv, SAGEConv, global_mean_pool
from torch_geometric.utils import scatter
from traced import relative_error

import gnnc

WIDTH = 16


class Normalized(nn.Module):
    """Two linear layers and a norm over a graph, whose rows are the result, or are pooled."""

    def __init__(self, norm: nn.Module, *, pooled: bool) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(33, 40), nn.Linear(40, WIDTH), norm
        self.pooled = pooled

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        """Return [nodes, WIDTH], or [2, WIDTH]."""
        h = self.norm(self.last(self.first(x).relu()), batch)
        return global_mean_pool(h, batch, 2) if self.pooled else h


class Centered(nn.Module):
    """A norm by hand: the mean of each graph is subtracted, and the result divided by its size."""

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        """Return [nodes, F]."""
        mean = scatter(x, batch, 0, 2, "mean")
        centered = x - mean[batch]
        square = scatter(centered.pow(2), batch, 0, 2, "mean")
        return centered / (square + 1e-5).sqrt()[batch]


class OfGraph(nn.Module):
    """A norm of PyG over all nodes as one graph, which ignores the batch vector."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        """Return [nodes, F]."""
        return self.norm(x)


NORMS = {
    "by hand": Centered,
    "GraphNorm": lambda: OfGraph(GraphNorm(WIDTH)),
    "GraphSizeNorm": lambda: OfGraph(GraphSizeNorm()),
}


def products(compiled: gnnc.CompiledModel) -> int:
    """Return the number of linear layers that a call computes, inside bodies too."""
    text = str(compiled)
    inside = "gnnc.gemm.default(", "gnnc.qgemm.default(", "aten.linear.default("
    return sum(text.count(name) for name in ("gnnc.gemm(", "gnnc.qgemm(", *inside))


@torch.no_grad()
@pytest.mark.parametrize("pooled", [False, True], ids=["rows", "pooled"])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_one_node_cancel_what_they_subtract(norm: str, pooled: bool) -> None:
    torch.manual_seed(0)
    model = Normalized(NORMS[norm](), pooled=pooled).eval()
    for precision in ("bf16", "int8"):
        compiled = gnnc.compile(model, precision)
        for nodes in (1, 2, 30):
            x, batch = torch.randn(nodes, 33), torch.arange(nodes) % 2
            want, got = model(x, batch), compiled(x, batch)
            cancels = nodes == 1 and norm != "GraphSizeNorm"
            torch.testing.assert_close(got, want, rtol=0, atol=1e-3 if cancels else 0.1)
        assert products(compiled) == 2


class EdgeScores(nn.Module):
    """A narrow score of edge features, computed from wide rows, that messages and the caller read."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sums, [nodes, F], and the scores, [edges, 1]."""
        score = self.score(edge_attr)
        message = x[edge_index[0]] * score
        return torch.zeros_like(x).index_add(0, edge_index[1], message), score


@torch.no_grad()
def test_scores_that_the_caller_gets_are_those_of_the_messages() -> None:
    """Sums of one edge are the score times the row, in any precision."""
    compiled = gnnc.compile(EdgeScores().eval(), "bf16")
    edge_index = torch.stack([torch.arange(9), torch.randperm(9)])
    out, score = compiled(torch.ones(9, 40), edge_index, torch.randn(9, 3))
    torch.testing.assert_close(out[edge_index[1]], score.expand(-1, 40), rtol=1e-6, atol=0)
    assert products(compiled) == 2


class EdgeMessages(nn.Module):
    """Messages of both ends and of edge features, which are summed and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums, [nodes, F], and the messages, [edges, F]."""
        message = (x[edge_index[0]] - x[edge_index[1]]) * self.score(edge_attr)
        return torch.zeros_like(x).index_add(0, edge_index[1], message), message


@torch.no_grad()
def test_what_messages_alone_read_is_made_with_them() -> None:
    """No matrix of 64 columns an edge is stored, though the caller gets the messages."""
    torch.manual_seed(0)
    model = EdgeMessages().eval()
    compiled = gnnc.compile(model, "fp32")
    args = torch.randn(9, 40), torch.randint(9, (2, 30)), torch.randn(30, 3)
    for got, want in zip(compiled(*args), model(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert "gnnc.gemm(" not in str(compiled) and products(compiled) >= 2


class Blocks(nn.Module):
    """A layer with edge features, a norm, a skip, a layer that gathers, and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first = NNConv(20, WIDTH, nn.Linear(3, 20 * WIDTH), aggr="max")
        self.norm, self.skip, self.last = GraphNorm(WIDTH), nn.Linear(20, WIDTH), SAGEConv(WIDTH, 8)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        """Return [2, 8]."""
        h = self.norm(self.first(x, edge_index, edge_attr)).tanh() + self.skip(x)
        return global_mean_pool(self.last(h, edge_index), batch, 2)


@torch.no_grad()
@pytest.mark.parametrize("nodes", [1, 25])
def test_layers_before_a_pool_are_computed_once(nodes: int) -> None:
    torch.manual_seed(0)
    model = Blocks().eval()
    x, edge_index = torch.randn(nodes, 20), torch.randint(nodes, (2, 4 * nodes))
    args = x, edge_index, torch.rand(4 * nodes, 3), torch.arange(nodes) % 2
    compiled = gnnc.compile(model, "bf16")
    assert relative_error(compiled(*args), model(*args)) < 0.02
    assert products(compiled) == 5
