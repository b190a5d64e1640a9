"""``precision="auto"`` end to end, at fixed rates."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from outliers import Outliers
from slow import slow_after
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv
from zoo import FEATURES, build, random_graph

import gnnc
from gnnc.compiler.auto import _Search
from gnnc.compiler.example_run import CallRun
from gnnc.ir.describe import inline
from gnnc.passes.assign import Assign
from gnnc.passes.pipeline import PIPELINE
from gnnc.passes.search.choice import MAX_TIGHTENINGS, Choice
from gnnc.passes.search.sensitivity import relative_l2

pytestmark = pytest.mark.usefixtures("rates")
INPUTS = random_graph(200, 1500)


def auto(model: nn.Module, budget: float = 0.02, **options: Any) -> gnnc.CompiledModel:
    options = {"example_inputs": INPUTS, "error_budget": budget, **options}
    return gnnc.compile(model, "auto", **options)


def choice(compiled: gnnc.CompiledModel) -> Choice:
    return compiled._captured().context.choice


def plan(compiled: gnnc.CompiledModel, tmp_path: Path) -> dict[str, dict[str, str]]:
    compiled.save_plan(tmp_path / "plan.json")
    return json.loads((tmp_path / "plan.json").read_text())["layers"]


@torch.no_grad()
def error(compiled: gnnc.CompiledModel, model: nn.Module, inputs: tuple[Tensor, ...] = INPUTS) -> float:
    return relative_l2(compiled(*inputs), model(*inputs))


@pytest.mark.first(1)
@pytest.mark.parametrize("budget", slow_after(1, [0.005, 0.002, 0.02]))
@pytest.mark.parametrize("name", ["gcn", "gat", "gin", "sage-mean", "gcn-deep-residual"])
def test_the_budget_holds_on_the_examples_and_beyond(name: str, budget: float) -> None:
    model = build(name)
    compiled = auto(model, budget)
    assert error(compiled, model) <= budget
    assert choice(compiled).measured == pytest.approx(error(compiled, model), rel=0.05, abs=1e-6)
    assert error(compiled, model, random_graph(200, 1500, seed=7)) <= 1.2 * budget


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["gcn", "gin"])
def test_more_budget_is_never_predicted_slower(name: str) -> None:
    first, last = (choice(auto(build(name), b)) for b in (0.002, 0.02))
    assert last.solution.seconds <= first.solution.seconds


@pytest.mark.slow
def test_it_is_deterministic(tmp_path: Path) -> None:
    plans = [plan(auto(build("gcn-deep-residual"), 0.008), tmp_path) for _ in range(2)]
    assert plans[0] == plans[1]
    assert len({p for ops in plans[0].values() for p in ops.values()}) > 1, "a mix, or this shows nothing"


def test_a_layer_with_outliers_is_found_and_protected(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Outliers().eval()
    compiled = auto(model, 0.02)
    assert error(compiled, model) <= 0.02
    layers = plan(compiled, tmp_path)
    assert layers["middle"]["gemm"] == "fp32"
    assert layers["conv1.lin"]["gemm"] == "int8" and layers["conv2.lin"]["gemm"] == "int8"
    worst = max(choice(compiled).study.ops, key=lambda op: op.sensitivity)
    assert worst.node.meta["layer"] == "middle" and worst.sensitivity > 0.5
    with torch.no_grad():
        int8 = gnnc.compile(model, "int8", example_inputs=INPUTS)
        assert relative_l2(int8(*INPUTS), model(*INPUTS)) > 0.2, "uniform int8 ruins it"


def test_overrides_win_and_a_budget_that_they_break_is_said_to_be(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Outliers().eval()
    compiled = auto(model, 0.01, overrides={"middle": "int8"})
    layers = plan(compiled, tmp_path)
    assert layers["middle"]["gemm"] == "int8"
    assert layers["conv1.lin"]["gemm"] == "fp32"
    text = compiled.explain()
    assert "no choice of precisions meets the budget" in text
    assert "this is the least that they allow" in text


def test_a_choice_that_measures_over_budget_is_tightened_at_most_five_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adjusted = []
    monkeypatch.setattr("gnnc.compiler.auto._Search._error", lambda *args: 0.5)
    before = Choice.adjust
    monkeypatch.setattr(Choice, "adjust", lambda self, *e: adjusted.append(e) or before(self, *e))
    compiled = auto(build("gcn"), 0.02)
    assert 1 <= len(adjusted) <= MAX_TIGHTENINGS
    assert "everything that may be is FP32" in compiled.explain()
    assert {str(o) for o in choice(compiled).plan.values()} == {"fp32"}


class Largest(nn.Module):
    """Maxima of inputs between 0 and 1, which one static scale for all rows suits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(64, 64, aggr="max"), SAGEConv(64, 8, aggr="max")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def test_what_keeps_the_budget_keeps_it_for_larger_values_too() -> None:
    """The static scales of a maximum clip what is larger than the examples, so that a call takes its own."""
    torch.manual_seed(0)
    model, edge_index = Largest().eval(), INPUTS[1]
    inputs = (torch.rand(200, 64), edge_index)
    larger = (1.5 * inputs[0], edge_index)
    compiled, uniform = (
        gnnc.compile(model, p, example_inputs=inputs, error_budget=0.02) for p in ("auto", "int8")
    )
    assert error(uniform, model, inputs) <= 0.02 and error(uniform, model, larger) <= 0.02
    assert error(compiled, model, inputs) <= 0.02 and error(compiled, model, larger) <= 0.02
    (line,) = [line for line in choice(compiled).log if line.startswith("uniform int8")]
    assert "had the values been 1.5 times as large), over budget" in line


