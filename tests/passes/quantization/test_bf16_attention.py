"""Attention in bf16: where an int8 model gathers rows of bf16 on CUDA, and that no other attention does."""

import pytest
import torch
from layer_zoo import LAYERS, arguments
from torch import nn

import gnnc

NOTE = "bf16, not int8: int8 is no faster here for"
_NODES = 40


def compiled(name: str, *, trains: bool = False, precision: str = "int8", **options: object) -> nn.Module:
    torch.manual_seed(0)
    edge_index = torch.randint(0, _NODES, (2, 200))
    x, extra = arguments(LAYERS[name].takes, edge_index, _NODES)
    model = LAYERS[name].make().train(trains)
    made = gnnc.compile(model, precision, backend="cuda-offline:sm_90", **options)
    with torch.set_grad_enabled(trains), pytest.raises(gnnc.BackendError, match="not here"):
        made(x, *extra)
    return made


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("name", "trains", "kind"),
    [
        ("GATv2 2x32", False, "attention whose logits are computed from the rows that it sums"),
        ("Transformer edges 4x16", False, "attention with features of edges"),
        ("GATv2 2x32 twice", True, "attention in training"),
    ],
)
def test_attention_takes_bf16(name: str, trains: bool, kind: str) -> None:
    assert f"{NOTE} {kind}" in compiled(name, trains=trains).explain()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("name", "trains"), [("Transformer 2x32", False), ("GAT 4x16", False), ("GAT 4x16", True)]
)
def test_other_attention_stays_int8(name: str, trains: bool) -> None:
    assert NOTE not in compiled(name, trains=trains).explain()


@pytest.mark.usefixtures("compiler")
def test_layers_that_are_named_keep_int8() -> None:
    assert NOTE not in compiled("GATv2 2x32", precision="fp32", overrides={"": "int8"}).explain()
