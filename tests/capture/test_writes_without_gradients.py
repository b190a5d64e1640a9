"""Writes in forward of which autograd knows nothing: ``no_grad``, ``detach()`` and ``.data``."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

import gnnc

X, EDGES = torch.randn(7, 6), torch.randint(7, (2, 20))


class Writes(nn.Module):
    """A layer whose result, weight or buffer a function writes before they are multiplied."""

    def __init__(self, write: Callable[["Writes", Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.weight = GCNConv(6, 8), nn.Parameter(torch.full((8,), 2.0))
        self.register_buffer("mean", torch.ones(8))
        self.write = write

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.conv(x, edge_index)
        self.write(self, hidden)
        return hidden * self.mean * self.weight


def average(model: Writes, hidden: Tensor) -> None:
    with torch.no_grad():
        model.mean.mul_(0.9).add_(0.1 * hidden.mean(0))


def average_of_columns(model: Writes, hidden: Tensor) -> None:
    with torch.no_grad():
        model.mean[:4].mul_(0.9).add_(hidden.mean(0)[:4])


def one_element(model: Writes, hidden: Tensor) -> None:
    with torch.no_grad():
        model.mean[2] = hidden.mean()


@torch.no_grad()
def decorated(model: Writes, hidden: Tensor) -> None:
    model.mean.lerp_(hidden.mean(0), 0.1)


def data(model: Writes, hidden: Tensor) -> None:
    model.mean.data.mul_(0.9).add_(hidden.data.mean(0))


def data_alone(model: Writes, hidden: Tensor) -> None:
    model.mean.data.mul_(0.9)


def through_detach(model: Writes, hidden: Tensor) -> None:
    model.mean.detach().mul_(0.9).add_(hidden.detach().mean(0))


@pytest.mark.parametrize(
    "write", [average, average_of_columns, one_element, decorated, data, data_alone, through_detach]
)
def test_a_buffer_is_written_and_has_no_gradient(write: Callable[[Writes, Tensor], None]) -> None:
    eager, owner = Writes(write), Writes(write)
    compiled = gnnc.compile(owner, "fp32")
    for _ in range(2):
        results = [call(X, EDGES) for call in (eager, compiled)]
        for result in results:
            result.square().sum().backward()
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close(owner.mean, eager.mean)
        assert not owner.mean.requires_grad
    for found, expected in zip(owner.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4)


def scaled(model: Writes, hidden: Tensor) -> None:
    with torch.no_grad():
        hidden.mul_(2)


def scaled_column(model: Writes, hidden: Tensor) -> None:
    with torch.no_grad():
        hidden[:, 0].mul_(2)


def scaled_through_detach(model: Writes, hidden: Tensor) -> None:
    hidden.detach()[:, 0].mul_(2)


def scaled_data(model: Writes, hidden: Tensor) -> None:
    hidden.data.mul_(2)


@pytest.mark.parametrize("write", [scaled, scaled_column, scaled_through_detach, scaled_data])
def test_in_training_a_value_with_a_gradient_is_not_written(write: Callable[[Writes, Tensor], None]) -> None:
    model = Writes(write)
    compiled = gnnc.compile(copy.deepcopy(model), "fp32")
    with torch.no_grad():
        torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))
    with pytest.raises(gnnc.CaptureError, match=r"writes .* into a tensor that has a gradient"):
        compiled(X, EDGES)


def test_in_training_a_parameter_is_not_written() -> None:
    def clamped(model: Writes, hidden: Tensor) -> None:
        with torch.no_grad():
            model.weight.clamp_(-1, 1)

    with pytest.raises(gnnc.CaptureError, match=r"has a gradient \(weight\)"):
        gnnc.compile(Writes(clamped), "fp32")(X, EDGES)


def test_new_memory_of_a_tensor_is_refused() -> None:
    def assigned(model: Writes, hidden: Tensor) -> None:
        model.mean.data = model.mean * 0.9

    with pytest.raises(gnnc.CaptureError, match=r"assigns tensor\.data"):
        gnnc.compile(Writes(assigned), "fp32")(X, EDGES)


class Limited(nn.Module):
    """Looks up an embedding that limits the norms of the rows that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.conv = nn.Embedding(5, 6, max_norm=1.0), GCNConv(6, 4)

    def forward(self, kind: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(self.kinds(kind), edge_index)


@pytest.mark.parametrize("trained", [False, True])
def test_an_embedding_with_a_limit_of_norms_is_refused(trained: bool) -> None:
    with (
        torch.set_grad_enabled(trained),
        pytest.raises(gnnc.CaptureError, match=r"max_norm \(kinds_weight"),
    ):
        gnnc.compile(Limited(), "fp32")(torch.arange(7) % 5, EDGES)
