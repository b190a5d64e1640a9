"""Programs compile for architectures that this machine need not have, and stay in registers."""

import re
from itertools import product

import graphs
import models
import pytest
import torch
from cuda_cases import lowered
from cuda_inference import CASES
from torch_geometric.nn import SimpleConv
from zoo import ZOO, build

import gnnc
from gnnc.runtime.backend import OFFLINE
from gnnc.runtime.cuda.build import compiler_version
from gnnc.runtime.cuda.emitter import CudaEmitter
from gnnc.runtime.cuda.executable import OfflineExecutable
from gnnc.runtime.cuda.machine_code import waiting_kernels
from gnnc.runtime.cuda.watch import Watch

pytestmark = pytest.mark.usefixtures("compiler")
CALL = 16
"""Bytes that the slow path of a division, which is a call, may save of its caller's registers."""
FIRST_BLACKWELL = 48
"""Bytes that NVRTC 13.0, which torch 2.11 brings, spills for sm_100 where 13.5 spills none."""
LOOP_STATE = 48
"""Bytes that a staged sum of rows may move: once a run it keeps two words, beside what ends the row."""
ATTENTION = ("gatv2", "transformer")


def check(executable: OfflineExecutable) -> None:
    """All architectures have code, which takes declared local memory alone, and waits before it reads."""
    assert set(executable.machines) == set(OFFLINE)
    for architecture, machine in executable.machines.items():
        assert set(machine.resources) == set(executable.unit.names)
        old = architecture == "sm_100" and compiler_version() < (13, 5)
        for kernel, taken in machine.resources.items():
            allowed = FIRST_BLACKWELL if old else LOOP_STATE if "spmm_staged" in kernel else CALL
            assert taken.spilled <= allowed and taken.stack <= CALL, (architecture, kernel, taken)
        waiting = frozenset() if architecture == "sm_80" else frozenset(machine.symbols.values())
        assert waiting_kernels(machine.cubin) == waiting


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [*product(ZOO, ["int8"]), *product(ATTENTION, ["fp16"])])
def test_the_zoo(name: str, precision: str) -> None:
    compiled = lowered(name, precision, "cuda-offline")
    assert "cuda-offline" in str(compiled)
    check(compiled._last.executable)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "precision"), [*product(CASES, ["int8"]), *product(("gcn:products", "gat:arxiv"), ["fp16"])]
)
def test_the_benchmarks(case: str, precision: str) -> None:
    name, graph = case.split(":")
    shape = graphs.SHAPES[graph]
    args = torch.randn(300, shape.features), torch.randint(300, (2, 6000))
    model = models.MODELS[name](shape.features, shape.classes).eval()
    compiled = gnnc.compile(model, precision, example_inputs=args, backend="cuda-offline")
    with torch.no_grad(), pytest.raises(gnnc.BackendError, match="not here"):
        compiled(*args)
    check(compiled._last.executable)


@pytest.mark.parametrize("name", ["gcn", "sage"])
def test_rows_of_codes_bring_their_weight_where_there_is_room(name: str) -> None:
    """47 columns leave a byte of the last sixteen, 64 do not."""
    torch.manual_seed(0)
    x, edge_index = torch.randn(300, 64), torch.randint(300, (2, 2000))
    compiled = gnnc.compile(
        models.MODELS[name](64, 47).eval(),
        "int8",
        example_inputs=(x, edge_index),
        backend="cuda-offline:sm_90",
    )
    with torch.no_grad(), pytest.raises(gnnc.BackendError, match="not here"):
        compiled(x, edge_index)
    kernels = compiled._last.executable.unit.names
    sums = [kernel for kernel in kernels if kernel.startswith("gnnc::spmm<")]
    assert [kernel.partition("Scale::")[2][:6] for kernel in sums if "i8, 64," in kernel] == ["power,"]
    assert [kernel.partition("Scale::")[2][:6] for kernel in sums if "i8, 47," in kernel] == ["in_row"]


