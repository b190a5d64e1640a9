"""Tables, figures and documentation page of a run of ``benchmarks/auto.py``."""

import statistics
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tabulate import tabulate

from gnnc.report.figure_style import save

BUDGETS = (0.005, 0.02, 0.05)
HELD_OUT = 1.2
FRONT_ERROR = 0.01
LARGE = 100_000
"""Least edges of a graph whose kernels' predicted times are compared with measured ones."""

STRATEGIES = {"sensitivity": "#0550ae", "gain": "#9a6700", "random": "#9ca3af"}


def time_within(points: list[tuple[float, float]], limit: float) -> float:
    """Return the least time of the choices whose error is within a limit."""
    return min((ms for ms, err in points if err <= limit), default=float("inf"))


def cases(results: list[dict[str, Any]], time: str | None = None) -> list[dict[str, Any]]:
    """Return each budget of each model beside the best uniform precision that keeps it.

    Args:
        results: one entry for each model and graph.
        time: ``ms`` for times on the whole graph, ``seen_ms`` on the part that was chosen on; None for
            the latter where they were measured.
    """
    rows = []
    time = time or ("seen_ms" if all("seen_ms" in w for r in results for w in r["ways"].values()) else "ms")
    for result in results:
        for budget in BUDGETS:
            ways = result["ways"]
            auto = ways[str(budget)]
            uniform = [key for key in ways if key not in map(str, BUDGETS)]
            good = {key: ways[key][time] for key in uniform if keeps(ways[key], budget)}
            best = min(good, key=good.__getitem__)
            rows.append(
                {
                    "graph": result["graph"], "model": result["model"], "budget": budget,
                    "examples": auto["error"] / budget, "held_out": auto["held_out_error"] / budget,
                    "ms": auto[time], "uniform": best, "uniform_ms": good[best],
                    "ratio": auto[time] / good[best], "compile_s": auto["compile_s"],
                }
            )  # fmt: skip
    return rows


def keeps(way: dict[str, Any], budget: float) -> bool:
    """Return whether a way to compute a model keeps a budget, by the criterion of auto."""
    return way["error"] <= budget and way["held_out_error"] <= HELD_OUT * budget


def conclusions(report: dict[str, Any]) -> dict[str, Any]:
    """Return the summary figures of the whole run."""
    results = report["results"]
    rows = cases(results)
    off = [
        abs(k["predicted"] / k["measured"] - 1) for r in (*results, *report["arxiv"]) for k in r["kernels"]
    ]
    whole = [row["ratio"] for row in cases(results, "ms")]
    return {
        "cases": len(rows),
        "held_out_within_1.2_budget": sum(r["held_out"] <= HELD_OUT for r in rows),
        "worst_held_out_over_budget": max(r["held_out"] for r in rows),
        "at_most_5_percent_slower": sum(r["ratio"] <= 1.05 for r in rows),
        "worst_ratio": max(r["ratio"] for r in rows),
        "faster": sum(r["ratio"] < 1 for r in rows),
        "faster_by_2_percent": sum(r["ratio"] < 0.98 for r in rows),
        "faster_by_5_percent": sum(r["ratio"] < 0.95 for r in rows),
        "on_the_whole_graph": {
            "at_most_5_percent_slower": sum(ratio <= 1.05 for ratio in whole),
            "worst_ratio": max(whole),
            "faster": sum(ratio < 1 for ratio in whole),
        },
        "longest_compile_s": {
            name: max(r["compile_s"] for r in rows if r["graph"] == name)
            for name in dict.fromkeys(r["graph"] for r in rows)
        },
        "longest_choice_on_arxiv_s": max((c["seconds"] for c in report["arxiv"]), default=None),
        "kernels": len(off),
        "median_prediction_error": statistics.median(off) if off else None,
        "error_model": _spread([m / p for r in results for p, m in r.get("error_model", [])]),
        "rank_correlation": _spread([c for r in results if (c := r["rank_correlation"]) is not None]),
        "time_at_error_0.01_relative_to_sensitivity": {s: relative_time(results, s) for s in STRATEGIES},
    }


def _spread(values: list[float]) -> dict[str, float] | None:
    """Return the count, the median and the range of nine in ten values."""
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"count": len(values), "median": statistics.median(values), "from": cuts[0], "to": cuts[-1]}


def relative_time(results: list[dict[str, Any]], strategy: str) -> float | None:
    """Return the mean of a strategy's least time over that by sensitivities, at one error."""
    pairs = [
        tuple(time_within(result["fronts"][s], FRONT_ERROR) for s in (strategy, "sensitivity"))
        for result in results
    ]
    ratios = [other / best for other, best in pairs if max(other, best) < float("inf")]
    return statistics.fmean(ratios) if ratios else None


def table(results: list[dict[str, Any]]) -> str:
    """Return the cases as text."""
    rows = [
        [
            r["graph"], r["model"], r["budget"], f"{r['examples']:.2f}", f"{r['held_out']:.2f}",
            f"{r['ms']:.3f}", r["uniform"], f"{r['uniform_ms']:.3f}", f"{r['ratio']:.2f}",
            f"{r['compile_s']:.1f}",
        ]
        for r in cases(results)
    ]  # fmt: skip
    headers = ["graph", "model", "budget", "error / budget", "held-out / budget", "auto ms"]
    headers += ["best uniform", "its ms", "auto / uniform", "compile s"]
    return tabulate(rows, headers, disable_numparse=True, tablefmt="github")


