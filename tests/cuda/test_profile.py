"""What ``profile`` says of a CUDA device, and what its profiler hears meanwhile."""

from typing import Any

import pytest
import torch
from backend_models import MODELS, given
from cuda_cases import on_device

import gnnc
from gnnc.errors import BackendError
from gnnc.runtime.cuda import executable
from gnnc.runtime.cuda.device import CudaDevice
from gnnc.runtime.cuda.driver.launch import Launcher
from gnnc.runtime.cuda.executable import CudaExecutable

pytestmark = pytest.mark.cuda


def compiled_and_inputs(name: str = "GCN", **options: Any) -> tuple[gnnc.CompiledModel, tuple[Any, ...]]:
    torch.manual_seed(0)
    return gnnc.compile(MODELS[name]().eval().cuda(), "int8", **options), on_device(given())


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ranges that were entered, and an empty one for each that was left."""
    heard: list[str] = []
    monkeypatch.setattr(CudaDevice, "enter_range", staticmethod(heard.append))
    monkeypatch.setattr(CudaDevice, "leave_range", staticmethod(lambda: heard.append("")))
    return heard


def cells(text: str) -> list[tuple[str, str]]:
    """Return "measured ms" and "floor / time" of each row of a table."""
    head, _, *rows = [line for line in text.splitlines() if not line.startswith("Launches: ")]
    begin, end = (head.index(name) + len(name) for name in ("predicted ms", "floor / time"))
    return [tuple(row[begin:end].split()) for row in rows]


@torch.no_grad()
@pytest.mark.parametrize("name", ["GCN", "GAT"])
@pytest.mark.usefixtures("said")
def test_the_text_has_the_time_and_the_part_of_the_floor_of_every_kernel(name: str) -> None:
    compiled, arguments = compiled_and_inputs(name)
    *rows, total = cells(compiled.profile(*arguments))
    kernels = compiled._dispatch.last.executable.kernels
    assert len(rows) == len(kernels) > 3
    assert all(float(time) > 0 and float(part) >= 0 for time, part in (*rows, total))
    assert sum(float(time) for time, _ in rows) == pytest.approx(float(total[0]), abs=0.0006 * len(rows))


def test_ranges_are_those_of_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", called.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: called.append("pop"))
    device = CudaDevice(torch.device("cuda", 0))
    device.enter_range("convs.0 gemm")
    device.leave_range()
    assert called == ["convs.0 gemm", "pop"]


@torch.no_grad()
@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_ranges_carry_the_names_of_layers(name: str, said: list[str]) -> None:
    compiled, arguments = compiled_and_inputs(name)
    compiled.profile(*arguments)
    assert said[::2] == [each for each in said if each] and set(said[1::2]) == {""}
    nodes = {node.name: node.meta.get("layer", "") for node in compiled.graph_module.graph.nodes}
    launched = {f"{nodes[node]} {node}".strip() for node, _ in compiled._dispatch.last.executable.kernels}
    assert launched <= set(said)
    layers = {each.split()[0] for each in launched if " " in each}
    assert layers <= set(dict(compiled.model.named_modules()))
    assert {".".join(layer.split(".")[:2]) for layer in layers} >= {"convs.0", "convs.1"}


@torch.no_grad()
def test_calls_that_are_not_profiled_enter_no_range(said: list[str]) -> None:
    compiled, arguments = compiled_and_inputs()
    compiled(*arguments)
    assert not said


@torch.no_grad()
def test_ranges_are_left_when_a_call_raises(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, arguments = compiled_and_inputs()
    compiled.profile(*arguments)
    said.clear()
    launch, made = Launcher.__call__, []

    def fail(self: Launcher, *given: int) -> None:
        made.append(self)
        if said and len(made) > 3:
            raise BackendError("this launch fails")
        launch(self, *given)

    monkeypatch.setattr(Launcher, "__call__", fail)
    with pytest.raises(BackendError, match="this launch fails"):
        compiled.profile(*arguments)
    assert said and said.count("") * 2 == len(said)


@torch.no_grad()
@pytest.mark.parametrize("below", [0.0, 1e6])
def test_auto_replays_what_takes_less_than_the_limit_alone(
    below: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executable, "GRAPH_BELOW_MS", below)
    compiled, arguments = compiled_and_inputs()
    expected = compiled(*arguments)
    for _ in range(CudaExecutable.SETTLES_AFTER):
        compiled(*arguments)
        torch.cuda.synchronize()
    launch, made = Launcher.__call__, []
    monkeypatch.setattr(Launcher, "__call__", lambda *given: made.append(1) or launch(*given))
    assert torch.equal(compiled(*arguments), expected)
    program = compiled._dispatch.last.executable
    assert isinstance(program, CudaExecutable) and program.replays_graph == (below > 0)
    assert (not made) == (below > 0)
    said = "each call is replayed as one CUDA graph" if below > 0 else "they run for more than 0.0 ms a call"
    assert said in compiled.explain() and "Launches: " in compiled.profile(*arguments)
