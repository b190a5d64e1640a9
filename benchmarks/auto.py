"""What ``precision="auto"`` chooses, beside the uniform precisions, in one run.

    OMP_NUM_THREADS=1 python benchmarks/auto.py --out benchmarks/results/auto-cpu.json --plot docs/fronts.svg

For each graph and model: the precisions are chosen on the graph that 80% of the nodes induce. Held-out
error is that of the other nodes' outputs on the whole graph, where all times are taken too, in turns: the
least of many calls, by the thread's own clock where there is one thread, so that other processes do not
count.
Fronts: the integer program with measured sensitivities, with 1 + receptive-field gain and with random
weights in their place; predicted time against the error that a run of each choice shows.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import graphs
import measure
import models
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tabulate import tabulate
from torch import Tensor, nn
from torch_geometric.utils import subgraph

import gnnc
from gnnc.arguments import flatten_call
from gnnc.passes.choose import solve
from gnnc.passes.study import Study, nominal_error
from gnnc.tradeoff import shortest

GRAPHS = ("cora", "pubmed", "amazon_computers", "facebook_pages")
MODELS = {**models.MODELS, "residual": models.residual_gcn}
BUDGETS = (0.005, 0.02, 0.05)
UNIFORM = ("fp32", "bf16", "int8")
FRONT_BUDGETS = (0.001, 0.002, 0.004, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1)
RANDOM_SEEDS = 3
EPOCHS = {"cora": 40, "pubmed": 20, "amazon_computers": 10, "facebook_pages": 5}
LARGE = 100_000
STRATEGIES = {"sensitivity": "#0550ae", "gain": "#9a6700", "random": "#9ca3af"}


def trained(name: str, data: dict[str, Any], model_name: str) -> nn.Module:
    """Return a model after a few epochs: weights with the shape of trained ones."""
    torch.manual_seed(0)
    model = MODELS[model_name](data["x"].shape[1], data["num_classes"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    mask = data["train_mask"]
    for _ in range(EPOCHS[name]):
        optimizer.zero_grad()
        logits = model(data["x"], data["edge_index"])[mask]
        nn.functional.cross_entropy(logits, data["y"][mask]).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def seen_part(data: dict[str, Any], share: float = 0.8) -> tuple[Tensor, Tensor, Tensor]:
    """Return x and edge_index of the graph that a random share of the nodes induces, and the others."""
    nodes = data["x"].shape[0]
    order = torch.randperm(nodes, generator=torch.Generator().manual_seed(0))
    kept, others = order[: int(nodes * share)].sort().values, order[int(nodes * share) :].sort().values
    edges, _ = subgraph(kept, data["edge_index"], relabel_nodes=True, num_nodes=nodes)
    return data["x"][kept].contiguous(), edges, others


def error(got: Tensor, wanted: Tensor) -> float:
    """Return the relative L2 error."""
    return float((got - wanted).norm() / wanted.norm())


@torch.no_grad()
def run(name: str, model_name: str, rounds: int) -> dict[str, Any]:
    """Return everything about one model on one graph."""
    data = graphs.load(name, standardize=name == "amazon_computers")
    with torch.enable_grad():
        model = trained(name, data, model_name)
    x, edge_index = data["x"], data["edge_index"]
    seen_x, seen_edges, others = seen_part(data)
    examples = (seen_x, seen_edges)
    wanted, seen_wanted = model(x, edge_index), model(*examples)
    calls: dict[str, gnnc.CompiledModel] = {}
    chosen_in: dict[str, float] = {}
    for key in (*UNIFORM, *BUDGETS):
        start = time.process_time()
        options = {"precision": key} if isinstance(key, str) else {"precision": "auto", "error_budget": key}
        calls[str(key)] = gnnc.compile(model, example_inputs=examples, **options)
        chosen_in[str(key)] = time.process_time() - start
    seconds = timed(calls, x, edge_index, rounds)
    ways = {}
    for key, call in calls.items():
        got = call(x, edge_index)
        ways[key] = {
            "ms": seconds[key] * 1e3,
            "error": error(call(*examples), seen_wanted),
            "held_out_error": error(got[others], wanted[others]),
            "compile_s": chosen_in[key],
        }
    last = calls[str(BUDGETS[-1])]
    result = {"graph": name, "model": model_name, "edges": edge_index.shape[1], "ways": ways}
    for budget in BUDGETS:
        choice = calls[str(budget)]._last.context.choice
        ways[str(budget)]["plan"] = {n: str(o) for n, o in choice.plan.items()}
        ways[str(budget)]["log"] = choice.log
    result["kernels"] = kernels(calls, x, edge_index) if edge_index.shape[1] >= LARGE else []
    result["fronts"], result["rank_correlation"] = fronts(last)
    return result


def timed(
    calls: dict[str, gnnc.CompiledModel], x: Tensor, edge_index: Tensor, rounds: int
) -> dict[str, float]:
    """Return the shortest seconds of each call; programs that are the same are timed as one."""
    first: dict[str, str] = {}
    for key, call in calls.items():
        first.setdefault(str(call).split("\n\n", 1)[-1], key)
    same = {key: first[str(call).split("\n\n", 1)[-1]] for key, call in calls.items()}
    runs = {key: lambda call=calls[key]: call(x, edge_index) for key in dict.fromkeys(same.values())}
    best = shortest(runs, rounds)
    return {key: best[same[key]] for key in calls}


def kernels(calls: dict[str, gnnc.CompiledModel], x: Tensor, edge_index: Tensor) -> list[dict[str, Any]]:
    """Return the predicted and the shortest measured time of every kernel, on the whole graph."""
    found = []
    for key in UNIFORM:
        model = calls[key].model
        compiled = gnnc.compile(model, key, example_inputs=(x, edge_index))
        program = compiled._last
        tensors = flatten_call(model, (x, edge_index), {}).tensors
        best: dict[str, float] = {}
        for _ in range(15):
            for timing in program.profiled(tensors)[1]:
                best[timing.node] = min(best.get(timing.node, float("inf")), timing.seconds)
        for node, predicted in program.knowledge().predicted.items():
            found.append({"way": key, "node": node, "predicted": predicted, "measured": best[node]})
    return found


def fronts(compiled: gnnc.CompiledModel) -> tuple[dict[str, list[tuple[float, float]]], float | None]:
    """Return (predicted ms, measured error) of choices by each strategy, and the rank correlation."""
    choice = compiled._last.context.choice
    study: Study = choice.study
    assert study.bench is not None
    found: dict[str, list[tuple[float, float]]] = {}
    for strategy in STRATEGIES:
        seeds = range(RANDOM_SEEDS) if strategy == "random" else range(1)
        points = []
        for seed in seeds:
            weighed = reweighed(study, strategy, seed)
            for plan in {solve(weighed, budget).chosen for budget in FRONT_BUDGETS}:
                options = dict(zip((op.node for op in study.ops), plan, strict=True))
                ran = study.bench.errors({op.node: op.options[options[op.node]] for op in study.ops})
                points.append((study.seconds(plan) * 1e3, max(ran)))
        found[strategy] = sorted(points)
    return found, choice.correlation()


def reweighed(study: Study, strategy: str, seed: int) -> Study:
    """Return the study with errors that another metric stands for."""
    if strategy == "sensitivity":
        return study
    generator = torch.Generator().manual_seed(seed)
    weights = [
        op.weight if strategy == "gain" else float(torch.rand((), generator=generator)) for op in study.ops
    ]
    unit = statistics.fmean(w * w for w in weights) ** 0.5
    ops = tuple(
        replace(
            op, errors=tuple((w / unit * nominal_error(op.node, o),) * 2 * study.outputs for o in op.options)
        )
        for op, w in zip(study.ops, weights, strict=True)
    )
    return Study(ops, study.stores, study.outputs, study.bench, study.gains)


def time_within(points: list[tuple[float, float]], limit: float) -> float:
    """Return the least time of a choice whose error is within a limit."""
    return min((ms for ms, err in points if err <= limit), default=float("inf"))


def cases(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each budget of each model beside the best uniform precision that keeps it."""
    found = []
    for result in results:
        for budget in BUDGETS:
            auto = result["ways"][str(budget)]
            good = {k: result["ways"][k]["ms"] for k in UNIFORM if result["ways"][k]["error"] <= budget}
            best = min(good, key=good.__getitem__)
            found.append(
                {
                    "graph": result["graph"], "model": result["model"], "budget": budget,
                    "held_out": auto["held_out_error"] / budget, "ms": auto["ms"],
                    "uniform": best, "uniform_ms": good[best], "ratio": auto["ms"] / good[best],
                    "compile_s": auto["compile_s"],
                }
            )  # fmt: skip
    return found