def page(report: dict[str, Any], json: str, fronts: str) -> str:
    """Return the documentation page of a run; ``json`` and ``fronts`` are the names of its files."""
    figures, machine, calibration = conclusions(report), report["machine"], report["calibration"]
    count = figures["cases"]
    at = {s: v for s, v in figures["time_at_error_0.01_relative_to_sensitivity"].items() if v is not None}
    off = figures["median_prediction_error"]
    longest = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in figures["longest_compile_s"].items())
    arxiv = ", ".join(f"{c['model']} {c['seconds']:.0f} s" for c in report["arxiv"])
    graphs = ", ".join(figures["longest_compile_s"])
    lines = [
        f"{count} cases ({graphs}); held-out error at most 1.2 times the budget in "
        f"{figures['held_out_within_1.2_budget']}, at worst "
        f"{figures['worst_held_out_over_budget']:.2f} times",
        "measured time at most 5% above that of the best uniform precision that keeps the budget in "
        f"{figures['at_most_5_percent_slower']}, at worst {figures['worst_ratio']:.2f} times; faster in "
        f"{figures['faster']}, by 2% or more in {figures['faster_by_2_percent']}, by 5% or more in "
        f"{figures['faster_by_5_percent']}",
        *_on_the_whole_graph(report["results"], figures),
        f"predicted against measured kernel times on graphs of {LARGE:,} edges and more: "
        + ("not measured" if off is None else f"median error {off:.0%} over {figures['kernels']} kernels"),
        f"compiling with auto takes at most {longest}; on the arxiv-shaped graph {arxiv or 'not measured'}",
        f"calibration took {format(calibration['measured_in'], '.1f') if calibration else '-'} s",
        f"measured over predicted error of a choice: {_spread_text(figures['error_model'])}",
        "rank correlation of receptive-field gain and sensitivity, by model and graph: "
        + _spread_text(figures["rank_correlation"]),
        f"at a measured error of {FRONT_ERROR}, predicted time relative to choices by sensitivity: "
        + ", ".join(f"{strategy} {ratio:.3f}" for strategy, ratio in at.items()),
    ]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['capability']}, threads: {machine['threads']}"
    return "\n".join(
        [
            "# What auto chooses, measured" + (" on a GPU" if "gpu" in machine else ""),
            "",
            "<!-- Written by benchmarks/auto.py --docs. -->",
            "",
            _wrapped(
                f"One run of `benchmarks/auto.py` ({where}, torch {machine['torch']}, copy bandwidth "
                f"{machine['copy_gbs']} GB/s); [Let the compiler choose](auto.md#results) describes "
                f"the comparison. The whole run is in `benchmarks/results/{json}`."
            ),
            "",
            *[_wrapped(f"- {line}.", "  ") for line in lines],
            "",
            f"![Fronts of choices by sensitivity, by gain and by random weights]({fronts})",
            "",
            table(report["results"]),
            "",
        ]
    )


def _on_the_whole_graph(results: list[dict[str, Any]], figures: dict[str, Any]) -> list[str]:
    """Return a line on the times on the whole graph, unless the cases are judged by those."""
    if "seen_ms" not in next(iter(results[0]["ways"].values())):
        return []
    whole = figures["on_the_whole_graph"]
    return [
        "these times are of the graph that the precisions were chosen on; on the whole one, with 1.25 times "
        f"as many nodes, at most 5% slower in {whole['at_most_5_percent_slower']}, at worst "
        f"{whole['worst_ratio']:.2f} times, faster in {whole['faster']}"
    ]


def _spread_text(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "not measured"
    return (
        f"median {spread['median']:.2f}, nine in ten from {spread['from']:.2f} to {spread['to']:.2f} "
        f"({spread['count']})"
    )


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the fronts: one panel for each model and graph."""
    columns = list(dict.fromkeys(r["model"] for r in results))
    rows = list(dict.fromkeys(r["graph"] for r in results))
    figure = Figure(figsize=(2.5 * len(columns), 2.1 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    errors = [err for r in results for points in r["fronts"].values() for _, err in points]
    limits = max(min(errors), 1e-4) * 0.7, max(errors) * 1.5
    for result in results:
        place = rows.index(result["graph"]) * len(columns) + columns.index(result["model"]) + 1
        axes = figure.add_subplot(len(rows), len(columns), place)
        for strategy, color in STRATEGIES.items():
            points = [(ms, max(err, 1e-6)) for ms, err in result["fronts"][strategy]]
            axes.scatter(*zip(*points, strict=True), s=12, color=color, label=strategy, zorder=2)
        front = pareto_front(result["fronts"]["sensitivity"])
        axes.plot(*zip(*front, strict=True), color=STRATEGIES["sensitivity"], linewidth=1, zorder=1)
        axes.set_yscale("log")
        axes.set_ylim(*limits)
        axes.set_title(f"{result['model']}, {result['graph'].split('_')[0]}", fontsize=8, loc="left")
        axes.tick_params(labelsize=6.5)
        axes.grid(True, color="#e5e7eb", linewidth=0.5)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper right", ncols=len(names), fontsize=7.5, frameon=False)
    figure.supxlabel("predicted time, ms", fontsize=8)
    figure.supylabel("measured relative error of the output", fontsize=8)
    save(figure, path)


def pareto_front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point beats in both coordinates."""
    front: list[tuple[float, float]] = []
    for ms, err in sorted(points):
        if not front or err < front[-1][1]:
            front.append((ms, max(err, 1e-6)))
    return front
