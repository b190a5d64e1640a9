"""A model on a CUDA device that is not the current one runs there, and the current one stays what it was."""

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graphs
import models
import pytest
import torch
from backend_models import MODELS, given
from cuda_cases import error
from torch.utils import _pytree as pytree

import gnnc
from gnnc.calibrate import calibration
from gnnc.calibrate.bandwidth import copy_bandwidth
from gnnc.calibrate.calibration import stored_rates
from gnnc.runtime.backend import get_backend
from gnnc.runtime.cuda.formats import tables, window_table

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device, and this needs two"),
]
THERE = torch.device("cuda", 1)
FOLDER = Path(__file__).resolve().parents[1]
PATHS = {"PYTHONPATH": os.pathsep.join(map(str, (FOLDER / "support", FOLDER, FOLDER.parent)))}
ALIKE = {"fp32": 1e-5, "int8": 0.01}
"""Relative error between devices, whose torch may add in another order."""


@pytest.fixture(autouse=True)
def current_device() -> Iterator[None]:
    """The first device is the current one, before and after."""
    torch.cuda.set_device(0)
    yield
    after = torch.cuda.current_device()
    torch.cuda.set_device(0)
    assert after == 0


def at(device: int | torch.device, *values: Any) -> Any:
    """Return copies on a device, of tensors and modules."""
    moved = pytree.tree_map(lambda v: copy.deepcopy(v).to(device), values)
    return moved if len(values) > 1 else moved[0]


@torch.no_grad()
@pytest.mark.parametrize("precision", ALIKE)
@pytest.mark.parametrize("name", MODELS)
def test_every_device_computes_the_same(name: str, precision: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    outputs = []
    for device in (0, 1):
        compiled = gnnc.compile(at(device, model), precision)
        outputs += [compiled(*at(device, *given())) for _ in range(3)]
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(THERE)
    assert [out.device.index for out in outputs] == [0, 0, 0, 1, 1, 1]
    assert all(error(out, outputs[0]) < ALIKE[precision] for out in outputs)


@torch.no_grad()
@pytest.mark.parametrize("cuda_graph", [True, False, "auto"])
def test_threads_and_streams_of_the_other_device(cuda_graph: bool | str) -> None:
    torch.manual_seed(0)
    model, x, edge_index = at(0, MODELS["GCN"]().eval(), *given())
    inputs = [x + i for i in range(4)]
    expected = [gnnc.compile(model, "int8", cuda_graph=cuda_graph)(one, edge_index).cpu() for one in inputs]
    compiled = gnnc.compile(at(THERE, model), "int8", cuda_graph=cuda_graph)
    inputs, edge_index = at(THERE, inputs, edge_index)
    torch.cuda.synchronize(THERE)
    found: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def call() -> None:
        for one, want in zip(inputs, expected, strict=True):
            got = compiled(one, edge_index)
            torch.cuda.synchronize(THERE)
            found.append((got, want, torch.cuda.current_device()))

    def work() -> None:
        with torch.no_grad():
            call()

    def work_on_a_stream() -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(THERE)):
            call()

    for target in (work, work_on_a_stream):
        target()
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert [current for _, _, current in found] == [0] * 8 + [1] * 8  # a stream brings its device
    assert all(got.device == THERE and torch.equal(got.cpu(), want) for got, want, _ in found)


@torch.no_grad()
@pytest.mark.parametrize("cuda_graph", [True, False, "auto"])
def test_the_stream_of_each_thread_of_the_other_device(cuda_graph: bool | str) -> None:
    torch.manual_seed(0)
    model, x, edge_index = at(THERE, MODELS["GCN"]().eval(), *given())
    compiled = gnnc.compile(model, "int8", cuda_graph=cuda_graph)
    inputs = [x + i for i in range(4)]
    expected = [compiled(one, edge_index) for one in inputs]
    torch.cuda.synchronize(THERE)
    stream = torch.cuda.ExternalStream(2, device=THERE)
    with torch.cuda.stream(stream), torch.cuda.device(0):
        got = [compiled(one, edge_index) for one in inputs]
        assert torch.cuda.current_device() == 0 and torch.cuda.current_stream(THERE) == stream
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@torch.no_grad()
def test_the_first_device_while_the_other_is_current() -> None:
    torch.manual_seed(0)
    model, x, edge_index = at(0, MODELS["GAT"]().eval(), *given())
    expected = gnnc.compile(copy.deepcopy(model), "int8")(x, edge_index)
    with torch.cuda.device(1):
        compiled = gnnc.compile(model, "int8")
        outputs = [compiled(x, edge_index.clone()) for _ in range(4)]
        assert torch.cuda.current_device() == 1
    assert all(torch.equal(out, expected) for out in outputs)


@torch.no_grad()
def test_devices_in_turns() -> None:
    torch.manual_seed(0)
    model, x, edge_index = at(0, MODELS["GraphSAGE"]().eval(), *given())
    sides = [(gnnc.compile(at(d, model), "fp32"), *at(d, x, edge_index)) for d in (0, 1)]
    for turn in range(12):
        here, there = (compiled(x + turn, edge_index) for compiled, x, edge_index in sides)
        assert error(there, here) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("cuda_graph", [True, False])
