"""Kernels of the gradient of attention against the reference in float64, on small graphs of hard shapes."""

from typing import Any

import pytest
import torch
from architectures import all_for_one
from cuda_cases import assert_no_spills
from kernel_graphs import GRAPHS
from one_op import fused_program_of, run_fused_on_cuda
from torch import Tensor

from gnnc.ir.structure import csr_transpose_reference
from gnnc.runtime.cuda.driver.nvrtc import resources_of

GNNC = torch.ops.gnnc
SHAPES = [(1, 1), (1, 40), (4, 16), (8, 8), (3, 8), (3, 10), (2, 128), (5, 100)]
"""Heads, and columns of each."""
SQUARE = next(n for n, make in GRAPHS.items() if (g := make()).num_src == g.num_dst and g.num_edges > 100)
"""A graph whose sources are its destinations."""
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
    values = [*values_of(SQUARE, heads, width, dtype), torch.randn(heads, width), torch.randn(heads, width)]
    got = run_fused_on_cuda(call, ["attention_backward"], *values)
    exact = [value.double() if value.is_floating_point() else value for value in values]
    assert_right(got, call(*exact), 5 * ALLOWED[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16])
def test_gradients_of_the_vectors_are_divided_by_the_last_launch(dtype: torch.dtype) -> None:
    values = [*values_of(SQUARE, 4, 16, dtype), torch.randn(4, 16), torch.randn(4, 16), torch.tensor(8.0)]

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


PARTS = [("x",), ("grad",), ("x", "grad")]
"""The rows that are quantized."""


def quantized_values(
    name: str, heads: int, width: int, parts: tuple[str, ...], logits: torch.dtype
) -> tuple[list[Tensor], Any]:
    """Return values whose rows are quantized, with their scales, and the function that reads them.

    The rows of a part differ in size by 2^8, and one is 0.
    """
    values = values_of(name, heads, width, torch.float32)
    values[4:6] = [half.to(logits) for half in values[4:6]]
    scales = []
    for place, part in ((6, "x"), (7, "grad")):
        if part in parts:
            rows = values[place] * torch.exp2(torch.randint(-4, 5, (len(values[place]), 1, 1)).float())
            rows[:1] = 0.0
            scale = GNNC.scale(rows, "int8/row")
            values[place] = GNNC.quantize(rows, scale, "int8/row")
            scales.append(scale)

    def wide(*given: Tensor) -> list[Tensor]:
        ends, left = list(given[:8]), list(given[8:])
        ends[4:6] = [half.float() if logits != torch.float32 else half for half in ends[4:6]]
        for place, part in ((6, "x"), (7, "grad")):
            if part in parts:
                ends[place] = GNNC.dequantize(ends[place], left.pop(0), "row")
        return [*ends, *left]

    return [*values, *scales], wide


@pytest.mark.cuda
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("heads", "width"), SHAPES)
@pytest.mark.parametrize("parts", PARTS)
def test_rows_are_read_in_eight_bits(name: str, heads: int, width: int, parts: tuple[str, ...]) -> None:
    values, wide = quantized_values(name, heads, width, parts, torch.float32)
    got = run_fused_on_cuda(lambda *g: without_vectors(*wide(*g)), ["attention_backward"], *values)
    assert_near(got, without_vectors(*doubled(wide(*values))), wide(*values), "grad" in parts)


@pytest.mark.cuda
@pytest.mark.parametrize(("heads", "width"), SHAPES)
@pytest.mark.parametrize("parts", [(), *PARTS])
def test_logits_are_read_in_bf16(heads: int, width: int, parts: tuple[str, ...]) -> None:
    values, wide = quantized_values(SQUARE, heads, width, parts, torch.bfloat16)
    values += [torch.randn(heads, width), torch.randn(heads, width)]
    got = run_fused_on_cuda(lambda *g: call(*wide(*g)), ["attention_backward"], *values)
    assert_near(got, call(*doubled(wide(*values))), wide(*values), "grad" in parts)


def doubled(values: list[Tensor]) -> list[Tensor]:
    return [value.double() if value.is_floating_point() else value for value in values]


def assert_near(
    got: tuple[Tensor, ...], want: tuple[Tensor, ...], ends: list[Tensor], is_fixed: bool
) -> None:
    """Check the gradients of x, and of the logits and the vectors, which are differences of products of ends.

    Sums of quantized rows are in fixed point: 2^-14 of the largest weight of a row.
    """
    x, grad = (end.abs() if end.numel() else torch.zeros(1, 1, 1) for end in ends[6:8])
    product = float(x.sum(-1).amax() * grad.amax())
    reaches = (0.0, product, product, *[product * float(x.sum(0).amax())] * 2)
    for value, exact, reach in zip(got, want, reaches[: len(got)], strict=True):
        assert value.shape == exact.shape and bool(value.isfinite().all())
        if exact.numel():
            largest = max(float(exact.abs().max()), 0.01 * reach, 1.0)
            assert float((value.double() - exact).abs().max()) < (5e-4 if is_fixed else 5e-5) * largest


@pytest.mark.cuda
def test_rows_that_other_ops_read_too_are_converted_for_each() -> None:
    values, wide = quantized_values(SQUARE, 4, 16, ("x",), torch.float32)

    def twice(*given: Tensor) -> tuple[Tensor, ...]:
        ends = wide(*given)
        return without_vectors(*ends)[0], ends[6] * 2.0

    got = run_fused_on_cuda(twice, ["rowmap", "attention_backward"], *values)
    assert torch.equal(got[1], wide(*values)[6] * 2.0)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("architecture", "shape"), all_for_one([(1, 40), (4, 16), (3, 10), (2, 128)]))
def test_no_kernel_spills(architecture: str, shape: tuple[int, int]) -> None:
    heads, width = shape
    for dtype in (torch.float32, torch.float16):
        values = values_of("random", heads, width, dtype)
        program = fused_program_of(without_vectors, *values, backend=f"cuda-offline:{architecture}")
        assert_no_spills(resources_of(program.code[architecture]))
    for parts in PARTS:
        values, wide = quantized_values("random", heads, width, parts, torch.bfloat16)
        program = fused_program_of(
            lambda *given, wide=wide: without_vectors(*wide(*given)),
            *values,
            backend=f"cuda-offline:{architecture}",
        )
        assert_no_spills(resources_of(program.code[architecture]))
