import pytest
import torch
from architectures import ARCHITECTURES
from backend_models import given
from cuda_cases import assert_no_spills, error, on_device
from cuda_launch import compile_kernels
from cuda_sparse import Sddmm, SddmmConfig, rows16, sparse
from kernel_graphs import GRAPHS, relative_error
from one_op import run_on_cuda
from torch_geometric.nn import SAGEConv

import gnnc
from gnnc.ir.qsddmm import qsddmm_reference
from gnnc.ir.sparse import sddmm_reference
from gnnc.runtime.cuda.formats.run_table import Cut

WIDTHS = (1, 7, 16, 32, 47, 64, 128, 256, 602)


@pytest.mark.first(1)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("element", ["f32", "f16", "bf16", "i8"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str, element: str) -> None:
    widths = (16, 47, 64, 602) if architecture == "sm_90" else (16, 602)
    configs = [SddmmConfig(element, width) for width in widths]
    configs += [SddmmConfig(element, 64, heads=4, scaled=True)]
    configs += [
        SddmmConfig(element, width, scaled=True) for width in widths if element == "i8" and width != 64
    ]
    configs += [] if element == "i8" else [SddmmConfig(element, 64, "add")]
    names = tuple(config.name() for config in configs)
    report = compile_kernels('#include "sparse/sddmm.cuh"', names, architecture)
    assert len(report) == len(names)
    assert_no_spills(report)


@pytest.mark.cuda
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_integer_dots_are_exact(graph: str, width: int) -> None:
    g = GRAPHS[graph]()
    a = torch.randint(-127, 128, (g.num_dst, width), dtype=torch.int8)
    b = torch.randint(-127, 128, (g.num_src, width), dtype=torch.int8)
    got = Sddmm(sparse(g.rowptr, g.col, Cut(32, 16), 5), rows16(a), rows16(b))().cpu()[:, 0]
    want = qsddmm_reference(g.rowptr, g.col, a, b, "dot")
    assert torch.equal(got, want)
    a_scale, b_scale = torch.rand(g.num_dst), torch.rand(g.num_src)
    scales = {"a_scale": a_scale.cuda(), "b_scale": b_scale.cuda()}
    got = Sddmm(sparse(g.rowptr, g.col, Cut(32, 16), 5), rows16(a), rows16(b), **scales)().cpu()[:, 0]
    assert torch.equal(got, want * a_scale[g.dst()] * b_scale[g.col])


@pytest.mark.cuda
@pytest.mark.parametrize("op", ["dot", "add", "sub", "mul", "copy_src", "copy_dst"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", (4, 47, 64, 602))
@pytest.mark.parametrize("graph", GRAPHS)
def test_float_products(graph: str, width: int, dtype: torch.dtype, op: str) -> None:
    g = GRAPHS[graph]()
    a, b = torch.randn(g.num_dst, width).to(dtype), torch.randn(g.num_src, width).to(dtype)
    got = Sddmm(sparse(g.rowptr, g.col, Cut(32, 16), 5), rows16(a), rows16(b), op)().cpu()
    want = sddmm_reference(g.rowptr, g.col, a.float().double(), b.float().double(), op)
    size = sddmm_reference(g.rowptr, g.col, a.double().abs(), b.double().abs(), "dot")
    if op == "dot":
        assert relative_error(got[:, 0], want, size) < 1e-6
    else:
        assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize(("heads", "each"), [(4, 16), (2, 32), (8, 16), (3, 16), (5, 16), (6, 16)])
def test_dots_a_head(heads: int, each: int, dtype: torch.dtype) -> None:
    g = GRAPHS["random"]()
    shape = heads * each
    a, b = (torch.randint(-9, 10, (n, shape)).to(dtype) for n in (g.num_dst, g.num_src))
    got = Sddmm(sparse(g.rowptr, g.col, Cut(32, 16), 5), rows16(a), rows16(b), heads=heads)().cpu()
    views = (t.double().view(-1, heads, each) for t in (a, b))
    assert torch.equal(got.double(), sddmm_reference(g.rowptr, g.col, *views, "dot"))


class Scores(torch.nn.Module):
    """Dot products of heads, as of rows that a layer made."""

    def __init__(self, heads: int, each: int) -> None:
        super().__init__()
        self.shape = (-1, heads, each) if heads > 1 else (-1, each)
        self.first = SAGEConv(24, heads * each)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        h = self.first(x, edge_index).view(self.shape)
        return (h[edge_index[0]] * h[edge_index[1]]).sum(-1)


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(("heads", "each"), [(1, 47), (3, 20), (2, 24), (12, 64)])
def test_programs_keep_no_row_for_an_edge(heads: int, each: int, precision: str) -> None:
    torch.manual_seed(0)
    model = Scores(heads, each).eval()
    eager = model(*given())
    compiled = gnnc.compile(model.cuda(), precision)
    got = compiled(*on_device(given()))
    taken = [name for node, name in compiled._dispatch.last.executable.kernels if "sddmm" in node]
    assert taken and set(taken) <= {"sddmm", "edge_sddmm"}
    if precision == "int8":  # the scales of both ends too
        assert len(taken) == 1 and not any(
            "mul" in node for node, _ in compiled._dispatch.last.executable.kernels
        )
    assert error(got, eager) < {"fp32": 1e-5, "fp16": 0.01, "int8": 0.05}[precision]


@pytest.mark.cuda
@pytest.mark.parametrize("op", ["copy_src", "copy_dst"])
def test_a_copied_end_may_have_fewer_rows_than_the_other(op: str) -> None:
    """A kernel loads rows of both ends; the rows of the absent end are not those of the copied one."""
    rows, others = torch.randn(3, 2), 5000
    count, ends = 40, (torch.arange(40) % 3).sort().values
    is_source = op == "copy_src"
    num_dst = others if is_source else 3
    dst = torch.arange(count) * (others // count) if is_source else ends
    col = ends if is_source else torch.arange(count) * (others // count)
    rowptr = torch.searchsorted(dst, torch.arange(num_dst + 1))

    def function(rowptr: torch.Tensor, col: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        a, b = (None, rows) if is_source else (rows, None)
        return torch.ops.gnnc.sddmm(rowptr, col, a, b, op)

    got = run_on_cuda(function, "sddmm", rowptr, col.int(), rows)
    assert torch.equal(got, rows[ends])
