"""Products with a weight: every width of rows, every form of x."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import error
from cuda_launch import compile_kernels
from cuda_sparse import STORES, epilogue_of
from torch import Tensor, nn

import gnnc
from gnnc.ir.dense import qgemm_reference
from gnnc.runtime.cuda.driver.nvrtc import compiler_version
from gnnc.runtime.cuda.emitter import lanes_for, round_up
from gnnc.runtime.cuda.kernels.gemm import Shape, Tile, config_of, product_of_quantized, tile_of

OUT = (1, 7, 47, 64, 256)
ROWS = (0, 1, 17, 1000)


class Products(nn.Module):
    """One x times weights of several widths, each with an epilogue of its own."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.plain = nn.ModuleList(nn.Linear(inner, out, bias=False) for out in OUT)
        self.active = nn.ModuleList(nn.Linear(inner, out) for out in OUT)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return every product."""
        return *[layer(x) for layer in self.plain], *[layer(x).relu() for layer in self.active]


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("inner", [1, 7, 47, 64, 602, 1433, 2050])
def test_products_equal_the_reference(inner: int, precision: str) -> None:
    torch.manual_seed(inner)
    model = Products(inner).eval()
    # on the CPU: torch's own CUDA kernels divide by a constant as they multiply by its reciprocal
    compiled = gnnc.compile(copy.deepcopy(model).cuda(), precision, backend="cuda")
    compiled(torch.randn(1, inner, device="cuda"))
    precision = "bf16" if "bf16, not int8" in compiled.explain() else precision  # of narrow rows
    reference = gnnc.compile(model, precision, backend="reference")
    for rows in ROWS:
        x = torch.randn(rows, inner) * torch.logspace(-1, 3, rows)[:, None]
        for got, want in zip(compiled(x.cuda()), reference(x), strict=True):
            assert got.shape == want.shape
            assert error(got, want) < (0.0 if precision == "int8" else 1e-5) + 1e-30


class ComputedWeights(nn.Module):
    """Products with weights that the program computes, whose rows lie padded in its memory."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.randn(7, inner) / inner**0.5)
        self.rows = nn.Parameter(torch.randn(inner, inner) / inner**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return products with a weight of each layout."""
        return x @ (self.columns * 2 - self.columns.sigmoid()).t(), x @ (self.rows - self.rows.t() - 0.1)


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("inner", [20, 47])
def test_computed_weights_have_padded_rows(inner: int, precision: str) -> None:
    torch.manual_seed(inner)
    model, x = ComputedWeights(inner).eval(), torch.randn(33, inner)
    compiled = gnnc.compile(copy.deepcopy(model).cuda(), precision, backend="cuda")
    reference = gnnc.compile(model, precision, backend="reference")
    for got, want in zip(compiled(x.cuda()), reference(x), strict=True):
        assert error(got, want) < (1e-2 if precision == "int8" else 1e-4)


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("inner", [1, 130, 602, 1281, 1433, 3001, 4714, 6200])
def test_one_product_loads_and_scales_rows(inner: int, precision: str) -> None:
    """Rows that begin anywhere, of one warp, of several, in chunks; the same bits in every call."""
    torch.manual_seed(inner)
    for out in (7, 64, 300):
        model = nn.Linear(inner, out).eval()
        reference = gnnc.compile(model, precision, backend="reference")
        compiled = gnnc.compile(copy.deepcopy(model).cuda(), precision, backend="cuda")
        for rows in (1, 33, 1000):
            x = torch.randn(rows, inner) * torch.logspace(-1, 3, rows)[:, None]
            got = compiled(x.cuda())
            assert error(got, reference(x)) < (0.0 if precision == "int8" else 1e-5) + 1e-30
            assert torch.equal(got, compiled(x.cuda()))


def shapes(*inner: int) -> list[Shape]:
    """Return products of every form of x."""
    return [
        Shape(product, size, each, out, is_quantized)
        for product, size, is_quantized in (("i8", 1, False), ("i8", 1, True), ("f16", 2, False))
        for each in inner
        for out in (7, 64, 256)
    ]


SHORT, LONG = shapes(1, 64, 100, 128, 256), shapes(602, 1433, 4714, 9001)


def config(shape: Shape, tile: Tile) -> str:
    """Return the C++ name of a configuration, with rows as they lie in memory."""
    stride = round_up(shape.inner, 32) if shape.is_quantized else shape.inner
    return config_of(shape, tile, "signed char" if shape.is_quantized else "float", stride)


def test_shared_memory_is_what_the_kernel_takes(compiler: None) -> None:
    source = '#include "dense/gemm.cuh"\n'
    for shape in SHORT + LONG:
        tile = tile_of(shape)
        assert tile is not None
        part = f"gnnc::Part<{config(shape, tile)}, 32, int>"
        source += f"static_assert(gnnc::SharedOf<{part}>::kBytes == {tile.shared([shape])});\n"
    compile_kernels(source, (), "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_under_way_stay_in_registers(architecture: str, compiler: None) -> None:
    names = []
    # register files are of one size: one architecture has all shapes, the others the ends
    ends = (SHORT[0].inner, SHORT[-1].inner, LONG[-1].inner)
    for shape in SHORT + LONG:
        tile = tile_of(shape)
        assert tile is not None
        is_end = shape.out == 64 and shape.inner in ends
        if is_end or (architecture == "sm_90" and (shape.out == 64 or shape in SHORT)):
            stores = epilogue_of(torch.float32, shape.out)
            names.append(f"gnnc::gemm<gnnc::Part<{config(shape, tile)}, {lanes_for(shape.out)}, {stores}>>")
    taken = compile_kernels('#include "dense/gemm.cuh"' + STORES, tuple(names), architecture)
    assert len(taken) == len(names)
    # as in test_offline.py: NVRTC 13.0 spills for sm_100 where 13.5 spills nothing
    allowed = 48 if architecture == "sm_100" and compiler_version() < (13, 5) else 0
    assert all(each.spilled <= allowed for each in taken.values()), taken


@pytest.mark.parametrize(
    ("precision", "inner", "launches"),
    [("fp16", 64, 2), ("int8", 64, 2), ("fp32", 64, 5), ("int8", 7000, 10)],
)
def test_products_of_one_matrix_are_one_launch(
    precision: str, inner: int, launches: int, compiler: None
) -> None:
    """Eight of ten products of rows that fit into one chunk; in FP32 those with a bias are submodules."""
    model = Products(inner).eval()
    compiled = gnnc.compile(
        model, precision, backend="cuda-offline:sm_90", example_inputs=(torch.randn(9, inner),)
    )
    assert str(compiled).count("with fused.gemm()") == launches


class Narrowed(nn.Module):
    """Two products of one x, of which one is added in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        second = self.b(x)
        return second + self.a(x).to(torch.bfloat16).float()


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_product_does_not_widen_what_another_of_its_launch_stored(precision: str, compiler: None) -> None:
    compiled = gnnc.compile(
        Narrowed().eval(), precision, backend="cuda-offline:sm_90", example_inputs=(torch.randn(9, 64),)
    )
    assert "with fused.gemm()" in str(compiled) and "reference" not in str(compiled)


@pytest.mark.cuda
@torch.no_grad()
def test_no_element_is_left_out() -> None:
    """Ones make every sum an integer that any precision holds."""
    for precision in ("fp32", "fp16", "bf16", "int8"):
        model = Products(64).eval().cuda()
        for parameter in model.parameters():
            parameter.fill_(1.0)
        compiled = gnnc.compile(model, precision, backend="cuda")
        x = torch.zeros(333, 64, device="cuda")
        x[torch.arange(333), torch.arange(333) % 64] = 1.0
        for i, got in enumerate(compiled(x)):
            assert torch.equal(got, torch.full_like(got, 1.0 if i < len(OUT) else 2.0)), (precision, i)


@pytest.mark.parametrize(
    ("rows", "inner", "out"), [(0, 8, 8), (1, 7, 3), (16, 64, 47), (17, 64, 64), (100, 9, 1433)]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_products_by_cublaslt_are_exact(device: str, rows: int, inner: int, out: int) -> None:
    x, w = (torch.randint(-128, 128, (n, inner), dtype=torch.int8) for n in (rows, out))
    strided = torch.zeros(rows, inner + 9, dtype=torch.int8)[:, 2 : inner + 2].copy_(x)
    for each in (x, strided):
        got = product_of_quantized(each.to(device), w.to(device))
        assert got.dtype == torch.float32 and torch.equal(got.cpu(), qgemm_reference(x, w))


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_what_no_block_holds_is_multiplied_by_cublaslt(static: bool) -> None:
    """Neither in FP64, as the reference does, nor in FP32; narrower inputs would be multiplied in bf16."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 40)).eval(), torch.randn(70, 64)
    examples = (x,) if static else None
    want = gnnc.compile(model, "int8", backend="reference", example_inputs=examples)(x)
    compiled = gnnc.compile(
        copy.deepcopy(model).cuda(), "int8", backend="cuda", example_inputs=(x.cuda(),) if static else None
    )
    assert error(compiled(x.cuda()), want) < 1e-3 and error(want, model(x)) < 0.05
    kernels = dict(compiled._dispatch.last.executable.kernels)
    assert "cublaslt" in kernels.values()
    assert not any(kernel == "reference" for node, kernel in kernels.items() if "gemm" in node)
    assert "sixteen rows of 2048 columns exceed shared memory" in compiled.explain()
