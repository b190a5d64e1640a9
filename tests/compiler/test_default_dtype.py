"""Models in float32 while torch's default dtype is another."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import gnnc

X, EDGES = torch.randn(21, 6), torch.randint(21, (2, 70))
LAYERS = {
    "gcn": lambda: GCNConv(6, 4),
    "gat": lambda: GATConv(6, 4, heads=2),
    "sage": lambda: SAGEConv(6, 4, aggr="mean"),
}


@pytest.fixture
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_default_of_float64_changes_nothing(name: str, precision: str) -> None:
    model: nn.Module = LAYERS[name]().float()
    compiled = gnnc.compile(model, precision, example_inputs=(X, EDGES))
    with torch.no_grad():
        found, expected = compiled(X, EDGES), model(X, EDGES)
    assert found.dtype == torch.float32
    assert (found - expected).norm() <= (1e-5 if precision == "fp32" else 0.05) * expected.norm()
    loss = gnnc.compile(model, precision)(X, EDGES).square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
