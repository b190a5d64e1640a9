"""Measures single layers beside PyG eager and torch.compile, on CUDA or the CPU: time, memory, error.

    python benchmarks/layers.py --device cuda --graph arxiv --out benchmarks/results/cuda-layers.json
    python benchmarks/layers.py --device cpu --threads 1 --out benchmarks/results/cpu-layers.json

Layers of width 64 with 16 edge features (``layer_zoo.py``), in inference and, with ``--training``, in a
training step: a linear layer before the layer, mean square of its result, backward, fused Adam. Calls take
one of several x tensors in turn. On CUDA a time is that of a loop of calls, from CUDA events, divided by
their number, and memory the peak of all calls above the caller's tensors, with what a contender keeps from
its first call on. On the CPU contenders take turns; with ``--threads 1`` a time is that of the process, in
which other programs do not count. An error is that of the result (of a step: of the gradients) against eager
FP32, relative, in the L2 norm. The floor is the larger of two times: of a copy of the bytes that must move
(arguments and results once, edges as one id), and of the products at the rate of a large product, in int8 at
four times that of FP32.
With ``--turbo`` layers that Turbo-GNN has run in its kernels, too (``turbo_gnn_layers.py``), in fp16: weights
and x in inference, autocast in training. torch.compile, which takes most of the time, comes last, as far as
``--seconds`` go. On graphs for which eager's matrices of all edges find no room, ``--skip eager`` leaves out
the errors, too.
"""

import argparse
import copy
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import gnnc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import cuda_kernels
import graphs
import measure
import turbo_gnn_layers
from cuda_inference import loop_ms
from layer_zoo import LAYERS, WIDTH, arguments

PRECISIONS = {"cuda": ("fp32", "fp16", "int8"), "cpu": ("fp32", "bf16", "int8")}
SPEEDUPS = {"fp32": 1, "bf16": 2, "fp16": 2, "int8": 4}
"""Products of each precision in the time of one in FP32, by vector instructions."""
SHAPES = {
    "tiny": graphs.Shape(300, 2_500, WIDTH, 8, 1.0),
    "small": graphs.Shape(20_000, 200_000, WIDTH, 8, 1.0),
    **graphs.SHAPES,
}
_TURBO = "Turbo-GNN fp16"
_PEERS = ("eager", "torch.compile", _TURBO)


class Trained(nn.Module):
    """Linear layer before a layer, whose rows then need gradients as in the middle of a network."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(width, width), layer

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor:
        """Return the layer's result."""
        return self.layer(self.first(x), *extra)


@dataclass(frozen=True, slots=True)
class Problem:
    """Layer with its arguments.

    Attributes:
        name: name of the layer.
        model: the layer, in eval mode, or ``Trained``.
        x: features of the nodes.
        extra: the arguments behind x.
    """

    name: str
    model: nn.Module
    x: Tensor
    extra: tuple[Tensor, ...]

    @property
    def is_training(self) -> bool:
        """Return whether a call is a training step."""
        return isinstance(self.model, Trained)


def problem(name: str, edge_index: Tensor, nodes: int, *, training: bool) -> Problem:
    """Return a layer with arguments on the device of the edges."""
    torch.manual_seed(0)
    model = LAYERS[name].make()
    x, extra = arguments(LAYERS[name].takes, edge_index, nodes)
    model = Trained(model, x.shape[1]).train() if training else model.eval()
    return Problem(name, model.to(edge_index.device), x, extra)


@dataclass(frozen=True, slots=True)
class Contender:
    """Call of a contender.

    Attributes:
        call: takes x; returns the result, or of a training step the gradients.
        compiled: the compiled model, if it is gnnc's.
    """

    call: Callable[[Tensor], Tensor]
    compiled: Any = None


def contender(name: str, given: Problem) -> Contender:
    """Return the call of a contender, by name."""
    model = copy.deepcopy(given.model)
    forward: Any = model
    if name == "torch.compile":
        torch._dynamo.reset()
        forward = torch.compile(model)
    elif name == _TURBO:
        forward = _turbo(model)
    elif name != "eager":
        forward = gnnc.compile(model, precision=name.split()[1])
    ours = forward if name not in _PEERS else None
    if given.is_training:
        return Contender(_step(forward, model, given.extra), ours)
    return Contender(torch.no_grad()(lambda x: forward(x, *given.extra)), ours)


