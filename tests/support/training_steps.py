"""Model, graphs and comparison of training steps with those of eager PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv

Step = Callable[[Any, nn.Module], Any]
"""Step of training: takes what to call, and the module that owns the parameters."""

WIDTH, CLASSES = 6, 4


def directed_graph(nodes: int = 20, edges: int = 70, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return x, and a directed edge list with repeated edges and self loops that leaves nodes alone."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, WIDTH, generator=generator)
    edge_index = torch.randint(nodes - 3, (2, edges), generator=generator)
    return x, torch.cat([edge_index, edge_index[:, :5]], 1)


X, EDGES = directed_graph()


class Net(nn.Module):
    """GCN with dropout and batch norm, and a SAGE layer."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(p)
        self.out = SAGEConv(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        h = self.norm(self.conv(x, edge_index, edge_weight)).relu()
        return self.out(self.drop(h), edge_index)


def compare(model: nn.Module, compiled: Any, step: Step) -> None:
    """Run a step on the compiled model and on an eager copy; compare gradients, buffers and the result.

    Args:
        model: the model, whose gradients are dropped.
        compiled: the model, compiled.
        step: takes what to call, and the owner of the parameters.
    """
    for parameter in model.parameters():
        parameter.grad = None
    eager = copy.deepcopy(model)
    found, expected = step(compiled, model), step(eager, eager)
    assert_alike(found, expected)
    for (name, parameter), right in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (parameter.grad is None) == (right.grad is None), name
        if right.grad is not None:
            assert_alike({name: parameter.grad}, {name: right.grad})
    for buffer, right in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(buffer, right, rtol=1e-4, atol=1e-5)


def losses_of_adam(owner: nn.Module, loss: Callable[[], Tensor], steps: int = 20) -> list[float]:
    """Return the losses of steps of Adam on the parameters of a module."""
    optimizer = torch.optim.Adam(owner.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def assert_alike(found: Any, expected: Any) -> None:
    # the gradient of a bias before a norm is 0 but for rounding, which each rounds in its own way
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5)
