"""Figures: names of points that do not lie on each other, and plain numbers on logarithmic axes."""

from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gnnc.report.figure_style import name_points, plain_log_ticks

NEAR = [(1.3 + 0.01 * i, 81.8) for i in range(8)]
SPREAD = [(1.0, 1.0), (9.0, 1.0), (1.0, 9.0), (9.0, 9.0)]


def figure_with_axes() -> tuple[Figure, object]:
    figure = Figure(figsize=(5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot(1, 1, 1)


@pytest.mark.parametrize("points", [NEAR, SPREAD, [(2.0, 2.0)] * 6])
def test_names_of_points_do_not_overlap_and_lie_within_the_panel(points: list[tuple[float, float]]) -> None:
    figure, axes = figure_with_axes()
    axes.scatter(*zip(*points, strict=True))
    axes.set_xlim(0, 10)
    axes.set_ylim(points[0][1] - 2, points[0][1] + 10)
    figure.draw_without_rendering()
    name_points(axes, points, [f"auto 0.{i:03d}" for i in range(len(points))], ["black"] * len(points))
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    frame = axes.get_window_extent()
    assert len(boxes) == len(points)
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 + 1 for box in boxes)


@pytest.mark.parametrize(
    ("limits", "labels"), [((0.9, 12), ["1", "2", "5", "10"]), ((0.9, 1500), ["1", "10"])]
)
def test_a_logarithmic_axis_has_plain_numbers(limits: tuple[float, float], labels: list[str]) -> None:
    figure, axes = figure_with_axes()
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    plain_log_ticks(axes.xaxis)
    figure.draw_without_rendering()
    shown = [tick.label1.get_text() for tick in axes.xaxis.get_major_ticks()]
    assert [label for label in shown if limits[0] <= float(label) <= limits[1]][: len(labels)] == labels
    assert all(tick.label1.get_text() == "" for tick in axes.xaxis.get_minor_ticks())
