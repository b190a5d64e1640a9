"""Kernels of backward graphs, each against its reference in float64, on small graphs of hard shapes."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import assert_no_spills
from kernel_graphs import GRAPHS, relative_error
from one_op import program_of, run_fused_on_cuda, run_on_cuda
from torch import Tensor

from gnnc.ir.dense import qgemm_tn_reference
from gnnc.runtime.cuda.driver.nvrtc import resources_of

GNNC = torch.ops.gnnc
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)
WIDTHS = [(1, 1), (7, 47), (47, 7), (64, 64), (16, 130), (100, 33)]
BODY = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.leaky_relu_backward.default(e0, t0, 0.2, False); "
    "t2 = aten.mul.Tensor(t1, c0); t3 = aten.sum.dim_IntList(t2, [0], True); "
    "t4 = aten.view.default(t3, [2, 9]); return t4"
)


def halves(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(sizes).to(dtype)


def int8_rows(rows: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-127, 128, (rows, width), dtype=torch.int8), torch.rand(rows) / 100


def present(given: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the operands that are there."""
    return [value for value in given if value is not None]


def filled(given: Sequence[Tensor | None], values: Sequence[Tensor]) -> list[Tensor | None]:
    """Return values in the places of the operands that are there."""
    rest = iter(values)
    return [None if value is None else next(rest) for value in given]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str) -> None:
    g = GRAPHS["random"]()
    edges, rows = torch.randn(g.num_edges, 4), torch.randn(g.num_dst, 64)
    calls = (
        *[
            (GNNC.gemm_tn, torch.randn(9, a).to(d), torch.randn(9, b).to(d))
            for a, b in WIDTHS
            for d in FLOATS
        ],
        *[
            (GNNC.qgemm_tn, q, r, q_scale, r_scale)
            for a, b in WIDTHS
            for (q, q_scale), (r, r_scale) in [(int8_rows(9, a), int8_rows(9, b))]
        ],
        (
            lambda a, b, scale: GNNC.qgemm_tn(a, b, scale),
            int8_rows(9, 64)[0],
            torch.randn(9, 64),
            torch.ones(9),
        ),
        (lambda x: x.sum(0), rows),
        (lambda x: x.sum(0), torch.randn(9, 300)),
        (GNNC.edge_softmax_backward, g.rowptr, edges, edges),
        (lambda *given: GNNC.edge_sum(*given[:2], BODY, *[[t] for t in given[2:]]), *body_operands(g)),
    )
    for function, *values in calls:
        program = program_of(function, *values, backend=f"cuda-offline:{architecture}")
        assert "reference" not in dict(program.kernels).values() and program.code[architecture]
        assert_no_spills(resources_of(program.code[architecture]))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [0, 1, 63, 1100])
@pytest.mark.parametrize(("inner", "outer"), WIDTHS)
def test_gemm_tn(rows: int, inner: int, outer: int, dtype: torch.dtype) -> None:
    a, b = halves(rows, inner, dtype=dtype), halves(rows, outer, dtype=dtype)
    got = run_on_cuda(GNNC.gemm_tn, "gemm_tn", a, b)
    want, size = a.double().t() @ b.double(), a.double().abs().t() @ b.double().abs()
    assert got.dtype == torch.float32 and relative_error(got, want, size) < 1e-6


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [0, 1, 31, 33, 1100])
@pytest.mark.parametrize(("inner", "outer"), [*WIDTHS, (6, 2), (4, 4), (60, 48), (200, 72)])
def test_gemm_tn_in_fp32(rows: int, inner: int, outer: int) -> None:
    a, b = torch.randn(rows, inner), torch.randn(rows, outer)
    got = run_on_cuda(GNNC.gemm_tn, "gemm_tn_fp32", a, b)
    want, size = a.double().t() @ b.double(), a.double().abs().t() @ b.double().abs()
    assert got.shape == want.shape and relative_error(got, want, size) < 1e-6


@pytest.mark.cuda
def test_gemm_tn_in_fp32_is_divided_by_a_number_of_the_device() -> None:
    a, b, divisor = torch.randn(70, 24), torch.randn(70, 40), torch.tensor(8.0)

    def call(a: Tensor, b: Tensor, divisor: Tensor) -> Tensor:
        return GNNC.gemm_tn(a, b) / divisor

    (got,) = run_fused_on_cuda(call, ["gemm_tn_fp32"], a, b, divisor)
    torch.testing.assert_close(got.double(), (a.double().t() @ b.double()) / 8, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("inner", "outer", "kernel"), [(512, 256, "gemm_tn_fp32"), (512, 260, "cublas_tn")])
