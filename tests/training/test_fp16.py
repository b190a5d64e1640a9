"""Training in fp16: gradients far below its range, overflow at hubs, scalers, and what is reported."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import EdgeConv, GATConv, GCNConv, GINConv, SAGEConv
from training_steps import EDGES, WIDTH, Net, X

import gnnc


def gin() -> nn.Module:
    mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    return GINConv(mlp, train_eps=True)


def edge_network() -> nn.Module:
    """Return a layer whose messages are those of a network of both ends."""
    mlp = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.SiLU(), nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 4))
    return EdgeConv(mlp, aggr="add")


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "gcn": lambda: GCNConv(WIDTH, 4),
    "gat": lambda: GATConv(WIDTH, 4, heads=2),
    "gin": gin,
    "edge network": edge_network,
    "sage-max": lambda: SAGEConv(WIDTH, 4, aggr="max"),
}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.first(1)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_any_size_are_those_of_fp32(name: str, backend: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    eager, compiled = copy.deepcopy(model), gnnc.compile(model, "fp16", backend=backend)
    for factor in (1.0, 1e-9, 1e9):
        for call, owner in ((compiled, model), (eager, eager)):
            owner.zero_grad()
            (call(X, EDGES).square().mean() * factor).backward()
        found, right = flat(model), flat(eager)
        assert (found - right).norm() <= 3e-3 * right.norm()


@pytest.mark.parametrize("layer", [GCNConv, SAGEConv])
def test_a_hub_does_not_overflow(layer: type[nn.Module]) -> None:
    nodes, edges = 2001, 1_000_000
    x = (100 + torch.randn(nodes, 2)).requires_grad_()
    edge_index = torch.stack([torch.arange(edges) % (nodes - 1) + 1, torch.zeros(edges, dtype=torch.long)])
    edge_index = torch.cat([edge_index, edge_index.flip(0)[:, : nodes - 1]], 1)
    model = layer(2, 2).train()
    out = gnnc.compile(model, "fp16")(x, edge_index)
    out.square().mean().backward()
    assert out.isfinite().all()
    assert (out - model(x.detach(), edge_index)).norm() <= 1e-2 * out.norm()
    for tensor in (x, *model.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_scaler_skips_steps_whose_gradients_are_not_finite(precision: str) -> None:
    model = GCNConv(WIDTH, 4).train()
    compiled, optimizer = gnnc.compile(model, precision), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=float("inf"))
    before = copy.deepcopy(model.state_dict())
    scaler.scale(compiled(X, EDGES).square().mean()).backward()
    scaler.step(optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    compiled(X, EDGES).square().mean().backward()
    assert flat(model).isfinite().all()


def test_the_rounding_is_reported_and_narrow_values_are_saved() -> None:
    compiled = gnnc.compile(Net().train(), "fp16", backend="cpu")
    compiled(X, EDGES)
    text = compiled.explain()
    assert "rounded to fp16, which has no kernel on this backend" in text
    assert "fp16, as asked for, is slower than fp32 here" in text
    assert "no reason was recorded" not in text
    saved = text.partition("Saved for the backward graph\n")[2].partition("\n\n")[0]
    assert "f16[N, 6]" in saved
    assert "f32[N, 6]" not in saved