def test_a_limit_for_larger_values_is_tightened_alone() -> None:
    found = choice(auto(build("gcn"), 0.02))
    limit = found.limit
    found.adjust(0.01, 0.03)
    assert found.limit == limit and found.grown_limit < 0.02
    assert found.limit_text == f"{limit:.2g} ({found.grown_limit:.2g} for larger values)"


def test_what_is_told_is_what_is_taken_and_not_what_was_tried_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A choice that used little of the budget is loosened; the looser one errs too much, and is dropped."""
    errors = iter([(0.001, 0.001), (0.5, 0.5), *[(0.5, 0.5)] * 3])
    monkeypatch.setattr("gnnc.compiler.auto._Search._errors", lambda *args: next(errors))
    compiled = auto(build("gcn-deep-residual"), 0.008)
    assert "loosened to" in compiled.explain()
    written = [value for ops in plan(compiled, tmp_path).values() for value in ops.values()]
    taken = [p for value in written for p in ([value] if isinstance(value, str) else value)]
    assert sorted(taken) == sorted(str(option) for option in choice(compiled).plan.values())


def test_a_wrong_prediction_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sensitivities that are told too low by a factor of ten still end within the budget."""
    from gnnc.passes.search import study

    measure = study._measure
    monkeypatch.setattr(study, "_measure", lambda *args: tuple(e / 10 for e in measure(*args)))
    model = build("gcn")
    compiled = auto(model, 0.003)
    assert error(compiled, model) <= 0.003
    assert "tightened to" in compiled.explain()


def test_a_choice_whose_values_are_not_finite_is_over_every_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = _Search._errors

    def bf16_overflows(self: _Search, run: CallRun) -> tuple[float, float]:
        if "bfloat16" in str(inline(run.graphs[0][0])):
            raise gnnc.PrecisionError("a scale is not finite")
        return measure(self, run)

    monkeypatch.setattr(_Search, "_errors", bf16_overflows)
    compiled = auto(build("gcn"), 0.5)
    told = choice(compiled).log
    assert any("uniform bf16: error inf, over budget" in line for line in told), told
    assert any("uniform int8: error 0.0" in line for line in told), told
    assert "bfloat16" not in str(inline(compiled._captured().stages[-1][1]))
    assert error(compiled, build("gcn")) <= 0.5


