"""Gradients of raised models: as eager's, and without features for every edge that the model lacks."""

import math
from typing import Any

import pytest
import torch
from edge_matrices import edge_matrices
from slow import slow_but
from torch import Tensor
from torch.utils import _pytree as pytree
from traced import operands, trace
from zoo import ZOO, prepared
from zoo_layers import LAYERS

MODELS = ZOO | LAYERS
NODES, EDGES = 60, 700
ROWS = range(EDGES - NODES, EDGES + NODES + 1)
"""Numbers of edges, with and without self loops."""
WIDEST = 4
"""Most values of an edge that are no features: one for each head."""
FAST = ("gcn", "gcn-edge-weight", "sage-max", "gin", "gat", "gatv2", "transformer", "pool-max", "agnn")


def loss(outputs: Any) -> Tensor:
    leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]
    weights = [torch.linspace(-1, 1, t.numel()).reshape(t.shape) for t in leaves]
    return sum((t * w).sum() for t, w in zip(leaves, weights, strict=True))  # type: ignore[return-value]


@pytest.mark.first(3)
@pytest.mark.parametrize("name", slow_but(FAST, list(MODELS)))
def test_gradients(name: str) -> None:
    entry = MODELS[name]
    model = prepared(entry)
    args, kwargs = entry.arguments(NODES, EDGES, 0)
    parameters = dict(model.named_parameters())
    expected = _gradients(loss(model(*args, **kwargs)), parameters)
    raised = trace(model, *args, **kwargs).raised
    values = operands(raised, model, args, kwargs)
    found: dict[str, Tensor] = {}
    forward: list[Any] = []
    own = edge_matrices(lambda: forward.append(loss(raised(*values))), ROWS, WIDEST)
    joint = edge_matrices(lambda: found.update(_gradients(forward[0], parameters)), ROWS, WIDEST)
    widths = {math.prod(shape[1:]) for _, shape in own} | _widths_of(args)
    assert [made for made in joint if math.prod(made[1][1:]) not in widths] == []
    largest = max((float(grad.abs().max()) for grad in expected.values()), default=0.0)
    for key, grad in expected.items():
        scale = max(float(grad.abs().max()), 0.01 * largest)
        assert float((found[key] - grad).abs().max()) <= 3e-4 * scale, key


def _gradients(total: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    if not total.requires_grad:
        return {}
    grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return {key: grad for key, grad in zip(parameters, grads, strict=True) if grad is not None}


def _widths_of(args: Any) -> set[int]:
    tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor) and t.dim()]
    return {math.prod(t.shape[1:]) for t in tensors if t.shape[0] in ROWS}
