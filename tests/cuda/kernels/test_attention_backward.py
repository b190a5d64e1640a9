"""Kernels of the gradient of attention against the reference in float64, on small graphs of hard shapes."""

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import assert_no_spills
from kernel_graphs import GRAPHS
from one_op import fused_program_of, run_fused_on_cuda
from torch import Tensor

from gnnc.ir.structure import csr_transpose_reference
from gnnc.runtime.cuda.driver.nvrtc import resources_of

GNNC = torch.ops.gnnc
SHAPES = [(1, 1), (1, 40), (4, 16), (8, 8), (3, 8), (3, 10), (2, 128), (5, 100)]
"""Heads, and columns of each."""
ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 2e-5, torch.float16: 2e-5}
"""Error of sums in FP32: operands are the same in float64."""


def call(*given: Tensor) -> tuple[Tensor, ...]:
    *ends, att_dst, att_src = given
    return tuple(GNNC.attention_backward(*ends, att_dst, att_src, 0.2, 1e-16))


def without_vectors(*ends: Tensor) -> tuple[Tensor, ...]:
    return tuple(GNNC.attention_backward(*ends, None, None, 0.2, 1e-16))[:3]


def values_of(name: str, heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the CSR, its transpose, both halves of the logits, rows and gradients of both ends."""
    g = GRAPHS[name]()
    rowptr_t, col_t, _ = csr_transpose_reference(g.rowptr, g.col, g.num_src)
    halves = torch.randn(g.num_dst, heads) * 3, torch.randn(g.num_src, heads) * 3
    rows = [torch.randn(count, heads, width).to(dtype) for count in (g.num_src, g.num_dst)]
    return [g.rowptr, g.col, rowptr_t, col_t, *halves, *rows]


def assert_right(got: tuple[Tensor, ...], want: tuple[Tensor, ...], allowed: float) -> None:
    for value, exact in zip(got, want, strict=True):
        assert value.shape == exact.shape
        if exact.numel():
            largest = exact.abs().max().clamp(min=1.0)
            assert ((value.double() - exact).abs().max() / largest) < allowed


@pytest.mark.cuda
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("heads", "width"), SHAPES)
@pytest.mark.parametrize("dtype", ALLOWED)
def test_gradients_of_the_ends(name: str, heads: int, width: int, dtype: torch.dtype) -> None:
    values = values_of(name, heads, width, dtype)
    got = run_fused_on_cuda(without_vectors, ["attention_backward"], *values)
    exact = [value.double() if value.is_floating_point() else value for value in values]
    assert_right(got, without_vectors(*exact), ALLOWED[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize(("heads", "width"), SHAPES)
@pytest.mark.parametrize("dtype", ALLOWED)
def test_gradients_through_the_vectors(heads: int, width: int, dtype: torch.dtype) -> None:
    name = next(n for n, make in GRAPHS.items() if (g := make()).num_src == g.num_dst and g.num_edges > 100)
    values = [*values_of(name, heads, width, dtype), torch.randn(heads, width), torch.randn(heads, width)]
    got = run_fused_on_cuda(call, ["attention_backward"], *values)
    exact = [value.double() if value.is_floating_point() else value for value in values]
    assert_right(got, call(*exact), 5 * ALLOWED[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16])
def test_gradients_of_the_vectors_are_divided_by_the_last_launch(dtype: torch.dtype) -> None:
    name = next(n for n, make in GRAPHS.items() if (g := make()).num_src == g.num_dst and g.num_edges > 100)
    values = [*values_of(name, 4, 16, dtype), torch.randn(4, 16), torch.randn(4, 16), torch.tensor(8.0)]

    def divided(*given: Tensor) -> tuple[Tensor, ...]:
        dx, _, _, of_dst, of_src = call(*given[:-1])
        return dx, of_dst / given[-1], of_src / given[-1]

    got = run_fused_on_cuda(divided, ["attention_backward"], *values)
    exact = [value.double() if value.is_floating_point() else value for value in values]
    assert_right(got, divided(*exact), 5 * ALLOWED[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize(("heads", "width"), [(4, 16), (8, 8)])
def test_rows_are_quantized_as_they_are_stored(heads: int, width: int) -> None:
    values = values_of("random", heads, width, torch.float32)

    def quantized(*ends: Tensor) -> tuple[Tensor, ...]:
        rows = without_vectors(*ends)[0].reshape(-1, heads * width)
        scale = GNNC.scale(rows, "int8/row")
        return GNNC.quantize(rows, scale, "int8/row"), scale

    q, scale = run_fused_on_cuda(quantized, ["attention_backward"], *values)
    exact = without_vectors(*[value.double() if value.is_floating_point() else value for value in values])[0]
    rows = exact.reshape(-1, heads * width)
    assert bool(((q * scale[:, None] - rows).abs() <= 0.501 * scale[:, None] + 1e-6).all())


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str) -> None:
    for heads, width in [(1, 40), (4, 16), (3, 10), (2, 128)]:
        for dtype in (torch.float32, torch.float16):
            values = values_of("random", heads, width, dtype)
            program = fused_program_of(without_vectors, *values, backend=f"cuda-offline:{architecture}")
            assert_no_spills(resources_of(program.code[architecture]))