def _turbo(model: nn.Module) -> Callable[..., Tensor]:
    """Return a model whose layer runs in Turbo-GNN's kernels, in fp16, with the parameters of the model."""
    if not isinstance(model, Trained):
        half = turbo_gnn_layers.in_turbo_gnn(model.half())
        return lambda x, *extra: half(x.half(), *extra)
    layer = turbo_gnn_layers.in_turbo_gnn(model.layer)

    def forward(x: Tensor, *extra: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            return layer(model.first(x), *extra).float()

    return forward


def _step(forward: Any, model: nn.Module, extra: tuple[Tensor, ...]) -> Callable[[Tensor], Tensor]:
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=1e-4, fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        forward(x, *extra).square().mean().backward()
        optimizer.step()
        return torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])

    return step


def rows_of(given: Problem, names: list[str], repeats: int, *, compare: bool) -> list[dict[str, Any]]:
    """Measure contenders on one layer, and their errors if ``compare``."""
    rows: list[dict[str, Any]] = []
    kind = "training" if given.is_training else "inference"
    contenders: dict[str, Contender] = {}
    expected = contender("eager", given).call(given.x) if compare else None
    for name in names:
        row: dict[str, Any] = {"layer": given.name, "kind": kind, "name": name}
        rows.append(row)
        start, before = time.perf_counter(), _memory(given)
        try:
            made = contender(name, given)
            got = made.call(given.x)
            row["kept_mb"] = round((_memory(given) - before) / 1e6)
            row["first_s"] = round(time.perf_counter() - start, 2)
        except (RuntimeError, gnnc.GnncError) as error:
            row["failed"] = str(error).splitlines()[0][:200]
            continue
        if expected is not None and name != "eager":
            row["error"] = float((got.double() - expected.double()).norm() / expected.double().norm())
        contenders[name] = made
    _time(given, contenders, {row["name"]: row for row in rows}, repeats)
    for row in rows:
        if (made := contenders.get(row["name"])) is not None and made.compiled is not None:
            row["kernels"] = kernels(made.compiled, given)
    return rows


def _time(
    given: Problem, contenders: dict[str, Contender], rows: dict[str, dict[str, Any]], repeats: int
) -> None:
    """Add the times and, on CUDA, the peak memory to the rows of the contenders."""
    calls = {name: made.call for name, made in contenders.items()}
    kept = {name: rows[name].pop("kept_mb") for name in contenders}
    if given.x.device.type == "cpu":
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        timings = measure.median_ms_in_turns(calls, given.x, repeats=repeats, warmup=1, clock=clock)
        for name, timing in timings.items():
            rows[name]["ms"] = timing
        return
    inputs = [given.x, *(given.x.clone() for _ in range(2))]
    for name, call in calls.items():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rows[name]["ms"] = loop_ms(call, inputs)
        peak = (torch.cuda.max_memory_allocated() - before) / 1e6
        rows[name]["peak_mb"] = round(peak) + kept[name]


def _memory(given: Problem) -> int:
    """Return the bytes of all tensors on the device."""
    gc.collect()
    return torch.cuda.memory_allocated() if given.x.is_cuda else 0


def kernels(compiled: Any, given: Problem) -> dict[str, float]:
    """Return the milliseconds of every launch of one call, the longest first, below 1% left out."""
    with torch.set_grad_enabled(given.is_training):
        compiled.profile(given.x, *given.extra)
    timings, names = compiled._dispatch.last.timings, dict(compiled._dispatch.last.executable.kernels)
    found = {f"{node} ({names.get(node, '')})": round(s * 1e3, 4) for node, s in timings.items()}
    least = sum(found.values()) / 100
    return {key: ms for key, ms in sorted(found.items(), key=lambda item: -item[1]) if ms >= least}


def product_gflops(device: str) -> float:
    """Return billions of operations a second of a large FP32 product."""
    size = 1024 if device == "cpu" else 8192
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    clock = time.process_time if torch.get_num_threads() == 1 and device == "cpu" else time.perf_counter
    times = []
    for _ in range(6):
        start = clock()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - start)
    return 2 * size**3 / min(times) / 1e9


