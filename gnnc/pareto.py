"""Accuracy against time: uniform precisions beside ``auto`` at several budgets, measured.

Matplotlib takes half a second to import, so functions that draw import it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnc.api import compile
from gnnc.calibrate.timing import elapsed, measure_on
from gnnc.compiler.dispatch import device_of
from gnnc.errors import InputError
from gnnc.passes.search.sensitivity import relative_l2
from gnnc.runtime.backend import get_backend
from gnnc.torch_private import pytree

BUDGETS = (0.002, 0.005, 0.01, 0.02, 0.05)
FORMATS = (".svg", ".png")

_ROUNDS = 15
_UNIFORM, _AUTO = "#9a6700", "#0550ae"
_LEAST_ACCURACY_SPAN = 2.0
"""Percentage points that an axis of accuracies shows at least: some rows more or less are no gap."""


@dataclass(frozen=True, slots=True)
class Point:
    """One way to compute a model.

    Attributes:
        name: ``int8``, or ``auto 0.02`` with its budget.
        seconds: the shortest time of a call; on a GPU of the device, calls queued.
        error: relative L2 error of the outputs against the model in FP32, the largest.
        accuracy: share of the rows whose largest output is at the label, in percent; None without labels.
    """

    name: str
    seconds: float
    error: float
    accuracy: float | None

    @property
    def is_auto(self) -> bool:
        """Return whether ``auto`` chose the precisions."""
        return self.name.startswith("auto")


@dataclass(frozen=True, slots=True)
class Pareto:
    """Measured points of a model.

    Attributes:
        model: the model's class.
        points: uniform precisions first, then ``auto`` by budget.
    """

    model: str
    points: tuple[Point, ...]

    def draw(self, path: str | Path) -> None:
        """Write the points as a picture.

        Args:
            path: file to write; its suffix chooses SVG or PNG.

        Raises:
            InputError: the suffix is neither.
        """
        draw((self,), path)


def pareto(
    model: torch.nn.Module,
    *inputs: Any,
    labels: Tensor | None = None,
    path: str | Path | None = None,
    budgets: Sequence[float] = BUDGETS,
    backend: str = "auto",
) -> Pareto:
    """Measure a model in every uniform precision and in ``auto`` at several budgets.

    Args:
        model: the model, in eval mode.
        *inputs: the arguments of a call; the precisions are chosen and the times taken on them.
        labels: int64 ``[rows]``, the class of each row of the first output; negative ones are left out.
            With them accuracy is measured and drawn, else the output's error.
        path: file of the drawing, ``.svg`` or ``.png``; None draws nothing.
        budgets: error budgets for ``auto``.
        backend: the backend, see ``gnnc.compile``.

    Returns:
        The points, which ``draw`` again.

    Raises:
        InputError: the labels do not fit the output, or the suffix of ``path`` is unknown.
        GnncError: ``gnnc.compile`` refuses the model or the backend.
    """
    if path is not None:
        _check_suffix(path)
    device = _device(model, inputs)
    names = sorted(get_backend(backend, device).target.precisions, key=lambda name: (name != "fp32", name))
    compiled = {name: compile(model, name, example_inputs=inputs, backend=backend) for name in names}
    for budget in sorted(budgets, reverse=True):
        compiled[f"auto {budget:g}"] = compile(
            model, "auto", example_inputs=inputs, error_budget=budget, backend=backend
        )
    with torch.no_grad():
        wanted = _outputs(model(*inputs))
        _check_labels(labels, wanted)
        calls = {name: lambda call=call: call(*inputs) for name, call in compiled.items()}
        seconds = shortest(calls, measure=measure_on(device))
        points = []
        for name, call in compiled.items():
            got = _outputs(call(*inputs))
            error = max((relative_l2(a, b) for a, b in zip(got, wanted, strict=True)), default=0.0)
            points.append(Point(name, seconds[name], error, _accuracy(got, labels)))
    result = Pareto(type(model).__name__, tuple(points))
    if path is not None:
        result.draw(path)
    return result


def shortest(
    calls: dict[str, Callable[[], object]],
    rounds: int = _ROUNDS,
    measure: Callable[[Callable[[], object]], float] = elapsed,
) -> dict[str, float]:
    """Return the shortest seconds of each call; rounds take turns, so that a disturbance hits all alike."""
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(rounds + 1):
        for name, call in calls.items():
            seconds = measure(call)
            best[name] = min(best[name], seconds) if turn else best[name]
    return best


def _check_suffix(path: str | Path) -> str:
    """Return the suffix of a picture's path; refuse an unknown one."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise InputError(f"gnnc.pareto writes {' and '.join(FORMATS)} files, got {str(path)!r}")
    return suffix


