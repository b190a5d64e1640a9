"""Draws the results of ``cuda_inference.py``, and prints their table.

python benchmarks/cuda_report.py benchmarks/results/cuda-inference.json docs/cuda-inference.svg
"""

import argparse
import json
from pathlib import Path
from typing import Any

from cuda_inference import OURS, table
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gnnc.report.figure_style import INK, MUTED, plain_log_ticks, save, tidy

_PEER, _GNNC = "#9a6700", "#0550ae"
_COLUMNS = 4


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a panel for every model and graph: one bar for each contender, shorter is faster."""
    cases = list(dict.fromkeys((row["model"], row["graph"]) for row in rows))
    height = -(-len(cases) // _COLUMNS)
    figure = Figure(figsize=(3.2 * _COLUMNS, 2.3 * height), layout="constrained")
    FigureCanvasAgg(figure)
    for number, case in enumerate(cases, 1):
        case_rows = [row for row in rows if (row["model"], row["graph"]) == case and "ms" in row]
        _panel(figure.add_subplot(height, _COLUMNS, number), case, case_rows)
    save(figure, path)


def _panel(axes: Axes, case: tuple[str, str], rows: list[dict[str, Any]]) -> None:
    times = [row["ms"]["median"] for row in rows]
    colors = [_GNNC if row["name"] in OURS else _PEER for row in rows]
    axes.barh([row["name"] for row in rows], times, color=colors, height=0.66, zorder=3)
    for place, time in enumerate(times):
        axes.text(time * 1.08, place, f"{time:.3g}", va="center", fontsize=7.5, color=INK)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(min(times) * 0.6, max(times) * 2.2)
    plain_log_ticks(axes.xaxis)
    tidy(axes, f"{case[0].upper()}, {case[1]}", grid="x", size=7.5)
    axes.set_xlabel("ms a call", fontsize=8, color=MUTED)


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    rows = json.loads(args.results.read_text())["rows"]
    plot(rows, args.picture)
    print(table(rows))


if __name__ == "__main__":
    main()
