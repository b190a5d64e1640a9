"""Parts of a linear of edge features: split, chunk and unbind, as in PaiNN and FiLM."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import gnnc

SPLITS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "split": lambda w: torch.split(w, 16, dim=-1),
    "uneven split": lambda w: [part[:, :8] for part in w.split([8, 16, 24], dim=1)],
    "last columns of uneven parts": lambda w: [part[:, -8:] for part in w.split([8, 16, 24], dim=1)],
    "chunk": lambda w: w.chunk(3, dim=-1),
    "tensor_split": lambda w: w.tensor_split(3, dim=1),
    "hsplit": lambda w: torch.hsplit(w, 3),
    "unbind": lambda w: w.view(-1, 3, 16).unbind(1),
    "iteration": lambda w: list(w.view(-1, 3, 16).transpose(0, 1)),
    "unsafe_split": lambda w: torch.unsafe_split(w, 16, dim=1),
    "unsafe_chunk": lambda w: torch.unsafe_chunk(w, 3, dim=1),
}


class Filters(MessagePassing):
    """A message of three parts of a linear of edge features."""

    def __init__(self, parts: Callable[[Tensor], Sequence[Tensor]], width: int) -> None:
        super().__init__(aggr="add")
        self.parts, self.edge, self.node = parts, nn.Linear(6, 48), nn.Linear(8, width)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=self.node(x), edge_attr=edge_attr)

    def message(self, x_j, edge_attr):
        scale, gate, shift = self.parts(self.edge(edge_attr))
        return x_j * scale.tanh() + gate.relu() - shift


class Painn(nn.Module):
    """PaiNN's message: a product of gathered and edge values in three parts, for scalars and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.filters = (
            nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 48)),
            nn.Linear(6, 48),
        )

    def forward(self, x, v, edge_index, radial, directions):
        src, dst = edge_index
        a, b, c = torch.split(self.phi(x)[src] * self.filters(radial), 16, dim=-1)
        dv = v[src] * a.unsqueeze(1) + b.unsqueeze(1) * directions.unsqueeze(-1)
        return x.index_add(0, dst, c), v.index_add(0, dst, dv)


def graph(nodes: int) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(nodes)
    edge_index = torch.randint(nodes, (2, 4 * nodes), generator=generator)
    return edge_index, torch.randn(4 * nodes, 6, generator=generator), generator


@pytest.mark.first(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", SPLITS)
@torch.no_grad()
def test_parts_of_edge_features(name: str, precision: str):
    torch.manual_seed(0)
    model = Filters(SPLITS[name], 8 if "uneven" in name else 16).eval()
    compiled = gnnc.compile(model, precision)
    for nodes in (20, 31, 1):
        edge_index, edge_attr, generator = graph(nodes)
        x = torch.randn(nodes, 8, generator=generator)
        expected = model(x, edge_index, edge_attr)
        error = (compiled(x, edge_index, edge_attr) - expected).norm() / expected.norm()
        assert error <= (1e-4 if precision == "fp32" else 0.05)


@pytest.mark.first(1)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@torch.no_grad()
def test_painn(precision: str):
    torch.manual_seed(0)
    model = Painn().eval()
    compiled = gnnc.compile(model, precision)
    for nodes in (20, 31):
        edge_index, radial, generator = graph(nodes)
        x = torch.randn(nodes, 16, generator=generator)
        v = torch.randn(nodes, 3, 16, generator=generator)
        directions = torch.randn(4 * nodes, 3, generator=generator)
        inputs = x, v, edge_index, radial, directions
        for actual, expected in zip(compiled(*inputs), model(*inputs), strict=True):
            assert (actual - expected).norm() <= (1e-4 if precision == "fp32" else 0.05) * expected.norm()
