"""Which calls replay what an earlier one left, and with which addresses.

Calls go their whole way, on tensors of the host and with a driver that does nothing.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch_geometric.nn import GCNConv
from torch_geometric.nn.models import GCN

import gnnc
from gnnc.runtime import backend, reference
from gnnc.runtime.cuda import executable, lowering
from gnnc.runtime.cuda.backend import TARGET
from gnnc.runtime.cuda.driver import kernel_set, launch
from gnnc.runtime.cuda.executable import CudaExecutable
from gnnc.runtime.cuda.formats import csr, tables
from gnnc.runtime.cuda.formats.run_table import Cut, Runs
from gnnc.runtime.cuda.graphs import cuda_graph
from gnnc.runtime.structure.runner import StructureRunner
from gnnc.target import NarrowRows

NODES, WIDTH = 40, 16


class Device:
    """Says which call went which way.

    Attributes:
        made: ``again`` with the addresses that a call gave, ``recorded`` or ``launched``, a call each.
        stream: the current stream.
        capturing: whether the caller captures a CUDA graph.
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.stream, self.capturing = 0, False

    def __getattr__(self, name: str) -> Any:
        if name == "cuLaunchKernelEx":
            self.made += ["launched"] if self.made[-1:] != ["launched"] else []
        return lambda *_: 0


class Stream(SimpleNamespace):
    """A stream on which everything is done at once."""

    def __init__(self, handle: int) -> None:
        super().__init__(cuda_stream=handle)

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait_event(self, event: Any) -> None:
        """Nor for that."""


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield patched(monkeypatch)


def patched(monkeypatch: pytest.MonkeyPatch) -> Device:
    found, here = Device(), torch.device("cpu", 0)
    zeros, held, recorded = torch.zeros, cuda_graph.PatchedGraph.__call__, cuda_graph.GraphCache.__call__

    def build(self: Any, device: int) -> Any:
        for each in self._launchers.values():
            each.take(ctypes.c_void_p(1), each.block or 32, lambda *_: found.cuLaunchKernelEx())
        return {}

    def again(self: Any, addresses: tuple[int, ...], stream: int) -> None:
        found.made.append(addresses)
        held(self, addresses, stream)

    def record(self: Any, launches: Any, stream: int) -> None:
        found.made.append("recorded")
        recorded(self, launches, stream)

    patches = [
        (torch._C, "_cuda_getCurrentRawStream", lambda index: found.stream),
        (torch._C, "_cuda_exchangeDevice", lambda index: index),
        (torch.cuda, "is_current_stream_capturing", lambda: found.capturing),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "current_stream", lambda *_: Stream(found.stream)),
        (torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None)),
        (torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4)),
        (torch._C._dynamo.guards, "_empty_strided_cuda", torch._C._dynamo.guards._empty_strided_cpu),
        (executable, "device_of", lambda graph_module: here),
        (executable, "_THREAD", threading.local()),
        (launch, "driver", lambda: found),
        (cuda_graph, "driver", lambda: found),
        (kernel_set.KernelSet, "build", build),
        (cuda_graph.PatchedGraph, "__call__", again),
        (cuda_graph.GraphCache, "__call__", record),
        (tables, "model_runs", lambda rowptr, edges: one_run(edges)),
        (torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options)),
    ]
    for owner, name, value in patches:
        monkeypatch.setattr(owner, name, value, raising=False)
    assert lowering.KERNEL_FILES and reference  # they registered their kernels
    stand_in = StandIn(
        target=replace(TARGET, tensor_scales=False, narrow_rows=NarrowRows(), sorts_with_loops=False),
        chain=("cuda", "reference"),
        executable=CudaExecutable,
    )
    monkeypatch.setitem(backend._REGISTRY, "cpu", backend.Registration(lambda device: stand_in))
    return found


class CallHooks(csr.StreamHooks):
    """Hooks of calls alone: builds run on the CPU."""

    def before_build(self, operands: Sequence[Any]) -> None:
        """Do nothing."""

    def after_build(self, results: Sequence[Any]) -> None:
        """Do nothing."""


class StandIn(backend.Backend):
    """The CUDA backend with the structure of graphs computed by references."""

    def structure_program(self, structure: GraphModule) -> StructureRunner:
        """Return a program without kernels."""
        return StructureRunner(structure, lambda node: None, CallHooks())


def one_run(edges: int) -> Runs:
    """A run table, of which nothing is read."""
    entry, split = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(0, 4, dtype=torch.int32)
    return Runs(entry, entry.clone(), split, edges, Cut(64, 16), entry.clone())


