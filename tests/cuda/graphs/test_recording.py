"""What calls that replay run again, and what they leave out (``gnnc/runtime/cuda/graphs/recording.py``)."""

import ctypes
import re
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_cases import lowered
from one_op import fused_program_of
from slow import slow_after
from torch import Tensor, nn

import gnnc
from gnnc.ir.source import Source
from gnnc.runtime.cuda.driver import launch as launch_module
from gnnc.runtime.cuda.driver.kernel_set import KernelSet
from gnnc.runtime.cuda.driver.launch import Launcher
from gnnc.runtime.cuda.emitter import CudaEmitter
from gnnc.runtime.cuda.graphs import cuda_graph
from gnnc.runtime.cuda.graphs.cuda_graph import CallState, PatchedGraph, _Graph
from gnnc.runtime.cuda.graphs.recording import obstacle, recording
from gnnc.runtime.program.launches import Call, Expr, Statement, Take, Unpacked, View, expr, literal, variable
from gnnc.runtime.program.launches import Launch as Launched

pytestmark = pytest.mark.usefixtures("compiler")


STANDS_FOR = {"fields": 6, "staged_fields": 7}
"""Arguments of a table's ``*runs.fields``."""


def repeated_lines(source: str) -> list[str]:
    """The lines that a call like an earlier one runs."""
    lines = [line.strip() for line in source.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("if held is not None"))
    last = next(i for i, line in enumerate(lines) if line.startswith("fixed = Fixed("))
    return lines[first + 1 : last]


RECORDED = ["gcn", "gat", "sage-mean", "gin", "graphconv", "batch-norm", "models.GCN"]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", slow_after(2, RECORDED))
def test_a_call_hands_over_what_is_made_of_its_input_and_its_output(name: str) -> None:
    recording = lowered(name, "int8", "cuda-offline:sm_90")._dispatch.last.executable.recording
    assert recording is not None
    *lines, held, result = repeated_lines(recording.source)
    assert sum("take(" in line for line in lines) == 1
    elsewhere = ("runs_of", "sums_of", "empty(", "record(", "bias", "weight")
    assert not any(word in " ".join(lines) for word in elsewhere)
    assert held.startswith("again(arena, held, (") and held.count("data_ptr()") == len(recording.patches)
    assert result.startswith("return (out_")
    names = set(re.findall(r"\b[a-z]+_\d+\b", " ".join(lines)))
    defined = set(re.findall(r"\b[a-z]\w*_\d+\b", recording.source.split("\n")[0]))
    made = {line.split(" = ")[0] for line in lines}
    bound = {name for name in names if name.rpartition("_")[0] in ("op", "view", "aligned", "dtype")}
    assert names <= defined | made | bound


