"""Deep models, whose examples save memory: reversible layers and checkpoints."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch.nn.functional as F
import torch_geometric.nn as pyg
from slow import slow_but
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_forms import (
    CLASSES,
    EDGES,
    FEATURES,
    HIDDEN,
    TRAIN,
    Compile,
    Form,
    X,
    Y,
    check,
    check_documented,
    descend,
)


class Block(nn.Module):
    """Norm, activation, dropout with a mask that all layers share, and a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width, elementwise_affine=True), pyg.SAGEConv(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x).relu()
        return self.conv(x if mask is None or not self.training else x * mask, edge_index)


class Reversible(nn.Module):
    """RevGNN: layers whose inputs are computed again from their outputs."""

    def __init__(self, disable: bool) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        make = partial(pyg.GroupAddRev, num_groups=2, disable=disable)
        self.convs = nn.ModuleList(make(Block(HIDDEN // 2)) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin1(x)
        mask = F.dropout(x.new_ones(x.shape[0], HIDDEN), 0.2, self.training)
        for conv in self.convs:
            x = conv(x, edge_index, mask)
        return self.lin2(x.relu())


class DeepGCN(nn.Module):
    """DeeperGCN: pre-activation residual layers, each under a checkpoint."""

    def __init__(self, block: str = "res+", checkpointed: bool = True) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.layers = nn.ModuleList(
            pyg.DeepGCNLayer(
                pyg.GENConv(HIDDEN, HIDDEN, aggr="softmax", t=1.0, learn_t=True, num_layers=2, norm="layer"),
                nn.LayerNorm(HIDDEN),
                nn.ReLU(),
                block=block,
                dropout=0.1,
                ckpt_grad=checkpointed,
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin1(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.lin2(F.dropout(x.relu(), 0.1, self.training))


class Checkpoints(nn.Module):
    """Layers under checkpoints of the kind that torch recommends."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.layers = nn.ModuleList(Block(HIDDEN) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin1(x)
        for layer in self.layers:
            update = checkpoint(layer, x, edge_index, use_reentrant=False)
            assert isinstance(update, Tensor)
            x = x + update
        return self.lin2(x.relu())


class GeniePath(nn.Module):
    """Adaptive breadth by attention, adaptive depth by an LSTM over layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.convs = nn.ModuleList(pyg.GATConv(HIDDEN, HIDDEN) for _ in range(3))
        self.lstms = nn.ModuleList(nn.LSTM(HIDDEN, HIDDEN, bias=False) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin1(x)
        state = (x.new_zeros(1, x.shape[0], HIDDEN), x.new_zeros(1, x.shape[0], HIDDEN))
        for conv, lstm in zip(self.convs, self.lstms, strict=True):
            _, state = lstm(conv(x, edge_index).tanh()[None], state)
            x = state[0][0]
        return self.lin2(x)


def classify(compiled: Compile, model: nn.Module) -> Iterator[float]:
    call = compiled(model)
    return descend(call, lambda: F.cross_entropy(call(X, EDGES)[TRAIN], Y[TRAIN]))


FORMS: dict[str, Form] = {
    "rev-gnn": Form(lambda compiled: classify(compiled, Reversible(disable=False)), "InvertibleFunction"),
    "rev-gnn-disabled": Form(lambda compiled: classify(compiled, Reversible(disable=True))),
    "deep-gcn": Form(lambda compiled: classify(compiled, DeepGCN())),
    "deep-gcn-dense": Form(lambda compiled: classify(compiled, DeepGCN("res", checkpointed=False))),
    "checkpoints": Form(lambda compiled: classify(compiled, Checkpoints())),
    "genie-path": Form(lambda compiled: classify(compiled, GeniePath())),
}


@pytest.mark.parametrize("name", slow_but(("rev-gnn", "checkpoints"), list(FORMS)))
def test_losses_are_those_of_eager(name: str) -> None:
    check(FORMS[name])


def test_the_page_lists_these_forms() -> None:
    check_documented("Deep models", FORMS)
