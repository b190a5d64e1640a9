"""Programs compile for architectures that this machine need not have, and stay in registers."""

import re
from itertools import product
from typing import NamedTuple

import graphs
import models
import pytest
import torch
from cuda_cases import lowered
from torch import nn
from torch_geometric.nn import SimpleConv
from zoo import ZOO, build

import gnnc
from gnnc.runtime.cuda.backend import OFFLINE
from gnnc.runtime.cuda.driver.cubin import waiting_kernels
from gnnc.runtime.cuda.driver.nan_flag import NanFlag
from gnnc.runtime.cuda.driver.nvrtc import compiler_version
from gnnc.runtime.cuda.emitter import CudaEmitter
from gnnc.runtime.cuda.offline import OfflineExecutable

pytestmark = pytest.mark.usefixtures("compiler")
ATTENTION = ("gatv2", "transformer")
ZOO_CASES = [*product(ZOO, ["int8"]), *product(ATTENTION, ["fp16"])]
BENCHMARK_CASES = (
    *("gcn:cora", "gcn:arxiv", "gcn:products", "gcn:reddit"),
    *("gat:arxiv", "gat:reddit", "sage:reddit", "gin:reddit"),
)
BENCHMARKS = [*product(BENCHMARK_CASES, ["int8"]), *product(("gcn:products", "gat:arxiv"), ["fp16"])]


OF_SM_90 = frozenset(
    {
        *("gcn-keywords", "gcn-deep-residual", "gcn-no-norm", "models.GCN", "sg", "appnp", "sparse-csr"),
        *("sage-sum", "graphconv", "models.GraphSAGE", "models.GIN", "index_add", "scatter_add"),
        *("gat-mean", "models.GAT", "jump-max", "pool-add", "pool-mean", "scatter_reduce-amax"),
        *("gcn:cora", "gcn:arxiv", "gcn:products", "gat:reddit"),
    }
)
"""Models whose kernels are those of others in other widths or orders: compiled for one architecture."""


def backend_of(name: str, precision: str) -> str:
    """Return the backend that compiles a case: for all architectures, or for one."""
    return "cuda-offline:sm_90" if name in OF_SM_90 and precision == "int8" else "cuda-offline"


class Allowance(NamedTuple):
    """What kernels of a program keep in local memory; all that no allowance is for keep nothing.

    Attributes:
        cases: of ``ZOO_CASES`` or ``BENCHMARKS``, each of which needs it to the byte.
        kernel: how the C++ name begins, a pattern.
        architecture: where it does.
        spilled: bytes of registers stored and loaded, as the assembler counts them.
        stack: bytes a thread.
        reason: why it is let be.
    """

    cases: tuple[tuple[str, str], ...]
    kernel: str
    architecture: str
    spilled: int
    stack: int
    reason: str

    def is_for(self, architecture: str, kernel: str) -> bool:
        """Whether it is of a kernel."""
        return architecture == self.architecture and re.match(self.kernel, kernel) is not None


_RUN = "loop state: two words stored once a run, read beside the calls that divisions at a row's end make"
_BLOCKS = "five blocks a multiprocessor leave 96 registers: words kept beside the epilogue"
_CALL = "a word kept beside the calls that divisions of the epilogue make"
_ATTENTION = "gnnc::attention<gnnc::AttentionConfig<gnnc::Element::i8, "
_STAGED = "gnnc::spmm_staged<gnnc::SpmmConfig<gnnc::Element::i8, 64, .*Scale::power"
_PRODUCT = "gnnc::gemm<gnnc::Part<gnnc::GemmConfig<gnnc::Product::"
_FP16 = f"{_PRODUCT}f16, float, 128, 128, 64,"
_GAT = (("gat:arxiv", "int8"), ("gat:reddit", "int8"))
ALLOWANCES = {
    (12, 6): (
        Allowance((("gat:reddit", "int8"),), f"{_ATTENTION}64, 4,", "sm_90", 32, 8, _RUN),
        Allowance((("gat:arxiv", "fp16"),), _FP16, "sm_90", 24, 16, _BLOCKS),
        Allowance((("gat:arxiv", "fp16"),), _FP16, "sm_100", 40, 16, _BLOCKS),
    ),
    (13, 0): (
        Allowance((("gat-mean", "int8"),), f"{_ATTENTION}48, 3,", "sm_90", 32, 8, _RUN),
        Allowance(_GAT, f"{_ATTENTION}64, 4,", "sm_90", 32, 8, _RUN),
        Allowance((("gat:arxiv", "fp16"),), _FP16, "sm_90", 24, 16, _BLOCKS),
    ),
    (13, 5): (
        Allowance((("gin:reddit", "int8"),), _STAGED, "sm_90", 44, 8, _RUN),
        Allowance((("gin:reddit", "int8"),), f"{_PRODUCT}i8, int8_t, 64, 64, 64,", "sm_90", 8, 8, _CALL),
        Allowance((("gat:arxiv", "fp16"),), _FP16, "sm_90", 8, 8, _BLOCKS),
    ),
}
"""By the version of NVRTC that they were found with; any other has those of the last one before it."""