def test_launches_and_arguments_of_the_patches_are_those_of_the_inputs() -> None:
    recording = lowered("gcn", "int8", "cuda-offline:sm_90")._dispatch.last.executable.recording
    lines = [line.strip() for line in recording.source.splitlines()]
    launches = [line for line in lines if ".record(" in line]
    held = next(line for line in lines if line.startswith("again(arena, held, ("))
    addresses = (held.partition("held, (")[2].rstrip(", )") + ")").split(", ")
    for (launch, position), address in zip(recording.patches, addresses, strict=True):
        _, _, *values = launches[launch].partition(".record(")[2].removesuffix(")").split(", ")
        counts = [STANDS_FOR.get(value.partition(".")[2], 1) for value in values]
        spread = [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
        assert spread[position] == address


def emitter_of(*statements: Statement) -> CudaEmitter:
    """A program of one input ``x``, one weight ``w``, and these statements."""
    graph = torch.fx.Graph()
    for name, kind in (("x", "input"), ("w", "parameter")):
        node = graph.placeholder(name)
        node.meta = {"val": torch.empty(4, 8), "source": Source(kind, name)}  # type: ignore[arg-type]
    graph.output(())
    emitter = CudaEmitter(torch.fx.GraphModule({}, graph), check_finite=False, offline=True)
    for node in graph.find_nodes(op="placeholder"):
        emitter.define(node, variable(node.name))
    for statement in statements:
        emitter.append(statement)
    return emitter


def address(name: str) -> Expr:
    return expr("{}.data_ptr()", variable(name))


def test_a_patch_is_the_position_of_an_address_behind_all_that_is_unpacked() -> None:
    take = Take("out_1", literal(4), 8, "dtype_1")
    fixed = Launched("launch_1", literal(1), (address("w"),))
    fields = Unpacked(expr("{}.fields", variable("w")), 6)
    last = Launched("launch_2", literal(1), (fields, address("x"), address("w"), address("out_1")))
    form = recording(emitter_of(take, fixed, last), [variable("out_1")])
    assert form is not None and form.patches == ((1, 6), (1, 8))
    assert last.recorded in form.source and last.text not in form.source


def test_a_call_that_uses_memory_of_launches_leaves_no_recording() -> None:
    take, view = Take("out_1", literal(4), 8, "dtype_1"), View("v_1", "out_1", (literal(32),))
    assert recording(emitter_of(take, view), [variable("v_1")]) is not None
    for name in ("out_1", "v_1"):
        read = Call("op_1", (variable(name),), result="r_1")
        emitter = emitter_of(take, view, read)
        assert recording(emitter, [variable("v_1")]) is None
        assert obstacle(emitter) == "the program reads or writes in PyTorch what kernels write"


def views_of_a_result(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    rows = torch.ops.gnnc.gemm(x, w)
    scale = torch.ops.gnnc.scale(rows, "int8/row")
    return rows.view(-1, 2, 4), scale, torch.ops.gnnc.quantize(rows, scale, "int8/row"), rows.relu().view(-1)


def test_a_view_of_an_output_reads_nothing_that_launches_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSet, "compile", lambda self, architecture: {})  # its text is enough
    given = torch.randn(9, 16), torch.randn(8, 16)
    program = fused_program_of(views_of_a_result, *given, backend="cuda-offline:sm_90")
    assert program.recording is not None, program.source
    assert {"= out_", ".view((9, 2, 4,))"} <= set(re.findall(r"= out_|\.view\(\(9.*", program.source))
    assert "reshape" not in program.source


def test_views_of_outputs_are_the_elements_of_the_reference() -> None:
    given = torch.randn(9, 16), torch.randn(8, 16)
    got = fused_program_of(views_of_a_result, *given, backend="cpu")(*given)
    for one, other in zip(got, views_of_a_result(*given), strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_grid_of_the_inputs_leaves_nothing_to_patch() -> None:
    take = Take("out_1", literal(4), 8, "dtype_1")
    launch = Launched("launch_1", expr("{}.shape[0]", variable("x")), (address("out_1"),))
    form = recording(emitter_of(take, launch), [variable("out_1")])
    assert form is not None and form.patches == () and "replay(recorded, arena, None)" in form.source


class Positive(nn.Module):
    """Works on the rows that begin with a positive number: how many there are is known in mid-program."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x[x[:, 0] > 0]).relu()
        return self.second(h[h[:, 0] > 0])


@pytest.mark.first(1)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_torch_waits_for_launches_that_write_memory_of_a_late_size(precision: str) -> None:
    """A recorded program launches at its end, when torch has read what it reads."""
    compiled = gnnc.compile(Positive().eval(), precision, backend="cuda-offline:sm_90")
    with torch.no_grad(), pytest.raises(gnnc.BackendError, match="compiles for a device that is not here"):
        compiled(torch.randn(40, 16))
    executable = compiled._dispatch.last.executable
    assert "= empty((" in executable.source and executable.recording is None
    assert (
        "launched one by one: " in compiled.explain()
        and "in PyTorch what kernels write" in compiled.explain()
    )


def test_what_is_fixed_is_the_same_tensors_not_equal_ones() -> None:
    rowptr, weight = torch.arange(5), torch.ones(3)
    fixed = CallState((weight.data_ptr(), True), (rowptr,))
    assert fixed.is_like(CallState((weight.data_ptr(), True), (rowptr,)))
    assert not fixed.is_like(CallState((weight.data_ptr(), False), (rowptr,)))
    assert not fixed.is_like(CallState((weight.data_ptr(), True), (rowptr.clone(),)))
    assert fixed.holds([weight, weight.contiguous(), rowptr, 3, torch.empty(0)])
    assert not fixed.holds([weight.clone()])


def test_what_is_fixed_keeps_no_graph_alive() -> None:
    rowptr = torch.arange(5)
    fixed = CallState((), (rowptr,))
    again = CallState((), (rowptr,))
    del rowptr
    assert fixed.structure[0]() is None and not fixed.is_like(again)


class Driver:
    """A driver that does nothing but note what it was asked, and fails where it is told to."""

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def answer(*values: Any) -> int:
            self.asked.append((name, values))
            return int(name in self.fails)

        return answer


@pytest.mark.parametrize("waits", [False, True])
def test_a_node_waits_for_the_one_before_it_or_is_launched_after_it(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, launches = Driver(), [Launcher(name, 1, 32, 0) for name in ("a", "b")]
    for module in (launch_module, cuda_graph):
        monkeypatch.setattr(module, "driver", lambda: driver)
    launches[1].waits = waits
    graph = _Graph([(launch, 5, struct.pack("q", 10)) for launch in launches])
    ((name, values),) = [each for each in driver.asked if each[0].startswith("cuGraphAddDep")]
    first, second = (node.handle for node in graph.nodes)
    assert values[1]._obj is first and values[2]._obj is second
    if waits:
        assert name == "cuGraphAddDependencies_v2" and list(bytes(values[3]._obj)) == [1, 0, 1] + 5 * [0]
    else:
        assert name == "cuGraphAddDependencies" and len(values) == 4
    driver.fails.add(name)
    with pytest.raises(gnnc.BackendError, match="put b behind a"):
        _Graph([(launch, 5, struct.pack("q", 10)) for launch in launches])


@pytest.mark.parametrize("refused", ["cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch"])
def test_what_a_refused_graph_was_given_is_launched_all_the_same(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, made = Driver(), []

    class Noted(Launcher):
        def __call__(self, grid: int, stream: int, *values: Any) -> None:
            made.append((self.name, grid, stream, *values))

    for module in (launch_module, cuda_graph):
        monkeypatch.setattr(module, "driver", lambda: driver)
    a, b = Noted("a", 2, 32, 0), Noted("b", 1, 32, 0)
    recorded = [(a, 5, struct.pack("2q", 10, 11)), (b, 6, struct.pack("q", 12))]
    driver.fails.add(refused)
    held = PatchedGraph(recorded, [(0, 1), (1, 0)], CallState((), ()), ())
    with pytest.raises(gnnc.BackendError, match="graph"):
        held((21, 22), 7)
    held.launch_separately((21, 22), 7)
    assert made == [("a", 5, 7, 10, 21), ("b", 6, 7, 22)]


@pytest.mark.parametrize("fails", [False, True])
def test_loading_kernels_leaves_the_current_device_what_it_was(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(launch_module, "driver", lambda: driver)
    monkeypatch.setattr(launch_module, "has_programmatic_edges", lambda: False)
    if fails:
        driver.fails.add("cuLibraryLoadData")
        with pytest.raises(gnnc.BackendError, match="load the kernels"):
            launch_module.LoadedCode(b"", 1)
    else:
        launch_module.LoadedCode(b"", 1)
    names = [name for name, _ in driver.asked if name.startswith(("cuCtx", "cuLibraryLoad"))]
    assert names == ["cuCtxPushCurrent_v2", "cuLibraryLoadData", "cuCtxPopCurrent_v2"]


@pytest.mark.parametrize("count", [4, 16, 32])
def test_python_adds_little_to_a_launch(count: int) -> None:
    """In the driver's place is a function that does nothing; a launch takes 2.7 such calls, on any host."""
    launch, takes = Launcher("a", count, 32, 0), ctypes.CDLL(None).sched_yield
    launch.take(ctypes.c_void_p(1), 32, takes)
    values, given = tuple(range(count)), [ctypes.c_void_p(1)] * 4
    pairs = [(least(lambda: launch(1, 7, *values)), least(lambda: takes(*given))) for _ in range(3)]
    assert min(whole / call for whole, call in pairs) <= 4


def least(call: Callable[[], Any]) -> float:
    """The least seconds of a call: others may take turns with this process."""
    times = []
    for _ in range(100):
        start = time.perf_counter()
        for _ in range(50):
            call()
        times.append(time.perf_counter() - start)
    return min(times) / 50
