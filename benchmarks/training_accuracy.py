r"""Measures what training in a low precision costs in accuracy: PyG in FP32 beside gnnc, from equal weights.

    python benchmarks/training_accuracy.py --device cuda --jobs 14 \
        --out benchmarks/results/cuda-training-accuracy.json --plot docs/training-losses.png

Nodes: test accuracy of GCN, SAGE, GIN and GAT on real graphs, of the weights with the best validation
accuracy, looked at every ten epochs. Links: area under the ROC curve of held edges by a GCN encoder and inner
products. A contender trains and evaluates as it is compiled. Runs with one seed are a pair: the same initial
weights and masks of dropout. ``--device cpu`` takes one thread a process; ``--resume`` keeps
the runs of ``--out``. Tasks that fail are listed there, too, and make the exit status 1.
"""

import argparse
import functools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from operator import contains
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tabulate import tabulate
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

import gnnc
from gnnc.passes.assign import Assign
from gnnc.passes.base import Pass
from gnnc.passes.partition import Partition
from gnnc.passes.pipeline import PIPELINE
from gnnc.passes.quantize import Quantize
from gnnc.report.figure_style import MUTED, plain_log_ticks, save, tidy
from gnnc.runtime.backend import get_backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import graphs
import measure
import models

DATASETS = ("coauthor_cs", "amazon_computers", "pubmed", "cora")
"""Data sets, largest first: the longest tasks begin first."""
LINKS = "links"
"""Name, in place of a model's, of the task that predicts edges."""
PYG = "pyg fp32"
CONTENDERS = (PYG, "gnnc fp32", "gnnc bf16", "gnnc fp16", "gnnc int8")
VARIANTS: dict[str, tuple[Pass, ...]] = {
    "gnnc int8, nearest": (Quantize(rounding="nearest"),),
    "gnnc int8, row": (Quantize(gradients="row"),),
    "gnnc int8, row nearest": (Quantize(gradients="row", rounding="nearest"),),
    "gnnc int8, tensor": (Quantize(gradients="tensor"),),
    "gnnc int8, tensor nearest": (Quantize(gradients="tensor", rounding="nearest"),),
    "gnnc int8, last layer low": (Assign(last_layer="low"),),
    "gnnc int8, saved in 4 bits": (Partition(save_bits=4),),
    "gnnc int8, saved in 2 bits": (Partition(save_bits=2),),
}
"""Passes of other options, by name of the contender that trains with them."""
LOOK_EVERY = 10
_TITLES = {
    "coauthor_cs": "Coauthor CS",
    "amazon_computers": "Computers",
    "pubmed": "PubMed",
    "cora": "Cora",
}
_LINES: dict[str, dict[str, Any]] = {
    PYG: {"color": "#9ca3af", "linewidth": 3.5},
    "gnnc fp32": {"color": "#24292f", "linewidth": 1.0},
    "gnnc bf16": {"color": "#0969da", "linewidth": 1.0, "linestyle": (0, (4, 2))},
    "gnnc fp16": {"color": "#cf222e", "linewidth": 1.0, "linestyle": (0, (1, 1.5))},
    "gnnc int8": {"color": "#1a7f37", "linewidth": 1.2},
}
Batch = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Seeds of one contender on one data set, which share a compiled program.

    Attributes:
        dataset: name of the data set.
        model: a key of ``models.MODELS``, or ``links``.
        contender: one of ``CONTENDERS`` or of ``VARIANTS``.
        seeds: the seeds.
        epochs: number of epochs.
        device: device type of the model and its data.
    """

    dataset: str
    model: str
    contender: str
    seeds: Sequence[int]
    epochs: int
    device: str


@functools.cache
def dataset(name: str, device: str) -> Batch:
    """Return a graph on a device; the features of Amazon Computers are standardized."""
    data = graphs.load(name, standardize=name == "amazon_computers")
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in data.items()}


class Encoder(nn.Module):
    """GCN of two layers that embeds nodes."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(features, 128), GCNConv(128, 64)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return one row of 64 values a node."""
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def split_edges(data: Batch, seed: int) -> Batch:
    """Return edges for messages; for validation and test 5 and 10% of the pairs, and as many random ones."""
    generator = torch.Generator().manual_seed(seed)
    src, dst = data["edge_index"].cpu()
    pairs = torch.stack([src, dst])[:, src < dst]
    pairs = pairs[:, torch.randperm(pairs.shape[1], generator=generator)]
    held = pairs.shape[1] // 20
    false = torch.randint(data["x"].shape[0], (2, 3 * held), generator=generator)
    known = pairs[:, 3 * held :]
    parts = {
        "messages": torch.cat([known, known.flip(0)], 1),
        "known": known,
        "val": torch.cat([pairs[:, :held], false[:, :held]], 1),
        "test": torch.cat([pairs[:, held : 3 * held], false[:, held:]], 1),
    }
    return {name: part.to(data["x"].device) for name, part in parts.items()}


