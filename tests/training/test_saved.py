"""Tensors that cross from the forward to the backward pass, and what their rounding does to gradients."""

import copy
from collections import Counter

import pytest
import torch
from graphs import load
from torch import Tensor, nn
from torch_geometric import nn as pyg
from zoo import ZOO, prepared
from zoo_layers import LAYERS

import gnnc
from gnnc.ir.nodes import outputs_of
from gnnc.ir.op import size_expr
from gnnc.ir.parts import SAVED

MODELS = ZOO | LAYERS
STATISTICS = {"float32[16]": 8}
SAVED_TENSORS = {
    ("gcn", "fp32"): {"float32[N, 12]": 1, "float32[N, 16]": 2, "uint8[N, 2]": 2},
    ("gcn", "bf16"): {"bfloat16[N, 12]": 1, "bfloat16[N, 16]": 2, "uint8[N, 2]": 2},
    ("gat", "fp32"): {"float32[N, 16]": 4, "float32[N, 4]": 4, "uint8[N, 2]": 2},
    ("gat", "bf16"): {
        "bfloat16[N, 12]": 1,
        "bfloat16[N, 16]": 2,
        "bfloat16[N, 4, 4]": 2,
        "float32[N, 4]": 4,
        "uint8[N, 2]": 2,
    },
    ("gin", "fp32"): {"float32[N, 12]": 1, "float32[N, 16]": 7, "uint8[N, 2]": 4} | STATISTICS,
    ("gin", "bf16"): {"bfloat16[N, 12]": 1, "bfloat16[N, 16]": 7, "uint8[N, 2]": 4} | STATISTICS,
    ("pna", "fp32"): {
        "bool[N, 2, 16]": 1,
        "float32[N, 16]": 8,
        "float32[N, 2, 16]": 4,
        "float32[N, 208]": 2,
        "uint8[N, 2]": 2,
    },
    ("pna", "bf16"): {
        "bool[N, 2, 16]": 1,
        "bfloat16[N, 16]": 4,
        "bfloat16[N, 208]": 2,
        "float32[N, 16]": 4,
        "float32[N, 2, 16]": 4,
        "uint8[N, 2]": 2,
    },
}
"""Number of saved tensors by type and shape; those in FP32 beside 16 bits feed comparisons or logits."""


def saved_tensors(compiled: gnnc.CompiledModel, nodes: str) -> Counter[str]:
    """Return how many saved tensors have each type and shape; ``nodes`` is the symbol of the node count."""
    forward = dict(compiled.stages)["partition"]
    outputs = outputs_of(forward.graph)
    values = [outputs[position].meta["val"] for position in forward.meta[SAVED].values()]
    kinds = [
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for value in values
        if isinstance(value, Tensor)
    ]
    return Counter(kind.replace(nodes, "N") for kind in kinds)


@pytest.mark.parametrize(
    ("name", "precision"),
    [pytest.param(*key, marks=pytest.mark.slow if key[0] in ("gin", "pna") else ()) for key in SAVED_TENSORS],
)
def test_exactly_these_tensors_are_saved(name: str, precision: str) -> None:
    model = prepared(MODELS[name]).requires_grad_(True).train()
    args, kwargs = MODELS[name].arguments(40, 90, 0)
    compiled = gnnc.compile(model, precision)
    compiled(*args, **kwargs)
    x = next(n for n in dict(compiled.stages)["capture"].graph.nodes if n.name == "x")
    assert saved_tensors(compiled, str(x.meta["val"].shape[0])) == SAVED_TENSORS[name, precision]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer"])
def test_attention_weights_are_computed_again(name: str) -> None:
    model = prepared(MODELS[name]).requires_grad_(True).train()
    args, kwargs = MODELS[name].arguments(40, 90, 0)
    compiled = gnnc.compile(model, "fp32")
    compiled(*args, **kwargs)
    assert compiled.backward_graph_module is not None
    assert "gnnc.edge_softmax.default" in str(compiled.backward_graph_module.graph)
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


def _mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, outputs))


ON_CORA = {
    "gcn": (lambda a, b: Net(pyg.GCNConv(a, 16), pyg.GCNConv(16, b)), 0.999),
    "sage": (lambda a, b: Net(pyg.SAGEConv(a, 16), pyg.SAGEConv(16, b)), 0.999),
    "gat": (lambda a, b: Net(pyg.GATConv(a, 8, heads=2), pyg.GATConv(16, b)), 0.999),
    "gin": (lambda a, b: Net(pyg.GINConv(_mlp(a, 16)), pyg.GINConv(_mlp(16, b))), 0.995),
}


@pytest.mark.parametrize(
    "name", ["gcn", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sage", "gat", "gin"))]
)
def test_gradients_in_bf16_on_cora_at_initialisation(name: str) -> None:
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
