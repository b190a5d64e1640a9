"""Rounding of gradients in int8 training: scales, seed, the runs that a seed repeats, options."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from on_cora import Net
from torch import Tensor, nn
from torch.fx import Node
from torch_geometric import nn as pyg

import gnnc
from gnnc.errors import PrecisionError
from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import arguments
from gnnc.ir.source import source_of
from gnnc.passes.assign import Assign
from gnnc.passes.pipeline import PIPELINE
from gnnc.passes.quantize import Quantize

QUANTIZE = torch.ops.gnnc.quantize.default


def make() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    graph = torch.randn(70, 40), torch.randint(70, (2, 300))
    return Net(pyg.GCNConv(40, 64), pyg.SAGEConv(64, 24)), graph


def compiled_with(model: nn.Module, **options: Any) -> gnnc.CompiledModel:
    steps = [
        Quantize(**options) if step.name == "quantize" else Assign(last_layer="low") if step.name == "assign"
        else step
        for step in PIPELINE
    ]  # fmt: skip
    return gnnc.compile(model, "int8", pipeline=steps)


def gradients(call: Any, model: nn.Module, graph: tuple[Tensor, Tensor]) -> Tensor:
    model.zero_grad()
    call(*graph).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def quantizations(compiled: gnnc.CompiledModel) -> Iterator[tuple[Node, dict[str, Any]]]:
    """Yield the quantizations of the joint graph that depend on a seed."""
    joint = dict(compiled.stages)["cache"]
    for node in joint.graph.find_nodes(op="call_function", target=QUANTIZE):
        named = arguments(node)
        if named["seed"] is not None:
            yield node, named


@pytest.fixture(scope="module")
def trained() -> tuple[gnnc.CompiledModel, nn.Module, tuple[Tensor, Tensor]]:
    model, graph = make()
    compiled = compiled_with(model)
    gradients(compiled, model, graph)
    return compiled, model, graph


def test_each_gradient_is_quantized_once_with_bits_of_its_own(trained: Any) -> None:
    compiled, *_ = trained
    found = list(quantizations(compiled))
    streams = [named["stream"] for _, named in found]
    values = [named["x"] for _, named in found]
    assert len(found) >= 2 and len(set(streams)) == len(streams) and len(set(values)) == len(values)
    for node, named in found:
        is_summed = any(user.target is torch.ops.gnnc.qspmm.default for user in node.users)
        assert named["qtype"] == ("int8/row_pow2" if is_summed else "int8/row")
    readers = {str(user.target).split(".")[1] for node, _ in found for user in node.users}
    assert readers == {"qspmm", "qgemm", "qgemm_tn"}
    assert any(len(node.users) > 1 for node, _ in found), "one set of values serves several ops"


def test_values_of_the_forward_pass_and_weights_round_to_nearest(trained: Any) -> None:
    compiled, *_ = trained
    forward = dict(compiled.stages)["partition"]
    nodes = forward.graph.find_nodes(op="call_function", target=QUANTIZE)
    assert nodes and all(arguments(node)["seed"] is None for node in nodes)
    assert "seed" not in {source.kind for source in map(source_of, placeholders(forward)) if source}


def test_the_seed_is_an_operand_in_the_printed_program(trained: Any) -> None:
    compiled, *_ = trained
    _, _, backward = str(compiled).partition("def backward(")
    line = next(line for line in backward.splitlines() if line.strip().startswith("rounding"))
    assert line.split("#")[1].split() == ["i64[]", "seed"]
    assert backward.count(", rounding, ") == len(list(quantizations(compiled)))
    assert "row_pow2 scales, rounded stochastically: a gradient" in compiled.explain()


def test_golden(trained: Any, golden: Callable[[str], None]) -> None:
    compiled, *_ = trained
    golden(str(compiled).partition("# runs when gradients are computed")[2])


def test_a_seed_repeats_a_run_bit_for_bit_and_calls_differ(trained: Any) -> None:
    compiled, model, graph = trained
    threads = torch.get_num_threads()

    def run(seed: int, count: int = 1) -> list[Tensor]:
        torch.set_num_threads(count)
        torch.manual_seed(seed)
        return [gradients(compiled, model, graph) for _ in range(3)]

    try:
        first = run(5)
        for again in (run(5), run(5, count=3)):
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        torch.use_deterministic_algorithms(True)
        assert torch.equal(run(5)[2], first[2])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    other = run(6)
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other[0])


def test_a_second_backward_pass_of_one_call_has_the_same_bits(trained: Any) -> None:
    compiled, model, graph = trained
    loss = compiled(*graph).square().mean()
    found = []
    for keep in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=keep)
        found.append(model.get_parameter("first.lin.weight").grad)
    assert torch.equal(*found)


def test_random_numbers_of_the_forward_pass_are_those_of_eager() -> None:
    model, graph = make()
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(40, 8)).train()
    compiled = compiled_with(model)
    states = []
    for call in (compiled, compiled, model):
        torch.manual_seed(3)
        out = call(graph[0])
        states.append((out.detach(), torch.get_rng_state()))
    torch.testing.assert_close(states[1][0], states[2][0], rtol=0.05, atol=0.05)
    assert not torch.equal(states[1][1], states[2][1]), "a call draws one number behind those"


@pytest.mark.parametrize("scales", ["row_pow2", "row", "tensor"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_options(scales: str, rounding: str) -> None:
    model, graph = make()
    eager = copy.deepcopy(model)
    compiled = compiled_with(model, gradients=scales, rounding=rounding)
    gradients(compiled, model, graph)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    found, right = gradients(compiled, model, graph), gradients(eager, eager, graph)
    assert torch.equal(torch.get_rng_state(), before) == (rounding == "nearest"), "nearest draws nothing"
    assert torch.cosine_similarity(found, right, dim=0) > 0.998
    if rounding == "nearest":
        assert torch.equal(found, gradients(compiled, model, graph))
        assert not list(quantizations(compiled))
        return
    mean = torch.stack([gradients(compiled, model, graph) for _ in range(32)]).mean(0)
    assert (mean - right).norm() < (found - right).norm()
    others = {"int8/row"} if scales == "row_pow2" else set()
    assert {named["qtype"] for _, named in quantizations(compiled)} == {f"int8/{scales}"} | others


class Twice(nn.Module):
    """Two sums over the edges, of which one has weights: both read one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(40, 64), nn.Linear(64, 24)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        (src, dst), h = edge_index, self.lin(x)
        zeros = torch.zeros_like(h)
        total = zeros.index_add(0, dst, h[src]) + zeros.index_add(0, dst, h[src] * weight.unsqueeze(1))
        return self.out(total.relu())


@pytest.mark.parametrize("scales", ["row_pow2", "row", "tensor"])
def test_weights_of_edges_weigh_gradients(scales: str) -> None:
    torch.manual_seed(0)
    graph = torch.randn(70, 40), torch.randint(70, (2, 300)), 2 * torch.randn(300)
    model = Twice()
    compiled = compiled_with(copy.deepcopy(model), gradients=scales)
    found, want = gradients(compiled, compiled.model, graph), gradients(model, model, graph)
    assert torch.cosine_similarity(found, want, dim=0) > 0.99


@pytest.mark.parametrize("option", [{"gradients": "column"}, {"rounding": "up"}])
def test_unknown_options_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(PrecisionError, match=f"{next(iter(option))} must be '"):
        Quantize(**option)
