"""Rows that are moved several times by indices of the graph become one gather."""

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import gnnc


class Loops(nn.Module):
    """Edge values computed by a layer, and those of self loops behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 1)

    def forward(self, x: Tensor, edge_index: Tensor, features: Tensor) -> Tensor:
        """Return sums of x with the values."""
        source, target = edge_index
        value, is_loop = self.lin(features).view(-1), source == target
        own = torch.full((x.shape[0],), 2.0).index_put((source[is_loop],), value[is_loop])
        value = torch.cat([value[~is_loop], own])
        everyone = torch.arange(x.shape[0])
        source = torch.cat([source[~is_loop], everyone])
        target = torch.cat([target[~is_loop], everyone])
        return torch.zeros_like(x).index_add(0, target, x[source] * value[:, None])


def graph(nodes: int, edges: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features and a graph that has at most one loop a node: what several would write is undefined."""
    torch.manual_seed(edges)
    source, target = torch.randint(nodes, (2, edges))
    first = torch.zeros(edges, dtype=torch.bool)
    seen: set[int] = set()
    for i, (a, b) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        first[i] = a != b or a not in seen
        seen.update({a} if a == b else ())
    edge_index = torch.stack([source[first], target[first]])
    return torch.randn(nodes, 8), edge_index, torch.randn(edge_index.shape[1], 4)


def ops_of(compiled: gnnc.CompiledModel, stage: str) -> list[str]:
    """Return the ops of the forward graph after a pass."""
    (module,) = [module for name, module in compiled.stages if name == stage]
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "loops": Loops,
    "PDN": lambda: pyg.PDNConv(8, 8, 4, 8),
    "MF": lambda: pyg.MFConv(8, 8, max_degree=3),
}


@torch.no_grad()
@pytest.mark.parametrize("name", list(LAYERS))
def test_moves_become_one_gather_and_keep_their_meaning(name: str) -> None:
    model = LAYERS[name]().eval()
    compiled = gnnc.compile(model, "fp32")
    for nodes, edges in ((20, 120), (20, 0), (3, 40), (1, 5)):
        given = graph(nodes, edges)[: 2 if name == "MF" else 3]
        assert torch.allclose(compiled(*given), model(*given), atol=1e-5)
    ops = ops_of(compiled, "hoist")
    assert not {"aten.index_put.default", "aten.index_copy.default", "aten.index.Tensor"} & set(ops)
    assert "aten.index_select.default" in ops and "one gather" in compiled.explain()


class Ranked(nn.Module):
    """Rows written back in the order of a feature, which is no index of the graph."""

    def __init__(self, accumulate: bool) -> None:
        super().__init__()
        self.lin, self.accumulate = nn.Linear(8, 8), accumulate

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return sums of the rows, and the rows of the sources that were added up."""
        index = edge_index[0] if self.accumulate else x[:, 0].argsort()
        rows = self.lin(x)[edge_index[1]] if self.accumulate else self.lin(x)
        moved = torch.zeros_like(x).index_put((index,), rows, accumulate=self.accumulate)
        return moved + torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])


@torch.no_grad()
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_and_other_indices_are_no_moves(accumulate: bool) -> None:
    model = Ranked(accumulate).eval()
    compiled = gnnc.compile(model, "fp32")
    given = graph(20, 120)[:2]
    assert torch.allclose(compiled(*given), model(*given), atol=1e-5)
    assert "one gather" not in compiled.explain()


def test_gradients_take_the_moves_of_the_model() -> None:
    model, given = Loops(), graph(20, 120)
    compiled = gnnc.compile(model, "fp32")
    compiled(*given).square().sum().backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    model(*given).square().sum().backward()
    for gradient, parameter in zip(got, model.parameters(), strict=True):
        assert parameter.grad is not None and torch.allclose(gradient, parameter.grad, rtol=1e-4, atol=1e-4)
    assert "one gather" not in compiled.explain()
