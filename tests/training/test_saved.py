"""Tensors that cross from the forward to the backward pass, and what their rounding does to gradients."""

import copy
from collections.abc import Callable

import pytest
import torch
from graphs import load
from shared_captures import shared_captures
from slow import slow_if
from torch import Tensor, nn
from torch_geometric import nn as pyg
from zoo import ZOO, prepared
from zoo_layers import LAYERS

import gnnc
from gnnc.ir.nodes import outputs_of
from gnnc.ir.op import size_expr
from gnnc.ir.parts import SAVED

MODELS = ZOO | LAYERS
SAVED_BY = [
    (name, precision) for name in ("gcn", "gat", "gin", "pna") for precision in ("fp32", "bf16", "fp16")
]
FAST = [("gcn", "bf16"), ("gat", "bf16")]


@pytest.mark.parametrize(
    ("name", "precision"), [pytest.param(*case, marks=slow_if(case not in FAST)) for case in SAVED_BY]
)
def test_golden(name: str, precision: str, golden: Callable[[str], None]) -> None:
    """Exactly these tensors are saved: layer, name, type, bytes, and why one is FP32 beside 16 bits."""
    compiled = trained(name, precision)
    saved = compiled.explain().partition("Saved for the backward graph\n")[2].partition("\n\n")[0]
    golden(saved)


def trained(name: str, precision: str) -> gnnc.CompiledModel:
    """Return a model of the zoo in train(), compiled by a call which wants gradients."""
    model = prepared(MODELS[name]).requires_grad_(True).train()
    args, kwargs = MODELS[name].arguments(40, 90, 0)
    compiled = gnnc.compile(model, precision)
    compiled(*args, **kwargs)
    return compiled


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer"])
def test_attention_weights_are_computed_again(name: str) -> None:
    compiled = trained(name, "fp32")
    assert compiled.backward_graph_module is not None
    backward = str(compiled).partition("# runs when gradients")[2]
    assert "gnnc.edge_softmax(" in backward or "gnnc.attention_backward(" in backward
    forward = dict(compiled.stages)["partition"]
    columns = [n for n in forward.graph.nodes if n.op == "placeholder" and n.name.startswith("col")]
    edges = {size_expr(n.meta["val"].shape[0]) for n in columns}
    for position in forward.meta[SAVED].values():
        value = outputs_of(forward.graph)[position].meta["val"]
        if isinstance(value, Tensor) and isinstance(value.shape[0], torch.SymInt):
            assert size_expr(value.shape[0]) not in edges


class Net(nn.Module):
    """Two convolutions with a ReLU between."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def _mlp(inputs: int, outputs: int, hidden: int = 16) -> nn.Module:
    first, last = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
    return nn.Sequential(first, nn.BatchNorm1d(hidden), nn.ReLU(), last)


ON_CORA = {
    "gcn": (lambda a, b: Net(pyg.GCNConv(a, 16), pyg.GCNConv(16, b)), 0.999),
    "sage": (lambda a, b: Net(pyg.SAGEConv(a, 16), pyg.SAGEConv(16, b)), 0.999),
    "gat": (lambda a, b: Net(pyg.GATConv(a, 8, heads=2), pyg.GATConv(16, b)), 0.999),
    "gin": (lambda a, b: Net(pyg.GINConv(_mlp(a, 16)), pyg.GINConv(_mlp(16, b))), 0.995),
}


@pytest.mark.parametrize(
    "name", ["gcn", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sage", "gat", "gin"))]
)
def test_gradients_in_bf16_on_cora_at_initialization(name: str) -> None:
    data = load("cora")
    make, least = ON_CORA[name]
    torch.manual_seed(0)
    model = make(data["x"].shape[1], int(data["y"].max()) + 1).train()
    train = data["train_mask"]
    labels = data["y"][train].long()
    flat = []
    for compiled in (False, True):
        twin = copy.deepcopy(model)
        call = gnnc.compile(twin, "bf16") if compiled else twin
        nn.functional.cross_entropy(call(data["x"], data["edge_index"])[train], labels).backward()
        flat.append(torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None]))
    assert torch.cosine_similarity(*flat, dim=0).item() >= least


def saved_bytes(compiled: gnnc.CompiledModel) -> int:
    """Return the bytes for each node of what the last captured program saves, sizes of weights left out."""
    forward = dict(compiled.stages)["partition"]
    values = [outputs_of(forward.graph)[place].meta["val"] for place in forward.meta[SAVED].values()]
    rows = [v for v in values if isinstance(v, Tensor) and v.dim() and isinstance(v.shape[0], torch.SymInt)]
    return sum(value[0].numel() * value.itemsize for value in rows)


AT_64_CHANNELS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: Net(pyg.GCNConv(128, 64), pyg.GCNConv(64, 40)),
    "sage": lambda: Net(pyg.SAGEConv(128, 64), pyg.SAGEConv(64, 40)),
    "gin": lambda: Net(pyg.GINConv(_mlp(128, 64, 64)), pyg.GINConv(_mlp(64, 40, 64))),
    "gat": lambda: Net(pyg.GATConv(128, 16, heads=4), pyg.GATConv(64, 40)),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=slow_if(n != "gat")) for n in AT_64_CHANNELS])
def test_int8_saves_at_most_29_percent_of_the_bytes_of_fp32(name: str) -> None:
    torch.manual_seed(0)
    model = AT_64_CHANNELS[name]().train()
    args = torch.randn(30, 128), torch.randint(30, (2, 90))
    found = {}
    with shared_captures():
        for precision in ("fp32", "int8"):
            compiled = gnnc.compile(model, precision)
            compiled(*args)
            found[precision] = saved_bytes(compiled)
    assert found["int8"] <= 0.29 * found["fp32"]


class Dropping(nn.Module):
    """GAT as its authors train it: dropout of the features, of the attention weights, and of hidden rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = pyg.GATConv(12, 8, heads=4, dropout=0.6)
        self.second = pyg.GATConv(32, 8, heads=1, dropout=0.6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.6, self.training)
        hidden = nn.functional.elu(self.first(x, edge_index))
        return self.second(nn.functional.dropout(hidden, 0.6, self.training), edge_index)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_of_dropout_the_mask_is_saved_alone(precision: str, golden: Callable[[str], None]) -> None:
    torch.manual_seed(0)
    model = Dropping().train()
    args = ZOO["gcn"].arguments(50, 90, 0)[0]
    gradients = []
    for call in (gnnc.compile(model, precision), model):
        model.zero_grad()
        torch.manual_seed(1)
        out = call(*args)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        if call is not model:
            golden(call.explain().partition("Saved for the backward graph\n")[2].partition("\n\n")[0])
    if precision == "fp32":
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=3e-5)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.999
