"""A study corrected by the times that launches of tried programs took."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slow import slow_after
from torch.fx import GraphModule
from zoo import build, random_graph

import gnnc
from gnnc.calibrate import timing
from gnnc.calibrate.timing import Times
from gnnc.compiler import auto as auto_module
from gnnc.compiler import build as build_module
from gnnc.cost.model import launches
from gnnc.ir import describe
from gnnc.passes.quantization.number_formats import Option
from gnnc.passes.search.choice import Choice
from gnnc.passes.search.measured import Observed, corrected, observed

pytestmark = pytest.mark.usefixtures("rates")
INPUTS = random_graph(200, 1500)


def auto(name: str = "gcn", budget: float = 0.02) -> gnnc.CompiledModel:
    return gnnc.compile(build(name), "auto", example_inputs=INPUTS, error_budget=budget)


def choice(compiled: gnnc.CompiledModel) -> Choice:
    return compiled._captured().context.choice


@pytest.mark.first(1)
@pytest.mark.parametrize("name", slow_after(2, ["gcn", "gat", "sage-mean", "gin", "transformer"]))
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_every_op_with_a_choice_is_found_in_what_was_timed(name: str, precision: str) -> None:
    ops = {op.node.name for op in choice(auto(name)).study.ops}
    stages = dict(gnnc.compile(build(name), precision, example_inputs=INPUTS)._captured().stages)
    took = {launch.name: 2e-3 for launch in launches(describe.inline(stages["lower"]))}
    seen = observed(stages["assign"], stages["lower"], {name: 5e-4 for name in took}, took)
    launched = [seconds / 1.5e-3 for seconds in seen.excess.values()]
    assert launched == pytest.approx(list(map(round, launched))) and sum(launched) == pytest.approx(len(took))
    # Products of one matrix share a launch here, which counts for the last of them.
    assert ops & seen.excess.keys() and seen.excess.keys() <= seen.options.keys()
    assert {o.precision.name for o in seen.options.values()} <= {"fp32", precision}


def test_what_an_option_took_counts_for_it_and_for_others_of_its_precision() -> None:
    study = choice(auto()).study
    op = max(study.ops, key=lambda op: len(op.options))
    name, low = op.node.name, [o for o in op.options if o.precision.is_integer]
    assert len(low) > 1
    seen = [
        Observed({name: low[0]}, {name: 1.0}),
        Observed({name: low[0]}, {name: 3.0}),
        Observed({name: Option.parse("fp32")}, {}),
    ]
    (after,) = [o for o in corrected(study, seen).ops if o.node is op.node]
    added = [a - b for a, b in zip(after.seconds, op.seconds, strict=True)]
    assert added == pytest.approx([2.0 if o.precision.is_integer else 0.0 for o in op.options])
    others = [o for o in corrected(study, seen).ops if o.node is not op.node]
    assert others == [o for o in study.ops if o.node is not op.node]


def slow(monkeypatch: pytest.MonkeyPatch, kinds: set[tuple[str, str]]) -> None:
    """Have programs timed, by a clock to which launches of some (family, precision) take long."""
    lowered: list[GraphModule] = []
    predict = auto_module.predicted_times

    def predicted_times(gm: GraphModule, *rest: Any) -> dict[str, float]:
        lowered.append(gm)
        return predict(gm, *rest)

    def timer(executable: Any, values: Any) -> Times:
        found = {}
        for launch in launches(describe.inline(lowered[-1])):
            precisions = {describe.precision_in(node) or "fp32" for node in launch.primitives}
            found[launch.name] = 1e-2 if any((launch.family, p) in kinds for p in precisions) else 1e-4
        return Times(sum(found.values()), found)

    monkeypatch.setattr(auto_module, "predicted_times", predicted_times)
    monkeypatch.setattr(build_module, "timer_of", lambda backend: timer)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "kinds", [{("spmm", "int8")}, {("gemm", "int8")}, {("gemm", "fp32"), ("spmm", "bf16"), ("spmm", "fp32")}]
)
def test_what_is_slow_is_not_taken(monkeypatch: pytest.MonkeyPatch, kinds: set[tuple[str, str]]) -> None:
    slow(monkeypatch, kinds)
    compiled = auto()
    plan = choice(compiled).plan
    assert plan is not None
    taken = {
        (op.node.name.split("_")[0], plan[op.node.name].precision.name) for op in choice(compiled).study.ops
    }
    assert not taken & kinds
    text = compiled.explain()
    assert "ms measured" in text and "taken:" in text


def test_processors_go_by_predictions() -> None:
    assert "measured" not in "".join(choice(auto()).log)
    with torch.no_grad():
        assert auto()(*INPUTS).isfinite().all()


@pytest.mark.first(1)
@pytest.mark.parametrize(("measured", "words"), [(True, "was measured"), (False, "is predicted")])
def test_a_uniform_precision_is_said_to_be_what_it_was_found_to_be(measured: bool, words: str) -> None:
    compiled = auto()
    taken = choice(compiled)
    taken.take_uniform(dict(compiled._captured().stages)["assign"], measured=measured)
    assert f"a uniform precision {words} to be faster" in taken.solution.binding


def test_times_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GNNC_CACHE", str(tmp_path))
    assert timing._load("key") is None
    timing._store("key", Times(1e-3, {"a": 2e-4}))
    assert timing._load("key") == Times(1e-3, {"a": 2e-4})
    monkeypatch.setenv("GNNC_CACHE", "off")
    timing._store("other", Times(1e-3, {}))
    assert timing._load("other") is None and len(list(tmp_path.rglob("*.json"))) == 1


def test_times_are_those_of_a_program_on_its_sizes_by_these_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(program: str, *values: Any) -> str:
        return timing._key(SimpleNamespace(fingerprint=program, device=None), values)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    x = torch.ones(4, 6)
    keys = [key("a", x), key("b", x), key("a", x.half()), key("a", x[:, :3]), key("a", x, 2)]
    assert key("a", x + 1) == keys[0] and len(set(keys)) == 5
    monkeypatch.setattr(timing, "cuda_facts", lambda: ("other sources",))
    assert key("a", x) not in keys


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"seconds": NaN, "launches": {}}', '{"seconds": 1, "launches": {"a": -1}}']
)
def test_damaged_times_are_measured_again(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GNNC_CACHE", str(tmp_path))
    timing._store("key", Times(1e-3, {"a": math.pi}))
    (tmp_path / "times" / "key.json").write_text(text)
    with pytest.warns(UserWarning, match="is damaged"):
        assert timing._load("key") is None


def test_a_folder_that_cannot_be_written_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GNNC_CACHE", str(tmp_path / "file"))
    assert timing._load("key") is None
    with pytest.warns(UserWarning, match="times cannot be kept"):
        timing._store("key", Times(1e-3, {}))
