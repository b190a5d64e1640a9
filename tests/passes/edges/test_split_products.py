"""The first linear layer of a message is computed on the nodes that the edges read."""

import copy
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from traced import eager, relative_error, run

from gnnc.capture.export import capture
from gnnc.compiler.build import example_values
from gnnc.ir import parse_body
from gnnc.passes.base import Context, run_pass
from gnnc.passes.normalize import Normalize
from gnnc.passes.raise_ import Raise
from gnnc.target import Target

WIDTH, FEATURES = 20, 4
SIZES = [(11, 50), (5, 0), (1, 1), (1, 0)]
DEGREES = torch.tensor([0, 3, 5])


def graph(nodes: int = 11, edges: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, WIDTH, generator=generator)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    return x, edge_index, torch.randn(edges, FEATURES, generator=generator)


def raised(model: nn.Module, *args: Tensor) -> tuple[torch.fx.GraphModule, Context]:
    context = Context(target=Target())
    normalized = run_pass(Normalize(), capture(model, args, {}).graph_module, context)
    return run_pass(Raise(), normalized, context), context


def widths_in_bodies(gm: torch.fx.GraphModule) -> list[int]:
    """Columns that each product in a body multiplies."""
    found = []
    for node in gm.graph.nodes:
        if node.target is torch.ops.gnnc.message.default:
            for call in parse_body(node.args[2]).graph.nodes:
                if "linear" in str(call.target):
                    weight = node.args[7][int(call.args[1].target[1:])]
                    found.append(weight.meta["val"].shape[1])
    return found


LAYERS = {
    "edge": (lambda: pyg.EdgeConv(pyg.MLP([2 * WIDTH, 16, 8], norm=None)), False, [16]),
    "pna": (lambda: pyg.PNAConv(WIDTH, 16, ["mean", "max", "std"], ["identity"], DEGREES), False, []),
    "towers": (
        lambda: pyg.PNAConv(WIDTH, 16, ["mean", "max"], ["identity"], DEGREES, towers=2),
        False,
        [],
    ),
    "cg": (lambda: pyg.CGConv(WIDTH, dim=FEATURES), True, [FEATURES, FEATURES]),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", LAYERS)
def test_only_edge_features_and_later_layers_are_multiplied_for_each_edge(name: str):
    torch.manual_seed(0)
    make, has_features, widths = LAYERS[name]
    model = make().eval()
    gm, context = raised(model, *graph()[: 2 + has_features])
    assert widths_in_bodies(gm) == widths
    assert any("on the nodes that the edges read, not on the edges" in note.text for note in context.notes)
    for sizes in SIZES:
        args = graph(*sizes)[: 2 + has_features]
        assert relative_error(run(gm, model, args, {})[0], eager(model, *args)[0]) < 1e-5


class Formula(nn.Module):
    def __init__(self, columns: int, width: int, function) -> None:
        super().__init__()
        self.lin, self.function = nn.Linear(columns, width), function

    def forward(self, x: Tensor, edge_index: Tensor, *rest: Tensor) -> Tensor:
        message = self.lin(self.function(x[edge_index[0]], x[edge_index[1]])).relu()
        return x.new_zeros(x.shape[0], message.shape[1]).index_add(0, edge_index[1], message)


def test_a_single_product_on_the_nodes_is_told_in_the_singular():
    model = Formula(2 * WIDTH, 24, lambda s, t: torch.cat([s, (s * t).tanh()], -1)).eval()
    _, context = raised(model, *graph()[:2])
    text = "1 of 2 products runs on the nodes that the edges read, not on the edges"
    assert [note.text for note in context.notes] == [text]


@pytest.mark.parametrize(
    ("columns", "width", "function"),
    [
        (WIDTH, WIDTH, lambda source, target: (source * target).relu()),  # not linear in either end
        (2, 64, lambda source, target: source[:, :2] - target[:, :2]),  # rows would grow from 2 to 64 columns
    ],
)
def test_what_gains_nothing_stays_in_the_body(columns: int, width: int, function):
    model = Formula(columns, width, function).eval()
    gm, context = raised(model, *graph()[:2])
    assert widths_in_bodies(gm) == [columns]
    assert context.notes == []
    assert relative_error(run(gm, model, graph()[:2], {})[0], eager(model, *graph()[:2])[0]) < 1e-5


def test_parts_of_both_kinds_are_told_apart():
    model = Formula(3 * WIDTH, 24, lambda s, t: torch.cat([s, (s * t).tanh(), t - s], -1)).eval()
    gm, context = raised(model, *graph()[:2])
    assert widths_in_bodies(gm) == [WIDTH]
    text = "products run on the nodes that the edges read, not on the edges"
    assert [note.text for note in context.notes] == [f"2 of 3 {text}"]
    assert relative_error(run(gm, model, graph()[:2], {})[0], eager(model, *graph()[:2])[0]) < 1e-5


@pytest.mark.parametrize(
    "function",
    [
        lambda s, t: s - t,  # the node that is read second has the negative weight, and no other
        lambda s, t: torch.sub(s, t, alpha=2),
        lambda s, t: torch.add(s, t, alpha=-3),
        lambda s, t: torch.cat([t - s, s], -1)[:, :WIDTH],
        lambda s, t: s - t[:, :1],  # of one column, which is subtracted from each of the other
        lambda s, t: torch.cat([s.view(-1, WIDTH, 1), t.view(-1, WIDTH, 1)], -1)[
            :, :, 1
        ],  # columns, not parts
    ],
)
def test_signs_and_factors_of_ends(function: Any):
    torch.manual_seed(0)
    model = Formula(WIDTH, 16, function).eval()
    gm, _ = raised(model, *graph()[:2])
    for sizes in SIZES:
        args = graph(*sizes)[:2]
        assert relative_error(run(gm, model, args, {})[0], eager(model, *args)[0]) < 1e-5


def test_differences_of_coordinates_are_multiplied_for_each_edge():
    """A common offset of 1e6 cancels in the difference, and would not in products of each end."""
    torch.manual_seed(0)
    model = pyg.FeaStConv(3, 8, heads=2).eval()
    positions, edges = torch.randn(11, 3) + 1e6, graph()[1]
    gm, _ = raised(model, positions, edges)
    exact = copy.deepcopy(model).double()(positions.double(), edges).float()
    assert relative_error(run(gm, model, (positions, edges), {})[0], exact) < 1e-5


@pytest.mark.parametrize(("nodes", "edges", "widths"), [(500, 20, [WIDTH]), (20, 500, [])])
def test_nodes_that_few_edges_read_are_multiplied_for_each_edge(nodes: int, edges: int, widths: list[int]):
    model, args = Formula(WIDTH, 16, lambda s, t: s - t).eval(), graph(nodes, edges)[:2]
    captured = capture(model, args, {})
    context = Context(target=Target(), examples=example_values(model, captured))
    gm = run_pass(Raise(), run_pass(Normalize(), captured.graph_module, context), context)
    assert widths_in_bodies(gm) == widths
