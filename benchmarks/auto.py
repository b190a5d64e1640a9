"""Measures the choices of ``precision="auto"`` beside the uniform precisions, in one run.

    OMP_NUM_THREADS=1 python benchmarks/auto.py --out benchmarks/results/auto-cpu.json --docs docs

The command measures the machine's rates again, runs all cases and writes the JSON after each; ``--resume``
keeps the cases of the JSON, ``--graphs`` and ``--models`` select cases. ``--docs`` writes
``auto-results.md`` and ``fronts.svg`` (``auto-results-cuda.md`` for a GPU); with ``--report`` it writes
these from the JSON and measures nothing.

For each graph and model: the precisions are chosen on the graph that 80% of the nodes induce. Held-out
error is that of the other nodes' outputs on the whole graph, where all times are taken too, in turns: the
least of many calls, by the thread's own clock where there is one thread, so that other processes do not
count; on a GPU the device's time for a call, calls queued ahead, and also on the part that was chosen on:
launches bound the time there, and their latencies do not grow with the graph. A uniform precision keeps a
budget by the same criterion as auto: an error of at most the budget on the examples, and at most 1.2 times
as much on the held-out nodes.
Fronts: the integer program with measured sensitivities, with 1 + receptive-field gain and with random
weights in their place; predicted time against the measured error of each choice.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.utils import subgraph

import gnnc
from gnnc.calibrate.calibration import rates_for
from gnnc.calibrate.timing import measure_on
from gnnc.capture.arguments import flatten_call
from gnnc.pareto import shortest
from gnnc.passes.search.choice import Choice
from gnnc.passes.search.solver import solve
from gnnc.passes.search.study import Study, nominal_error
from gnnc.runtime.backend import get_backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import cuda_kernels
import graphs
import measure
import models
from auto_report import BUDGETS, LARGE, STRATEGIES, conclusions, page, plot, table

GRAPHS = ("cora", "pubmed", "amazon_computers", "facebook_pages")
MODELS = {**models.MODELS, "residual": models.residual_gcn}
_ANY = 1e9
FRONT_BUDGETS = (0.001, 0.002, 0.004, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1)
EPOCHS = {"cora": 40, "pubmed": 20, "amazon_computers": 10, "facebook_pages": 5}
ON_ARXIV = ("gcn", "gat", "residual")
"""Models whose choices are timed on the arxiv-shaped graph."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of measuring.

    Attributes:
        rounds: timed calls of each program.
        profiles: timed runs of each kernel.
        seeds: random choices of the fronts.
        device: ``cpu`` or ``cuda``, which is also the backend.
    """

    rounds: int
    profiles: int
    seeds: int
    device: str

    @property
    def uniform(self) -> list[str]:
        """The uniform precisions that choices are compared with."""
        return sorted(get_backend(self.device).target.precisions, key=lambda name: (name != "fp32", name))


def trained(name: str, data: dict[str, Any], model_name: str) -> nn.Module:
    """Return a model trained for a few epochs, so that its weights resemble trained ones."""
    torch.manual_seed(0)
    model = MODELS[model_name](data["x"].shape[1], data["num_classes"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    mask, edges = data["train_mask"], edges_for(model_name, data["edge_index"], data["x"].shape[0])
    for _ in range(EPOCHS[name]):
        optimizer.zero_grad()
        logits = model(data["x"], edges)[mask]
        nn.functional.cross_entropy(logits, data["y"][mask]).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def edges_for(model_name: str, edge_index: Tensor, nodes: int) -> Tensor:
    """Return the edges as a sparse matrix, on which PyG computes without a row for every edge.

    (A GraphSAGE over Facebook's 4714 features would make 6.4 GB of such rows.) GAT takes no matrix.
    """
    if model_name == "gat":
        return edge_index
    src, dst = edge_index
    order = torch.argsort(dst, stable=True)
    rowptr = dst.new_zeros(nodes + 1)
    rowptr[1:] = torch.bincount(dst, minlength=nodes).cumsum(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        return torch.sparse_csr_tensor(
            rowptr,
            src[order],
            torch.ones(src.shape[0], device=src.device),
            (nodes, nodes),
            check_invariants=False,
        )


def eager(model: nn.Module, model_name: str, x: Tensor, edge_index: Tensor) -> Tensor:
    """Return the output in plain PyG."""
    return model(x, edges_for(model_name, edge_index, x.shape[0]))


def seen_part(data: dict[str, Any], share: float = 0.8) -> tuple[Tensor, Tensor, Tensor]:
    """Return x and edge_index of the graph that a random share of the nodes induces, and the other nodes."""
    nodes = data["x"].shape[0]
    order = torch.randperm(nodes, generator=torch.Generator().manual_seed(0))
    seen, held_out = order[: int(nodes * share)].sort().values, order[int(nodes * share) :].sort().values
    edges, _ = subgraph(seen, data["edge_index"], relabel_nodes=True, num_nodes=nodes)
    return data["x"][seen].contiguous(), edges, held_out


def error(result: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error."""
    return float((result - expected).norm() / expected.norm())


@torch.no_grad()
def run(name: str, model_name: str, effort: Effort) -> dict[str, Any]:
    """Return the measurements of one model on one graph."""
    start = time.perf_counter()
    data = graphs.load(name, standardize=name == "amazon_computers")
    with torch.enable_grad():
        model = trained(name, data, model_name)
    model.to(effort.device)
    seen_x, seen_edges, held_out = (tensor.to(effort.device) for tensor in seen_part(data))
    x, edge_index = data["x"].to(effort.device), data["edge_index"].to(effort.device)
    examples = (seen_x, seen_edges)
    expected, seen_expected = eager(model, model_name, x, edge_index), eager(model, model_name, *examples)
    calls: dict[str, gnnc.CompiledModel] = {}
    compiled_in: dict[str, float] = {}
    for key in (*effort.uniform, *BUDGETS):
        begin = time.perf_counter()
        options = {"precision": key} if isinstance(key, str) else {"precision": "auto", "error_budget": key}
        calls[str(key)] = gnnc.compile(model, example_inputs=examples, backend=effort.device, **options)
        compiled_in[str(key)] = time.perf_counter() - begin
    seconds = timed(calls, x, edge_index, effort)
    seen_seconds = timed(calls, *examples, effort) if effort.device == "cuda" else {}
    ways = {}
    for key, call in calls.items():
        got = call(x, edge_index)
        ways[key] = {
            "ms": seconds[key] * 1e3,
            "error": error(call(*examples), seen_expected),
            "held_out_error": error(got[held_out], expected[held_out]),
            "compile_s": compiled_in[key],
            **({"seen_ms": seen_seconds[key] * 1e3} if seen_seconds else {}),
        }
    last = calls[str(BUDGETS[-1])]
    result = {"graph": name, "model": model_name, "edges": edge_index.shape[1], "ways": ways}
    for budget in BUDGETS:
        choice = calls[str(budget)]._dispatch.last.context.choice
        ways[str(budget)]["plan"] = {n: str(o) for n, o in choice.plan.items()}
        ways[str(budget)]["log"] = choice.log
    is_large = edge_index.shape[1] >= LARGE
    result["kernels"] = kernels(model, x, edge_index, effort) if is_large else []
    result |= fronts(last._dispatch.last.context.choice, effort.seeds)
    result["took_s"] = time.perf_counter() - start
    return result


@torch.no_grad()
def on_arxiv(effort: Effort) -> list[dict[str, Any]]:
    """Return the seconds of a choice on the arxiv-shaped graph, and the times of its kernels."""
    shape = graphs.SHAPES["arxiv"]
    edge_index = graphs.generate("arxiv").to(effort.device)
    x = torch.randn(shape.nodes, shape.features, generator=torch.Generator().manual_seed(0))
    x = x.to(effort.device)
    results = []
    for name in ON_ARXIV:
        torch.manual_seed(0)
        model = MODELS[name](shape.features, shape.classes).eval().requires_grad_(False).to(effort.device)
        start = time.perf_counter()
        gnnc.compile(model, "auto", example_inputs=(x, edge_index), backend=effort.device)
        seconds = time.perf_counter() - start
        times = kernels(model, x, edge_index, effort)
        results.append({"graph": "arxiv", "model": name, "seconds": seconds, "kernels": times})
    return results


def timed(
    calls: dict[str, gnnc.CompiledModel], x: Tensor, edge_index: Tensor, effort: Effort
) -> dict[str, float]:
    """Return the shortest seconds of each call; equal programs are timed once."""
    first: dict[str, str] = {}
    for key, call in calls.items():
        first.setdefault(str(call).split("\n\n", 1)[-1], key)
    twin_of = {key: first[str(call).split("\n\n", 1)[-1]] for key, call in calls.items()}
    runs = {key: lambda call=calls[key]: call(x, edge_index) for key in dict.fromkeys(twin_of.values())}
    best = shortest(runs, effort.rounds, measure_on(torch.device(effort.device)))
    return {key: best[twin_of[key]] for key in calls}


def kernels(model: nn.Module, x: Tensor, edge_index: Tensor, effort: Effort) -> list[dict[str, Any]]:
    """Return the predicted and the shortest measured time of every kernel, on the whole graph."""
    rows = []
    for key in effort.uniform:
        compiled = gnnc.compile(model, key, example_inputs=(x, edge_index), backend=effort.device)
        program = compiled._dispatch.last
        tensors = flatten_call(model, (x, edge_index), {}).tensors
        best: dict[str, float] = {}
        for _ in range(effort.profiles):
            for timing in program.profiled(tensors)[1]:
                best[timing.node] = min(best.get(timing.node, float("inf")), timing.seconds)
        for node, predicted in program.knowledge().predicted.items():
            rows.append({"way": key, "node": node, "predicted": predicted, "measured": best[node]})
    return rows


def fronts(choice: Choice, seeds: int) -> dict[str, Any]:
    """Return the fronts of each strategy, as (predicted ms, measured error) of its choices.

    The result also has the rank correlation of gain and sensitivity, and for each choice its error as
    predicted by sensitivities and as measured. Errors are those on the examples alone: the metrics do not
    model larger values.
    """
    study = choice.study
    assert study.bench is not None
    points_of: dict[str, list[tuple[float, float]]] = {}
    error_of: dict[tuple[int, ...], float] = {}
    for strategy in STRATEGIES:
        points = []
        for seed in range(seeds if strategy == "random" else 1):
            weighed = reweighed(study, strategy, seed)
            for plan in {solve(weighed, budget, grown=_ANY).chosen for budget in FRONT_BUDGETS}:
                if plan not in error_of:
                    ops = zip(study.ops, plan, strict=True)
                    error_of[plan] = max(study.bench.errors({op.node: op.options[o] for op, o in ops}))
                points.append((study.seconds(plan) * 1e3, error_of[plan]))
        points_of[strategy] = sorted(points)
    pairs = [(max(study.error(plan)[: study.outputs]), measured) for plan, measured in error_of.items()]
    return {
        "fronts": points_of,
        "rank_correlation": choice.correlation(),
        "error_model": [pair for pair in pairs if min(pair) > 0],
    }


def reweighed(study: Study, strategy: str, seed: int) -> Study:
    """Return the study with its errors replaced by another metric."""
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


def main() -> None:
    """Run the benchmark of the command line."""
    args = arguments()
    old = json.loads(args.out.read_text()) if args.out.exists() and (args.resume or args.report) else None
    report: dict[str, Any] = {"calibration": {}, "arxiv": [], "results": []}
    describe = measure.machine if args.device == "cpu" else cuda_kernels.machine
    report |= old or {"machine": describe()}
    if not args.report:
        rates = rates_for(get_backend(args.device), again=old is None)
        report["calibration"] = {"machine": rates.machine, "measured_in": rates.measured_in}
        run_all(args, report)
    if not report["results"]:
        sys.exit(f"{args.out} holds no case to report")
    report["conclusions"] = conclusions(report)
    print(table(report["results"]))
    print(json.dumps(report["conclusions"], indent=1))
    if args.docs:
        suffix = "" if args.device == "cpu" else f"-{args.device}"
        fronts = args.docs / f"fronts{suffix}.svg"
        plot(report["results"], fronts)
        text = page(report, args.out.name, fronts.name)
        (args.docs / f"auto-results{suffix}.md").write_text(text)


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON")
    parser.add_argument("--docs", type=Path, help="folder to write auto-results.md and fronts.svg to")
    parser.add_argument("--graphs", nargs="*", default=GRAPHS, choices=GRAPHS)
    parser.add_argument("--models", nargs="*", default=tuple(MODELS), choices=tuple(MODELS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--resume", action="store_true", help="keep the cases that the JSON has")
    parser.add_argument("--report", action="store_true", help="measure nothing, report the JSON")
    parser.add_argument("--no-arxiv", action="store_true", help="leave out the arxiv-shaped graph")
    parser.add_argument("--rounds", type=int, default=25, help="timed calls of each program")
    parser.add_argument("--profiles", type=int, default=15, help="timed runs of each kernel")
    parser.add_argument("--seeds", type=int, default=3, help="random choices of the fronts")
    return parser.parse_args()


def run_all(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Run the missing cases, and write the report after each."""
    effort = Effort(args.rounds, args.profiles, args.seeds, args.device)
    finished = {(r["graph"], r["model"]) for r in report["results"]}
    for name in args.graphs:
        for model_name in args.models:
            if (name, model_name) in finished:
                continue
            result = run(name, model_name, effort)
            report["results"].append(result)
            write(args.out, report)
            print(f"{name} {model_name}: {result['took_s']:.0f} s", file=sys.stderr, flush=True)
    if not args.no_arxiv and not report["arxiv"]:
        report["arxiv"] = on_arxiv(effort)
        write(args.out, report)


def write(path: Path, report: dict[str, Any]) -> None:
    """Write the measurements so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    ordered = {key: report[key] for key in ("machine", "calibration")}
    ordered |= {"conclusions": conclusions(report), "arxiv": report["arxiv"]}
    part.write_text(json.dumps({**ordered, "results": report["results"]}, indent=1) + "\n")
    part.replace(path)


if __name__ == "__main__":
    main()
