"""attention against float64: logits, softmax, weighted sum."""

import pytest
import torch
from kernel_graphs import (
    GRAPHS,
    STORE_F32,
    Graph,
    ops,
    random_graph,
    random_int8,
    relative_error,
    same_at_any_thread_count,
    segment_sum,
    star,
)
from torch import Tensor

from gnnc.runtime.cpu import library

ADDITIVE, DOT, EDGE = range(3)
EPS = 1e-16
ERROR = 2e-6
FIXED_ERROR = 1.5e-5  # weights of int8 rows are 16-bit integers


class Case:
    """Random operands of one kind of logit, the kernel's answer and the reference."""

    def __init__(
        self, g: Graph, kind: int, heads: int, head_width: int, dtype: torch.dtype, edge: bool
    ) -> None:
        self.g, self.kind, self.heads, self.head_width = g, kind, heads, head_width
        width = heads * head_width
        self.x = (
            random_int8(g.num_src, width) if dtype == torch.int8 else torch.randn(g.num_src, width).to(dtype)
        )
        self.x_scale = torch.rand(g.num_src) + 0.1 if dtype == torch.int8 else None
        each = heads * 5 if kind == DOT else heads
        self.a_src = None if kind == EDGE else torch.randn(g.num_src, each)
        self.a_dst = None if kind == EDGE else torch.randn(g.num_dst, each)
        self.edge = torch.randn(g.num_edges, heads) if edge or kind == EDGE else None
        self.scale, self.slope, self.eps = 0.3, 0.2, EPS
        self.error = FIXED_ERROR if dtype == torch.int8 else ERROR

    def factors(self) -> Tensor | None:
        """Memory for the factors of the sources, where rows may find their weights without a maximum."""
        if self.kind != ADDITIVE or self.edge is not None or self.heads not in (1, 2, 4, 8, 16):
            return None
        return torch.full((self.g.num_src, 4 if self.heads == 1 else 2 * self.heads), float("nan"))

    def call(self, alpha: Tensor | None, factors: Tensor | None = None) -> Tensor:
        g = self.g
        out = torch.full((g.num_dst, self.x.shape[1]), float("nan"))
        operands = (self.x, self.x_scale, self.kind, self.a_src, self.a_dst, self.edge)
        numbers = (self.scale, self.slope, self.eps, self.heads)
        ops().attention(g.rowptr, g.col, *operands, *numbers, alpha, factors, STORE_F32, [], [], [out])
        return out

    def run(self) -> tuple[Tensor, Tensor]:
        alpha = torch.full((self.g.num_edges, self.heads), float("nan"))
        out = same_at_any_thread_count(lambda: self.call(None, self.factors()))
        assert relative_error(self.call(alpha), out.double()) < self.error
        return out, alpha

    def logits(self) -> Tensor:
        g = self.g
        logits = torch.zeros(g.num_edges, self.heads, dtype=torch.float64)
        if self.a_src is not None and self.a_dst is not None:
            left, right = self.a_dst.double()[g.dst()], self.a_src.double()[g.col.long()]
            if self.kind == DOT:
                logits = self.scale * (left * right).view(g.num_edges, self.heads, 5).sum(2)
            else:
                logits = left + right
        if self.edge is not None:
            logits = logits + self.edge.double()
        return torch.nn.functional.leaky_relu(logits, self.slope) if self.kind == ADDITIVE else logits

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        g, logits = self.g, self.logits()
        top = torch.full((g.num_dst, self.heads), -torch.inf, dtype=torch.float64)
        top.scatter_reduce_(0, g.dst()[:, None].expand_as(logits), logits, "amax")
        exp = (logits - top[g.dst()]).exp()
        alpha = exp / (segment_sum(g, exp) + self.eps)[g.dst()]
        rows = self.x.double()
        if self.x_scale is not None:
            rows = rows * self.x_scale.double()[:, None]
        messages = rows[g.col.long()].view(-1, self.heads, self.head_width) * alpha[:, :, None]
        messages = messages.flatten(1)
        return segment_sum(g, messages), segment_sum(g, messages.abs()), alpha

    def check(self) -> None:
        out, alpha = self.run()
        want, size, want_alpha = self.reference()
        assert relative_error(out, want, size) < self.error
        assert relative_error(alpha, want_alpha) < ERROR


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("kind", [ADDITIVE, DOT, EDGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_graphs(name: str, heads: int, kind: int, dtype: torch.dtype) -> None:
    Case(GRAPHS[name](), kind, heads, 16, dtype, edge=False).check()


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 16, 20])
@pytest.mark.parametrize("head_width", [1, 7, 16, 47, 64])
@pytest.mark.parametrize("kind", [ADDITIVE, DOT])
def test_widths(heads: int, head_width: int, kind: int) -> None:
    g = random_graph(90, 80, 1500)
    Case(g, kind, heads, head_width, torch.int8, edge=True).check()
    Case(g, kind, heads, head_width, torch.float32, edge=False).check()


