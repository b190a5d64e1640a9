"""Scatters along another dimension than the first: they get rows or stay, with the values of eager."""

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.fx import GraphModule
from traced import relative_error, targets

import gnnc
from gnnc.capture.export import capture
from gnnc.passes.base import run_pass
from gnnc.passes.nodes_first import NodesFirst
from gnnc.passes.normalize import Normalize
from gnnc.report.printing import format_graph

NODES, EDGES, WIDTH = 20, 90, 16


class Layers(nn.Module):
    """Layers of PyG in a row, with a ReLU behind each."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return x


class ByHand(nn.Module):
    """A message of both ends of the edges, written with indexing, and a norm of the rows behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.norm = nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        m = torch.relu(self.message(torch.cat([x[:, dst], x[:, src]], -1)))
        total = torch.zeros(x.size(0), x.size(1), WIDTH).index_add(1, dst, m)
        return self.out(self.norm(total)) + x[..., :8]


class LargestOfTime(nn.Module):
    """The largest neighbor of ``[batch, time, nodes, features]``, and its mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        m = self.lin(x)[:, :, src]
        index = dst.view(1, 1, -1, 1).expand_as(m)
        base = torch.zeros(x.size(0), x.size(1), x.size(2), WIDTH)
        return base.scatter_reduce(2, index, m, "amax", include_self=False).mean(1)


class WeightedSum(nn.Module):
    """A sum with a weight for each edge, in ``[batch, nodes, features]``, and a bias for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, NODES, 1))

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        m = x.index_select(1, edge_index[0]) * weight[:, None]
        return x.new_zeros(x.shape).index_add(1, edge_index[1], m) + self.bias


class Square(nn.Module):
    """A transpose of two batch dimensions of one size between a gather and its scatter."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        square = x[:3].unsqueeze(1) * x[:3].unsqueeze(0)
        m = square[:, :, edge_index[0]].transpose(0, 1)
        return torch.zeros_like(square).index_add(2, edge_index[1], m)


class ChannelsFirst(nn.Module):
    """A sum of neighbors of features ``[features, nodes]``."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = x.t()
        return torch.zeros_like(h).index_add(1, edge_index[1], h[:, edge_index[0]])


def matrix(batch: int) -> Tensor:
    return torch.randn(NODES, WIDTH)


def batched(batch: int) -> Tensor:
    return torch.randn(batch, NODES, WIDTH)


def over_time(batch: int) -> Tensor:
    return torch.randn(batch, 3, NODES, WIDTH)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "arma": (lambda: Layers(pyg.ARMAConv(WIDTH, 8, num_stacks=3, num_layers=2)), matrix),
    "arma-one-stack": (lambda: Layers(pyg.ARMAConv(WIDTH, 8, num_layers=2, shared_weights=True)), matrix),
    "gcn": (lambda: Layers(pyg.GCNConv(WIDTH, 8), pyg.GCNConv(8, 8)), batched),
    "sage-max": (lambda: Layers(pyg.SAGEConv(WIDTH, 8, aggr="max")), batched),
    "gin": (lambda: Layers(pyg.GINConv(mlp())), batched),
    "cheb": (lambda: Layers(pyg.ChebConv(WIDTH, 8, 3)), batched),
    "by-hand": (ByHand, batched),
    "largest-of-time": (LargestOfTime, over_time),
    "square": (Square, batched),
    "channels-first": (ChannelsFirst, matrix),
}


def edge_list() -> Tensor:
    """Return directed edges with repeated ones, loops and lone nodes."""
    return torch.cat([torch.randint(NODES - 2, (2, EDGES)), torch.tensor([[3, 3], [3, 3]])], 1)


def rewritten(model: nn.Module, *args: Tensor) -> GraphModule:
    normalized = run_pass(Normalize(), capture(model, args).graph_module)
    return run_pass(NodesFirst(), normalized)


def scatter_dims(gm: GraphModule) -> set[int]:
    names = ("scatter_add", "index_add", "scatter_reduce")
    calls = [node for node in gm.graph.nodes if any(name in str(node.target) for name in names)]
    return {node.args[1] for node in calls}


@pytest.mark.parametrize("name", MODELS)
def test_scatters_go_along_the_first_dimension(name: str) -> None:
    build, make = MODELS[name]
    gm = rewritten(build().eval(), make(2), edge_list())
    assert scatter_dims(gm) == {0}


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-5), ("int8", 0.03)])
@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_eager_for_batches_of_any_size(name: str, precision: str, bound: float) -> None:
    build, make = MODELS[name]
    model = build().eval()
    compiled = gnnc.compile(model, precision)
    with torch.no_grad():
        for batch in (4, 3, 1, 7):
            x, edge_index = make(batch), edge_list()
            found, expected = compiled(x, edge_index), model(x, edge_index)
            assert found.is_contiguous() == expected.is_contiguous()
            assert relative_error(found, expected) < bound


def test_batches_of_all_sizes_are_one_program() -> None:
    compiled = gnnc.compile(Layers(pyg.GCNConv(WIDTH, 8)).eval(), "fp32")
    with torch.no_grad():
        for batch in (4, 3, 7, 12):
            compiled(batched(batch), edge_list())
    assert len(list(compiled._dispatch.programs())) == 1


@pytest.mark.parametrize("name", ["arma", "gcn", "by-hand", "largest-of-time"])
def test_gradients_are_those_of_eager(name: str) -> None:
    build, make = MODELS[name]
    model, edge_index = build(), edge_list()
    gradients = []
    x = make(3).requires_grad_()
    for forward in (model, gnnc.compile(model, "fp32")):
        loss = forward(x, edge_index).square().sum()
        gradients.append(torch.autograd.grad(loss, [x, *model.parameters()]))
    for expected, found in zip(*gradients, strict=True):
        assert relative_error(found, expected) < 1e-5