def test_products_of_many_columns_are_left_to_cublas(inner: int, outer: int, kernel: str) -> None:
    given = torch.randn(9, inner), torch.randn(9, outer)
    program = program_of(GNNC.gemm_tn, *given, backend="cuda-offline:sm_90")
    assert [name for _, name in program.kernels] == [kernel]
    assert (program.recording is not None) == (kernel == "gemm_tn_fp32")


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [0, 1, 63, 1100])
@pytest.mark.parametrize(("inner", "outer"), WIDTHS)
@pytest.mark.parametrize("floats", ["neither", "a", "b"])
def test_qgemm_tn(rows: int, inner: int, outer: int, floats: str) -> None:
    (a, a_scale), (b, b_scale) = int8_rows(rows, inner), int8_rows(rows, outer)
    given: list[Tensor | None] = [a, b, a_scale, b_scale]
    if floats != "neither":
        side = "ab".index(floats)
        given[side], given[side + 2] = torch.randn(rows, (inner, outer)[side]), None
    got = run_on_cuda(lambda *some: GNNC.qgemm_tn(*filled(given, some)), "qgemm_tn", *present(given))
    exact = [value if value is None or value.dtype == torch.int8 else value.double() for value in given]
    want = qgemm_tn_reference(*exact)
    # two bf16 parts round the product of an int8 and the scales, or a float, by 2^-17 at most
    most = qgemm_tn_reference(*(value if value is None else value.abs() for value in exact))
    assert got.shape == want.shape and bool(((got - want).abs() <= 2**-16 * most + 1e-6).all())


@pytest.mark.cuda
def test_qgemm_tn_is_exact_where_scales_are_powers_of_two() -> None:
    (a, _), (b, _) = int8_rows(100, 24), int8_rows(100, 40)
    scales = torch.exp2(-torch.randint(0, 2, (100,)).float())  # FP32 holds sums of 24 bits
    got = run_on_cuda(GNNC.qgemm_tn, "qgemm_tn", a, b, scales, scales.flip(0))
    want = (a.double() * (scales * scales.flip(0))[:, None]).T @ b.double()
    assert torch.equal(got.double(), want)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALVES)
def test_gemm_tn_of_large_values_does_not_overflow(dtype: torch.dtype) -> None:
    a = torch.full((3000, 17), 100.0).to(dtype)
    assert torch.equal(run_on_cuda(GNNC.gemm_tn, "gemm_tn", a, a), torch.full((17, 17), 3e7))


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [0, 1, 5, 4000])
@pytest.mark.parametrize("width", [1, 7, 64, 300])
def test_column_sum(rows: int, width: int) -> None:
    x = torch.randn(rows, width) * torch.logspace(-2, 2, max(rows, 1))[:rows, None]
    want, size = x.double().sum(0), x.double().abs().sum(0)
    for keep in (False, True):
        got = run_on_cuda(partial(torch.sum, dim=0, keepdim=keep), "column_sum", x)
        assert relative_error(got, x.double().sum(0, keep), size.reshape(got.shape)) < 1e-6
    heads = run_on_cuda(lambda x: x.unsqueeze(1).sum([0]), "column_sum", x)
    assert relative_error(heads, want[None], size[None]) < 1e-6


@pytest.mark.cuda
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("heads", [None, 1, 3, 8, 20])
def test_edge_softmax_backward(name: str, heads: int | None) -> None:
    g = GRAPHS[name]()
    shape = (g.num_edges, *([] if heads is None else [heads]))
    alpha, grad = torch.rand(shape), torch.randn(shape)
    got = run_on_cuda(GNNC.edge_softmax_backward, "edge_softmax_backward", g.rowptr, alpha, grad)
    want = GNNC.edge_softmax_backward(g.rowptr, alpha.double(), grad.double())
    assert relative_error(got, want) < 1e-5


def body_operands(g) -> tuple[Tensor, ...]:
    """Return the CSR of a graph, and operands of ``BODY``."""
    dst, src = torch.randn(g.num_dst, 2, 9), torch.randn(g.num_src, 2, 9)
    return g.rowptr, g.col, dst, src, torch.randn(g.num_edges, 2, 1), torch.randn(1, 2, 9)


@pytest.mark.cuda
@pytest.mark.parametrize("name", GRAPHS)
def test_edge_sum(name: str) -> None:
    values = body_operands(GRAPHS[name]())

    def call(*given: Tensor) -> Tensor:
        return GNNC.edge_sum(*given[:2], BODY, *[[t] for t in given[2:]])

    exact = [value.double() if value.is_floating_point() else value for value in values]
    got, want = run_on_cuda(call, "edge_sum", *values), call(*exact)
    size = call(*exact[:2], *[value.abs() for value in exact[2:]])
    assert relative_error(got, want, size) < 1e-5


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [(0,), (1,), (3, 5), (400, 41)])
@pytest.mark.parametrize("exponent", [-140, -30, 0, 30])
def test_fp16_scale(sizes: tuple[int, ...], exponent: int) -> None:
    x = torch.randn(sizes) * 2.0**exponent
    got = run_on_cuda(GNNC.fp16_scale, "fp16_scale", x)
    assert torch.equal(got, GNNC.fp16_scale(x)) and got.dtype == torch.float32


@pytest.mark.cuda
def test_fp16_scale_of_values_that_are_not_finite_is_finite() -> None:
    for value in (float("inf"), float("nan")):
        power = run_on_cuda(GNNC.fp16_scale, "fp16_scale", torch.tensor([1.0, value, 2.0]))
        assert power.isfinite() and power > 0
