"""Both passes of attention's gradient against the reference in float64."""

import pytest
import torch
from kernel_graphs import (
    GRAPHS,
    STORE_F32,
    Graph,
    ops,
    padded_int8,
    relative_error,
    same_at_any_thread_count,
)
from torch import Tensor

from gnnc.runtime.backend import get_backend
from gnnc.runtime.cpu.structure import csr_transpose

SLOPE, EPS = 0.2, 1e-16


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    get_backend("cpu")


def run(
    g: Graph,
    ends: tuple[Tensor, ...],
    att: tuple[Tensor | None, ...],
    slope: float = SLOPE,
    scales: tuple[Tensor | None, ...] = (None, None),
) -> list[Tensor]:
    """Return the gradients of x, a_dst, a_src, att_dst and att_src; int8 rows have scales."""
    a_dst, a_src, x, grad = ends
    heads, width = a_src.shape[1], x.shape[1] * x.shape[2]
    rowptr_t, col_t, _ = csr_transpose(g.rowptr, g.col, g.num_src)
    rows = [t.reshape(-1, width) for t in (x, grad)]
    rows = [*(padded_int8(t) if t.dtype == torch.int8 else t for t in rows), *scales]
    sizes = [(g.num_src, width), (g.num_dst, heads), (g.num_src, heads), (width,), (width,)]

    def call() -> Tensor:
        dx, da_dst, da_src, *weights = [torch.full(size, float("nan")) for size in sizes]
        statistics = torch.full((g.num_dst, 4, heads), float("nan"))
        ends = (a_dst, a_src, *rows, slope, EPS, heads)
        ops().attention_backward_rows(g.rowptr, g.col, *ends, da_dst, statistics)
        flat = [None if t is None else t.flatten() for t in att]
        passed = [None if t is None else w for t, w in zip(att, weights, strict=True)]
        own = None if att[0] is None else da_dst
        args = (rowptr_t, col_t, a_src, statistics, *rows, *flat, own, slope, heads, da_src, *passed)
        ops().attention_backward_columns(*args, STORE_F32, [], [], [dx])
        weights = [torch.zeros(width) if w is None else w for w in passed]
        return torch.cat([t.flatten() for t in (dx, da_dst, da_src, *weights)])

    parts = same_at_any_thread_count(call).split([torch.Size(size).numel() for size in sizes])
    shapes = [x.shape, a_dst.shape, a_src.shape, x.shape[1:], x.shape[1:]]
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "width"), [(1, 40), (2, 7), (3, 5), (4, 16), (8, 8), (16, 3), (20, 4), (1, 1)]
)
@pytest.mark.parametrize("name", GRAPHS)
def test_gradients(name: str, heads: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    g = GRAPHS[name]()
    ends = (torch.randn(g.num_dst, heads), torch.randn(g.num_src, heads) * 3)
    rows = [torch.randn(count, heads, width).to(dtype) for count in (g.num_src, g.num_dst)]
    is_square = g.num_src == g.num_dst
    att = (torch.randn(heads, width) if is_square else None, torch.randn(heads, width))
    got = run(g, (*ends, *rows), att)
    rowptr_t, col_t, _ = csr_transpose(g.rowptr, g.col, g.num_src)
    exact = [None if t is None else t.double() for t in (*ends, *rows, *att)]
    want = torch.ops.gnnc.attention_backward(g.rowptr, g.col, rowptr_t, col_t, *exact, SLOPE, EPS)
    # Gradients of a row's logits cancel but for the slope: their errors are those of the terms.
    for part, expected, terms in zip(got, want, (1, 1, 1, g.num_src, g.num_src), strict=True):
        size = torch.clamp(expected.abs(), min=(width * terms) ** 0.5)
        assert relative_error(part, expected, size) < 1e-6


def quantized(count: int, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return int8 rows of sizes that differ by 2^8, of which one is 0, their scales, and the rows in FP64."""
    values = torch.randn(count, heads, width) * torch.exp2(torch.randint(-4, 5, (count, 1, 1)).float())
    values[:1] = 0.0
    scale = torch.ops.gnnc.scale(values, "int8/row")
    int8_values = torch.ops.gnnc.quantize(values, scale, "int8/row")
    return int8_values, scale, int8_values.double() * scale.double()[:, None, None]


QUANTIZED_SHAPES = [
    (1, 40),
    (1, 64),
    (1, 100),
    (2, 32),
    (2, 7),
    (3, 5),
    (4, 16),
    (4, 64),
    (8, 8),
    (16, 4),
    (20, 4),
]


@pytest.mark.parametrize("parts", ["x", "grad", "x grad"])
@pytest.mark.parametrize(("heads", "width"), QUANTIZED_SHAPES)
@pytest.mark.parametrize("name", GRAPHS)
def test_rows_are_read_in_eight_bits(name: str, heads: int, width: int, parts: str) -> None:
    torch.manual_seed(0)
    g = GRAPHS[name]()
    halves = (torch.randn(g.num_dst, heads), torch.randn(g.num_src, heads) * 3)
    rows, scales, exact = [], [], []
    for part, count in (("x", g.num_src), ("grad", g.num_dst)):
        int8_values, scale, wide = quantized(count, heads, width)
        is_quantized = part in parts.split()
        values = int8_values if is_quantized else wide.float()
        rows.append(values)
        scales.append(scale if is_quantized else None)
        exact.append(wide if is_quantized else values.double())
    att = (torch.randn(heads, width) if g.num_src == g.num_dst else None, torch.randn(heads, width))
    got = run(g, (*halves, *rows), att, SLOPE, tuple(scales))
    rowptr_t, col_t, _ = csr_transpose(g.rowptr, g.col, g.num_src)
    known = [None if t is None else t.double() for t in (*halves, *exact, *att)]
    want = torch.ops.gnnc.attention_backward(g.rowptr, g.col, rowptr_t, col_t, *known, SLOPE, EPS)
    # Weights of int8 rows are integers: 2^-17 of the largest of a row.
    size = float(exact[0].abs().mean() + 1) * float(exact[1].abs().mean() + 1)
    for part, expected, terms in zip(got, want, (1, 1, 1, g.num_src, g.num_src), strict=True):
        each = torch.clamp(expected.abs(), min=size * (width * terms) ** 0.5)
        assert relative_error(part, expected, each) < 2e-5


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 16])
def test_a_row_that_is_not_finite_taints_no_other(heads: int) -> None:
    """The scale of such a row is not finite; rows of other destinations stay right."""
    torch.manual_seed(0)
    g = GRAPHS["random"]()
    halves = torch.randn(g.num_dst, heads), torch.randn(g.num_src, heads)
    (x, x_scale, _), (grad, grad_scale, _) = (quantized(n, heads, 16) for n in (g.num_src, g.num_dst))
    clean = run(g, (*halves, x, grad), (None, None), scales=(x_scale, grad_scale))
    reads = torch.zeros(g.num_dst, dtype=torch.bool)
    reads[g.dst()[g.col == 7]] = True
    x_scale[7] = float("nan")
    tainted = run_once(g, (*halves, x, grad), (x_scale, grad_scale))
    assert tainted[reads].isnan().all() and torch.equal(tainted[~reads], clean[1][~reads])


def run_once(g: Graph, ends: tuple[Tensor, ...], scales: tuple[Tensor, Tensor]) -> Tensor:
    """Return the gradient of a_dst."""
    a_dst, a_src, x, grad = ends
    heads = a_dst.shape[1]
    da_dst, statistics = torch.empty_like(a_dst), torch.empty(g.num_dst, 4, heads)
    rows = [padded_int8(t.reshape(t.shape[0], -1)) for t in (x, grad)]
    last = (SLOPE, EPS, heads, da_dst, statistics)
    ops().attention_backward_rows(g.rowptr, g.col, a_dst, a_src, *rows, *scales, *last)
    return da_dst


@pytest.mark.parametrize("heads", [1, 3, 4])
def test_logits_are_read_in_bf16(heads: int) -> None:
    torch.manual_seed(0)
    g = GRAPHS["loops"]()
    halves = [torch.randn(count, heads).bfloat16() for count in (g.num_dst, g.num_src)]
    rows = [torch.randn(count, heads, 4) for count in (g.num_src, g.num_dst)]
    got = run(g, (*halves, *rows), (None, None))
    want = run(g, (*(half.float() for half in halves), *rows), (None, None))
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("slope", [0.0, -0.1, 2.0])
@pytest.mark.parametrize("heads", [1, 2, 3, 8])
def test_any_slope(heads: int, slope: float) -> None:
    torch.manual_seed(0)
    g = GRAPHS["loops"]()
    ends = (torch.randn(g.num_dst, heads), torch.randn(g.num_src, heads))
    rows = [torch.randn(count, heads, 4) for count in (g.num_src, g.num_dst)]
    got = run(g, (*ends, *rows), (None, None), slope)
    rowptr_t, col_t, _ = csr_transpose(g.rowptr, g.col, g.num_src)
    exact = [t.double() for t in (*ends, *rows)]
    want = torch.ops.gnnc.attention_backward(g.rowptr, g.col, rowptr_t, col_t, *exact, None, None, slope, EPS)
    for part, expected in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(part.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_row_of_a_million_edges_with_large_logits() -> None:
    edges = 1_000_000
    g = Graph(torch.tensor([0, edges]), torch.arange(edges, dtype=torch.int32), edges, 1)
    ends = (torch.zeros(1, 1), torch.randn(edges, 1) * 20)
    rows = [torch.randn(edges, 1, 4), torch.randn(1, 1, 4) * 100]
    got = run(g, (*ends, *rows), (None, None))
    rowptr_t, col_t, _ = csr_transpose(g.rowptr, g.col, edges)
    exact = [t.double() for t in (*ends, *rows)]
    want = torch.ops.gnnc.attention_backward(g.rowptr, g.col, rowptr_t, col_t, *exact, None, None, SLOPE, EPS)
    for part, expected in zip(got[:3], want[:3], strict=True):
        assert relative_error(part, expected, torch.clamp(expected.abs(), min=100)) < 1e-5


def test_sums_of_a_row_of_a_million_edges_for_three_heads() -> None:
    torch.manual_seed(0)
    edges, heads = 1_000_000, 3
    g = Graph(torch.tensor([0, edges]), torch.arange(edges, dtype=torch.int32), edges, 1)
    ends = (torch.zeros(1, heads), torch.randn(edges, heads))
    rows = [torch.randn(edges, heads, 2) + 1, torch.randn(1, heads, 2) + 1]
    got = run(g, (*ends, *rows), (None, None))
    rowptr_t, col_t, _ = csr_transpose(g.rowptr, g.col, edges)
    exact = [t.double() for t in (*ends, *rows)]
    want = torch.ops.gnnc.attention_backward(g.rowptr, g.col, rowptr_t, col_t, *exact, None, None, SLOPE, EPS)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-3, atol=1e-6)


def test_refusals() -> None:
    g = GRAPHS["loops"]()
    a, x, flat, scale = torch.zeros(40, 1), torch.zeros(40, 3), torch.zeros(3), torch.ones(40)
    ends, int8_values = (g.rowptr, g.col, a, a), padded_int8(x.to(torch.int8))

    def rows(x: Tensor, grad: Tensor, *scales: Tensor | None, heads: int = 1) -> None:
        last = (0.2, 0.0, heads, a.clone(), torch.zeros(40, 4))
        ops().attention_backward_rows(*ends, x, grad, *scales, *last)

    with pytest.raises(RuntimeError, match="give scales of the rows of x if they are int8"):
        rows(int8_values, x, None, None)
    with pytest.raises(RuntimeError, match="give scales of the rows of grad if they are int8"):
        rows(int8_values, x, scale, scale)
    with pytest.raises(RuntimeError, match="2 heads do not divide"):
        rows(x, x, None, None, heads=2)
    with pytest.raises(RuntimeError, match="give att_dst and da_dst, or none"):
        columns = (g.rowptr, g.col, a, torch.zeros(40, 4), x, x, None, None)
        last = (flat, None, None, 0.2, 1, a.clone(), flat, None)
        ops().attention_backward_columns(*columns, *last, STORE_F32, [], [], [torch.zeros(40, 3)])
