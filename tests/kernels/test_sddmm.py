"""sddmm against gathers in PyTorch."""

import pytest
import torch
from kernel_graphs import (
    GRAPHS,
    WIDTHS,
    Graph,
    ops,
    padded_int8,
    random_graph,
    random_int8,
    relative_error,
    same_at_any_thread_count,
)
from torch import Tensor

DOT, ADD, SUB, MUL, COPY_SRC, COPY_DST = range(6)


def run(
    g: Graph,
    a: Tensor,
    b: Tensor,
    op: int = DOT,
    heads: int = 1,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
) -> Tensor:
    def call() -> Tensor:
        out = torch.full((g.num_edges, heads if op == DOT else a.shape[1]), float("nan"))
        ops().sddmm(g.rowptr, g.col, a, b, a_scale, b_scale, op, heads, out)
        return out

    return same_at_any_thread_count(call)


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    return random_int8(count, width) if dtype == torch.int8 else torch.randn(count, width).to(dtype)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_dot(name: str, width: int, dtype: torch.dtype) -> None:
    g = GRAPHS[name]()
    a, b = rows(g.num_dst, width, dtype), rows(g.num_src, width, dtype)
    products = a.double()[g.dst()] * b.double()[g.col.long()]
    got, want = run(g, a, b), products.sum(1, keepdim=True)
    if dtype == torch.int8:
        assert torch.equal(got, want.float())
    else:
        assert relative_error(got, want, products.abs().sum(1)) < 1e-6


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("heads", [3, 4, 6, 8, 12])
def test_heads_of_16_bytes_are_exact(heads: int, name: str) -> None:
    g = GRAPHS[name]()
    a, b = rows(g.num_dst, 16 * heads, torch.int8), rows(g.num_src, 16 * heads, torch.int8)
    want = (a[g.dst()].long() * b[g.col.long()].long()).view(-1, heads, 16).sum(2)
    assert torch.equal(run(g, a, b, heads=heads), want.float())


@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_heads(heads: int, dtype: torch.dtype) -> None:
    g = random_graph(90, 80, 2000)
    for head_width in (1, 7, 16, 47):
        a, b = rows(80, heads * head_width, dtype), rows(90, heads * head_width, dtype)
        products = a.double()[g.dst()] * b.double()[g.col.long()]
        want = products.view(-1, heads, head_width).sum(2)
        assert relative_error(run(g, a, b, heads=heads), want, products.abs().sum(1)) < 1e-6


def test_scales_are_two_multiplies() -> None:
    g = random_graph(90, 80, 2000)
    a, b, a_scale, b_scale = random_int8(80, 47), random_int8(90, 47), torch.rand(80), torch.rand(90)
    exact = (a.long()[g.dst()] * b.long()[g.col.long()]).sum(1).float()
    want = exact * a_scale[g.dst()] * b_scale[g.col.long()]
    assert torch.equal(run(g, a, b, a_scale=a_scale, b_scale=b_scale)[:, 0], want)


def test_widest_quantized_values_do_not_overflow() -> None:
    g = random_graph(2, 2, 5)
    q = padded_int8(torch.full((2, 65536), 127, dtype=torch.int8))
    assert (run(g, q, q) == float(127 * 127 * 65536)).all()


@pytest.mark.parametrize("width", [1, 47, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("op", [ADD, SUB, MUL, COPY_SRC, COPY_DST])
def test_rows(width: int, dtype: torch.dtype, op: int) -> None:
    g = random_graph(90, 80, 2000)
    a, b = rows(80, width, dtype), rows(90, width, dtype)
    scales = [torch.rand(80), torch.rand(90)] if dtype == torch.int8 else [None, None]
    left, right = a.float(), b.float()
    if dtype == torch.int8:
        left, right = left * scales[0][:, None], right * scales[1][:, None]
    left, right = left[g.dst()], right[g.col.long()]
    want = [left + right, left - right, left * right, right, left][op - 1]
    assert torch.equal(run(g, a, b, op, a_scale=scales[0], b_scale=scales[1]), want)


@pytest.mark.parametrize("num_src", [3, 200])
def test_a_copy_reads_one_table_only(num_src: int) -> None:
    g = random_graph(num_src, 80, 2000)
    a, b = rows(80, 47, torch.float32), rows(num_src, 47, torch.float32)
    assert torch.equal(run(g, b, b, COPY_SRC), b[g.col.long()])
    assert torch.equal(run(g, a, a, COPY_DST), a[g.dst()])


def test_refusals() -> None:
    g = random_graph(9, 8, 20)
    with pytest.raises(RuntimeError, match="must have one type"):
        run(g, torch.randn(8, 4), torch.randn(9, 4).bfloat16())
    with pytest.raises(RuntimeError, match="a has 4 columns, but b has 5"):
        run(g, torch.randn(8, 4), torch.randn(9, 5))
    with pytest.raises(RuntimeError, match="a has 9 rows, but there are 8"):
        run(g, torch.randn(9, 4), torch.randn(9, 4))
