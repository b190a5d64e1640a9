"""Conversions of 8-bit floats, and products and sums of rows of them, in CUDA kernels."""

import pytest
import torch
from cuda_launch import Module, address
from kernel_graphs import random_graph, relative_error
from one_op import run_fused_on_cuda, run_on_cuda
from torch import Tensor

import gnnc

pytestmark = pytest.mark.cuda
TYPES = {"E4m3": torch.float8_e4m3fn, "E5m2": torch.float8_e5m2}
BLOCK = 256
SOURCE = """
#include "common/row_steps.cuh"
using namespace gnnc;
template <class T>
__global__ void widen_all(const T* from, float* out) {
  const int i = threadIdx.x;
  float four[4];
  widen<T>(reinterpret_cast<const uint32_t*>(from)[i / 4], four);
  out[i] = four[i % 4];
  out[i + 256] = step::as_float(from[i]);
}
template <class T>
__global__ void narrow_all(const float* from, uint16_t* out, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i < count) out[i] = static_cast<uint16_t>(narrowed<T>(from[2 * i], from[2 * i + 1]));
}
"""


def module() -> Module:
    return Module(SOURCE, tuple(f"{name}<{kind}>" for name in ("widen_all", "narrow_all") for kind in TYPES))


def same(got: Tensor, want: Tensor) -> bool:
    """Return whether bits are equal, but those of NaN, which has several."""
    got, want = got.float().cpu(), want.float().cpu()
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(
        got.nan_to_num(0).view(torch.int32), want.nan_to_num(0).view(torch.int32)
    )


@pytest.mark.parametrize("kind", TYPES)
def test_every_value_is_widened_as_torch_does(kind: str) -> None:
    values = torch.arange(256, dtype=torch.uint8)
    given, out = values.cuda(), torch.empty(512, device="cuda")
    module().launch(f"widen_all<{kind}>", 1, 256, address(given), address(out))
    want = values.view(TYPES[kind]).float()
    finite = want.isfinite()  # halves have an infinity too, which e5m2 values have and stores never make
    assert same(out[:256], want) and same(out[256:], want) and finite.sum() >= 247