@pytest.mark.first(2)
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("num_edges", [15, 16, 17, 512, 513, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_hub(heads: int, num_edges: int, dtype: torch.dtype) -> None:
    Case(star(num_edges), ADDITIVE, heads, 16, dtype, edge=False).check()


@pytest.mark.parametrize("heads", [1, 4])
def test_one_heavy_edge_of_a_hub_does_not_hide_the_light_ones(heads: int) -> None:
    case = Case(star(100_000, 100_000), ADDITIVE, heads, 16, torch.int8, edge=False)
    assert case.a_src is not None and case.x_scale is not None
    case.a_src.zero_()
    case.x_scale.fill_(1.0)
    case.a_src[case.g.col[0]] = 12.0  # the others: 6e-6 of it, less than half a step of 16 bits
    want, size, _ = case.reference()
    error = relative_error(case.call(None, case.factors()), want, size)
    assert error < 2e-4  # those of its own segment are lost


@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_bounded_rows_at_any_slope(heads: int, slope: float) -> None:
    case = Case(random_graph(300, 200, 9000), ADDITIVE, heads, 16, torch.float32, edge=False)
    case.slope = slope
    case.check()


@pytest.mark.parametrize("heads", [1, 4])
def test_rows_without_weight(heads: int) -> None:
    case = Case(random_graph(90, 80, 1500), ADDITIVE, heads, 16, torch.int8, edge=False)
    assert case.x_scale is not None
    case.x_scale.zero_()
    assert not case.call(None, case.factors()).any()
    case.x_scale.fill_(1e-36)  # too small for integers
    out = case.call(None, case.factors())
    want, size, _ = case.reference()
    assert relative_error(out, want, size) < 1e-5


@pytest.mark.parametrize("heads", [1, 4])
def test_rows_whose_weights_underflow_below_the_bound(heads: int) -> None:
    case = Case(random_graph(90, 80, 1500), ADDITIVE, heads, 16, torch.int8, edge=False)
    assert case.x_scale is not None and case.a_src is not None
    case.x_scale.fill_(1e-36)
    # a term of the others is 4e-18: enough for their sum, not for a product with the scale
    case.a_src[7] = 40.0
    out = case.call(None, case.factors())
    want, size, _ = case.reference()
    assert relative_error(out, want, size) < 1e-5 and (out.abs().amax(1) > 1e-37).all()


@pytest.mark.parametrize("heads", [1, 4])
def test_scales_may_be_negative(heads: int) -> None:
    case = Case(random_graph(90, 80, 1500), ADDITIVE, heads, 16, torch.int8, edge=False)
    assert case.x_scale is not None
    case.x_scale *= torch.where(torch.rand(case.g.num_src) < 0.3, -1.0, 1.0)
    case.check()


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("kind", [ADDITIVE, DOT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_no_columns(heads: int, kind: int, dtype: torch.dtype) -> None:
    case = Case(random_graph(90, 80, 1500), kind, heads, 16, dtype, edge=False)
    *_, want = case.reference()
    case.x = case.x[:, :0]
    out, alpha = case.run()
    assert out.shape == (80, 0)
    assert relative_error(alpha, want) < ERROR


@pytest.mark.parametrize("width", [1, 7, 47, 100, 602])
def test_one_head_of_any_width(width: int) -> None:
    Case(random_graph(90, 80, 1500), ADDITIVE, 1, width, torch.int8, edge=False).check()


def test_large_logits() -> None:
    case = Case(random_graph(90, 80, 1500), ADDITIVE, 4, 16, torch.float32, edge=False)
    assert case.a_src is not None
    case.a_src *= 1000
    out, _ = case.run()
    want, size, _ = case.reference()
    assert relative_error(out, want, size) < 1e-5


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("above", [60.0, 80.0, 87.0, 95.0, 500.0])  # exponentials from small to 0
def test_rows_far_below_the_largest_source(heads: int, dtype: torch.dtype, above: float) -> None:
    case = Case(random_graph(90, 80, 1500), ADDITIVE, heads, 16, dtype, edge=False)
    assert case.a_src is not None
    case.a_src[7] = above
    case.check()


@pytest.mark.parametrize("num_values", [16, 592, 160_000])  # the last: two slices of a thread and a part
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_the_factors_of_the_sources(heads: int, num_values: int) -> None:
    if heads > {"avx512": 16, "avx2": 8}.get(library.load(), 4):
        pytest.skip("more heads than the lanes of a vector: rows find their maximum")
    case = Case(random_graph(num_values // heads, 3, 20), ADDITIVE, heads, 16, torch.int8, edge=False)
    assert case.a_src is not None and case.x_scale is not None

    def table() -> Tensor:
        factors = case.factors()
        assert factors is not None
        case.call(None, factors)
        return factors[:, : max(2 * heads, 3)]

    got = same_at_any_thread_count(table)
    below = (case.a_src - case.a_src.amax(0)).double()
    want = torch.stack([below.exp(), (case.slope * below).exp()], 1)  # [source][both][head]
    assert relative_error(got[:, : 2 * heads], want.flatten(1)) < ERROR
    assert heads > 1 or torch.equal(got[:, 2], case.x_scale)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_source_that_is_not_finite_shows_in_the_rows_that_read_it(heads: int, value: float) -> None:
    case = Case(random_graph(90, 80, 300), ADDITIVE, heads, 16, torch.int8, edge=False)
    assert case.a_src is not None
    case.a_src[7] = value
    out = case.call(None, case.factors())
    reads = torch.zeros(case.g.num_dst, dtype=torch.bool)
    reads[case.g.dst()[case.g.col == 7]] = True
    assert out[reads].isnan().all() and reads.any()
    assert out[~reads].isfinite().all()


def test_refusals() -> None:
    g = random_graph(9, 8, 20)
    case = Case(g, ADDITIVE, 4, 16, torch.int8, edge=False)
    case.x_scale = None
    with pytest.raises(RuntimeError, match="x_scale belongs to an int8 x"):
        case.run()
    case = Case(g, ADDITIVE, 4, 16, torch.float32, edge=False)
    case.a_src = None
    with pytest.raises(RuntimeError, match="both are needed"):
        case.run()
    case = Case(g, EDGE, 4, 16, torch.float32, edge=True)
    case.edge = None
    with pytest.raises(RuntimeError, match="kind 2 needs edge"):
        case.run()


def test_factors_are_refused_where_a_row_needs_its_maximum() -> None:
    g = random_graph(9, 8, 20)
    case = Case(g, ADDITIVE, 4, 16, torch.int8, edge=False)
    with pytest.raises(RuntimeError, match=f"factors must have {8 * g.num_src} elements"):
        case.call(None, torch.zeros(g.num_src, 4))
    for bad in ("alpha", "slope", "eps", "heads", "edge", "kind"):
        kind, heads = DOT if bad == "kind" else ADDITIVE, 3 if bad == "heads" else 4
        case = Case(g, kind, heads, 16, torch.int8, edge=bad == "edge")
        case.slope = 2.0 if bad == "slope" else 0.2
        case.eps = 1e-6 if bad == "eps" else EPS
        alpha = torch.zeros(g.num_edges, 4) if bad == "alpha" else None
        with pytest.raises(RuntimeError, match="factors belong to leaky_relu"):
            case.call(alpha, torch.zeros(g.num_src, 8))
