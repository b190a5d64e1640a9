"""gnnc.pareto: the points and the picture."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from zoo import build, random_graph

import gnnc
from gnnc.pareto import shortest
from gnnc.runtime.backend import Backend, get_backend

pytestmark = pytest.mark.usefixtures("rates")
INPUTS = random_graph(80, 400)


@pytest.mark.slow
def test_points_of_uniform_precisions_and_of_budgets(tmp_path: Path) -> None:
    path = tmp_path / "pareto.svg"
    result = gnnc.pareto(build("gcn"), *INPUTS, path=path, budgets=(0.004, 0.02))
    assert [p.name for p in result.points] == ["fp32", "bf16", "int8", "auto 0.02", "auto 0.004"]
    assert [p.is_auto for p in result.points] == [False] * 3 + [True] * 2
    assert all(p.seconds > 0 and p.accuracy is None for p in result.points)
    errors = {p.name: p.error for p in result.points}
    assert errors["fp32"] < 1e-5 < errors["bf16"] < errors["int8"]
    assert errors["auto 0.004"] <= 0.004 and errors["auto 0.02"] <= 0.02
    text = path.read_text(encoding="utf-8")
    assert "auto 0.004" in text and "relative error of the output" in text
    result.draw(tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == text, "the same points, the same file"


@pytest.mark.slow
def test_labels_give_accuracy(tmp_path: Path) -> None:
    model = build("gcn")
    with torch.no_grad():
        labels = model(*INPUTS).argmax(1)
    labels[:40] = -1
    path = tmp_path / "pareto.png"
    result = gnnc.pareto(model, *INPUTS, labels=labels, path=path, budgets=(0.02,))
    accuracy = {p.name: p.accuracy for p in result.points}
    assert accuracy["fp32"] == 100.0 and all(a is not None and a >= 90 for a in accuracy.values())
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        gnnc.InputError, match=r"labels of shape \(3,\) do not fit an output of shape \(80, 5\)"
    ):
        gnnc.pareto(build("gcn"), *INPUTS, labels=torch.zeros(3, dtype=torch.long), budgets=())
    with pytest.raises(gnnc.InputError, match=r"writes .svg and .png files, got 'plot.gif'"):
        gnnc.pareto(build("gcn"), *INPUTS, path="plot.gif")


def test_shortest_takes_turns_and_leaves_out_the_first_round() -> None:
    calls: list[str] = []
    seconds = iter([1.0, 2.0, 9.0, 8.0, 5.0, 8.5])

    def measure(call: Callable[[], object]) -> float:
        call()
        return next(seconds)

    two = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    best = shortest(two, rounds=2, measure=measure)
    assert calls == ["a", "b"] * 3
    assert best == {"a": 5.0, "b": 8.0}


def test_the_precisions_are_those_of_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def known(name: str, device: torch.device) -> Backend:
        asked.append((name, device))
        return get_backend("cpu")

    # `gnnc.pareto` is the function, which has the name of its module
    monkeypatch.setattr(importlib.import_module("gnnc.pareto"), "get_backend", known)
    gnnc.pareto(build("gcn"), *INPUTS, budgets=())
    assert asked == [("auto", torch.device("cpu"))]
