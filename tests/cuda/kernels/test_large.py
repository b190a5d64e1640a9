"""More elements than a 32-bit integer counts: sampled rows and edges against float64."""

import fcntl
import gc
from collections.abc import Iterator

import pytest
import torch
from cuda_cases import error
from cuda_sparse import Sddmm, Sparse, Spmm, sparse
from torch import Tensor, nn

import gnnc
from gnnc.runtime.cuda.formats.run_table import cut_for

pytestmark = pytest.mark.cuda
DTYPES = (torch.float32, torch.float16, torch.int8)
MOST = 2**31
GIGABYTES = 40


@pytest.fixture(autouse=True)
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One such test at a time, also among several processes; what it held is given back."""
    total = torch.cuda.get_device_properties(0).total_memory / 1e9
    if total < GIGABYTES:
        pytest.skip(f"needs {GIGABYTES} GB of device memory, and there are {total:.0f}")
    with (tmp_path_factory.getbasetemp().parent / "large").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


def graph(nodes: int, edges: int) -> tuple[Sparse, Tensor]:
    """A random graph whose last node has edges, and the destination of each edge."""
    dst = torch.randint(nodes, (edges,), device="cuda")
    dst[-9:] = nodes - 1
    dst = dst.sort().values
    rowptr = torch.zeros(nodes + 1, dtype=torch.int64, device="cuda")
    rowptr[1:] = torch.bincount(dst, minlength=nodes).cumsum(0)
    col = torch.randint(nodes, (edges,), dtype=torch.int32, device="cuda")
    col[-1] = nodes - 1
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return sparse(rowptr, col, cut_for(nodes, edges, processors), processors), dst


def features(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random rows that start on 16 bytes, made in place."""
    step = 16 // dtype.itemsize
    padded = torch.empty(rows, -(-width // step) * step, dtype=dtype, device="cuda")
    if dtype == torch.int8:
        padded.random_(-127, 128)
    else:
        padded.normal_()
    return padded[:, :width]


def some(count: int) -> Tensor:
    """Numbers below ``count``: the first, the last, and any."""
    ends = torch.tensor([0, 1, count - 2, count - 1])
    return torch.cat([ends, torch.randint(count, (96,))]).cuda()


@pytest.mark.parametrize("dtype", DTYPES)
def test_spmm(dtype: torch.dtype) -> None:
    nodes, width = 2**22, 602
    assert nodes * width > MOST
    g, dst = graph(nodes, 2**23)
    x = features(nodes, width, dtype)
    got = Spmm(g, x)()
    for row in some(nodes).tolist():
        first, end = g.rowptr[row : row + 2].tolist()
        want = x[g.col[first:end].long()].double().sum(0)
        if dtype == torch.int8:
            assert torch.equal(got[row].double(), want)
        else:
            assert torch.allclose(got[row].double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sddmm_of_many_edges(dtype: torch.dtype) -> None:
    nodes, edges, width = 1_000_000, 36_000_000, 64
    assert edges * width > MOST
    g, dst = graph(nodes, edges)
    a, b = features(nodes, width, dtype), features(nodes, width, dtype)
    got = Sddmm(g, a, b)()[:, 0]
    at = some(edges)
    want = (a[dst[at]].double() * b[g.col[at].long()].double()).sum(1)
    assert torch.allclose(got[at].double(), want, rtol=1e-5, atol=1e-3)


def test_sddmm_of_many_values() -> None:
    nodes, edges, width = 100_000, 3_600_000, 602
    assert edges * width > MOST
    g, dst = graph(nodes, edges)
    a, b = features(nodes, width, torch.float32), features(nodes, width, torch.float32)
    got, at = Sddmm(g, a, b, "add")(), some(edges)
    assert torch.equal(got[at], a[dst[at]] + b[g.col[at].long()])


LIMIT: dict[str, float] = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2, "int8": 2e-2}


@torch.no_grad()
@pytest.mark.parametrize("precision", LIMIT)
def test_gemm(precision: str) -> None:
    """Both x and the result are large."""
    rows, width = 3_600_000, 602
    assert rows * width > MOST
    model = nn.Linear(width, width).eval().cuda()
    x = torch.randn(rows, width, device="cuda")
    compiled, at = gnnc.compile(model, precision), some(rows)
    got = compiled(x)
    want = x[at].double() @ model.weight.double().t() + model.bias.double()
    assert got.shape == x.shape and error(got[at], want) < LIMIT[precision]
    assert error(compiled(x[at]), got[at]) < 1e-5
