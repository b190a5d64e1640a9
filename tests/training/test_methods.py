"""Methods other than forward, on a compiled model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GAE, GCNConv
from training_steps import EDGES, WIDTH, X, compare

import gnnc


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index).tanh()


def step(call: Any, owner: nn.Module) -> Any:
    torch.manual_seed(0)
    z = call.encode(X, EDGES)
    loss = call.recon_loss(z, EDGES, EDGES.flip(0)) + call(X, EDGES).square().mean()
    loss.backward()
    return loss.detach(), call.decode(z, EDGES).detach()


def test_methods_have_the_gradients_of_eager_and_are_named() -> None:
    model = GAE(Encoder()).train()
    compiled = gnnc.compile(model, "fp32")
    compare(model, compiled, step)
    text = compiled.explain()
    for name in ("encode", "decode", "recon_loss"):
        assert f"  {name}: only forward is compiled" in text
    assert "  test:" not in text


def test_methods_are_named_where_forward_was_never_called() -> None:
    compiled = gnnc.compile(GAE(Encoder()), "fp32")
    with pytest.raises(gnnc.GnncError, match="nothing is captured yet"):
        compiled.explain()
    compiled.recon_loss(compiled.encode(X, EDGES), EDGES)
    text = compiled.explain()
    assert "GAE, not captured yet" in text
    assert "  encode: only forward is compiled" in text and "  recon_loss: only forward" in text


def test_a_compiled_submodule_trains_within_methods() -> None:
    model = GAE(Encoder()).train()
    model.encoder = gnnc.compile(model.encoder, "fp32")
    compare(model, model, step)
    assert "Methods in eager" not in model.encoder.explain()
