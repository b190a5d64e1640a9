"""Style and files of figures, of programs and of measurements."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

INK, MUTED = "#24292f", "#6b7280"


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure with fixed ids and no date: the same content gives the same file."""
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with mpl.rc_context({"svg.hashsalt": "gnnc", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=160, metadata=undated.get(Path(path).suffix.lower()))


def tidy(axes: Axes, title: str, *, grid: Literal["x", "y", "both"] = "both", size: float = 8) -> None:
    """Give a panel its title, a faint grid and no frame.

    Args:
        axes: the panel.
        title: text at the panel's upper left.
        grid: axes with grid lines.
        size: font size of the numbers, in points.
    """
    axes.set_title(title, fontsize=size + 2, color=INK, loc="left")
    axes.tick_params(labelsize=size, colors=MUTED)
    axes.grid(True, axis=grid, color="#e5e7eb", linewidth=0.7, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def plain_log_ticks(axis: Axis) -> None:
    """Set plain numbers on a logarithmic axis: 1, 2 and 5 of each decade within two decades, else 1."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def name_points(
    axes: Axes, points: Sequence[tuple[float, float]], names: Sequence[str], colors: Sequence[str]
) -> None:
    """Write the name of each point beside it, where no other name or point is, with a line to the point.

    The figure must have its final layout: positions are compared in pixels.

    Args:
        axes: the panel; its limits stay.
        points: coordinates of the points, in data units.
        names: a name for each point.
        colors: a color for each name.
    """
    renderer = axes.figure.canvas.get_renderer()  # pyright: ignore[reportAttributeAccessIssue]
    frame, to_data = axes.get_window_extent(renderer), axes.transData.inverted()
    pixels = [tuple(axes.transData.transform(point)) for point in points]
    taken = [Bbox.from_bounds(x - 8, y - 8, 16, 16) for x, y in pixels]
    for number in sorted(range(len(points)), key=lambda i: (-pixels[i][1], pixels[i][0])):
        label = axes.text(0, 0, names[number], fontsize=7.5, color=colors[number], va="center")
        size = label.get_window_extent(renderer)
        box = _free_box(pixels[number], size.width, size.height, taken, frame)
        taken.append(box)
        middle = (box.y0 + box.y1) / 2
        label.set_position(to_data.transform((box.x0, middle)))
        if abs(middle - pixels[number][1]) > 1:
            nearest = box.x0 - 2 if box.x0 > pixels[number][0] else box.x1 + 2
            line = points[number], tuple(to_data.transform((nearest, middle)))
            axes.plot(*zip(*line, strict=True), color=colors[number], linewidth=0.5, zorder=1)


def _free_box(
    point: tuple[float, float], width: float, height: float, taken: Sequence[Bbox], frame: Bbox
) -> Bbox:
    """Return the box nearest to a point, in pixels, that overlaps none and lies in the frame."""
    steps = sorted(range(-20, 21), key=abs)
    boxes = [
        Bbox.from_bounds(point[0] + side, point[1] + step * height * 1.1 - height / 2, width, height)
        for step in steps
        for gap in (10.0 if step == 0 else 26.0,)
        for side in (gap, -gap - width)
    ]
    inside = [box for box in boxes if frame.x0 <= box.x0 and box.x1 <= frame.x1]
    inside = [box for box in inside if frame.y0 <= box.y0 and box.y1 <= frame.y1] or boxes
    return next((box for box in inside if box.count_overlaps(taken) == 0), inside[0])
