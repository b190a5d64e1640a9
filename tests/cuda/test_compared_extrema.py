"""Gradients of maxima of messages with products, where a kernel takes some bodies and declines others."""

import copy
from typing import Any

import pytest
import torch
from cuda_cases import error, on_device
from torch import Tensor, nn
from torch.fx import Node
from torch_geometric.nn import MessagePassing

import gnnc
from gnnc.passes.join_bodies import KIND
from gnnc.runtime.cuda.kernels import edge_sum, message

pytestmark = pytest.mark.filterwarnings("ignore:The usage of `scatter")
EDGE_OPS = ("gnnc.message.default", "gnnc.edge_map.default", "gnnc.edge_sum.default")


class Gated(MessagePassing):
    """Two layers on every edge, and a reduction."""

    def __init__(self, width: int, aggr: str) -> None:
        super().__init__(aggr=aggr)
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Reduce the messages."""
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        """Multiply the features of an edge and its source."""
        return self.second(torch.tanh(self.first(edge_attr) + x_j))


def arguments(width: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(30, width, requires_grad=True)
    return x, torch.randint(0, 30, (2, 150)), torch.randn(150, 4)


def weighted(out: Tensor) -> Tensor:
    """Return a scalar that depends on every element."""
    return (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out)).sum()


def gradients(call: Any, model: nn.Module, args: tuple[Tensor, ...]) -> list[Tensor]:
    return list(torch.autograd.grad(weighted(call(*args)), [args[0], *model.parameters()]))


def is_on_edges(node: Node) -> bool:
    """Return whether a node is an op with a body, or several in one pass."""
    return str(node.target) in EDGE_OPS or node.meta.get("kind") == KIND


def kernels_of_bodies(compiled: Any) -> dict[str, set[str]]:
    """Return the kernels of the ops with bodies in each graph."""
    return {
        part: {node.meta["kernel"] for node in gm.graph.nodes if is_on_edges(node)}
        for part, gm in compiled._dispatch.last.parts.per_call()
    }


def check(model: Gated, backend: str, args: tuple[Tensor, ...]) -> Any:
    """Compile a model, compare its gradients with those in float64, and return it."""
    exact = copy.deepcopy(model).double()
    doubles = tuple(arg.double() if arg.is_floating_point() else arg for arg in args)
    wanted = gradients(exact, exact, doubles)
    if backend == "cuda":
        model, args = model.cuda(), on_device(args)
    compiled = gnnc.compile(model, precision="fp32", backend=backend)
    found = gradients(compiled, model, args)
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) < 1e-5
    return compiled


def decline_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels of sums over the edges take no gradient of a bias."""
    monkeypatch.setattr(edge_sum, "_MAX_WIDTH", 4)
    monkeypatch.setattr(edge_sum, "_has_room", lambda plan, node: False)


@pytest.mark.cuda
def test_all_bodies_run_in_a_kernel() -> None:
    compiled = check(Gated(8, "max"), "cuda", arguments(8))
    assert kernels_of_bodies(compiled) == {"forward": {"edge_body"}, "backward": {"edge_body", "edge_sums"}}


@pytest.mark.cuda
def test_a_maximum_is_declined_and_a_comparison_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message, "_MOST_STATES", 0)
    compiled = check(Gated(8, "max"), "cuda", arguments(8))
    assert kernels_of_bodies(compiled) == {"forward": {"reference"}, "backward": {"reference"}}
    assert "is not used: no kernel takes" in compiled.explain()


@pytest.mark.cuda
def test_a_comparison_is_declined_and_a_maximum_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    decline_sums(monkeypatch)
    compiled = check(Gated(8, "min"), "cuda", arguments(8))
    assert kernels_of_bodies(compiled) == {"forward": {"reference"}, "backward": {"reference"}}


@pytest.mark.cuda
def test_a_sum_needs_no_equal_values(monkeypatch: pytest.MonkeyPatch) -> None:
    decline_sums(monkeypatch)
    compiled = check(Gated(8, "mean"), "cuda", arguments(8))
    assert kernels_of_bodies(compiled)["forward"] == {"edge_body"}
    assert "edge_body" in kernels_of_bodies(compiled)["backward"]