def roc_auc(scores: Tensor) -> float:
    """Return the area under the ROC curve in percent; the first half of the scores are of true pairs."""
    true, false = scores.double().cpu().chunk(2)
    below = torch.searchsorted(false.sort().values, torch.stack([true, true]), side="left")[0]
    upto = torch.searchsorted(false.sort().values, true, right=True)
    return 100.0 * ((below + upto) / 2 / len(false)).mean().item()


def nodes_task(call: Any, data: Batch) -> tuple[Callable[[], Tensor], Callable[[str], float]]:
    """Return the loss of a step, and the accuracy in percent on a mask."""
    x, edge_index, y = data["x"], data["edge_index"], data["y"]

    def loss() -> Tensor:
        return F.cross_entropy(call(x, edge_index)[data["train_mask"]], y[data["train_mask"]])

    def score(part: str) -> float:
        mask = data[f"{part}_mask"]
        return 100.0 * (call(x, edge_index).argmax(-1) == y)[mask].float().mean().item()

    return loss, score


def links_task(call: Any, data: Batch, seed: int) -> tuple[Callable[[], Tensor], Callable[[str], float]]:
    """Return the loss of a step, with new random pairs each time, and the AUC in percent on a part."""
    x, parts = data["x"], split_edges(data, seed)
    known = parts["known"]
    labels = torch.cat([torch.ones_like(known[0]), torch.zeros_like(known[0])]).float()

    def scores(pairs: Tensor) -> Tensor:
        z = call(x, parts["messages"])
        return (z[pairs[0]] * z[pairs[1]]).sum(-1)

    def loss() -> Tensor:
        pairs = torch.cat([known, torch.randint_like(known, x.shape[0])], 1)
        return F.binary_cross_entropy_with_logits(scores(pairs), labels)

    return loss, lambda part: roc_auc(scores(parts[part]))


def fit(
    call: Any, loss: Callable[[], Tensor], score: Callable[[str], float], epochs: int, weight_decay: float
) -> tuple[float, list[float]]:
    """Train with Adam; return the test score of the best weights by validation, and the losses."""
    optimizer = torch.optim.Adam(call.parameters(), lr=0.01, weight_decay=weight_decay)
    losses: list[Tensor] = []
    best, best_test = -1.0, 0.0
    for epoch in range(1, epochs + 1):
        call.train()
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.detach())
        if epoch % LOOK_EVERY == 0 or epoch == epochs:
            call.eval()
            with torch.no_grad():
                found = score("val")
                if found > best:
                    best, best_test = found, score("test")
    return best_test, torch.stack(losses).tolist()


def compiled(model: nn.Module, contender: str) -> nn.Module:
    """Return a model compiled as a contender says."""
    passes = {step.name: step for step in VARIANTS.get(contender, ())}
    precision = contender.removeprefix("gnnc ").partition(",")[0]
    return gnnc.compile(model, precision, pipeline=tuple(passes.get(p.name, p) for p in PIPELINE))


def run(task: Task) -> list[dict[str, Any]]:
    """Train all seeds of a task; return a record for each, with its losses."""
    torch.set_num_threads(1)
    data, records = dataset(task.dataset, task.device), []
    make: Callable[[], nn.Module] = (
        (lambda: Encoder(data["x"].shape[1]))
        if task.model == LINKS
        else (lambda: models.MODELS[task.model](data["x"].shape[1], data["num_classes"]))
    )
    model = make().to(task.device)
    call: Any = model
    if task.contender != PYG:
        call = compiled(model, task.contender)
    for seed in task.seeds:
        start = time.perf_counter()
        torch.manual_seed(seed)
        model.load_state_dict(make().state_dict())
        links = task.model == LINKS
        loss, score = links_task(call, data, seed) if links else nodes_task(call, data)
        value, losses = fit(call, loss, score, task.epochs, weight_decay=0.0 if links else 5e-4)
        record = {"dataset": task.dataset, "model": task.model, "contender": task.contender, "seed": seed}
        record |= {"score": value, "finite": all(map(math.isfinite, losses))}
        record |= {"seconds": round(time.perf_counter() - start, 2)}
        records.append(record | {"losses": [round(v, 4) for v in losses]})
    return records