def values_to_round(dtype: torch.dtype) -> Tensor:
    """Random values, all ties of neighbors and what is next to them, denormals, and what is out of range."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    known = values[values.isfinite()].sort().values
    ties = (known[1:] + known[:-1]) / 2
    near = [torch.nextafter(ties, torch.full_like(ties, side)) for side in (-torch.inf, torch.inf)]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4096, generator=generator) * torch.logspace(-9, 6, 4096)
    beyond = torch.tensor([0.0, -0.0, 1e-45, 1e-38, 464.0, 465.0, 1e9, 61440.0, 65504.0, 3e38])
    whole = torch.cat([known, ties, *near, drawn, beyond, -beyond])
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.nan])
    return torch.cat([whole, special[: 4 - len(whole) % 2]])


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_rounded_as_torch_does_and_saturate(kind: str) -> None:
    dtype = TYPES[kind]
    values = values_to_round(dtype)
    largest = torch.finfo(dtype).max
    given, out = values.cuda(), torch.empty(values.numel() // 2, dtype=torch.int16, device="cuda")
    count = out.numel()
    module().launch(f"narrow_all<{kind}>", -(-count // BLOCK), BLOCK, address(given), address(out), count)
    got = out.cpu().view(torch.uint8).view(dtype)
    want = values.clamp(-largest, largest).to(dtype)
    assert torch.equal(got.float().isnan(), values.isnan())
    assert same(got, want)


def quantized(rows: int, width: int, element: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows of very different sizes as 8-bit floats, and their scales."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * torch.logspace(-3, 2, rows)[:, None]
    scale = torch.ops.gnnc.scale(x, f"{element}/row")
    return torch.ops.gnnc.quantize(x, scale, f"{element}/row"), scale


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("width", [7, 47, 64, 130, 602])
def test_stored_rows_are_those_of_the_reference(width: int, element: str) -> None:
    def function(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        y = x * factor
        scale = torch.ops.gnnc.scale(y, f"{element}/row")
        return torch.ops.gnnc.quantize(y, scale, f"{element}/row"), scale

    for rows in (0, 1, 37):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
        x = x * torch.logspace(-30, 20, max(rows, 1))[:rows, None]
        if rows:
            x[0] = 0
        values = x, torch.rand(rows, 1) + 0.5
        got, want = run_fused_on_cuda(function, ["rowmap"], *values), function(*values)
        assert all(same(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_an_error(value: float) -> None:
    def function(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        y = x * factor
        scale = torch.ops.gnnc.scale(y, "e4m3/row")
        return torch.ops.gnnc.quantize(y, scale, "e4m3/row"), scale

    x = torch.ones(3, 40)
    x[1, 39] = value
    with pytest.raises(gnnc.PrecisionError, match="not finite"):
        run_fused_on_cuda(function, ["rowmap"], x, torch.ones(3, 1))


SUMS = [("sum", None), ("mean", None), ("max", None), ("sum", 1), ("sum", 4)]


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("width", [16, 48, 64, 128, 300, 604])
@pytest.mark.parametrize(("reduce", "heads"), SUMS)
def test_sums_of_rows_are_those_of_the_reference(
    reduce: str, heads: int | None, width: int, element: str
) -> None:
    graph = random_graph(60, 50, 900)
    x, scale = quantized(graph.num_src, width, element)
    generator = torch.Generator().manual_seed(1)
    value = () if heads is None else (torch.randn(graph.num_edges, heads, generator=generator),)
    if heads == 1:
        value = (value[0][:, 0],)
    rows = x.reshape(len(x), heads, -1) if heads == 4 else x

    def function(rowptr: Tensor, col: Tensor, x: Tensor, scale: Tensor, *value: Tensor) -> Tensor:
        weights = value[0] if value else None
        return torch.ops.gnnc.qspmm(rowptr, col, weights, x, scale, None, reduce, graph.num_dst)

    given = graph.rowptr, graph.col.int(), rows, scale, *value
    got, want = run_on_cuda(function, "spmm", *given), function(*given)
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("elements", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
@pytest.mark.parametrize("heads", [1, 4])
def test_dots_of_both_ends_are_those_of_the_reference(heads: int, elements: tuple[str, str]) -> None:
    nodes = 30
    graph = random_graph(nodes, nodes, 200)
    ends = [quantized(nodes, 64, element, seed) for seed, element in enumerate(elements)]
    rows = [values.reshape(nodes, heads, -1) if heads > 1 else values for values, _ in ends]

    def function(rowptr: Tensor, col: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return torch.ops.gnnc.qsddmm(rowptr, col, a, b, "dot", p, q)

    given = graph.rowptr, graph.col.int(), *rows, *(scale for _, scale in ends)
    got, want = run_on_cuda(function, "sddmm", *given), function(*given)
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("elements", [("e5m2", "e4m3"), ("e4m3", "e4m3")])
@pytest.mark.parametrize("widths", [(7, 47), (64, 64)])
def test_products_over_nodes_are_those_of_the_reference(
    widths: tuple[int, int], elements: tuple[str, str]
) -> None:
    (a, p), (b, q) = (quantized(300, width, e, 1) for width, e in zip(widths, elements, strict=True))

    def function(a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return torch.ops.gnnc.qgemm_tn(a, b, p, q)

    got, want = run_on_cuda(function, "qgemm_tn", a, b, p, q), function(a, b, p, q)
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("inner", [7, 47, 64, 602, 1433])
def test_products_with_a_weight_are_those_of_the_reference(inner: int, element: str) -> None:
    """Rows are quantized on load; the second product reads those that the first stored."""
    ops = torch.ops.gnnc

    def product(x: Tensor, w: Tensor) -> Tensor:
        scale, w_scale = ops.scale(x, f"{element}/row"), ops.scale(w, "e4m3/row")
        values, weight = ops.quantize(x, scale, f"{element}/row"), ops.quantize(w, w_scale, "e4m3/row")
        return ops.dequantize(ops.dequantize(ops.qgemm(values, weight), scale, "row"), w_scale, "column")

    def function(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor]:
        return (product(product(x, v).relu(), w),)

    generator = torch.Generator().manual_seed(inner)
    x = torch.randn(70, 24, generator=generator) * torch.logspace(-3, 2, 70)[:, None]
    v, w = torch.randn(inner, 24, generator=generator), torch.randn(24, inner, generator=generator)
    for given in ((x, v, w), (product(x, v), w, v)):
        got, want = run_fused_on_cuda(function, ["gemm", "gemm"], *given), function(*given)
        assert relative_error(got[0], want[0]) < 1e-3  # a value between two may be rounded to the other
