"""Edge values that bodies alone read are computed in these bodies; others stay stored."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from edge_layers import random_edges
from torch import Tensor, nn
from torch_geometric.utils import scatter, softmax

import gnnc
from gnnc.ir.nodes import op_name

NODES, WIDTH = 60, 32


class Equivariant(nn.Module):
    """Moved positions and a sum of messages, which both read ways and distances."""

    def __init__(self, reduce: str = "sum") -> None:
        super().__init__()
        self.reduce = reduce
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH + 1, WIDTH), nn.SiLU())
        self.move = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
        src, dst = edge_index
        way = pos[dst] - pos[src]
        message = self.mlp(torch.cat([x[dst], x[src], way.square().sum(1, keepdim=True)], 1))
        moved = scatter(way * self.move(message), dst, 0, x.shape[0], "mean")
        return scatter(message, dst, 0, x.shape[0], self.reduce), pos + moved


class Returned(nn.Module):
    """Sum of messages that read distances, which are returned, too."""

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
        src, dst = edge_index
        distance = (pos[dst] - pos[src]).square().sum(1, keepdim=True)
        return scatter((x[src] * distance).relu(), dst, 0, x.shape[0], "sum"), distance


class Attended(nn.Module):
    """Sum of messages that a softmax of the distances weighs, and that read the distances themselves."""

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
        src, dst = edge_index
        distance = (pos[dst] - pos[src]).square().sum(1, keepdim=True)
        weight = softmax(distance, dst, num_nodes=x.shape[0])
        return (scatter((x[src] + distance).relu() * weight, dst, 0, x.shape[0], "sum"),)


class Sines(nn.Module):
    """Sum of messages that read sines of distances, for which the kernel of bodies has no step."""

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
        src, dst = edge_index
        wave = (pos[dst] - pos[src]).square().sum(1, keepdim=True).sin()
        return (scatter((x[src] + x[dst] * wave).relu(), dst, 0, x.shape[0], "sum"),)


def _arguments(kind: str = "plain") -> tuple[Tensor, ...]:
    return torch.randn(NODES, WIDTH), random_edges(kind, NODES), torch.randn(NODES, 3)


def _names(compiled: gnnc.CompiledModel) -> list[str]:
    """Return the names of the ops of the forward graph behind the pass."""
    graph = dict(compiled.stages)["inline_edges"].graph
    return [op_name(node) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("kind", ["plain", "hub", "none"])
@pytest.mark.parametrize("make", [Equivariant, partial(Equivariant, "max"), Returned, Attended, Sines])
def test_results_are_those_of_eager(make: Callable[[], nn.Module], kind: str) -> None:
    torch.manual_seed(0)
    model, given = make(), _arguments(kind)
    compiled = gnnc.compile(model, precision="fp32")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), model(*given), rtol=1e-4, atol=1e-4)


def test_ways_and_distances_are_computed_in_the_bodies_that_read_them() -> None:
    compiled = gnnc.compile(Equivariant(), precision="fp32", example_inputs=_arguments())
    names = _names(compiled)
    assert names.count("message") == 2
    assert not {"sddmm", "edge_map", "square", "sum"}.intersection(names)
    assert "computed where it is read, by the bodies of" in compiled.explain()


@pytest.mark.parametrize(("make", "stored"), [(Returned, "sum"), (Sines, "sin")])
def test_a_value_stays_where_something_else_reads_it_or_the_kernel_has_no_step(
    make: Callable[[], nn.Module], stored: str
) -> None:
    assert stored in _names(gnnc.compile(make(), precision="fp32", example_inputs=_arguments()))


def test_programs_with_gradients_stay_as_they_are() -> None:
    model, (x, edge_index, pos) = Equivariant(), _arguments()
    compiled = gnnc.compile(model, precision="fp32")
    compiled(x.requires_grad_(), edge_index, pos)[0].sum().backward()
    assert "sddmm" in _names(compiled)
