"""Both passes of attention's gradient against the reference in float64."""

import pytest
import torch
from kernel_graphs import GRAPHS, STORE_F32, Graph, ops, relative_error, same_at_any_thread_count
from torch import Tensor

from gnnc.runtime.backend import get_backend
from gnnc.runtime.cpu.structure import csr_transpose

SLOPE, EPS = 0.2, 1e-16


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    get_backend("cpu")


def run(
    g: Graph, ends: tuple[Tensor, ...], att: tuple[Tensor | None, ...], slope: float = SLOPE
) -> list[Tensor]:
    """Return the gradients of x, a_dst, a_src, att_dst and att_src."""
    a_dst, a_src, x, grad = ends
    heads, width = a_src.shape[1], x.shape[1] * x.shape[2]
    rowptr_t, col_t, _ = csr_transpose(g.rowptr, g.col, g.num_src)
    rows = [t.reshape(-1, width) for t in (x, grad)]
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
    a, x, flat = torch.zeros(40, 1), torch.zeros(40, 3), torch.zeros(3)
    ends = (g.rowptr, g.col, a, a, x)
    with pytest.raises(RuntimeError, match="both be float32, or both bfloat16"):
        ops().attention_backward_rows(*ends, x.bfloat16(), 0.2, 0.0, 1, a.clone(), torch.zeros(40, 4))
    with pytest.raises(RuntimeError, match="2 heads do not divide"):
        ops().attention_backward_rows(*ends, x, 0.2, 0.0, 2, a.clone(), torch.zeros(40, 4))
    with pytest.raises(RuntimeError, match="give att_dst and da_dst, or none"):
        columns = (
            g.rowptr,
            g.col,
            a,
            torch.zeros(40, 4),
            x,
            x,
            flat,
            None,
            None,
            0.2,
            1,
            a.clone(),
            flat,
            None,
        )
        ops().attention_backward_columns(*columns, STORE_F32, [], [], [torch.zeros(40, 3)])
