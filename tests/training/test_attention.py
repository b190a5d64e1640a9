"""Training of attention layers: which of them the kernel of two passes takes, and gradients without it."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv
from torch_geometric.utils import softmax

import gnnc

GRAPH = torch.randn(40, 64), torch.randint(40, (2, 200))


class Stack(nn.Module):
    """Three layers of attention."""

    def __init__(self, slope: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GATConv(64, 16, heads=4, negative_slope=slope) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return [nodes, 64]."""
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return x


class ByNode(nn.Module):
    """Attention whose logits are products with another matrix of the nodes, not with a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.key, self.att = nn.Linear(64, 8), nn.Linear(64, 8), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return [nodes, 2, 4]."""
        value, key = self.value(x).view(-1, 2, 4), self.key(x).view(-1, 2, 4)
        source, target = (value * key).sum(-1), (value * self.att).sum(-1)
        logits = nn.functional.leaky_relu(source[edge_index[0]] + target[edge_index[1]], 0.2)
        alpha = softmax(logits, edge_index[1], num_nodes=x.size(0))
        rows = value[edge_index[0]] * alpha[..., None]
        return torch.zeros_like(value).index_add(0, edge_index[1], rows)


def gradients(call: Callable[..., Tensor], owner: nn.Module) -> list[Tensor]:
    out = call(*GRAPH)
    (out * torch.linspace(0.1, 1, out.numel()).view(out.shape)).sum().backward()
    return [p.grad for p in owner.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "make", [ByNode, Stack, lambda: Stack(0.0), lambda: Stack(-0.1)], ids=["by node", "0.2", "0", "-0.1"]
)
def test_gradients_are_those_of_eager(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    eager = copy.deepcopy(model)
    found, right = gradients(gnnc.compile(model, "fp32"), model), gradients(eager, eager)
    for got, want in zip(found, right, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()) + 1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_every_layer_takes_the_kernel(precision: str) -> None:
    torch.manual_seed(0)
    compiled = gnnc.compile(Stack(), precision)
    compiled(*GRAPH)
    kernels = [kernel for _, kernel in compiled._dispatch.last.executable.kernels]
    assert kernels.count("attention_backward") == 3