def given(seed: int = 0, nodes: int = NODES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(nodes, WIDTH, generator=generator), torch.randint(nodes, (2, 90), generator=generator)


class Settled:
    """A compiled model of which calls go as graphs, and the way that its calls go."""

    def __init__(self, device: Device) -> None:
        torch.manual_seed(0)
        self.model = GCN(WIDTH, WIDTH, 2, 5, dropout=0.5).eval()
        self.compiled = gnnc.compile(self.model, "fp16", cuda_graph=True)
        self.device = device

    def way(self, *arguments: Tensor) -> Any:
        """Which way a call goes: ``recorded``, ``launched``, or the addresses that it puts into a graph."""
        self.device.made.clear()
        with torch.no_grad():
            self.out = self.compiled(*(arguments or (self.x, self.edge_index)))
        (made,) = self.device.made
        return made

    def settle(self) -> None:
        """Call until calls replay what is held: after a trace, and two that record."""
        ways = [self.way() for _ in range(4)]
        assert not isinstance(ways[-1], str) and self.compiled._dispatch.fast_path is not None

    @property
    def program(self) -> Any:
        """The one that calls are known to run."""
        run = self.compiled._dispatch.fast_path.run
        return next(program for program in self.compiled._dispatch.programs() if program.run is run)

    @property
    def captures(self) -> int:
        return len(self.compiled._dispatch.captures)


@pytest.fixture(scope="module")
def shared(device: Device) -> Settled:
    return Settled(device)


@pytest.fixture
def settled(shared: Settled) -> Settled:
    """The same one for all tests: they leave a model that runs."""
    shared.x, shared.edge_index = given()
    shared.settle()
    shared.compiled._dispatch.captures.clear()
    return shared


def test_the_addresses_of_a_fresh_x_and_of_the_output_are_handed_over(settled: Settled) -> None:
    kept = [settled.out]
    for _ in range(3):
        fresh = settled.x.clone()
        addresses = settled.way(fresh, settled.edge_index)
        assert fresh.data_ptr() in addresses
        assert {settled.out.data_ptr(), fresh.data_ptr()} == set(addresses)
        assert settled.out.data_ptr() not in [out.data_ptr() for out in kept]
        kept.append(settled.out)


def test_an_x_that_lies_otherwise_is_copied(settled: Settled) -> None:
    x, edge_index = settled.x, settled.edge_index
    for form in (x.t().contiguous().t(), torch.empty(x.numel() + 1)[1:].view_as(x)):
        addresses = settled.way(form, edge_index)
        assert not isinstance(addresses, str) and form.data_ptr() not in addresses


def test_weights_that_are_written_where_they_are_change_no_address(settled: Settled) -> None:
    for parameter in settled.model.parameters():
        parameter.data.mul_(2)
    settled.model.load_state_dict({k: v / 3 for k, v in settled.model.state_dict().items()})
    assert not isinstance(settled.way(), str)
    assert settled.captures == 0


def replace_data(weight: nn.Parameter, layer: nn.Module) -> None:
    weight.data = weight.data.clone()


def turn(weight: nn.Parameter, layer: nn.Module) -> None:
    weight.data = weight.data.t()


def replace_parameter(weight: nn.Parameter, layer: nn.Module) -> None:
    layer.weight = nn.Parameter(weight.data.clone())


@pytest.mark.parametrize("change", [replace_data, turn, replace_parameter])
def test_a_weight_that_lies_elsewhere_or_otherwise_is_recorded_anew(settled: Settled, change: Any) -> None:
    layer = settled.model.convs[0].lin
    change(layer.weight, layer)
    assert settled.way() == "recorded"
    if change is turn:  # copied in each call
        assert [settled.way() for _ in range(3)] == ["recorded"] * 3
        change(layer.weight, layer)
    settled.settle()
    assert settled.captures == 0


def test_weights_of_another_dtype_or_shape_are_refused(settled: Settled) -> None:
    weight = settled.model.convs[0].lin.weight
    whole = weight.data
    weight.data = whole[:7]
    with pytest.raises(gnnc.InputError, match="had shape"):
        settled.way()
    weight.data = whole.half()
    with pytest.raises(gnnc.UnsupportedError, match="float16"):
        settled.way()
    weight.data = whole
    assert not isinstance(settled.way(), str)


def test_another_structure_is_recorded(settled: Settled) -> None:
    settled.edge_index[0, 0] = 7
    assert settled.way() == "recorded"
    settled.settle()
    settled.edge_index.data = settled.edge_index.clone()
    assert settled.way() == "recorded"
    settled.settle()
    _, other = given(1)
    assert settled.way(settled.x, other) == "recorded"
    assert settled.way(given(0, NODES + 3)[0], other) == "recorded"
    settled.settle()
    settled.compiled.clear_cache()
    assert settled.way() == "recorded"


def test_a_structure_that_is_freed_leaves_nothing(settled: Settled) -> None:
    settled.edge_index = settled.edge_index.clone()
    settled.settle()
    cache = settled.program.runner.cache
    before = len(cache)
    settled.edge_index = given(2)[1]
    assert len(cache) == before - 1
    assert settled.way() == "recorded"


def test_ids_out_of_range_are_refused(settled: Settled) -> None:
    settled.edge_index[1, 3] = NODES
    with pytest.raises(gnnc.GraphError, match=r"\[1, 3\] = 40"):
        settled.way()
    settled.edge_index[1, 3] = 0
    settled.settle()


def test_hooks_and_layers_of_the_model_are_seen(settled: Settled) -> None:
    hook = settled.model.convs[1].register_forward_hook(lambda module, arguments, result: result * 2)
    settled.settle()
    hook.remove()
    settled.settle()
    settled.model.convs[1] = GCNConv(WIDTH, 5).eval()
    settled.settle()
    assert settled.captures == 3


@pytest.mark.slow
def test_modes_and_autocast_have_programs_of_their_own(settled: Settled) -> None:
    program = settled.program
    with torch.autocast("cpu", torch.bfloat16):
        settled.way()
    assert settled.captures == 1
    settled.compiled.train()
    settled.way()  # drops out: torch draws the numbers
    assert settled.captures == 2
    settled.compiled.eval()
    assert not isinstance(settled.way(), str)
    settled.settle()
    assert settled.captures == 2 and settled.program is program


def test_each_stream_has_memory_and_a_graph_of_its_own(settled: Settled) -> None:
    settled.device.stream = 7
    assert [settled.way() for _ in range(2)] == ["recorded", "recorded"]
    settled.settle()
    settled.device.stream = 0
    assert not isinstance(settled.way(), str)


def test_a_call_on_the_stream_of_each_thread_runs_as_a_whole_on_another(
    settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph is made there, too."""
    entered: list[int] = []
    made: list[int] = []
    looked_up = CallHooks.after_call

    def elsewhere(device: torch.device, call: Any, *values: Any) -> Any:
        entered.append(settled.device.stream)
        settled.device.stream = 9
        try:
            return call(*values)
        finally:
            settled.device.stream = 2

    def look_up(self: Any, results: tuple[Any, ...]) -> None:
        made.append(settled.device.stream)
        looked_up(self, results)

    monkeypatch.setattr(executable, "on_own_stream", elsewhere)
    monkeypatch.setattr(CallHooks, "after_call", look_up)
    settled.device.stream = 2
    settled.edge_index = given(3)[1]
    assert settled.way() == "recorded"
    settled.settle()
    settled.device.stream = 0
    arenas = settled.program.executable._arenas._by_stream
    assert entered == [2] * 5 and set(made) == {9}
    assert arenas[9] and 2 not in arenas


def test_a_program_that_is_run_by_itself_runs_there_too(
    settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = settled.program.executable
    monkeypatch.setattr(executable, "on_own_stream", lambda device, call, *values: (device, values))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    settled.device.stream = 2
    assert program(1, 2) == (program.device, ((1, 2),))
    assert program.profile(1, 2) == (program.device, (1, 2))
    settled.device.stream = 0


def test_a_thread_on_the_stream_of_another_takes_turns_with_it(settled: Settled) -> None:
    ways: list[Any] = []
    thread = threading.Thread(target=lambda: ways.append(settled.way()))
    thread.start()
    thread.join()
    assert ways and not isinstance(ways[0], str)


def test_the_callers_own_graph_gets_launches(settled: Settled) -> None:
    settled.device.capturing = True
    assert settled.way() == "launched"
    settled.device.capturing = False
    assert not isinstance(settled.way(), str)


def test_what_a_kernel_met_is_raised_by_the_next_call(settled: Settled) -> None:
    nan_flag = settled.program.executable._nan_flag
    ctypes.c_int64.from_address(nan_flag.address).value = nan_flag.add("convs.1")
    with pytest.raises(gnnc.PrecisionError, match=r"convs\.1.*in this call or an earlier one"):
        settled.way()
    assert not isinstance(settled.way(), str)


def test_inputs_that_the_program_is_not_for(settled: Settled) -> None:
    x, edge_index = settled.x, settled.edge_index
    with pytest.raises(gnnc.InputError, match="float64"):
        settled.way(x.double(), edge_index)
    with pytest.raises(gnnc.InputError):
        settled.way(x[:, 1:], edge_index)
    with pytest.raises(gnnc.GraphError, match="float32"):
        settled.way(x, edge_index.float())
    assert settled.captures == 0 and not isinstance(settled.way(), str)
