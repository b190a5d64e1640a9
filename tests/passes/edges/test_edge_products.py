"""Linear layers on edge features run inside the bodies that read them, or say why they do not."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from traced import edge_widths, relative_error

import gnnc
from gnnc.capture.export import capture
from gnnc.ir.body import widest_value
from gnnc.passes.base import Context, run_pass
from gnnc.passes.normalize import Normalize
from gnnc.passes.raise_ import Raise
from gnnc.target import Target

WIDTH, FEATURES = 40, 3
DEGREES = torch.tensor([0, 3, 5])


def graph(nodes: int = 11, edges: int = 50, features: int = FEATURES) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, WIDTH, generator=generator)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    return x, edge_index, torch.randn(edges, features, generator=generator)


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, width))


LAYERS = {
    "gine": lambda: pyg.GINEConv(nn.Linear(WIDTH, 8), edge_dim=FEATURES),
    "gat": lambda: pyg.GATConv(WIDTH, 20, heads=2, edge_dim=FEATURES),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, 20, heads=2, edge_dim=FEATURES),
    "transformer": lambda: pyg.TransformerConv(WIDTH, 20, heads=2, edge_dim=FEATURES),
    "res-gated": lambda: pyg.ResGatedGraphConv(WIDTH, WIDTH, edge_dim=FEATURES),
    "gen": lambda: pyg.GENConv(WIDTH, WIDTH, edge_dim=FEATURES, aggr="max"),
    "pna": lambda: pyg.PNAConv(WIDTH, WIDTH, ["mean", "std"], ["identity"], DEGREES, FEATURES, towers=2),
    "cg": lambda: pyg.CGConv(WIDTH, dim=FEATURES),
    "nn": lambda: pyg.NNConv(WIDTH, 4, _mlp(WIDTH * 4)),
    "pdn": lambda: pyg.PDNConv(WIDTH, 24, FEATURES, 32),
}


def raised(model: nn.Module, args: tuple[Tensor, ...]) -> tuple[torch.fx.GraphModule, Context]:
    context = Context(target=Target())
    normalized = run_pass(Normalize(), capture(model, args, {}).graph_module, context)
    return run_pass(Raise(), normalized, context), context


@pytest.mark.first(1)
@pytest.mark.parametrize("name", LAYERS)
def test_no_value_is_as_long_as_the_edges_and_as_wide_as_the_messages(name: str):
    torch.manual_seed(0)
    model = LAYERS[name]().eval()
    compiled = gnnc.compile(model, "fp32", backend="cpu")
    for sizes in [(11, 50), (5, 0), (1, 1)]:
        args = graph(*sizes)
        with torch.no_grad():
            assert relative_error(compiled(*args), model(*args)) < 1e-5
    assert max(edge_widths(compiled.graph_module).values(), default=0) <= FEATURES


def test_explain_names_what_is_computed_in_a_body():
    compiled = gnnc.compile(LAYERS["gine"]().eval(), "fp32", example_inputs=graph(), backend="cpu")
    assert "lin linear: computed inside the body that reads it" in compiled.explain()


@pytest.mark.first(1)
@pytest.mark.parametrize("bias", [True, False])
def test_attention_of_edge_features_is_a_product_with_few_columns(bias: bool):
    model = pyg.GATConv(WIDTH, 20, heads=2, edge_dim=FEATURES).eval()
    model.lin_edge = nn.Linear(FEATURES, 40, bias=bias)
    compiled = gnnc.compile(model, "fp32", example_inputs=graph(), backend="cpu")
    with torch.no_grad():
        assert relative_error(compiled(*graph()), model(*graph())) < 1e-5
    assert "its columns are summed in its weight" in compiled.explain()
    assert not any("edge_map" in str(node.target) for node in compiled.graph_module.graph.nodes)


def test_many_features_that_two_bodies_read_are_multiplied_once():
    model, args = pyg.TransformerConv(WIDTH, 20, heads=2, edge_dim=200).eval(), graph(features=200)
    gm, context = raised(model, args)
    assert WIDTH in edge_widths(gm).values()
    assert any("2 bodies that compute it cost" in note.text for note in context.notes)


def test_edge_features_that_the_caller_gets_are_stored():
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(FEATURES, WIDTH)

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
            edges = self.lin(edge_attr)
            message = (x[edge_index[0]] + edges).relu()
            return torch.zeros_like(x).index_add(0, edge_index[1], message), edges

    model, args = Returned().eval(), graph()
    compiled = gnnc.compile(model, "fp32", example_inputs=args, backend="cpu")
    with torch.no_grad():
        for got, expected in zip(compiled(*args), model(*args), strict=True):
            assert relative_error(got, expected) < 1e-5
    assert "read other than by messages" in compiled.explain()


def test_the_widest_value_of_a_body_counts_what_it_makes_on_the_way():
    body = "t0 = aten.linear.default(e0, c0); t1 = aten.sum.dim_IntList(t0, [1]); return t1"
    assert widest_value(body, {"e0": torch.ones(7, 3), "c0": torch.ones(500, 3)}) == 500
    assert widest_value("return j0", {"j0": torch.ones(7, 6, 2)}) == 12