def check(executable: OfflineExecutable, case: tuple[str, str]) -> None:
    """Each architecture has code, which takes declared local memory alone, and waits before it reads."""
    found = compiler_version()
    given = ALLOWANCES[max(version for version in ALLOWANCES if version <= found)]
    given = [each for each in given if case in each.cases]
    needed: set[Allowance] = set()
    of_one = backend_of(*case).partition(":")[2]
    assert set(executable.code) == ({of_one} if of_one else set(OFFLINE))
    for architecture, code in executable.code.items():
        assert set(code) == set(executable.kernel_set.names)
        for kernel, part in code.items():
            taken = part.resources[kernel]
            own = [each for each in given if each.is_for(architecture, kernel)]
            spilled, stack = max(((each.spilled, each.stack) for each in own), default=(0, 0))
            assert taken.spilled <= spilled and taken.stack <= stack, (architecture, kernel, taken)
            needed |= {each for each in own if (each.spilled, each.stack) == (taken.spilled, taken.stack)}
            waiting = frozenset() if architecture == "sm_80" else frozenset(part.symbols.values())
            assert waiting_kernels(part.cubin) == waiting
    if found in ALLOWANCES:
        assert not set(given) - needed, "allowed, and not needed to the byte"


def test_allowances_are_of_cases() -> None:
    cases = {case for given in ALLOWANCES.values() for each in given for case in each.cases}
    assert cases <= {*ZOO_CASES, *BENCHMARKS}
    assert OF_SM_90 < {name for name, _ in (*ZOO_CASES, *BENCHMARKS)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), ZOO_CASES)
def test_the_zoo(name: str, precision: str) -> None:
    compiled = lowered(name, precision, backend_of(name, precision))
    assert "cuda-offline" in str(compiled)
    check(compiled._dispatch.last.executable, (name, precision))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "precision"), BENCHMARKS)
def test_the_benchmarks(case: str, precision: str) -> None:
    name, graph = case.split(":")
    shape = graphs.SHAPES[graph]
    args = torch.randn(300, shape.features), torch.randint(300, (2, 6000))
    model = models.MODELS[name](shape.features, shape.classes).eval()
    compiled = gnnc.compile(model, precision, example_inputs=args, backend=backend_of(case, precision))
    with torch.no_grad(), pytest.raises(gnnc.BackendError, match="not here"):
        compiled(*args)
    check(compiled._dispatch.last.executable, (case, precision))


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["gcn", "sage"])
def test_rows_of_quantized_values_bring_their_weight_where_there_is_room(name: str) -> None:
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
    kernels = compiled._dispatch.last.executable.kernel_set.names
    sums = [kernel for kernel in kernels if kernel.startswith("gnnc::spmm<")]
    assert [kernel.partition("Scale::")[2][:6] for kernel in sums if "i8, 64," in kernel] == ["power,"]
    assert [kernel.partition("Scale::")[2][:6] for kernel in sums if "i8, 47," in kernel] == ["in_row"]


