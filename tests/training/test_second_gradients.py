"""Gradients of gradients (``create_graph=True``) against those of eager PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    MessagePassing,
    SAGEConv,
    TransformerConv,
)
from torch_geometric.utils import scatter
from training_steps import EDGES, WIDTH, Net, Step, X, compare

import gnnc


class Forces(nn.Module):
    """Energy of atoms by continuous filters of their distances, as in SchNet."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(5, 8)
        self.filter = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 8))
        self.dense, self.out = nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("centers", torch.linspace(0, 3, 6))

    def forward(self, kind: Tensor, pos: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        src, dst = edge_index
        distance = (pos[src] - pos[dst]).square().sum(1).add(1e-6).sqrt()
        weight = self.filter((-(distance[:, None] - self.centers).square()).exp())
        h = self.kinds(kind)
        h = h + torch.zeros_like(h).index_add(0, dst, self.dense(h)[src] * weight)
        return torch.zeros(2, 1, dtype=pos.dtype).index_add(0, batch, self.out(torch.tanh(h)))


class Potential(nn.Module):
    """Energy of atoms by messages of a network with biases, of which the positions are moved, as in EGNN."""

    def __init__(
        self, activation: type[nn.Module] = nn.SiLU, reduce: str = "sum", norm: bool = False
    ) -> None:
        super().__init__()
        self.kinds, self.reduce = nn.Embedding(5, 7), reduce
        self.message = nn.Sequential(nn.Linear(15, 7), activation(), nn.Linear(7, 7))
        self.norm = nn.LayerNorm(7) if norm else nn.Identity()
        self.move = nn.Sequential(nn.Linear(7, 7), activation(), nn.Linear(7, 1))
        self.out = nn.Sequential(nn.Linear(7, 8), activation(), nn.Linear(8, 1))

    def forward(self, kind: Tensor, pos: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        (src, dst), h = edge_index, self.kinds(kind)
        for _ in range(2):
            offset = pos[dst] - pos[src]
            distance = offset.square().sum(1, keepdim=True)
            message = self.norm(self.message(torch.cat([h[dst], h[src], distance], 1)))
            moved = offset / (distance + 1).sqrt() * self.move(message)
            pos = pos + scatter(moved, dst, dim_size=len(pos), reduce="mean")
            h = h + scatter(message, dst, dim_size=len(h), reduce=self.reduce)
        return torch.zeros(2, 1, dtype=pos.dtype).index_add(0, batch, self.out(h))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 4))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GCNConv(WIDTH, 4),
    "gat": lambda: GATConv(WIDTH, 4, heads=2),
    "net": Net,
    "dropout": lambda: Net(0.3),
    "sage-max": lambda: SAGEConv(WIDTH, 4, aggr="max"),
    "gin": lambda: GINConv(mlp(), train_eps=True),
    "gatv2": lambda: GATv2Conv(WIDTH, 4, heads=2),
    "transformer": lambda: TransformerConv(WIDTH, 4, heads=2, dropout=0.3),
}
FAST = ("gcn", "gat", "dropout")


def check(model: nn.Module, step: Step) -> None:
    """Compare a step of the compiled model with that of eager PyTorch."""
    compare(model, gnnc.compile(model, "fp32"), step)


def penalty(call: Any, owner: nn.Module) -> Any:
    """Do a step of a gradient penalty, as Wasserstein critics have it."""
    torch.manual_seed(3)
    x = X.clone().requires_grad_()
    out = call(x, EDGES)
    (slope,) = torch.autograd.grad(out.tanh().sum(), x, create_graph=True)
    (slope.norm(dim=1).square().mean() + out.square().mean()).backward()
    return x.grad, torch.rand(2)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in LAYERS]
)
def test_a_gradient_penalty_trains(name: str) -> None:
    torch.manual_seed(0)
    check(LAYERS[name]().train(), penalty)


ATOMS = 12
KIND, BATCH = torch.arange(ATOMS) % 5, torch.arange(ATOMS) // 6
GRAPHS = {
    "directed": EDGES.remainder(ATOMS),
    "no edges": EDGES[:, :0],
    "isolated": EDGES.remainder(4),
    "hub": torch.stack([EDGES[0].remainder(ATOMS), torch.full_like(EDGES[1], 3)]),
}
POTENTIALS: dict[str, Callable[[], nn.Module]] = {
    "schnet": Forces,
    "egnn": Potential,
    "egnn-softplus": lambda: Potential(nn.Softplus),
    "egnn-mean": lambda: Potential(reduce="mean"),
    "egnn-max": lambda: Potential(nn.Softplus, "max"),
    "egnn-max-of-norms": lambda: Potential(reduce="max", norm=True),
    "egnn-norms": lambda: Potential(nn.Tanh, norm=True),
}


def forces(edges: Tensor) -> Step:
    """Return a step on energies and on their negative gradients by positions."""
    generator = torch.Generator().manual_seed(0)
    pos, target = (torch.randn(ATOMS, 3, generator=generator) for _ in range(2))

    def step(call: Any, owner: nn.Module) -> Any:
        moved = pos.clone().to(next(owner.parameters()).dtype).requires_grad_()
        energy = call(KIND, moved, edges, BATCH)
        force = -torch.autograd.grad(energy, moved, torch.ones_like(energy), create_graph=True)[0]
        ((force - target).square().mean() + energy.square().mean()).backward()
        return force.detach(), energy.detach(), moved.grad

    return step