def floor_ms(given: Problem, precision: str, machine: dict[str, Any]) -> float | None:
    """Return the least time of a call in inference; None where the layer's products are not counted."""
    layer, nodes = LAYERS[given.name], given.x.shape[0]
    if given.is_training or not layer.edge:
        return None
    edges = next(t for t in given.extra if t.dtype == torch.int64).shape[1]
    columns = sum(t.numel() for t in (given.x, *given.extra) if t.is_floating_point())
    itemsize = 4 // SPEEDUPS[precision]
    moved = itemsize * columns + 4 * (edges + nodes) + 4 * nodes * WIDTH
    operations = 1e3 * (layer.node * nodes + layer.edge * edges)
    rate = machine["product_gflops"] * SPEEDUPS[precision]
    return max(moved / machine["copy_gbs"] / 1e6, operations / rate / 1e6)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text: times, their ratio to eager, and the part of the time that is the floor."""
    found = {(row["layer"], row["kind"], row["name"]): row for row in rows}
    names = list(dict.fromkeys(row["name"] for row in rows))

    def cell(layer: str, kind: str, name: str) -> str:
        row, unit = found.get((layer, kind, name), {}), found.get((layer, kind, "eager"), {})
        if "ms" not in row:
            return "failed" if "failed" in row else "-"
        ms = row["ms"]["median"]
        text = f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"
        if name == "eager" or "ms" not in unit:
            return text
        floor = f", {100 * row['floor_ms'] / ms:.0f}%" if "floor_ms" in row else ""
        return f"{text} ({unit['ms']['median'] / ms:.1f}x{floor})"

    def others(layer: str, kind: str, key: str, form: str) -> str:
        values = [found.get((layer, kind, name), {}).get(key) for name in names if name.startswith("gnnc")]
        return "/".join("-" if value is None else format(value, form) for value in values)

    lines = [
        [layer, kind, *(cell(layer, kind, name) for name in names)]
        + [others(layer, kind, "peak_mb", ".0f"), others(layer, kind, "error", ".0e")]
        for layer, kind in dict.fromkeys((row["layer"], row["kind"]) for row in rows)
    ]
    headers = ["layer, ms (times eager, floor / ms)", "", *names, "peak MB", "errors"]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=list(PRECISIONS), required=True)
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--graph", default="small", choices=list(SHAPES))
    parser.add_argument("--training", nargs="?", const="too", choices=["too", "alone"], help="training steps")
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile, too")
    parser.add_argument("--turbo", action="store_true", help="measure Turbo-GNN, where it has the layer")
    parser.add_argument("--threads", type=int, help="threads of torch; default: all cores")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls on the CPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing new after so long")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.threads:
        torch.set_num_threads(args.threads)
    shape, begin = SHAPES[args.graph], time.perf_counter()
    machine = measure.machine() if args.device == "cpu" else cuda_kernels.machine()
    machine["product_gflops"] = round(product_gflops(args.device), 1)
    torch.manual_seed(0)
    edge_index = graphs.generate(shape, device=args.device)
    ours = [f"gnnc {precision}" for precision in PRECISIONS[args.device]]
    rounds = [[name for name in ("eager", *ours) if name not in args.skip]]
    rounds += [[_TURBO]] if args.turbo else []
    rounds += [["torch.compile"]] if args.compile else []
    rows: list[dict[str, Any]] = []
    kinds = {None: (False,), "too": (False, True), "alone": (True,)}[args.training]
    for names, training, layer in ((n, t, name) for n in rounds for t in kinds for name in args.layers):
        if time.perf_counter() - begin > args.seconds:
            break
        if names == [_TURBO] and not turbo_gnn_layers.is_supported(LAYERS[layer].make()):
            continue
        given = problem(layer, edge_index, shape.nodes, training=training)
        for row in rows_of(given, names, args.repeats, compare="eager" not in args.skip):
            floor = floor_ms(given, row["name"].split()[-1], machine) if row["name"] in ours else None
            rows.append(row if floor is None else row | {"floor_ms": round(floor, 4)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            report = {"machine": machine, "graph": args.graph, "rows": rows}
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(machine))
    print(table(rows))


if __name__ == "__main__":
    main()