class Twice(torch.nn.Module):
    """A sum over neighbors of such sums, and a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sum = SimpleConv()
        self.layer = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Sum, sum, multiply."""
        return self.layer(self.sum(self.sum(x, edge_index).relu(), edge_index).relu())


@pytest.mark.first(1)
@pytest.mark.parametrize(("width", "gathered", "others"), [(64, 64, 64), (47, 64, 48), (40, 64, 40)])
def test_rows_that_nothing_gathers_leave_l2_first_and_begin_on_no_line(
    width: int, gathered: int, others: int
) -> None:
    compiled = gnnc.compile(Twice(width).eval(), "fp32", backend="cuda-offline:sm_90")
    with torch.no_grad(), pytest.raises(gnnc.BackendError, match="not here"):
        compiled(torch.randn(300, width), torch.randint(300, (2, 2000)))
    executable = compiled._dispatch.last.executable
    store = r"struct Epilogue_\w+ {.*?store<(\d+, (?:true|false)), float>"
    sums = [text for text, names in executable.kernel_set.sources if "gnnc::spmm<" in "".join(names)]
    found = [re.findall(store, text, re.S) for text in sums]
    assert found == [[f"{gathered}, false"], [f"{others}, true"]]


@pytest.mark.parametrize(
    ("width", "dtype", "plain", "windowed"),
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
def test_rows_that_may_be_summed_by_node_block_begin_on_a_line(
    width: int, dtype: torch.dtype, plain: int, windowed: int
) -> None:
    assert CudaEmitter.padded(width, dtype) == plain
    assert CudaEmitter.padded(width, dtype, windowed=True) == windowed


class Weighted(torch.nn.Module):
    """A product, and a sum over neighbors: with values of edges, or without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.sum = torch.nn.Linear(16, 40), SimpleConv()

    def forward(
        self, x: torch.Tensor, edge_index: torch.Tensor, edge_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply, sum."""
        return self.sum(self.layer(x), edge_index, edge_weight)


@pytest.mark.first(1)
@pytest.mark.parametrize(("weight", "stride"), [(None, 256), (torch.rand(2000), 160)])
def test_only_sums_without_values_go_by_node_block(weight: torch.Tensor | None, stride: int) -> None:
    compiled = gnnc.compile(Weighted().eval(), "fp32", backend="cuda-offline:sm_90")
    with torch.no_grad(), pytest.raises(gnnc.BackendError, match="not here"):
        compiled(torch.randn(300, 16), torch.randint(300, (2, 2000)), weight)
    lines = compiled._dispatch.last.executable.source.splitlines()
    sums = [line for line in lines if "launch" in line and "runs_" in line]
    assert len(sums) == (2 if weight is None else 1)
    assert all(f".data_ptr(), {stride}, " in line for line in sums)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_the_text_of_a_program_says_nothing_of_where_memory_lies(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a program took is remembered by it (``gnnc.calibrate.timing``)."""
    addresses = iter((4096, 8192))

    def somewhere(self: NanFlag, *, offline: bool) -> None:
        begin(self, offline=offline)
        self.address = next(addresses)

    begin = NanFlag.__init__
    monkeypatch.setattr(NanFlag, "__init__", somewhere)
    first, second = (lowered(name, "int8", "cuda-offline:sm_90")._dispatch.last.executable for _ in range(2))
    assert first.source == second.source and next(addresses, None) is None


def test_an_unknown_architecture_is_no_backend() -> None:
    with pytest.raises(gnnc.BackendError, match="choose one of"):
        gnnc.compile(build("gcn"), backend="cpu:sm_90")


class Halves(nn.Module):
    """Elementwise ops on a result of an op that has several."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, rest = x.split([3, x.shape[0] - 3])
        return torch.where(rest > 0, rest.exp(), rest * 2)


def test_results_of_ops_with_several_are_aligned() -> None:
    """A base that begins off 16 bytes, such as ``x[1:]``, has results that do, too."""
    compiled = gnnc.compile(Halves(), precision="fp32", backend="cuda-offline:sm_90")
    with pytest.raises(gnnc.BackendError):
        compiled(torch.randn(20, 8))
    assert "aligned" in compiled._dispatch.last.executable.source
