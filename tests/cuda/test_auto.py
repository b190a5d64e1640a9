"""``precision="auto"`` on a CUDA device: its rates, what they predict, and what is chosen by them."""

import json
import os
import statistics
import time
from pathlib import Path

import graphs
import models
import pytest
import torch
from cuda_cases import error, on_device
from outliers import Outliers
from zoo import build, random_graph

import gnnc
from gnnc.__main__ import describe_speed
from gnnc.calibrate import calibration
from gnnc.calibrate.probes import PROBES, Probe, Writer, values_of
from gnnc.capture.arguments import flatten_call
from gnnc.cost import model as cost_model
from gnnc.cost.model import ALONE, Rates
from gnnc.ir import describe
from gnnc.passes.base import Context, run_passes
from gnnc.passes.cache import Cache
from gnnc.passes.fuse import Fuse
from gnnc.passes.lower import Lower
from gnnc.passes.quantization.number_formats import Option
from gnnc.passes.quantize import Quantize
from gnnc.runtime.backend import get_backend
from gnnc.target import Target

NAMES = ("gcn", "gat", "gin", "sage-mean", "gcn-deep-residual")
_measured: list[Rates] = []
_worked: list[float] = []


def _is_alone() -> bool:
    """Whether no other tests take turns with this one on the processor and the device."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) == 1


@pytest.fixture
def rates(no_rates: None) -> Rates:
    """What this GPU does, measured once in a session."""
    backend = get_backend("cuda")
    if not _measured:
        begin = time.process_time()
        _measured.append(calibration.calibrate(backend))
        _worked.append(time.process_time() - begin)
    calibration._known[calibration._key(backend)] = _measured[0]
    return _measured[0]


def auto(name: str, budget: float) -> tuple[gnnc.CompiledModel, torch.nn.Module]:
    model = build(name).cuda()
    inputs = on_device(random_graph(200, 1500))
    return gnnc.compile(model, "auto", example_inputs=inputs, error_budget=budget, backend="cuda"), model


@pytest.mark.first(1)
@pytest.mark.parametrize("option", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_the_families_of_a_probe_have_kernels(probe: Probe, option: str, compiler: None) -> None:
    """Needs no device: what is measured in them is kernels of ours, or cuBLAS."""
    backend = get_backend("cuda-offline:sm_90")
    facts = backend.target
    target = Target(facts.name, facts.precisions, joins_products=facts.joins_products, lowering=backend)
    writer = Writer(probe, torch.device("cuda"))
    graph_module = writer.finish(probe.body(writer))
    assert {n.meta["val"].device.type for n in graph_module.graph.find_nodes(op="placeholder")} == {"cuda"}
    context = Context(precision=Option.parse(option).precision, target=target)
    calibration._assign(graph_module, Option.parse(option), context)
    lowered = run_passes(graph_module, (Quantize(), Cache(), Fuse(), Lower()), context)[-1][1].forward
    nodes = {node.name: node for node in lowered.graph.nodes}
    timed = [la for la in cost_model.launches(describe.inline(lowered)) if la.family in cost_model.FAMILIES]
    assert {launch.family for launch in timed} >= {"gemm", "spmm"}
    assert {nodes[launch.name].meta["choice"].kernel.backend for launch in timed} == {"cuda"}


@pytest.mark.cuda
def test_the_values_of_a_probe_are_on_the_device_and_the_same_each_time() -> None:
    device = torch.device("cuda")
    first, again = (values_of(PROBES[0], 500, 4000, device) for _ in range(2))
    assert all(value.is_cuda for value in first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.cuda
def test_this_gpu_is_measured(rates: Rates) -> None:
    # Where other processes take turns with this one, the clock goes on, and processor time does not.
    assert min(rates.measured_in, *_worked) <= (10 if _is_alone() else 30)
    assert torch.cuda.get_device_name() in rates.machine
    assert {"gemm", "spmm", "attention", "sddmm", "edge_softmax", ALONE} <= rates.families.keys()
    assert {f"dot.{p}" for p in ("fp32", "fp16", "bf16", "int8")} <= rates.families["gemm"].keys()
    modes = {name.split("@")[0] for name in rates.families["spmm"] if name.startswith("gather")}
    ways = ("fp32", "fp16", "bf16", "int8.tensor", "int8.row_pow2", "int8.row")
    assert modes == {f"gather.{way}" for way in ways}
    assert f"speed of backend cuda: {rates.machine}" in describe_speed("cuda")


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("budget", [0.005, 0.02])
@pytest.mark.parametrize("name", NAMES)
def test_the_budget_holds_on_the_examples_and_beyond(name: str, budget: float, rates: Rates) -> None:
    start = time.perf_counter()
    compiled, model = auto(name, budget)
    assert time.perf_counter() - start < (30 if _is_alone() else 60)
    for limit, seed in ((budget, 0), (1.2 * budget, 7)):
        inputs = on_device(random_graph(200, 1500, seed=seed))
        assert error(compiled(*inputs), model(*inputs)) <= limit
    assert "taken: " in compiled.explain() and "rank correlation" in compiled.explain()


@pytest.mark.cuda
def test_it_is_deterministic(rates: Rates, tmp_path: Path) -> None:
    texts = []
    for _ in range(2):
        compiled, _ = auto("gcn-deep-residual", 0.008)
        compiled.save_plan(tmp_path / "plan.json")
        texts.append((tmp_path / "plan.json").read_text())
    assert texts[0] == texts[1]


@pytest.mark.cuda
@torch.no_grad()
def test_a_layer_with_outliers_is_protected(rates: Rates, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Outliers().eval().cuda()
    inputs = on_device(random_graph(200, 1500))
    compiled = gnnc.compile(model, "auto", example_inputs=inputs, error_budget=0.02, backend="cuda")
    assert error(compiled(*inputs), model(*inputs)) <= 0.02
    compiled.save_plan(tmp_path / "plan.json")
    layers = json.loads((tmp_path / "plan.json").read_text())["layers"]
    assert layers["middle"]["gemm"] != "int8"


def on_arxiv() -> tuple[graphs.Shape, tuple[torch.Tensor, torch.Tensor]]:
    """The arxiv-shaped graph on the device: its sizes, x and edge_index."""
    shape = graphs.SHAPES["arxiv"]
    x = torch.randn(shape.nodes, shape.features, device="cuda")
    return shape, (x, graphs.generate(shape, device="cuda"))


@pytest.mark.cuda
@pytest.mark.slow
@torch.no_grad()
def test_predictions_are_within_30_percent_of_kernels_on_a_large_graph(rates: Rates) -> None:
    """Median over the kernels of three models in three precisions, on the arxiv-shaped graph."""
    shape, inputs = on_arxiv()
    off = []
    for name in ("gcn", "sage", "gat"):
        model = models.MODELS[name](shape.features, shape.classes).eval().cuda()
        for precision in ("fp32", "bf16", "int8"):
            compiled = gnnc.compile(model, precision, example_inputs=inputs, backend="cuda")
            off += _relative_errors(compiled, model, inputs)
    assert statistics.median(off) <= 0.3, sorted(off)


def _relative_errors(
    compiled: gnnc.CompiledModel, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> list[float]:
    program = compiled._captured()
    tensors = flatten_call(model, inputs, {}).tensors
    best: dict[str, float] = {}
    for _ in range(15):
        for timing in program.profiled(tensors)[1]:
            best[timing.node] = min(best.get(timing.node, float("inf")), timing.seconds)
    return [abs(seconds / best[node] - 1) for node, seconds in program.knowledge().predicted.items()]


@pytest.mark.cuda
@pytest.mark.slow
@torch.no_grad()
def test_choosing_takes_less_than_two_minutes_on_a_large_graph(rates: Rates) -> None:
    shape, inputs = on_arxiv()
    model = models.residual_gcn(shape.features, shape.classes).eval().cuda()
    start = time.perf_counter()
    gnnc.compile(model, "auto", example_inputs=inputs, backend="cuda")
    assert time.perf_counter() - start < 120