def test_a_batch_is_rows_of_a_matrix_and_has_a_kernel_for_each_product() -> None:
    model = Layers(pyg.GCNConv(WIDTH, 8)).eval()
    compiled = gnnc.compile(model, "int8")
    with torch.no_grad():
        compiled(batched(4), edge_list())
    text = compiled.explain()
    assert "gemm 1/1" in text and "scatters along" not in text and "bytes for every edge" not in text


def test_edge_weights_and_biases_of_nodes_are_repeated_for_each_item() -> None:
    model, edge_index = WeightedSum().eval(), edge_list()
    weight = torch.rand(edge_index.shape[1])
    compiled = gnnc.compile(model, "fp32")
    for batch in (2, 5):
        x = batched(batch)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, edge_index, weight), model(x, edge_index, weight))


@pytest.mark.parametrize("end", [0, 1])
def test_an_index_beyond_the_nodes_is_an_error_not_the_next_item(end: int) -> None:
    model = ByHand().eval()
    compiled = gnnc.compile(model, "fp32")
    edge_index = edge_list()
    with torch.no_grad():
        compiled(batched(3), edge_index)
        edge_index = edge_index.clone()
        edge_index[end, 5] = NODES
        with pytest.raises(gnnc.GnncError, match=rf"{NODES}"):
            compiled(batched(3), edge_index)


@pytest.mark.parametrize("edges", [0, 1])
def test_graphs_without_edges(edges: int) -> None:
    model = Layers(pyg.GCNConv(WIDTH, 8)).eval()
    x, edge_index = batched(2), torch.zeros(2, edges, dtype=torch.long)
    with torch.no_grad():
        torch.testing.assert_close(gnnc.compile(model, "fp32")(x, edge_index), model(x, edge_index))


def test_dropout_draws_in_the_order_of_eager() -> None:
    class Dropped(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            m = nn.functional.dropout(x, 0.5, self.training).index_select(1, edge_index[0])
            return torch.zeros_like(x).index_add(1, edge_index[1], m)

    model, x, edge_index = Dropped(), batched(3), edge_list()
    results = []
    for forward in (model, gnnc.compile(model, "fp32")):
        torch.manual_seed(5)
        results.append(forward(x, edge_index))
    torch.testing.assert_close(*results)


class NodesLast(nn.Module):
    """A sum of neighbors of ``[batch, features, nodes]``."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = x.transpose(1, 2)
        return torch.zeros_like(h).index_add(2, edge_index[1], h[:, :, edge_index[0]])


def test_nodes_behind_the_features_of_a_batch_stay() -> None:
    model, x, edge_index = NodesLast().eval(), batched(3), edge_list()
    assert scatter_dims(rewritten(model, x, edge_index)) == {2}
    compiled = gnnc.compile(model, "fp32")
    torch.testing.assert_close(compiled(x, edge_index), model(x, edge_index))
    assert (
        "scatters along dimension 2" in compiled.explain()
        or "adds along another dimension" in compiled.explain()
    )


def test_a_graph_of_rows_is_left_alone() -> None:
    model = Layers(pyg.GCNConv(WIDTH, 8)).eval()
    normalized = run_pass(Normalize(), capture(model, (matrix(1), edge_list())).graph_module)
    assert format_graph(run_pass(NodesFirst(), normalized)) == format_graph(normalized)


def test_stacks_of_weights_become_one_product(golden: Callable[[str], None]) -> None:
    gm = rewritten(pyg.ARMAConv(WIDTH, 8, num_stacks=2, num_layers=2).eval(), matrix(1), edge_list())
    assert targets(gm).count("mm") == 3  # the first product, and the root of each layer
    golden(format_graph(gm))


def test_a_batch_golden(golden: Callable[[str], None]) -> None:
    golden(format_graph(rewritten(WeightedSum().eval(), batched(2), edge_list(), torch.rand(EDGES + 2))))


def test_factors_of_the_nodes_leave_the_edges_of_a_batch() -> None:
    compiled = gnnc.compile(pyg.GCNConv(WIDTH, 8).eval(), "fp32")
    with torch.no_grad():
        compiled(batched(4), edge_list())
    assert "edge weights separate: node scales leave the kernel" in compiled.explain()


class SizeBehindTheMessage(nn.Module):
    """A model that asks for the number of edges of its messages, which the pass replaces."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index[:, edge_index[0] != edge_index[1]]
        m = x.index_select(1, src) * torch.ones(src.shape[0], 1)
        total = torch.zeros_like(x).index_add(1, dst, m)
        return total / m.size(1)


def test_sizes_are_read_off_values_that_stay() -> None:
    model, x, edge_index = SizeBehindTheMessage().eval(), batched(3), edge_list()
    torch.testing.assert_close(gnnc.compile(model, "fp32")(x, edge_index), model(x, edge_index))


class StepsOfNodes(nn.Module):
    """A convolution over the graph at each step, then a recurrent layer over the steps of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.steps = pyg.GCNConv(4, 8), nn.GRU(8, 6, batch_first=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.conv(x, edge_index)
        batch, steps, nodes, width = h.shape
        return self.steps(h.permute(0, 2, 1, 3).reshape(batch * nodes, steps, width))[0]


@torch.no_grad()
def test_a_size_that_is_computed_behind_the_rows_is_moved_before_them() -> None:
    torch.manual_seed(0)
    model = StepsOfNodes().eval()
    compiled = gnnc.compile(model, "fp32")
    for nodes in (21, 34, 12):
        x, edge_index = torch.randn(2, 6, nodes, 4), torch.randint(nodes, (2, 80))
        torch.testing.assert_close(compiled(x, edge_index), model(x, edge_index), rtol=1e-4, atol=1e-5)
