"""Pictures of what ``gnnc.pareto`` measured."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gnnc.pareto import Pareto, Point, check_suffix
from gnnc.report.figure_style import MUTED, save, tidy

_UNIFORM, _AUTO = "#9a6700", "#0550ae"
_NAME = (80.0, 13.0)
"""Width and height in pixels that the name of a point may take."""


def draw(results: Sequence[Pareto], path: str | Path) -> None:
    """Write several models side by side.

    Args:
        results: what ``pareto`` returned.
        path: file to write; its suffix chooses SVG or PNG.

    Raises:
        InputError: the suffix is neither.
    """
    check_suffix(path)
    figure = Figure(figsize=(5.2 * len(results), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for number, result in enumerate(results, 1):
        _panel(figure.add_subplot(1, len(results), number), result)
    save(figure, path)


def _panel(axes: Axes, result: Pareto) -> None:
    labelled = all(point.accuracy is not None for point in result.points)
    for is_auto, color, marker in ((False, _UNIFORM, "s"), (True, _AUTO, "o")):
        points = [point for point in result.points if point.is_auto == is_auto]
        xs = [point.seconds * 1e3 for point in points]
        ys = [_height(point, labelled) for point in points]
        label = "auto, by error budget" if is_auto else "one precision for all"
        axes.scatter(xs, ys, color=color, marker=marker, s=34, label=label, zorder=3)
    tidy(axes, result.model)
    axes.set_xlabel("time of a call, ms", fontsize=8.5, color=MUTED)
    axes.set_ylabel("accuracy, %" if labelled else "relative error of the output", fontsize=8.5, color=MUTED)
    if not labelled:
        axes.set_yscale("log")
    axes.margins(0.18)
    _label(axes, result.points, labelled)
    axes.legend(fontsize=7.5, frameon=False)


def _label(axes: Axes, points: Sequence[Point], labelled: bool) -> None:
    """Name each point to its right, from the lowest up, moved up where names would meet."""
    axes.autoscale_view()
    places = [axes.transData.transform((p.seconds * 1e3, _height(p, labelled))) for p in points]
    free: list[tuple[float, float]] = []
    for (x, y), point in sorted(zip(places, points, strict=True), key=lambda pair: (pair[0][1], pair[0][0])):
        above = [top for left, top in free if abs(left - x) < _NAME[0]]
        lift = max([y, *(top for top in above if top > y)]) - y
        free.append((x, y + lift + _NAME[1]))
        axes.annotate(
            point.name,
            (point.seconds * 1e3, _height(point, labelled)),
            xytext=(7, lift * 72 / axes.figure.dpi - 3),
            textcoords="offset points",
            fontsize=7.5,
            color=_AUTO if point.is_auto else _UNIFORM,
        )


def _height(point: Point, labelled: bool) -> float:
    if labelled:
        assert point.accuracy is not None
        return point.accuracy
    return max(point.error, 1e-8)
