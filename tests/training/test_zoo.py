"""Gradients of the models of the zoo, in train(), against autograd of eager PyTorch in float64."""

import copy
from typing import Any

import pytest
import torch
from slow import slow_but
from torch import Tensor, nn
from training_steps import losses_of_adam
from zoo import ZOO, Arguments, prepared, random_graph
from zoo_gradients import gradients, rms
from zoo_layers import LAYERS

import gnnc

MODELS = ZOO | LAYERS
UNTRACED = ("super-gat", "super-gat-sd")
"""Layers that draw negative edges in train(), which no trace does."""
CASES = [name for name in MODELS if name not in UNTRACED]
NO_GRADIENT_OF_INPUTS = ("sparse-csr",)
"""Models whose gradient PyTorch itself refuses: that of a CSR matrix with repeated entries."""
SIZES = (50, 90, 0)
"""Nodes, edges and seed of a directed graph with repeated edges, self loops and nodes without any edge."""


def cases(name: str) -> tuple[nn.Module, Arguments]:
    """Return a model in train(), and arguments."""
    model = prepared(MODELS[name]).requires_grad_(True).train()
    return model, MODELS[name].arguments(*SIZES)


def test_the_graph_has_repeated_edges_self_loops_and_lone_nodes() -> None:
    nodes, edges, seed = SIZES
    _, (src, dst) = random_graph(nodes, edges, seed)
    assert len(torch.unique(src * nodes + dst)) < edges
    assert len(torch.unique(torch.cat([src, dst]))) < nodes
    assert (src == dst).any()


@pytest.mark.first(1)
@pytest.mark.parametrize("name", slow_but(("gcn",), CASES))
def test_gradients_are_as_near_to_float64_as_those_of_eager(name: str) -> None:
    check(name, of_inputs=False)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "name", slow_but(("gcn-edge-weight",), [name for name in CASES if name not in NO_GRADIENT_OF_INPUTS])
)
def test_gradients_of_inputs_too(name: str) -> None:
    """Edge weights and features that want a gradient are no part of the structure."""
    check(name, of_inputs=True)


def check(name: str, *, of_inputs: bool) -> None:
    """Compare the gradients of a model, of its float arguments as well, with those of float64."""
    model, arguments = cases(name)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    right = gradients(exact, exact, arguments, torch.float64, of_inputs=of_inputs)
    own = gradients(eager, eager, arguments, torch.float32, of_inputs=of_inputs)
    compiled = gnnc.compile(model, "fp32")
    found = gradients(compiled, model, arguments, torch.float32, of_inputs=of_inputs)
    assert found.keys() == right.keys()
    largest = max((rms(grad) for grad in right.values() if grad is not None), default=0.0)
    for path, grad in right.items():
        assert (found[path] is None) == (grad is None), path
        if grad is not None:
            scale = max(rms(grad), 0.01 * largest, 1e-30)
            error, allowed = rms(found[path] - grad) / scale, 2 * rms(own[path] - grad) / scale + 3e-6
            assert error <= allowed, (path, error, allowed)


@pytest.mark.parametrize("name", slow_but(("gat-mean",), CASES))
def test_a_reason_is_recorded_for_every_op_of_a_step_that_stays_fp32(name: str) -> None:
    model, arguments = cases(name)
    compiled = gnnc.compile(model, "int8")
    gradients(compiled, model, arguments, torch.float32)
    assert "no reason was recorded" not in compiled.explain()


@pytest.mark.parametrize("name", ["gcn", pytest.param("gin", marks=pytest.mark.slow)])
def test_gradients_in_bf16_point_where_those_of_fp32_do(name: str) -> None:
    model, arguments = cases(name)
    eager = copy.deepcopy(model)
    right = gradients(eager, eager, arguments, torch.float32)
    found = gradients(gnnc.compile(model, "bf16"), model, arguments, torch.float32)
    flat = [torch.cat([grad.flatten() for grad in side.values()]) for side in (found, right)]
    assert torch.cosine_similarity(*flat, dim=0) >= 0.995


@pytest.mark.parametrize(
    "name", ["gcn", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gin", "gat", "sage-mean"))]
)
def test_twenty_steps_of_adam_have_the_losses_of_eager(name: str) -> None:
    model, (args, kwargs) = cases(name)
    twin = copy.deepcopy(model)

    def loss_of(call: Any) -> Tensor:
        return torch.nn.functional.log_softmax(call(*args, **kwargs), 1)[:, 0].neg().mean()

    losses = [
        losses_of_adam(owner, lambda call=call: loss_of(call))
        for call, owner in ((model, model), (gnnc.compile(twin, "fp32"), twin))
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[1][-1] < losses[1][0]