def tasks_of(args: argparse.Namespace, runs: Sequence[dict[str, Any]]) -> Iterator[Task]:
    """Yield the tasks that were not run; PyG, which compiles nothing, has a task for each seed."""
    known = {(r["dataset"], r["model"], r["contender"], r["seed"]) for r in runs}
    for name in args.datasets:
        for model in (*args.models, *([LINKS] if name in args.links else [])):
            seeds = range(args.link_seeds if model == LINKS else args.seeds)
            for contender in args.contenders:
                left = [seed for seed in seeds if (name, model, contender, seed) not in known]
                for part in [[seed] for seed in left] if contender == PYG else filter(None, [left]):
                    yield Task(name, model, contender, part, args.epochs, args.device)


def _reference(scores: dict[tuple[str, str, str, int], float], name: str, model: str) -> str:
    """Return the contender in FP32 that has more seeds; gnnc's in fp32 has PyG's results run by run."""
    counts = {c: sum(key[:3] == (name, model, c) for key in scores) for c in (PYG, "gnnc fp32")}
    return max(counts, key=lambda c: counts[c])


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each data set, model and contender: mean, and mean difference of pairs to FP32.

    ``error`` is the standard error of the mean difference. A row *holds* where the mean is at least 99.9% of
    that in FP32 (int8: 99.7%), or less by no more than two standard errors; links: where it is at most 0.3
    points less (int8: 0.5).
    """
    scores = {(r["dataset"], r["model"], r["contender"], r["seed"]): r["score"] for r in runs}
    rows = []
    for name, model, contender in sorted({key[:3] for key in scores}):
        seeds = [key[3] for key in scores if key[:3] == (name, model, contender)]
        reference = _reference(scores, name, model)
        pairs = [
            (scores[name, model, contender, s], scores[name, model, reference, s])
            for s in seeds
            if (name, model, reference, s) in scores
        ]
        if not pairs:
            continue
        differences = [ours - theirs for ours, theirs in pairs]
        error = statistics.stdev(differences) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0
        fp32, change = statistics.mean(theirs for _, theirs in pairs), statistics.mean(differences)
        is_int8 = "int8" in contender
        share, points = (0.003, 0.5) if is_int8 else (0.001, 0.3)
        allowed = points if model == LINKS else share * fp32 + 2 * error
        group = [r for r in runs if (r["dataset"], r["model"], r["contender"]) == (name, model, contender)]
        rows.append(
            {"dataset": name, "model": model, "contender": contender, "pairs": len(pairs)}
            | {"reference": reference, "fp32": fp32, "mean": fp32 + change, "change": change, "error": error}
            | {"holds": change >= -allowed, "finite": all(r["finite"] for r in group)}
            | {"seconds": statistics.median(r["seconds"] for r in group)}
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each data set and model: the mean in FP32, and mean differences to it."""
    names = (*CONTENDERS, *VARIANTS)
    ours = [name for name in names if name != PYG and any(r["contender"] == name for r in rows)]
    lines = []
    for name, model in dict.fromkeys((r["dataset"], r["model"]) for r in rows):
        group = {r["contender"]: r for r in rows if (r["dataset"], r["model"]) == (name, model)}
        first = max(group.values(), key=lambda row: row["pairs"])
        differences = [_difference(group[name]) if name in group else "-" for name in ours]
        lines.append([name, model, first["pairs"], f"{first['fp32']:.2f}", *differences])
    return tabulate(
        lines, ["data", "model", "seeds", "FP32", *ours], tablefmt="github", disable_numparse=True
    )


