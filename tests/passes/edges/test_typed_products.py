"""Weights that a type chooses: products on the nodes, or lookups inside a body."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from traced import count, eager, edge_widths, relative_error, run

import gnnc
from gnnc.capture.export import capture
from gnnc.errors import GraphError
from gnnc.passes.base import Context, run_pass
from gnnc.passes.normalize import Normalize
from gnnc.passes.raise_ import Raise
from gnnc.target import Target

WIDTH, TYPES = 20, 5
SIZES = [(11, 50), (5, 0), (1, 1), (1, 0)]


def graph(nodes: int = 11, edges: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, WIDTH, generator=generator)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    return x, edge_index, torch.randint(TYPES, (edges,), generator=generator)


def raised(model: nn.Module, *args: Tensor) -> tuple[torch.fx.GraphModule, Context]:
    context = Context(target=Target())
    normalized = run_pass(Normalize(), capture(model, args, {}).graph_module, context)
    return run_pass(Raise(), normalized, context), context


LAYERS = {
    "fast-rgcn": lambda: pyg.FastRGCNConv(WIDTH, 24, TYPES),
    "bases": lambda: pyg.FastRGCNConv(WIDTH, 24, TYPES, num_bases=2),
    "blocks": lambda: pyg.FastRGCNConv(WIDTH, 24, TYPES, num_blocks=4),
    "sum": lambda: pyg.FastRGCNConv(WIDTH, 24, TYPES, aggr="sum"),
    "rgat": lambda: pyg.RGATConv(WIDTH, 12, TYPES, heads=2),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", LAYERS)
def test_no_edge_has_a_matrix_or_a_message(name: str):
    torch.manual_seed(0)
    model = LAYERS[name]().eval()
    compiled = gnnc.compile(model, "fp32", backend="cpu")
    for sizes in SIZES:
        with torch.no_grad():
            assert relative_error(compiled(*graph(*sizes)), model(*graph(*sizes))) < 1e-5
    assert max(edge_widths(compiled.graph_module).values(), default=0) <= TYPES
    assert "weights of 5 types are computed on the nodes" in compiled.explain()


@pytest.mark.first(1)
@pytest.mark.parametrize(("row", "value"), [("type", TYPES), ("type", -1), ("source", 11), ("source", -1)])
@torch.no_grad()
def test_an_index_out_of_range_is_named(row: str, value: int):
    compiled = gnnc.compile(LAYERS["fast-rgcn"]().eval(), "fp32", example_inputs=graph(), backend="cpu")
    x, edge_index, types = graph()
    if row == "type":
        types[3] = value
    else:
        edge_index[0, 3] = value
    with pytest.raises(GraphError, match="edge_type" if row == "type" else "edge_index"):
        compiled(x, edge_index, types)


class PerEdge(nn.Module):
    """``act(x_i, x_j) @ weight[type]``: the factor comes from both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(TYPES, WIDTH, 24) / 5)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        both = (x[edge_index[0]] + x[edge_index[1]]).relu()
        message = torch.bmm(both.unsqueeze(1), self.weight[edge_type]).squeeze(1)
        return x.new_zeros(x.shape[0], 24).index_add(0, edge_index[1], message)


def test_a_factor_from_both_ends_looks_its_weight_up_in_the_body():
    model = PerEdge().eval()
    gm, context = raised(model, *graph())
    assert (count(gm, "message"), count(gm, "sddmm")) == (1, 0)
    assert max(edge_widths(gm).values(), default=0) == 0
    assert ["does not come from one node" in note.text for note in context.notes] == [True]
    for sizes in SIZES:
        assert relative_error(run(gm, model, graph(*sizes), {})[0], eager(model, *graph(*sizes))[0]) < 1e-5


def test_more_types_than_edges_stay_on_the_edges():
    class Many(PerEdge):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4000, WIDTH, 24))

        def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
            message = torch.bmm(x[edge_index[0]].unsqueeze(1), self.weight[edge_type]).squeeze(1)
            return x.new_zeros(x.shape[0], 24).index_add(0, edge_index[1], message)

    model = Many().eval()
    gm, context = raised(model, *graph())
    assert count(gm, "message") == 1
    assert any("products on the nodes" in note.text for note in context.notes)
    assert relative_error(run(gm, model, graph(), {})[0], eager(model, *graph())[0]) < 1e-5


def test_an_embedding_of_types_is_read_in_the_body():
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edges = nn.Embedding(TYPES, WIDTH)

        def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
            message = (self.edges(edge_type) + x[edge_index[0]]).relu()
            return torch.zeros_like(x).index_add(0, edge_index[1], message)

    model = Embedded().eval()
    compiled = gnnc.compile(model, "fp32", backend="cpu")
    for sizes in SIZES:
        with torch.no_grad():
            assert relative_error(compiled(*graph(*sizes)), model(*graph(*sizes))) < 1e-5
    assert edge_widths(compiled.graph_module) == {}