def test_a_compiled_model_moves_from_device_to_device(cuda_graph: bool) -> None:
    torch.manual_seed(0)
    model, x, edge_index = at(0, MODELS["GCN"]().eval(), *given())
    compiled = gnnc.compile(model, "int8", cuda_graph=cuda_graph)
    expected = compiled(x, edge_index).cpu()
    for device in (1, 0, 1):
        model.to(device)
        moved = at(device, x, edge_index)
        for _ in range(4):
            got = compiled(*moved)
            assert got.device.index == device and error(got, expected) < ALIKE["int8"]
        model.to(1 - device)  # and the inputs stay
        with pytest.raises(
            gnnc.InputError, match=f"inputs are on cuda:{device}, but .* is on cuda:{1 - device}"
        ):
            compiled(*moved)


@torch.no_grad()
def test_two_devices_at_once() -> None:
    torch.manual_seed(0)
    model, x, edge_index = at(0, MODELS["GAT"]().eval(), *given())
    sides = [(gnnc.compile(at(d, model), "int8", cuda_graph=True), *at(d, x, edge_index)) for d in (0, 1)]
    expected = [compiled(x, edge_index).cpu() for compiled, x, edge_index in sides]
    found: list[bool] = []

    def work(side: int) -> None:
        compiled, x, edge_index = sides[side]
        stream = torch.cuda.Stream(x.device)
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(40):
                got = compiled(x, edge_index)
                stream.synchronize()
                found.append(torch.equal(got.cpu(), expected[side]))

    threads = [threading.Thread(target=work, args=(side,)) for side in (0, 1, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 160 and all(found)


ALONE = """
import sys, torch, gnnc
from backend_models import MODELS, given
precision = sys.argv[1]
model = MODELS["GCN"]().eval().to("cuda:1")
arguments = [value.to("cuda:1") for value in given()]
with torch.no_grad():
    examples = arguments if precision == "auto" else None
    compiled = gnnc.compile(model, precision, cuda_graph=True, example_inputs=examples)
    for _ in range(4):
        compiled(*arguments)
torch.cuda.synchronize("cuda:1")
assert not torch._C._cuda_hasPrimaryContext(0), "the first device is taken, too"
"""


@pytest.mark.parametrize("precision", ["int8", pytest.param("auto", marks=pytest.mark.slow)])
def test_the_other_device_alone_is_taken(precision: str) -> None:
    """Half a gigabyte of every device that a process opens is gone. For auto the other one is measured."""
    command = [sys.executable, "-W", "ignore", "-c", ALONE, precision]
    subprocess.run(command, cwd=FOLDER, check=True, env=os.environ | PATHS)


@torch.no_grad()
def test_arguments_on_the_other_device() -> None:
    model, x, edge_index = at(THERE, MODELS["GCN"]().eval(), *given())
    compiled = gnnc.compile(model, "int8")
    with pytest.raises(gnnc.InputError, match="x is on cuda:0, but the model is on cuda:1"):
        compiled(x.to(0), edge_index)
    with pytest.raises(gnnc.InputError, match="edge_index is on cuda:0"):
        compiled(x, edge_index.to(0))


@torch.no_grad()
def test_an_id_out_of_range() -> None:
    model, x, edge_index = at(THERE, MODELS["GCN"]().eval(), *given())
    compiled = gnnc.compile(model, "int8")
    expected = compiled(x, edge_index)
    bad = edge_index.clone()
    bad[0, 7] = x.shape[0]
    with pytest.raises(gnnc.GnncError, match=r"edge_index\[0, 7\] = 90 is not a node"):
        compiled(x, bad)
    assert torch.equal(compiled(x, edge_index), expected)


@torch.no_grad()
@pytest.mark.parametrize("precision", ALIKE)
def test_edges_by_node_block(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with more shared memory than devices give unasked."""
    monkeypatch.setattr(tables, "pays", lambda *_: True)
    monkeypatch.setattr(window_table, "pays", lambda *_: True)
    torch.manual_seed(0)
    shape = graphs.Shape(nodes=5000, edges=100_000, features=64, classes=47, skew=1.6)
    given = models.MODELS["gcn"](64, 47).eval(), torch.randn(5000, 64), graphs.generate(shape)
    here, there = (
        gnnc.compile(model, precision)(x, edge_index)
        for model, x, edge_index in (at(d, *given) for d in (0, 1))
    )
    assert error(there, here) < ALIKE[precision]


@torch.no_grad()
def test_what_is_measured_is_measured_there() -> None:
    model, x, edge_index = at(THERE, MODELS["GAT"]().eval(), *given())
    compiled = gnnc.compile(model, "int8")
    assert "floor / time" in compiled.profile(x, edge_index)
    assert all(timing > 0 for timing in compiled._dispatch.last.timings.values())
    assert copy_bandwidth(THERE) > 1e11  # a copy that the clock of another device meets takes no time, or all
    assert copy_bandwidth(THERE) < 1e13


@torch.no_grad()
@pytest.mark.slow
def test_auto_chooses_for_the_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs that are alike, too, so they have names of their own here."""
    name = torch.cuda.get_device_name
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device=None: f"{name(device)} at {torch.device(device)}"
    )
    torch.manual_seed(0)
    model, x, edge_index = at(THERE, MODELS["GCN"]().eval(), *given())
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    compiled = gnnc.compile(model, "auto", example_inputs=(x, edge_index))
    got = compiled(x, edge_index)
    assert torch.cuda.max_memory_allocated(0) == before
    assert got.device == THERE and error(got, model(x, edge_index)) < 0.02
    backend, current = compiled._dispatch.last.backend, get_backend("cuda")
    assert backend.device == THERE and "at cuda:1," in backend.description
    assert "at cuda:0," in current.description
    assert list(calibration._known) == [calibration._key(backend)] != [calibration._key(current)]
    rates = stored_rates(backend)
    assert rates is not None and rates.machine == backend.description
    assert stored_rates(current) is None
