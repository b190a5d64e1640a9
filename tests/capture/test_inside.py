"""What models do inside forward: make graphs, ask about sizes, and what cannot be captured."""

import pytest
import torch
import torch_geometric.nn as pyg
from slow import slow_but
from torch import Tensor, nn
from torch_geometric.nn import global_mean_pool
from torch_geometric.utils import dropout_edge, softmax

import gnnc

WIDTH = 12
SIZES = [(60, 400), (37, 150), (7, 0), (1, 0), (1, 1)]


def graph(nodes: int, edges: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, WIDTH, generator=generator)
    return x, torch.randint(nodes, (2, edges), generator=generator)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = pyg.GCNConv(WIDTH, 8), pyg.GCNConv(8, 4)


class DropEdge(Net):
    def forward(self, x, edge_index):
        edge_index, _ = dropout_edge(edge_index, p=0.3, training=True)
        return self.last(self.conv(x, edge_index).relu(), edge_index)


class NearestNeighbors(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = pyg.EdgeConv(nn.Linear(16, 4))

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        near = torch.cdist(x, x).topk(3, largest=False).indices
        dst = torch.arange(x.shape[0]).repeat_interleave(3)
        return self.last(x, torch.stack([near.reshape(-1), dst]))


class TopK(Net):
    def __init__(self) -> None:
        super().__init__()
        self.pool = pyg.TopKPooling(8, 0.5)

    def forward(self, x, edge_index):
        x, edge_index, *_ = self.pool(self.conv(x, edge_index).relu(), edge_index)
        return self.last(x, edge_index)


class SelfAttentionPool(Net):
    def __init__(self) -> None:
        super().__init__()
        self.pool = pyg.SAGPooling(8, 0.5)

    def forward(self, x, edge_index):
        return self.pool(self.conv(x, edge_index).relu(), edge_index)[0]


class Norms(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([pyg.GraphNorm(8), pyg.InstanceNorm(8), pyg.LayerNorm(8), pyg.PairNorm()])

    def forward(self, x, edge_index):
        batch = torch.arange(x.shape[0]) // 20
        x = self.norms[0](self.conv(x, edge_index), batch, 4)
        for norm in self.norms[1:]:
            x = norm(x, batch)
        return x


class Hypergraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.HypergraphConv(WIDTH, 8)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


class AsksAboutSizes(Net):
    def forward(self, x, edge_index):
        if x.shape[0] == 1:
            return self.conv.lin(x)
        if not edge_index.numel():
            return self.conv.lin(x) * 3
        if x.size(0) > 50:
            return self.conv(x, edge_index) * 2
        return self.conv(x, edge_index)


class AsksBeforeSizesAreOne(Net):
    """Asks about the rows of one argument, of which a later step shows that another has as many."""

    def __init__(self, question) -> None:
        super().__init__()
        self.question = question

    def forward(self, x, edge_index, batch):
        h = self.conv(x, edge_index)
        return global_mean_pool(h * 2 if self.question(x.shape[0]) else h, batch)


@torch.no_grad()
@pytest.mark.parametrize(
    "question", [lambda n: n == 1, lambda n: n < 3, lambda n: n > 5 and n != 7, lambda n: n % 2 == 0]
)
def test_questions_about_sizes_that_turn_out_to_be_one(question):
    model = AsksBeforeSizesAreOne(question).eval()
    compiled = gnnc.compile(model, "fp32")
    for nodes in (9, 1, 3, 2, 7, 6, 4):
        x, edge_index = graph(nodes, 3 * nodes, nodes)
        arguments = x, edge_index, torch.zeros(nodes).long()
        torch.testing.assert_close(compiled(*arguments), model(*arguments))


class Trims(nn.Module):
    """Compares sizes of two arguments without asking, as sampled bipartite batches do."""

    def forward(self, x, targets):
        return x[: targets.shape[0]] * 2


@torch.no_grad()
def test_a_comparison_of_two_sizes_is_seen():
    compiled = gnnc.compile(Trims(), "fp32")
    for rows, targets in ((60, 20), (20, 60), (50, 3), (7, 7), (3, 50)):
        x = torch.randn(rows, 4)
        assert torch.equal(compiled(x, torch.zeros(targets)), x[:targets] * 2)


class SoftmaxBySource(nn.Module):
    def forward(self, x, edge_index):
        src, dst = edge_index
        weight = softmax((x[src] * x[dst]).sum(-1), src, num_nodes=x.shape[0])
        return torch.zeros_like(x).index_add(0, dst, x[src] * weight[:, None]), weight


class TwoCountsOfRows(nn.Module):
    def forward(self, x, edge_index):
        src, dst = edge_index
        larger = x.new_zeros(x.shape[0] + 5, WIDTH).index_add(0, dst, x[src])
        equal = torch.zeros_like(x).index_add(0, dst, (x[src] - x[dst]).relu() * larger[dst])
        return larger, equal, larger[dst] - equal[src]


# The number of captures over SIZES. Where values decide sizes, Dynamo traces; what it takes for granted
# about sizes of 0 and 1 cannot be seen, and each such size is captured for itself.
INSIDE = {
    DropEdge: 1,
    NearestNeighbors: 2,  # topk asks for three rows at least
    TopK: 2,
    SelfAttentionPool: 2,
    Norms: 2,
    Hypergraph: 2,
    AsksAboutSizes: 5,
    SoftmaxBySource: 1,
    TwoCountsOfRows: 1,
}
SMALLEST_TOO = (DropEdge, AsksAboutSizes, SoftmaxBySource, TwoCountsOfRows)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "kind",
    slow_but([DropEdge, TopK, Norms, SoftmaxBySource, TwoCountsOfRows], list(INSIDE)),
    ids=lambda kind: kind.__name__,
)
@torch.no_grad()
def test_equals_eager(kind):
    if kind is SelfAttentionPool and torch.__version__.startswith("2.11"):
        # Its torch.export takes the scores of PyG's SelectTopK(1) for a tensor of one element.
        with pytest.raises(gnnc.CaptureError, match="_scatter.py"):
            compared(kind, SIZES[:1])
        return
    compiled = compared(kind, SIZES if kind in SMALLEST_TOO else SIZES[:3])
    assert f"  {INSIDE[kind] + 1}. " not in compiled.explain().rpartition("Captures")[2]


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", SMALLEST_TOO, ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_the_smallest_may_come_first(kind):
    compared(kind, SIZES[::-1])


def compared(kind: type[nn.Module], sizes: list[tuple[int, int]]) -> gnnc.CompiledModel:
    torch.manual_seed(0)
    model = kind().eval()
    compiled = gnnc.compile(model, "fp32")
    for seed, (nodes, edges) in enumerate(sizes):
        arguments = graph(nodes, edges, seed)
        torch.manual_seed(seed)  # DropEdge draws the same edges
        expected = model(*arguments)
        torch.manual_seed(seed)
        torch.testing.assert_close(compiled(*arguments), expected, rtol=1e-4, atol=1e-5)
    return compiled


@torch.no_grad()
def test_a_random_graph_is_drawn_at_each_call():
    compiled = gnnc.compile(DropEdge().eval(), "fp32")
    arguments = graph(60, 400)
    assert not torch.equal(compiled(*arguments), compiled(*arguments))


class Loops(Net):
    def forward(self, x, edge_index):
        for _ in range(1000 * int(edge_index.max())):  # this line
            x = x + 1
        return self.conv(x, edge_index)


class Decides(Net):
    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        while x.mean() > 0:  # this line
            x = x - 1
        return x


REFUSED = {
    Loops: "pass the value as an argument",
    Decides: "decides by the values of a tensor",
}


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_refusal_names_the_line_and_the_way_out(kind):
    compiled = gnnc.compile(kind().eval(), "fp32")
    place = rf"\[{kind.__name__}\] cannot be captured at test_inside\.py:\d+ in forward: `.*# this line`"
    with pytest.raises(gnnc.CaptureError, match=f"{place}.*Way out: .*{REFUSED[kind]}"):
        compiled(*graph(60, 400))


class LoopsOnSums(Net):
    def forward(self, x, edge_index, kind):
        x = x.index_add(0, edge_index[1], x[edge_index[0]] * kind[:, None])
        for _ in range(1000 + int(x.abs().sum())):  # this line
            x = x + 1
        return x


@torch.no_grad()
def test_what_a_wrong_reading_of_the_sizes_fails_for_is_not_blamed():
    x, edge_index = graph(60, 400)
    with pytest.raises(gnnc.CaptureError, match="`.*# this line`.*pass the value as an argument"):
        gnnc.compile(LoopsOnSums().eval(), "fp32")(x, edge_index, torch.arange(400) % 5)