def test_without_examples_gain_stands_for_sensitivity() -> None:
    model = build("gcn")
    compiled = gnnc.compile(model, "auto", error_budget=0.01)
    with torch.no_grad():
        compiled(*INPUTS)
    found = choice(compiled)
    assert not found.study.measured and found.measured is None
    weights = [op.weight for op in found.study.ops]
    int8 = [op.errors[-1][0] for op in found.study.ops]
    assert all(op.options[-1].precision.name == "int8" for op in found.study.ops)
    assert max(weights) > 2 and int8.index(max(int8)) == weights.index(max(weights))
    assert all(o.granularity in (None, "row") for op in found.study.ops for o in op.options)
    assert "no example_inputs: an op's weight is 1 + its receptive-field gain" in compiled.explain()


def test_the_plan_does_not_depend_on_the_first_call(tmp_path: Path) -> None:
    plans = []
    for inputs in (random_graph(20, 30), random_graph(300, 9000)):
        compiled = gnnc.compile(build("gcn"), "auto", error_budget=0.01)
        with torch.no_grad():
            compiled(*inputs)
        plans.append(plan(compiled, tmp_path))
    assert plans[0] == plans[1]


def test_summary_and_explain_tell_the_choice() -> None:
    compiled = auto(build("gcn"), 0.004)
    header, _, *rows = compiled.summary().splitlines()
    for column in ("precision", "sensitivity", "error (eq. 4)", "RF gain", "predicted ms", "next best"):
        assert column in header
    gemms = [row for row in rows if "gemm" in row]
    assert gemms and all(" ms, " in row for row in gemms)
    text = compiled.explain()
    assert "Precision choice\n  budget 0.004: " in text
    assert "rank correlation of receptive-field gain" in text
    assert "binds" in text and "taken: " in text


@pytest.mark.slow
def test_a_saved_plan_gives_the_same_program(tmp_path: Path) -> None:
    model = build("gcn-deep-residual")
    compiled = auto(model, 0.008)
    compiled.save_plan(tmp_path / "plan.json")
    again = gnnc.compile(model, plan=tmp_path / "plan.json", example_inputs=INPUTS)
    with torch.no_grad():
        assert torch.equal(compiled(*INPUTS), again(*INPUTS))
    other = gnnc.compile(
        model, plan=tmp_path / "plan.json", example_inputs=INPUTS, overrides={"head": "fp32"}
    )
    assert plan(other, tmp_path)["head"]["gemm"] == "fp32"


def test_the_predicted_time_of_what_is_taken_is_the_least_within_the_budget() -> None:
    compiled = auto(build("gcn"), 0.02)
    log = choice(compiled).log
    taken = float(log[-1].split("predicted ")[1].removesuffix(" ms"))
    others = [float(line.split()[-2]) for line in log if line.startswith("uniform") and line.endswith("ms")]
    assert others and taken <= min(others)


def test_a_pipeline_without_assign_is_refused() -> None:
    short = tuple(step for step in PIPELINE if not isinstance(step, Assign))
    with pytest.raises(gnnc.UnsupportedError, match="the pass 'assign', which the pipeline lacks"):
        auto(build("gcn"), pipeline=short)


def test_on_the_reference_backend() -> None:
    model = build("gcn")
    assert error(auto(model, 0.01, backend="reference"), model) <= 0.01


def test_a_model_with_two_outputs_keeps_the_budget_for_both() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = GCNConv(FEATURES, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
            h = self.a(x, edge_index).relu()
            return h, self.b(h)

    model = Two().eval()
    compiled = auto(model, 0.006)
    with torch.no_grad():
        pairs = zip(compiled(*INPUTS), model(*INPUTS), strict=True)
        assert max(relative_l2(a, b) for a, b in pairs) <= 0.006
