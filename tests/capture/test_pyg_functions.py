"""Functions of PyG that a model calls in forward: edges merged and sorted, questions of equality."""

import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from compare import capture_count
from torch import Tensor, nn
from torch_geometric import utils
from torch_geometric.nn.models.graph_mixer import LinkEncoder
from torch_geometric.nn.to_hetero_module import ToHeteroMessagePassing

import gnnc
from gnnc.capture import pyg_functions
from gnnc.errors import CaptureError

Step = Callable[[Tensor, Tensor], Any]


def undirected_with_weights(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    weight = (x[edge_index[0]] * x[edge_index[1]]).sum(1).sigmoid()
    return utils.to_undirected(edge_index, weight, len(x), reduce="mean")


def merged_by_column(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    values = [x[edge_index[0], 0].abs(), x[edge_index[1], 1]]
    edges, (first, _) = utils.coalesce(edge_index, values, reduce="max", sort_by_row=False)
    return edges, first


EDGES: dict[str, Step] = {
    "to_undirected": lambda x, e: (utils.to_undirected(e), None),
    "to_undirected(num_nodes)": lambda x, e: (utils.to_undirected(e, num_nodes=len(x)), None),
    "to_undirected(weights)": undirected_with_weights,
    "coalesce": lambda x, e: (utils.coalesce(e), None),
    "coalesce(list)": merged_by_column,
    "loops of to_undirected": lambda x, e: utils.add_remaining_self_loops(utils.to_undirected(e)),
    "sort_edge_index": lambda x, e: (utils.sort_edge_index(utils.remove_self_loops(e)[0]), None),
    "is_undirected": lambda x, e: (e if utils.is_undirected(e) else e.flip(0), None),
}


class Net(nn.Module):
    """A layer over edges that forward makes."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step, self.conv = step, pyg.GraphConv(6, 4)

    def forward(self, x, edge_index):
        return self.conv(x, *self.step(x, edge_index))


def arguments(nodes: int, edges: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    return torch.randn(nodes, 6, generator=generator), torch.randint(nodes, (2, edges), generator=generator)


@pytest.mark.first(2)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", EDGES)
@torch.no_grad()
def test_edges_made_in_forward(name: str, precision: str):
    torch.manual_seed(0)
    model = Net(EDGES[name]).eval()
    compiled = gnnc.compile(model, precision)
    limit = 1e-4 if precision == "fp32" else 0.05
    for sizes in ((20, 90), (31, 50), (9, 200)):
        expected, actual = model(*arguments(*sizes)), compiled(*arguments(*sizes))
        assert (actual - expected).abs().max() <= limit * expected.abs().max()
    assert capture_count(compiled) <= (2 if name == "is_undirected" else 1)


@pytest.mark.first(1)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("is_sorted", [False, True])
@torch.no_grad()
def test_the_latest_edges_of_a_link_encoder(is_sorted: bool, precision: str):
    torch.manual_seed(0)
    model = LinkEncoder(3, 8, 16, 12, 4, is_sorted=is_sorted).eval()
    compiled = gnnc.compile(model, precision)
    limit = 1e-4 if precision == "fp32" else 0.05
    for nodes, edges in ((12, 60), (30, 40), (5, 200), (7, 1)):
        dst = torch.randint(nodes, (edges,)).sort()[0] if is_sorted else torch.randint(nodes, (edges,))
        edge_index = torch.stack([torch.randint(nodes, (edges,)), dst])
        times = torch.randint(9, (edges,)).float()  # with many that are equal
        args = edge_index, torch.randn(edges, 8), times, torch.full((nodes,), 6.0)
        expected, actual = model(*args), compiled(*args)
        assert (actual - expected).abs().max() <= limit * expected.abs().max()
    assert capture_count(compiled) <= 2


class Colors(nn.Module):
    def forward(self, x):
        return x + len({int(value) for value in x.tolist()})


class Numpy(nn.Module):
    def forward(self, x):
        return x + torch.from_numpy(x.__array__())


class Memory(nn.Module):
    def forward(self, x):
        return x + torch.from_dlpack(x)


class EachElement(nn.Module):
    def forward(self, x):
        return x.clone().apply_(lambda value: 2 * value)


@pytest.mark.parametrize(
    ("model", "args", "words"),
    [
        (pyg.WLConv(), (torch.arange(4), torch.tensor([[0, 1], [1, 2]])), "hashes values of a tensor"),
        (Colors(), (torch.arange(4),), "hashes values of a tensor"),
        (Numpy(), (torch.randn(4),), "computes with numpy"),
        (Memory(), (torch.randn(4),), "reads the memory of a tensor"),
        (EachElement(), (torch.randn(4),), "calls a Python function for each element"),
    ],
)
def test_values_that_leave_torch_are_refused_with_the_way_out(model: nn.Module, args: Any, words: str):
    with pytest.raises(CaptureError, match=rf"{words}.*Way out: (number|write)"):
        gnnc.compile(model.eval(), "fp32")(*args)


NODES, EDGES_OF_TYPES = torch.randn(12, 8), torch.randint(6, (2, 40))
TYPES, TYPED_EDGES = ["a", "b"], [("a", "to", "a"), ("b", "to", "b")]
REFUSED: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "EquilibriumAggregation": (
        pyg.EquilibriumAggregation(8, 6, [10], 2).eval(),
        (NODES, torch.arange(12) // 4),
    ),
    "WLConv": (pyg.WLConv().eval(), (torch.arange(12) % 4, EDGES_OF_TYPES)),
    "SuperGATConv": (
        pyg.SuperGATConv(8, 4, attention_type="MX", edge_sample_ratio=0.8).train(),
        (NODES, EDGES_OF_TYPES),
    ),
    "ToHeteroMessagePassing": (
        ToHeteroMessagePassing(pyg.SAGEConv(8, 4), TYPES, TYPED_EDGES).eval(),
        (NODES, EDGES_OF_TYPES + torch.arange(40) // 20 * 6, torch.arange(12) // 6, torch.arange(40) // 20),
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_limits_names_are_refused_in_words_of_gnnc(name: str):
    model, args = REFUSED[name]
    model(*args)  # eager takes the call
    with pytest.raises(CaptureError, match=rf"\[{name}\] .*Way out: (write|number|sample|compile)"):
        gnnc.compile(model, "fp32")(*args)


def test_limits_names_the_layers_that_are_refused():
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    line = page.partition("- Layers of PyG that are refused by name:")[2].partition("`tests/peers/pyg.py`")[0]
    assert set(re.findall(r"`(\w+)`", line)) == REFUSED.keys()


@torch.no_grad()
def test_layers_for_each_type_take_dicts():
    model = REFUSED["ToHeteroMessagePassing"][0]
    compiled = gnnc.compile(model, "fp32")
    for nodes in (6, 11):
        x = {name: torch.randn(nodes + number, 8) for number, name in enumerate(TYPES)}
        edges = {edge_type: torch.randint(6, (2, 30)) for edge_type in TYPED_EDGES}
        torch.testing.assert_close(compiled(x, edges), model(x, edges))


@torch.no_grad()
def test_another_answer_about_equality_is_another_program():
    model = Net(EDGES["is_undirected"]).eval()
    compiled = gnnc.compile(model, "fp32")
    x, edge_index = arguments(20, 60)
    for edges in (edge_index, utils.to_undirected(edge_index)):
        torch.testing.assert_close(compiled(x, edges), model(x, edges))


def test_values_are_those_of_pyg():
    """The functions return what PyG's do, without edges too, and their names stay."""
    for edges in (torch.randint(5, (2, 30)), torch.zeros(2, 0, dtype=torch.long)):
        for by_row in (True, False):
            weight = torch.rand(edges.shape[1])
            ours = pyg_functions.coalesce(edges, weight, 5, "sum", False, by_row)
            for got, want in zip(ours, utils.coalesce(edges, weight, 5, "sum", False, by_row), strict=True):
                torch.testing.assert_close(got, want)
    for x, dim in ((torch.arange(6), 0), (torch.rand(2, 3), 1), (torch.zeros(0).int(), 0)):
        torch.testing.assert_close(pyg_functions.cumsum(x, dim), utils.cumsum(x, dim))


def test_other_threads_run_the_code_of_pyg():
    came = []
    edges = torch.tensor([[1, 0, 1], [0, 1, 0]])
    before = utils.coalesce.__code__
    with pyg_functions.traceable_functions():
        thread = Thread(target=lambda: came.append(utils.coalesce(edges, is_sorted=True)))
        thread.start()
        thread.join()
        assert utils.coalesce(edges, is_sorted=True).tolist() == [[0, 1], [1, 0]]
    assert came[0].tolist() == [[1, 1], [0, 0]]  # PyG believes that they are sorted
    assert utils.coalesce.__code__ is before