def conclusions(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that the whole run comes to."""
    rows = cases(results)
    off = [abs(k["predicted"] / k["measured"] - 1) for r in results for k in r["kernels"]]
    at = {
        strategy: statistics.fmean(
            time_within(r["fronts"][strategy], 0.01) / time_within(r["fronts"]["sensitivity"], 0.01)
            for r in results
            if time_within(r["fronts"][strategy], 0.01) < float("inf")
        )
        for strategy in STRATEGIES
    }
    return {
        "cases": len(rows),
        "held_out_within_1.2_budget": sum(r["held_out"] <= 1.2 for r in rows),
        "worst_held_out_over_budget": max(r["held_out"] for r in rows),
        "at_most_5_percent_slower": sum(r["ratio"] <= 1.05 for r in rows),
        "worst_ratio": max(r["ratio"] for r in rows),
        "faster": sum(r["ratio"] < 1 for r in rows),
        "faster_by_2_percent": sum(r["ratio"] < 0.98 for r in rows),
        "faster_by_5_percent": sum(r["ratio"] < 0.95 for r in rows),
        "longest_compile_s": max(r["compile_s"] for r in rows),
        "kernels": len(off),
        "median_prediction_error": statistics.median(off) if off else None,
        "time_at_error_0.01_relative_to_sensitivity": at,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return the cases as text."""
    rows = [
        [
            r["graph"], r["model"], r["budget"], f"{r['held_out']:.2f}", f"{r['ms']:.2f}", r["uniform"],
            f"{r['uniform_ms']:.2f}", f"{r['ratio']:.2f}", f"{r['compile_s']:.1f}",
        ]
        for r in cases(results)
    ]  # fmt: skip
    headers = ["graph", "model", "budget", "held-out error / budget", "auto ms", "best uniform", "ms"]
    return tabulate(rows, [*headers, "auto / uniform", "compile s"], disable_numparse=True, tablefmt="github")


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the fronts: one panel a model and graph."""
    columns = list(dict.fromkeys(r["model"] for r in results))
    rows = list(dict.fromkeys(r["graph"] for r in results))
    figure = Figure(figsize=(2.5 * len(columns), 2.1 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    for result in results:
        place = rows.index(result["graph"]) * len(columns) + columns.index(result["model"]) + 1
        axes = figure.add_subplot(len(rows), len(columns), place)
        for strategy, color in STRATEGIES.items():
            points = [(ms, max(err, 1e-6)) for ms, err in result["fronts"][strategy]]
            axes.scatter(*zip(*points, strict=True), s=12, color=color, label=strategy, zorder=2)
        front = pareto_front(result["fronts"]["sensitivity"])
        axes.plot(*zip(*front, strict=True), color=STRATEGIES["sensitivity"], linewidth=1, zorder=1)
        axes.set_yscale("log")
        axes.set_ylim(1e-3, 0.3)
        axes.set_title(f"{result['model']}, {result['graph'].split('_')[0]}", fontsize=8, loc="left")
        axes.tick_params(labelsize=6.5)
        axes.grid(True, color="#e5e7eb", linewidth=0.5)
    figure.axes[0].legend(fontsize=6.5, frameon=False)
    figure.supxlabel("predicted time, ms", fontsize=8)
    figure.supylabel("measured relative error of the output", fontsize=8)
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def pareto_front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other beats in both."""
    front: list[tuple[float, float]] = []
    for ms, err in sorted(points):
        if not front or err < front[-1][1]:
            front.append((ms, max(err, 1e-6)))
    return front


def main() -> None:
    """Run the benchmark that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", nargs="*", default=GRAPHS)
    parser.add_argument("--models", nargs="*", default=tuple(MODELS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    results = []
    for name in args.graphs:
        for model_name in args.models:
            start = time.perf_counter()
            results.append(run(name, model_name, args.rounds))
            print(f"{name} {model_name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
            if args.out:
                write(args.out, results)
    print(table(results))
    print(json.dumps(conclusions(results), indent=1))
    if args.plot:
        plot(results, args.plot)


def write(path: Path, results: list[dict[str, Any]]) -> None:
    """Keep what was measured so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": measure.machine(), "conclusions": conclusions(results), "results": results}
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
