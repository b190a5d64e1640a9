"""Bodies of one set of edges become one pass over them, which gives what eager gives."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from edge_layers import random_edges
from torch import Tensor, nn
from torch_geometric.utils import scatter

import gnnc
from gnnc.runtime import registry
from gnnc.runtime.backend import get_backend

NODES, WIDTH, FEATURES = 60, 64, 5


def _mlp(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))


class EdgeStates(nn.Module):
    """New edge states with a norm, and their sum by destination."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = _mlp(2 * WIDTH + FEATURES), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> tuple[Tensor, Tensor]:
        src, dst = edge_index
        edges = self.norm(self.mlp(torch.cat([x[dst], x[src], attr], 1)))
        return scatter(edges, dst, 0, x.shape[0], "sum"), edges


class Equivariant(nn.Module):
    """Two reductions by destination over one edge MLP."""

    def __init__(self, reduce: str = "sum") -> None:
        super().__init__()
        self.reduce = reduce
        self.mlp = _mlp(2 * WIDTH + 1)
        self.move = nn.Sequential(nn.SiLU(), _mlp(WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        src, dst = edge_index
        way = pos[dst] - pos[src]
        message = self.mlp(torch.cat([x[dst], x[src], way.square().sum(1, keepdim=True)], 1))
        moved = scatter(way * self.move(message), dst, 0, x.shape[0], "mean")
        return scatter(message, dst, 0, x.shape[0], self.reduce), pos + moved


class OneMaximum(EdgeStates):
    """Maximum of one edge MLP, and nothing else."""

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> tuple[Tensor, ...]:
        src, dst = edge_index
        return (scatter(self.mlp(torch.cat([x[dst], x[src], attr], 1)), dst, 0, x.shape[0], "max"),)


class Chain(nn.Module):
    """Two sums of which the second needs the first."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        src, dst = edge_index
        first = scatter((x[src] + x[dst]).relu(), dst, 0, x.shape[0], "sum")
        return scatter((first[src] + self.lin(x)[dst]).relu(), dst, 0, x.shape[0], "sum")


def _arguments(model: nn.Module, edge_index: Tensor) -> tuple[Tensor, ...]:
    rows, width = (NODES, 3) if isinstance(model, Equivariant) else (edge_index.shape[1], FEATURES)
    return torch.randn(NODES, WIDTH), edge_index, torch.randn(rows, width)


def _groups(compiled: gnnc.CompiledModel) -> list[int]:
    """Return the number of bodies that ``explain()`` names for each group."""
    found = re.findall(r"(\d+) bodies are computed in one pass", compiled.explain())
    return [int(count) for count in found]


def _total(results: Tensor | tuple[Tensor, ...]) -> Tensor:
    results = (results,) if isinstance(results, Tensor) else results
    return sum((result.square().sum() for result in results), start=torch.zeros(()))


@pytest.mark.parametrize("kind", ["plain", "hub", "none"])
@pytest.mark.parametrize("make", [EdgeStates, Equivariant, partial(Equivariant, "max"), Chain])
def test_a_joint_pass_gives_the_results_and_gradients_of_eager(
    make: Callable[[], nn.Module], kind: str
) -> None:
    torch.manual_seed(0)
    model = make()
    given = _arguments(model, random_edges(kind, NODES))
    compiled = gnnc.compile(model, precision="fp32")
    torch.testing.assert_close(compiled(*given), model(*given), rtol=1e-4, atol=1e-4)
    _total(model(*given)).backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    _total(compiled(*given)).backward()
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        scale = grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5 * max(scale, 1.0))


def _kernels(compiled: gnnc.CompiledModel) -> set[str]:
    return {kernel for _, kernel in compiled._dispatch.last.executable.kernels}


def test_two_reductions_of_one_edge_mlp_are_one_pass() -> None:
    model = Equivariant()
    compiled = gnnc.compile(model, precision="fp32")
    with torch.no_grad():
        compiled(*_arguments(model, random_edges("plain", NODES)))
    assert _groups(compiled) == [2]
    assert "joint_bodies" in _kernels(compiled)


class Sines(EdgeStates):
    """Edge states of which one step has no C++ kernel."""

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> tuple[Tensor, Tensor]:
        src, dst = edge_index
        edges = torch.sin(self.mlp(torch.cat([x[dst], x[src], attr], 1)))
        return scatter(edges, dst, 0, x.shape[0], "sum"), edges


def test_bodies_that_tiles_have_no_steps_for_are_one_pass_in_blocks() -> None:
    model = Sines()
    given = _arguments(model, random_edges("hub", NODES))
    compiled = gnnc.compile(model, precision="fp32")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), model(*given), rtol=1e-4, atol=1e-4)
    assert "joint_blocks" in _kernels(compiled)
    assert "kernel joint_bodies declined: no step computes sin" in compiled.explain()


def _gradient_of_maximum(compiled: gnnc.CompiledModel, *given: Tensor) -> Tensor:
    x = given[0].clone().requires_grad_()
    compiled(x, *given[1:])[0].square().sum().backward()
    assert x.grad is not None
    return x.grad


def test_an_extremum_and_its_comparisons_are_joined() -> None:
    model = Equivariant("max")
    given = _arguments(model, random_edges("hub", NODES))
    compiled = gnnc.compile(model, precision="fp32")
    grad = _gradient_of_maximum(compiled, *given)
    assert "joint_bodies" in _kernels(compiled) and max(_groups(compiled)) >= 5
    wanted = _gradient_of_maximum(model, *given)  # type: ignore[arg-type]
    torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4)


def test_an_extremum_is_compared_with_values_of_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(entry: registry.Kernel) -> registry.Kernel:
        return replace(entry, arithmetic="other") if entry.name == "joint_bodies" else entry

    get_backend("cpu")  # registers its kernels where no test before has
    monkeypatch.setitem(registry._KERNELS, "cpu", list(map(other, registry.kernels("cpu"))))
    model = OneMaximum()
    given = _arguments(model, random_edges("hub", NODES))
    compiled = gnnc.compile(model, precision="fp32")
    grad = _gradient_of_maximum(compiled, *given)
    assert "joint_bodies" not in _kernels(compiled)
    assert "compared with values that another kernel computes" in compiled.explain()
    wanted = _gradient_of_maximum(model, *given)  # type: ignore[arg-type]
    torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4)


def test_gradients_of_a_body_by_both_ends_and_over_all_edges_are_one_pass() -> None:
    model = Equivariant()
    compiled = gnnc.compile(model, precision="fp32")
    x, edge_index, pos = _arguments(model, random_edges("plain", NODES))
    _total(compiled(x, edge_index, pos)).backward()
    assert max(_groups(compiled)) >= 6
    backward = str(compiled).partition("def backward(")[2]
    assert "with fused.bodies():" in backward and "rowptr_t" in backward


def test_a_body_that_needs_the_result_of_another_stays_apart() -> None:
    model = Chain()
    compiled = gnnc.compile(model, precision="fp32")
    with torch.no_grad():
        compiled(*_arguments(model, random_edges("plain", NODES)))
    assert _groups(compiled) == []


def test_the_reference_backend_keeps_bodies_apart() -> None:
    model = Equivariant()
    compiled = gnnc.compile(model, precision="fp32", backend="reference")
    with torch.no_grad():
        compiled(*_arguments(model, random_edges("plain", NODES)))
    assert _groups(compiled) == []
