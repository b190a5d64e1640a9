"""Networks of the edges: gradients through the norms and activations that a message may hold."""

import edge_layers
import pytest
import torch
from slow import slow_but
from torch import Tensor, nn
from torch_geometric.utils import scatter
from traced import relative_error

import gnnc

WIDTH, NODES, EDGES = 16, 60, 300
STEPS = {
    "prelu": lambda: nn.PReLU(),
    "prelu of channels": lambda: nn.PReLU(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "layer norm without weight": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "group norm": lambda: nn.GroupNorm(4, WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "softmax": lambda: nn.Softmax(-1),
    "log sigmoid": lambda: nn.LogSigmoid(),
    "gelu": lambda: nn.GELU(),
    "mish": lambda: nn.Mish(),
    "hardswish": lambda: nn.Hardswish(),
}


class Message(nn.Module):
    """A sum of messages, which are a network of both ends with a step between its products."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), step, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        return torch.zeros_like(x).index_add(0, dst, self.net(torch.cat([x[dst], x[src]], 1)))


class Largest(nn.Module):
    """The largest messages, of an op that no kernel of bodies has, which then runs in PyTorch's ops."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.lin, self.step = nn.Linear(WIDTH, WIDTH), step

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        (src, dst), h = edge_index, self.lin(x)
        message = h[src] + 2 * h[dst]
        message = self.step(message) + 0.1 * message.cumsum(1)
        return scatter(message, dst, dim_size=len(x), reduce="max")


def check(model: nn.Module, *args: Tensor) -> None:
    """Check that the gradients of all parameters are those of eager."""
    gradients = []
    for forward in (model, gnnc.compile(model, "fp32")):
        loss = forward(*args).square().sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for expected, found in zip(*gradients, strict=True):
        assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("name", slow_but(("prelu", "layer norm", "log sigmoid"), list(STEPS)))
def test_gradients_through_a_step_of_a_message(name: str) -> None:
    check(Message(STEPS[name]()), torch.randn(NODES, WIDTH), torch.randint(NODES, (2, EDGES)))


@pytest.mark.parametrize("name", ["layer norm", "log sigmoid", "prelu", "gelu"])
def test_gradients_of_maxima_in_ops_of_pytorch(name: str) -> None:
    check(Largest(STEPS[name]()), torch.randn(NODES, WIDTH), torch.randint(NODES, (2, EDGES)))


class Padded(nn.Module):
    """A sum of messages with columns of zeros beside those of the source, times a row for all edges."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.factor = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(1, WIDTH + 2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        (src, dst), h = edge_index, self.lin(x)
        message = torch.cat([h[src], x.new_zeros(len(src), 2)], 1) * self.factor
        return scatter(message.sigmoid(), dst, dim_size=len(x), reduce="sum")


@pytest.mark.parametrize("edges", [EDGES, 1, 0])
def test_columns_of_a_number_beside_those_of_a_node_train(edges: int) -> None:
    check(Padded(), torch.randn(NODES, WIDTH), torch.randint(NODES, (2, edges)))


@pytest.mark.parametrize("wants_edges", [False, True])
def test_a_mesh_network_trains(wants_edges: bool) -> None:
    edges = torch.randn(EDGES, edge_layers.FEATURES, requires_grad=wants_edges)
    x = torch.randn(NODES, edge_layers.WIDTH)
    check(edge_layers.MeshGraphNet(), x, torch.randint(NODES, (2, EDGES)), edges)
