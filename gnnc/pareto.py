"""Accuracy against time: uniform precisions beside ``auto`` at several budgets, measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnc.api import compile, device_of
from gnnc.calibrate.timing import elapsed, measure_on
from gnnc.errors import InputError
from gnnc.passes.search.sensitivity import relative_l2
from gnnc.runtime.backend import get_backend
from gnnc.torch_private import pytree

BUDGETS = (0.002, 0.005, 0.01, 0.02, 0.05)
FORMATS = (".svg", ".png")

_ROUNDS = 15


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
        """Whether ``auto`` chose the precisions."""
        return self.name.startswith("auto")


@dataclass(frozen=True, slots=True)
class Pareto:
    """What was measured.

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
        from gnnc import plotting  # matplotlib takes half a second to import

        check_suffix(path)
        plotting.draw((self,), path)


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
        path: where to draw it, ``.svg`` or ``.png``; None draws nothing.
        budgets: error budgets for ``auto``.
        backend: as for ``gnnc.compile``.

    Returns:
        The points, which ``draw`` again.

    Raises:
        InputError: the labels do not fit the output, or the suffix of ``path`` is unknown.
        GnncError: as ``gnnc.compile``.
    """
    if path is not None:
        check_suffix(path)
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


def check_suffix(path: str | Path) -> str:
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
