"""Gradients of the models of the zoo, in train(), against autograd of eager PyTorch in float64."""

import copy

import pytest
import torch
from torch import nn
from zoo import ZOO, Arguments, prepared
from zoo_gradients import gradients, rms

import gnnc

FAST = ("gcn", "gat", "gin", "sage-max", "pool-mean")
CASES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in ZOO]


def cases(name: str) -> tuple[nn.Module, Arguments]:
    """Return a model in train(), and arguments with a directed graph of repeated edges and lone nodes."""
    model = prepared(ZOO[name]).requires_grad_(True).train()
    return model, ZOO[name].arguments(40, 90, 0)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_as_near_to_float64_as_those_of_eager(name: str) -> None:
    model, arguments = cases(name)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    right = gradients(exact, exact, arguments, torch.float64)
    own = gradients(eager, eager, arguments, torch.float32)
    found = gradients(gnnc.compile(model, "fp32"), model, arguments, torch.float32)
    largest = max((rms(grad) for grad in right.values() if grad is not None), default=0.0)
    for path, grad in right.items():
        assert (found[path] is None) == (grad is None), path
        if grad is not None:
            scale = max(rms(grad), 0.01 * largest, 1e-30)
            error, allowed = rms(found[path] - grad) / scale, 2 * rms(own[path] - grad) / scale + 3e-6
            assert error <= allowed, (path, error, allowed)


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
    losses = []
    for compiled in (False, True):
        twin = copy.deepcopy(model)
        call = gnnc.compile(twin, "fp32") if compiled else twin
        optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
        steps = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = torch.nn.functional.log_softmax(call(*args, **kwargs), 1)[:, 0].neg().mean()
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[1][-1] < losses[1][0]
