"""Edge values that several bodies read are stored once, where computing them again costs more."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from edge_layers import FEATURES, WIDTH, MeshBlock, mlp
from torch import Tensor, nn
from torch_geometric.utils import scatter

import gnnc
from gnnc.capture.export import capture
from gnnc.ir.body import parse_body
from gnnc.ir.nodes import argument
from gnnc.passes.base import Context, run_pass
from gnnc.passes.normalize import Normalize
from gnnc.passes.raise_ import Raise
from gnnc.target import Target

gnnc_ops = torch.ops.gnnc

NODES, EDGES = 17, 60


class Mesh(nn.Module):
    """Blocks of a MeshGraphNet, each of which reads the edge states of the one before."""

    def __init__(self, blocks: int, *, returns_edges: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([MeshBlock() for _ in range(blocks)])
        self.returns_edges = returns_edges

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        edges = self.encoder(attr)
        for block in self.blocks:
            x, edges = block(x, edge_index, edges)
        return (x, edges) if self.returns_edges else x


class Cheap(nn.Module):
    """Two layers that read one edge value without a product."""

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        src, dst = edge_index
        value = (x[src] - x[dst]).relu()
        first = scatter(value * value, dst, 0, x.shape[0], "sum")
        return scatter(value + first[src], dst, 0, x.shape[0], "sum")


class TwoReaders(nn.Module):
    """An edge MLP that a sum reads, and a number for every edge."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(*mlp(2 * WIDTH), nn.ReLU())
        self.gate = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        src, dst = edge_index
        message = self.mlp(torch.cat([x[dst], x[src]], 1))
        way = (x[dst] - x[src])[:, :3] * self.gate(message)
        summed = scatter(message, dst, 0, x.shape[0], "sum")
        return torch.cat([summed, scatter(way, dst, 0, x.shape[0], "sum")], 1)


def _arguments(edges: int = EDGES) -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    return torch.randn(NODES, WIDTH), torch.randint(NODES, (2, edges)), torch.randn(edges, FEATURES)


def _raised(model: nn.Module, *, joins: bool = False) -> tuple[torch.fx.GraphModule, Context]:
    context = Context(target=replace(Target(), joint_bodies=joins))
    normalized = run_pass(Normalize(), capture(model, _arguments(), {}).graph_module, context)
    return run_pass(Raise(), normalized, context), context


def _products(gm: torch.fx.GraphModule) -> list[int]:
    """Return the number of products in every body that has any."""
    found = [
        node
        for node in gm.graph.nodes
        if node.target in (gnnc_ops.message.default, gnnc_ops.edge_map.default)
    ]
    graphs = [parse_body(argument(node, "body")).graph for node in found]
    counts = [sum("linear" in str(node.target) for node in graph.nodes) for graph in graphs]
    return [count for count in counts if count]


@pytest.mark.parametrize("joins", [False, True])
def test_every_body_of_a_mesh_network_computes_one_layer(joins: bool) -> None:
    gm, context = _raised(Mesh(5), joins=joins)
    assert sorted(_products(gm)) == [2, 2, 2, 2, 3]
    assert sum("bodies read it" in str(note) for note in context.notes) == 4


def test_a_value_without_products_is_computed_again() -> None:
    gm, _ = _raised(Cheap())
    assert not any("edge_map" in str(node.target) for node in gm.graph.nodes)


@pytest.mark.parametrize(("joins", "products"), [(False, [1, 2]), (True, [1, 3])])
def test_bodies_that_one_pass_may_join_read_no_stored_value(joins: bool, products: list[int]) -> None:
    assert sorted(_products(_raised(TwoReaders(), joins=joins)[0])) == products


@pytest.mark.parametrize("edges", [EDGES, 1, 0])
@pytest.mark.parametrize("make", [partial(Mesh, 3), partial(Mesh, 2, returns_edges=True), Cheap, TwoReaders])
def test_the_results_and_gradients_are_those_of_eager(make: Callable[[], nn.Module], edges: int) -> None:
    torch.manual_seed(0)
    model = make()
    compiled = gnnc.compile(model, precision="fp32", backend="cpu")
    given = _arguments(edges)
    given[0].requires_grad_()
    results = []
    for call in (model, compiled):
        found = call(*given)
        found = found if isinstance(found, tuple) else (found,)
        total = sum(part.square().sum() for part in found)
        results.append((*found, *torch.autograd.grad(total, given[0])))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_explain_says_why_a_value_is_stored() -> None:
    compiled = gnnc.compile(Mesh(2), precision="fp32", example_inputs=_arguments(), backend="cpu")
    assert "2 bodies read it; to compute it again costs as much as" in compiled.explain()
