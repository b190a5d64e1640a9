"""attention against float64: logits, softmax, weighted sum."""

import pytest
import torch
from kernel_graphs import (
    GRAPHS,
    STORE_F32,
    Graph,
    codes,
    ops,
    random_graph,
    relative_error,
    same_at_any_thread_count,
    segment_sum,
    star,
)
from torch import Tensor

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
        self.x = codes(g.num_src, width) if dtype == torch.int8 else torch.randn(g.num_src, width).to(dtype)
        self.x_scale = torch.rand(g.num_src) + 0.1 if dtype == torch.int8 else None
        each = heads * 5 if kind == DOT else heads
        self.a_src = None if kind == EDGE else torch.randn(g.num_src, each)
        self.a_dst = None if kind == EDGE else torch.randn(g.num_dst, each)
        self.edge = torch.randn(g.num_edges, heads) if edge or kind == EDGE else None
        self.scale, self.slope = 0.3, 0.2
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
        numbers = (self.scale, self.slope, EPS, self.heads)
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
        alpha = exp / (segment_sum(g, exp) + EPS)[g.dst()]
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
def test_rows_far_below_the_largest_source(heads: int, dtype: torch.dtype) -> None:
    case = Case(random_graph(90, 80, 1500), ADDITIVE, heads, 16, dtype, edge=False)
    assert case.a_src is not None
    case.a_src[7] = 500.0
    case.check()


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
    for bad in ("alpha", "slope", "heads"):
        case = Case(g, ADDITIVE, 3 if bad == "heads" else 4, 16, torch.int8, edge=False)
        case.slope = 2.0 if bad == "slope" else 0.2
        alpha = torch.zeros(g.num_edges, 4) if bad == "alpha" else None
        with pytest.raises(RuntimeError, match="factors belong to leaky_relu"):
            case.call(alpha, torch.zeros(g.num_src, 8))