def slopes(edges: Tensor) -> Step:
    """Return a step on the gradients of the energies by all weights, biases and positions."""
    pos = torch.randn(ATOMS, 3, generator=torch.Generator().manual_seed(0))

    def step(call: Any, owner: nn.Module) -> Any:
        moved = pos.clone().to(next(owner.parameters()).dtype).requires_grad_()
        energy = call(KIND, moved, edges, BATCH).sin().sum()
        leaves = [moved, *owner.parameters()]
        found = torch.autograd.grad(energy, leaves, create_graph=True, allow_unused=True)
        torch.stack([slope.sin().square().sum() for slope in found if slope is not None]).sum().backward()
        return energy.detach(), moved.grad

    return step


def is_fast(name: str, graph: str) -> bool:
    return (name, graph) in (("egnn", "directed"), ("egnn-max-of-norms", "hub"), ("schnet", "no edges"))


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        pytest.param(name, graph, marks=() if is_fast(name, graph) else pytest.mark.slow)
        for name in POTENTIALS
        for graph in GRAPHS
    ],
)
@pytest.mark.parametrize("loss", [forces, slopes])
def test_potentials_train(loss: Callable[[Tensor], Step], name: str, graph: str) -> None:
    """In FP32 the error is at most a few times the largest of eager, whose edges are in several orders."""
    torch.manual_seed(0)
    model, edges = POTENTIALS[name](), GRAPHS[graph]
    compiled, exact = copy.deepcopy(model), copy.deepcopy(model).double()

    def results(call: Any, owner: nn.Module, order: Tensor) -> list[Tensor | None]:
        owner.zero_grad()
        return [*loss(edges[:, order])(call, owner), *(p.grad for p in owner.parameters())]

    as_given = torch.arange(edges.shape[1])
    orders = [as_given, *(torch.randperm(len(as_given)) for _ in range(3))]
    of_eager = [results(model, model, order) for order in orders]
    of_both = (results(gnnc.compile(compiled, "fp32"), compiled, as_given), results(exact, exact, as_given))
    for found, wanted, *eager in zip(*of_both, *of_eager, strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None:
            noise = max((other - wanted).norm() for other in eager)
            assert (found - wanted).norm() <= 4 * noise + 1e-5 * wanted.norm() + 1e-6


def test_third_gradients_and_gradients_of_tangents() -> None:
    def step(call: Any, owner: nn.Module) -> Any:
        x, tangent = X.clone().requires_grad_(), torch.ones(len(X), 4).requires_grad_()
        first = torch.autograd.grad(call(x, EDGES).tanh(), x, tangent, create_graph=True)[0]
        second = torch.autograd.grad(first.sin().sum(), [x, tangent], create_graph=True)
        third = torch.autograd.grad([part.cos().sum() for part in second], [x, tangent])
        return [value.detach() for value in (first, *second, *third)]

    check(GCNConv(WIDTH, 4), step)


def test_inputs_that_depend_on_each_other_count_once() -> None:
    def step(call: Any, owner: nn.Module) -> Any:
        x = X.clone().requires_grad_()
        weight = x.mean(1).sigmoid()[EDGES[0]]
        slope = torch.autograd.grad(call(x, EDGES, weight).square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(slope.square().sum(), x)[0]

    check(GCNConv(WIDTH, 4), step)


def test_a_first_backward_pass_keeps_the_graph_for_a_second() -> None:
    def step(call: Any, owner: nn.Module) -> Any:
        loss = call(X, EDGES).square().sum()
        loss.backward(retain_graph=True)
        grads = torch.autograd.grad(loss, list(owner.parameters()), create_graph=True)
        torch.stack([grad.square().sum() for grad in grads]).sum().backward()

    check(GCNConv(WIDTH, 4), step)


@pytest.mark.first(1)
def test_other_precisions_have_no_second_gradients() -> None:
    model = GCNConv(WIDTH, 4)
    out = gnnc.compile(model, "bf16")(X, EDGES)
    with pytest.raises(gnnc.UnsupportedError, match=r"create_graph.*precision='fp32'"):
        torch.autograd.grad(out.sum(), list(model.parameters()), create_graph=True)


def test_a_value_written_since_the_forward_pass_is_refused() -> None:
    model = GCNConv(WIDTH, 4)
    out = gnnc.compile(model, "fp32")(X, EDGES)
    with torch.no_grad():
        model.bias.add_(1.0)
    with pytest.raises(gnnc.UnsupportedError, match="modified in place"):
        torch.autograd.grad(out.sum(), list(model.parameters()), create_graph=True)


class Larger(MessagePassing):
    """Sums of the larger, or smaller, of both ends of an edge, weighted."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(aggr="sum")
        self.op, self.weight = op, nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.op(x_i, x_j) * self.weight


@pytest.mark.parametrize("op", [torch.maximum, torch.minimum])
def test_gradients_of_a_maximum_of_both_ends(op: Callable[[Tensor, Tensor], Tensor]) -> None:
    """ATen's gradient writes to its operand, of which the other side's gradient has an equal one."""
    torch.manual_seed(0)
    model, edge_index, start = Larger(op), torch.randint(30, (2, 90)), torch.randn(30, 6)

    def found(call: Callable[..., Tensor]) -> list[Tensor]:
        x = start.clone().requires_grad_()
        first = torch.autograd.grad(call(x, edge_index).square().sum(), [x, model.weight], create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), [x, model.weight])
        return [*first, *second]

    for got, want in zip(found(gnnc.compile(model, precision="fp32")), found(model), strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()
