"""``precision="auto"`` in training, at fixed rates: budgets on gradients, and what is told of the choice."""

import copy
from typing import Any

import pytest
import torch
from graphs import load
from on_cora import ON_CORA
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from zoo import FEATURES, build, random_graph

import gnnc
from gnnc.ir.parts import FORWARD
from gnnc.passes.quantization.last_layer import last_layer
from gnnc.passes.search.assumed_loss import loss_gradient
from gnnc.passes.search.choice import Choice
from gnnc.passes.search.judged_values import relative_error
from gnnc.passes.search.sensitivity import relative_l2

pytestmark = pytest.mark.usefixtures("rates")
INPUTS = random_graph(200, 1500)


def choice(compiled: gnnc.CompiledModel) -> Choice:
    return compiled._captured().context.choice


def step(call: Any, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor, list[Tensor]]:
    """Return the output and the gradients under the loss, and the seed, that steps are measured under."""
    model.zero_grad()
    torch.manual_seed(0)
    output = call(*inputs)
    output.backward(loss_gradient(output.detach(), 0))
    return output.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def errors(
    model: nn.Module, inputs: tuple[Any, ...], budget: float
) -> tuple[gnnc.CompiledModel, float, float]:
    twin = copy.deepcopy(model)
    compiled = gnnc.compile(twin, "auto", example_inputs=inputs, error_budget=budget)
    (got, gradients), (want, expected) = step(compiled, twin, inputs), step(model, model, inputs)
    return compiled, relative_l2(got, want), relative_error(gradients, expected)


@pytest.mark.parametrize(
    ("name", "budget"),
    [("gcn", 0.05), *(pytest.param(n, 0.05, marks=pytest.mark.slow) for n in ("sage", "gin", "gat"))],
)
def test_the_budget_holds_on_cora(name: str, budget: float) -> None:
    data = load("cora")
    model = ON_CORA[name](data["x"].shape[1], int(data["y"].max()) + 1).train()
    compiled, of_output, of_gradients = errors(model, (data["x"], data["edge_index"]), budget)
    assert of_output <= budget
    assert of_gradients <= budget
    assert choice(compiled).measured == pytest.approx(max(of_output, of_gradients), rel=0.05)
    assert {str(option) for option in choice(compiled).plan.values()} != {"fp32"}


def test_a_small_budget_leaves_fp32_alone_and_a_large_one_does_not() -> None:
    model = build("gcn").train()
    for budget, wanted in ((1e-7, False), (0.2, True)):
        compiled, _, error = errors(model, INPUTS, budget)
        assert error <= max(budget, 1e-5)
        assert compiled._captured().context.step is None, "its values are freed"
        options = {str(option) for option in choice(compiled).plan.values()}
        assert (options != {"fp32"}) == wanted, options


def test_what_is_next_to_an_output_takes_no_integers_and_others_may() -> None:
    compiled, *_ = errors(build("gcn").train(), INPUTS, 0.5)
    stages = dict(compiled.stages)
    last = {node.name for node in last_layer(stages["joint"])}
    taken = {
        node.name: node.meta["precision"] for node in stages["assign"].graph.nodes if "precision" in node.meta
    }
    assert last < taken.keys()
    assert not [name for name in last if taken[name].is_quantized]
    assert any(precision.is_quantized for precision in taken.values()), "or this shows nothing"


def test_the_choice_is_told_for_both_graphs() -> None:
    compiled, *_ = errors(build("gcn").train(), INPUTS, 0.1)
    text = compiled.explain()
    assert "Precision choice\n  budget 0.1: " in text and "taken: " in text
    assert "the error is the largest of output 0, the gradient of all weights together" in text
    rows = [row for row in compiled.summary().splitlines() if "(backward)" in row]
    assert any(" ms, " in row and ("int8" in row or "bf16" in row) for row in rows)
    layers = {op.node.meta["layer"] for op in choice(compiled).study.ops}
    assert any("(backward)" in layer for layer in layers) and len(layers) > 2


def test_frozen_parameters_and_gradients_of_arguments_are_judged_as_they_are_wanted() -> None:
    torch.manual_seed(0)

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(FEATURES, 64), GCNConv(64, 5)

        def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index, weight).relu(), edge_index, weight)

    model = Weighted()
    model.first.requires_grad_(False)
    x, edge_index = INPUTS[:2]
    weight = torch.rand(edge_index.shape[1]).requires_grad_()
    compiled = gnnc.compile(model, "auto", example_inputs=(x, edge_index, weight), error_budget=0.05)
    gradients = {}
    for call in (compiled, model):
        model.zero_grad()
        weight.grad = None
        call(x, edge_index, weight).square().sum().backward()
        assert model.first.lin.weight.grad is None
        gradients[call] = [weight.grad, model.second.lin.weight.grad]
    names = [each.name for each in choice(compiled).study.judged]
    assert names == ["output 0", "the gradient of all weights together", "the gradient of weight"]
    for got, want in zip(*gradients.values(), strict=True):
        assert relative_l2(got, want) <= 0.1


def test_a_model_with_two_outputs_and_dropout_keeps_the_budget_for_each() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.drop = GCNConv(FEATURES, 32), nn.Linear(32, 4), nn.Dropout(0.5)

        def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
            h = self.a(x, edge_index).relu()
            return h, self.b(self.drop(h))

    model = Two().train()
    compiled = gnnc.compile(model, "auto", example_inputs=INPUTS, error_budget=0.05)
    found = []
    for call in (compiled, model):
        model.zero_grad()
        torch.manual_seed(3)
        h, out = call(*INPUTS)
        (h.square().mean() + out.square().mean()).backward()
        found.append(([h.detach(), out.detach()], [p.grad for p in model.parameters()]))
    assert [each.name for each in choice(compiled).study.judged][:2] == ["output 0", "output 1"]
    assert 0 < (choice(compiled).measured or 0) <= 0.05
    (outputs, gradients), (want, expected) = found
    assert max(map(relative_l2, outputs, want)) <= 0.075
    assert relative_error(gradients, expected) <= 0.1


@pytest.mark.parametrize(("budget", "precision"), [(0.02, "bf16"), (0.001, "fp32")])
def test_without_examples_a_uniform_precision_is_named(budget: float, precision: str) -> None:
    model = build("gcn").train()
    compiled = gnnc.compile(model, "auto", error_budget=budget)
    step(compiled, model, INPUTS)
    assert f"the step is {precision}" in compiled.explain()
    assert ("bf16" in str(compiled).split("structure")[-1]) == (precision == "bf16")


def test_inference_and_training_have_a_choice_each() -> None:
    model = build("gcn").train()
    compiled = gnnc.compile(model, "auto", example_inputs=INPUTS, error_budget=0.05)
    with torch.no_grad():
        compiled(*INPUTS)
    inference = choice(compiled)
    step(compiled, model, INPUTS)
    training = choice(compiled)
    assert not any("gradient" in each.name for each in inference.study.judged)
    assert any("gradient" in each.name for each in training.study.judged)
    assert compiled._captured().parts.forward is dict(compiled._captured().parts)[FORWARD]
