"""Style and files of figures, of programs and of measurements."""

from pathlib import Path
from typing import Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
        title: at its upper left.
        grid: which lines it has.
        size: of the numbers, in points.
    """
    axes.set_title(title, fontsize=size + 2, color=INK, loc="left")
    axes.tick_params(labelsize=size, colors=MUTED)
    axes.grid(True, axis=grid, color="#e5e7eb", linewidth=0.7, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