def _difference(row: dict[str, Any]) -> str:
    text = f"{row['change']:+.2f} ± {row['error']:.2f}"
    if not row["finite"]:
        return f"**{text}, not finite**"
    return text if row["holds"] else f"**{text}**"


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Write a picture of the losses: a row of panels for each data set, a column for each model.

    A line is the mean over seeds, in a band from the least to the largest.
    """
    curves: dict[tuple[str, str, str], list[list[float]]] = {}
    for r in runs:
        if "losses" in r and r["contender"] in _LINES:
            curves.setdefault((r["dataset"], r["model"], r["contender"]), []).append(r["losses"])
    names = [name for name in reversed(DATASETS) if any(key[0] == name for key in curves)]
    columns = [model for model in models.MODELS if any(key[1] == model for key in curves)]
    figure = Figure(figsize=(max(3 * len(columns), 5.5), max(2.2 * len(names), 3)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, name in enumerate(names):
        for column, model in enumerate(columns):
            axes = figure.add_subplot(len(names), len(columns), row * len(columns) + column + 1)
            for contender in CONTENDERS:
                seeds = list(zip(*curves.get((name, model, contender), ()), strict=True))
                if seeds:
                    epochs = range(1, len(seeds) + 1)
                    line = _LINES[contender]
                    axes.plot(epochs, list(map(statistics.mean, seeds)), label=contender, zorder=3, **line)
                    axes.fill_between(
                        epochs, list(map(min, seeds)), list(map(max, seeds)), color=line["color"], alpha=0.08,
                        linewidth=0, zorder=2,
                    )  # fmt: skip
            axes.set_yscale("log")
            plain_log_ticks(axes.yaxis)
            tidy(axes, f"{model.upper()}, {_TITLES[name]}", size=7)
    found = [zip(*reversed(axes.get_legend_handles_labels()), strict=True) for axes in figure.axes]
    named = dict(pair for pairs in found for pair in pairs)
    labels = [name for name in CONTENDERS if name in named]
    handles = [named[name] for name in labels]
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=8, frameon=False)
    figure.supxlabel("epoch", fontsize=8.5, color=MUTED)
    figure.supylabel("training loss, dropout on", fontsize=8.5, color=MUTED)
    save(figure, path)


def _key(run: dict[str, Any]) -> tuple[str, str, str]:
    return run["dataset"], run["model"], run["contender"]


def write(
    path: Path, settings: dict[str, Any], runs: list[dict[str, Any]], failed: list[dict[str, Any]]
) -> None:
    """Write what is measured so far, a line for each run."""
    lists = {"rows": summarize(runs), "runs": runs} | ({"failed": failed} if failed else {})
    lines = {name: ",\n  ".join(map(json.dumps, found)) for name, found in lists.items()}
    parts = [f' "{name}": {json.dumps(value)}' for name, value in settings.items()]
    parts += [f' "{name}": [\n  {text}\n ]' for name, text in lines.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _failure(task: Task, reason: str) -> dict[str, Any]:
    named = {"dataset": task.dataset, "model": task.model, "contender": task.contender}
    return named | {"seeds": list(task.seeds), "reason": reason}


def measured(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the runs of the command line, and the tasks that failed; write both as they come."""
    start = time.monotonic()
    runs = json.loads(args.out.read_text())["runs"] if args.resume and args.out.exists() else []
    machine = measure.machine() | {"kernels": get_backend(args.device).description}
    settings = {"device": args.device, "epochs": args.epochs, "machine": machine}
    pool = ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn"))
    pending: dict[Future[Any], Task] = {pool.submit(run, task): task for task in tasks_of(args, runs)}
    failed: list[dict[str, Any]] = []
    try:
        for done in as_completed(pending, timeout=None if math.isinf(args.limit) else args.limit):
            task = pending.pop(done)
            error = done.exception()
            outcome = f"{type(error).__name__}: {str(error)[:300]}" if error else "done"
            if error:
                failed.append(_failure(task, outcome))
            else:
                runs += done.result()
            seconds = f"{time.monotonic() - start:6.0f} s"
            print(seconds, task.dataset, task.model, task.contender, outcome, file=sys.stderr, flush=True)
            write(args.out, settings, runs, failed)
    except TimeoutError:
        failed += [_failure(task, f"not finished after {args.limit:.0f} s") for task in pending.values()]
        write(args.out, settings, runs, failed)
        for process in multiprocessing.active_children():
            process.kill()
    pool.shutdown(cancel_futures=True)
    return runs, failed


def main() -> int:
    """Run the benchmark of the command line; return 1 where a task failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", nargs="*", default=DATASETS)
    parser.add_argument("--models", nargs="*", default=tuple(models.MODELS))
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS)
    parser.add_argument("--links", nargs="*", default=("cora", "pubmed"), help="data sets of link prediction")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--link-seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds to wait for results")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path, help="picture of the losses to write")
    parser.add_argument(
        "--resume", action="store_true", help="keep the runs of --out, and run what is missing"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing: read --out")
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.report else {}
    runs, failed = (found["runs"], found.get("failed", [])) if args.report else measured(args)
    print(table(summarize(runs)))
    if args.plot:
        asked = args.datasets, args.models, args.contenders
        plot([r for r in runs if all(map(contains, asked, _key(r)))], args.plot)
    for failure in failed:
        print("failed:", *failure.values(), file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