class Twice(torch.nn.Module):
    """A sum over neighbours of such sums, and a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sum = SimpleConv()
        self.layer = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Sum, sum, multiply."""
        return self.layer(self.sum(self.sum(x, edge_index).relu(), edge_index).relu())


@pytest.mark.parametrize(("width", "gathered", "others"), [(64, 64, 64), (47, 64, 48), (40, 64, 40)])
def test_rows_that_nothing_gathers_leave_l2_first_and_begin_on_no_line(
    width: int, gathered: int, others: int
) -> None:
    compiled = gnnc.compile(Twice(width).eval(), "fp32", backend="cuda-offline:sm_90")
    with torch.no_grad(), pytest.raises(gnnc.BackendError, match="not here"):
        compiled(torch.randn(300, width), torch.randint(300, (2, 2000)))
    executable = compiled._last.executable
    store = r"struct (Epilogue\d+) {.*?store<(\d+, (?:true|false)), float>"
    stores = dict(re.findall(store, executable.unit.source, re.S))
    sums = [name for name in executable.unit.names if name.startswith("gnnc::spmm<")]
    found = [stores[re.findall(r"Epilogue\d+", name)[0]] for name in sums]
    assert found == [f"{gathered}, false", f"{others}, true"]


@pytest.mark.parametrize(
    ("width", "dtype", "plain", "by_stretch"),
    [
        (32, torch.bfloat16, 32, 32),  # half a line
        (33, torch.bfloat16, 48, 64),
        (43, torch.bfloat16, 64, 64),
        (40, torch.float32, 40, 64),
        (65, torch.int8, 96, 128),
        (130, torch.int8, 160, 256),
        (40, torch.float64, 40, 40),
    ],
)
def test_rows_that_may_be_summed_by_stretch_begin_on_a_line(
    width: int, dtype: torch.dtype, plain: int, by_stretch: int
) -> None:
    assert CudaEmitter.padded(width, dtype) == plain
    assert CudaEmitter.padded(width, dtype, by_stretch=True) == by_stretch


class Weighted(torch.nn.Module):
    """A product, and a sum over neighbours: with values of edges, or without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.sum = torch.nn.Linear(16, 40), SimpleConv()

    def forward(
        self, x: torch.Tensor, edge_index: torch.Tensor, edge_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply, sum."""
        return self.sum(self.layer(x), edge_index, edge_weight)


@pytest.mark.parametrize(("weight", "stride"), [(None, 256), (torch.rand(2000), 160)])
def test_only_sums_without_values_go_by_stretch(weight: torch.Tensor | None, stride: int) -> None:
    compiled = gnnc.compile(Weighted().eval(), "fp32", backend="cuda-offline:sm_90")
    with torch.no_grad(), pytest.raises(gnnc.BackendError, match="not here"):
        compiled(torch.randn(300, 16), torch.randint(300, (2, 2000)), weight)
    lines = compiled._last.executable.source.splitlines()
    sums = [line for line in lines if "launch" in line and "runs_" in line]
    assert len(sums) == (2 if weight is None else 1)
    assert all(f".data_ptr(), {stride}, " in line for line in sums)


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_the_text_of_a_program_says_nothing_of_where_memory_lies(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a program took is remembered by it (``gnnc.timing``)."""
    addresses = iter((4096, 8192))

    def somewhere(self: Watch, *, offline: bool) -> None:
        begin(self, offline=offline)
        self.address = next(addresses)

    begin = Watch.__init__
    monkeypatch.setattr(Watch, "__init__", somewhere)
    first, second = (lowered(name, "int8", "cuda-offline:sm_90")._last.executable for _ in range(2))
    assert first.source == second.source and next(addresses, None) is None


def test_an_unknown_architecture_is_no_backend() -> None:
    with pytest.raises(gnnc.BackendError, match="choose one of"):
        gnnc.compile(build("gcn"), backend="cpu:sm_90")


def test_fp16_is_for_cuda() -> None:
    with pytest.raises(gnnc.UnsupportedError, match="on CUDA only"):
        gnnc.compile(build("gcn"), "fp16", backend="cpu")
