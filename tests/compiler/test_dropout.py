"""Dropout that is on: it runs in ATen, and from one seed draws what it draws in eager."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from traced import relative_error

import gnnc

NODES, WIDTH = 20, 8


class Features(nn.Module):
    """A layer that also takes the first features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.FAConv(WIDTH, dropout=0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, x, edge_index)


class Always(nn.Module):
    """Sums messages, with a dropout that does not ask for the mode."""

    def __init__(self, message: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.message = message

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        return torch.zeros_like(x).index_add(0, dst, self.message(x[src], x[dst]))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gat": lambda: pyg.GATConv(WIDTH, 4, heads=2, dropout=0.5),
    "gat with one head": lambda: pyg.GATConv(WIDTH, 4, dropout=0.5),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, 4, heads=2, dropout=0.5),
    "transformer": lambda: pyg.TransformerConv(WIDTH, 4, heads=2, dropout=0.5),
    "appnp": lambda: pyg.APPNP(3, 0.1, dropout=0.5),
    "fa": Features,
    "linkx": lambda: pyg.LINKX(NODES, WIDTH, WIDTH, 3, 2, dropout=0.5),
    "nodes": lambda: pyg.GCN(WIDTH, WIDTH, 2, dropout=0.5),
}
MESSAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of a weight": lambda xj, xi: F.dropout((xj * xi).sum(-1, keepdim=True), 0.5) * xj,
    "of a message": lambda xj, xi: F.dropout(xj * xi, 0.5),
    "of a source": lambda xj, xi: F.dropout(xj, 0.5),
    "of columns": lambda xj, xi: F.dropout1d((xj + xi).relu(), 0.5),
    "alpha": lambda xj, xi: F.alpha_dropout(xj - xi, 0.5, training=True),
}


@torch.no_grad()
def assert_draws_as_eager(model: nn.Module, precision: str, backend: str) -> None:
    x, edge_index = torch.randn(NODES, WIDTH), torch.randint(NODES, (2, 80))
    compiled = gnnc.compile(model, precision=precision, backend=backend)
    compiled(x, edge_index)
    assert "dropout" in compiled.explain() or "bernoulli" in compiled.explain()
    for seed in range(3):
        torch.manual_seed(seed)
        want = model(x, edge_index)
        torch.manual_seed(seed)
        assert relative_error(compiled(x, edge_index), want) < (1e-5 if precision == "fp32" else 5e-2)


@pytest.mark.first(1)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize(
    ("precision", "backend"),
    [
        ("int8", "cpu"),
        pytest.param("fp32", "cpu", marks=pytest.mark.slow),
        pytest.param("int8", "reference", marks=pytest.mark.slow),
    ],
)
def test_layers_in_train_mode(make: Callable[[], nn.Module], precision: str, backend: str) -> None:
    assert_draws_as_eager(make().train(), precision, backend)


@pytest.mark.first(1)
@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_dropout_in_eval_mode(message: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_draws_as_eager(Always(message).eval(), "fp32", "cpu")