def _device(model: torch.nn.Module, inputs: Sequence[Any]) -> torch.device:
    """The model's device: inputs may be objects, such as ``Data``, that hold their tensors."""
    given = (leaf.device for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
    return device_of(model) or next(given, torch.device("cpu"))


def _outputs(value: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _check_labels(labels: Tensor | None, outputs: Sequence[Tensor]) -> None:
    if labels is None:
        return
    first = outputs[0] if outputs else None
    if first is None or first.dim() != 2 or labels.shape != first.shape[:1]:
        shape = "no floating output" if first is None else f"an output of shape {tuple(first.shape)}"
        raise InputError(f"gnnc.pareto: labels of shape {tuple(labels.shape)} do not fit {shape}")


def _accuracy(outputs: Sequence[Tensor], labels: Tensor | None) -> float | None:
    if labels is None:
        return None
    known = labels >= 0
    hits = outputs[0].argmax(1)[known] == labels[known]
    return 100.0 * hits.float().mean().item()


def draw(results: Sequence[Pareto], path: str | Path) -> None:
    """Write several models side by side.

    Args:
        results: what ``pareto`` returned.
        path: file to write; its suffix chooses SVG or PNG.

    Raises:
        InputError: the suffix is neither.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from gnnc.report.figure_style import save

    _check_suffix(path)
    figure = Figure(figsize=(5.2 * len(results), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for number, result in enumerate(results, 1):
        _panel(figure.add_subplot(1, len(results), number), result)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside upper right",
        ncols=2,
        fontsize=7.5,
        frameon=False,
    )
    figure.draw_without_rendering()  # names are placed in the final layout
    for axes, result in zip(figure.axes, results, strict=True):
        _name_points(axes, result.points, _is_labeled(result))
    save(figure, path)


def _panel(axes: Any, result: Pareto) -> None:
    from gnnc.report.figure_style import MUTED, tidy

    labeled = _is_labeled(result)
    for is_auto, color, marker in ((False, _UNIFORM, "s"), (True, _AUTO, "o")):
        points = [point for point in result.points if point.is_auto == is_auto]
        xs = [point.seconds * 1e3 for point in points]
        ys = [_height(point, labeled) for point in points]
        label = "auto, by error budget" if is_auto else "one precision for all"
        axes.scatter(xs, ys, color=color, marker=marker, s=34, label=label, zorder=3)
    tidy(axes, result.model)
    axes.set_xlabel("time of a call, ms", fontsize=8.5, color=MUTED)
    axes.set_ylabel("accuracy, %" if labeled else "relative error of the output", fontsize=8.5, color=MUTED)
    if not labeled:
        axes.set_yscale("log")
    axes.margins(0.18)
    low, high = axes.get_ylim()
    if labeled and high - low < _LEAST_ACCURACY_SPAN:
        middle = (low + high) / 2
        axes.set_ylim(middle - _LEAST_ACCURACY_SPAN / 2, middle + _LEAST_ACCURACY_SPAN / 2)
    axes.set_xlim(left=0)


def _is_labeled(result: Pareto) -> bool:
    return all(point.accuracy is not None for point in result.points)


def _name_points(axes: Any, points: Sequence[Point], labeled: bool) -> None:
    from gnnc.report.figure_style import name_points

    places = [(point.seconds * 1e3, _height(point, labeled)) for point in points]
    colors = [_AUTO if point.is_auto else _UNIFORM for point in points]
    name_points(axes, places, [point.name for point in points], colors)


def _height(point: Point, labeled: bool) -> float:
    if labeled:
        assert point.accuracy is not None
        return point.accuracy
    return max(point.error, 1e-8)
