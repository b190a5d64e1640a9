"""softmax_sum against float64."""

import math

import pytest
import torch
from kernel_graphs import GRAPHS, Graph, ops, relative_error, same_at_any_thread_count, segment_sum, star
from torch import Tensor
from torch.testing import assert_close


def run(g: Graph, logits: Tensor, value: Tensor) -> Tensor:
    def call() -> Tensor:
        out = torch.full((g.num_dst, logits.shape[1]), math.nan)
        ops().softmax_sum(g.rowptr, logits, value, None, out)
        return out

    return same_at_any_thread_count(call)


def in_pieces(logits: Tensor, value: Tensor, sizes: list[int]) -> Tensor:
    """One row whose edges come in several calls."""
    width = logits.shape[1]
    state, out = torch.zeros(3, width), torch.full((1, width), math.nan)
    state[0] = -math.inf
    for some, those in zip(logits.split(sizes), value.split(sizes), strict=True):
        ops().softmax_sum(torch.tensor([0, len(some)]), some, those, state, out)
    return out[0]


def reference(g: Graph, logits: Tensor, value: Tensor) -> Tensor:
    logits, dst = logits.double(), g.dst()
    top = torch.zeros(g.num_dst, logits.shape[1], dtype=torch.float64)
    top.scatter_reduce_(0, dst[:, None].expand_as(logits), logits, "amax", include_self=False)
    exp = (logits - top[dst]).exp()
    total = segment_sum(g, exp)
    return segment_sum(g, exp * value.double()) / torch.where(total == 0, 1, total)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("width", [1, 7, 16, 47, 100])
@pytest.mark.parametrize("spread", [1.0, 40.0])
def test_sums(name: str, width: int, spread: float) -> None:
    g = GRAPHS[name]()
    logits, value = spread * torch.randn(g.num_edges, width), torch.randn(g.num_edges, width)
    got, want = run(g, logits, value), reference(g, logits, value)
    assert_close(got.double(), want, rtol=1e-5, atol=3e-6)
    assert (got[g.rowptr.diff() == 0] == 0).all()


def test_rows_of_out_may_be_apart() -> None:
    g = GRAPHS["random"]()
    logits, value = torch.randn(g.num_edges, 7), torch.randn(g.num_edges, 7)
    wide = torch.full((g.num_dst, 21), 5.0)
    ops().softmax_sum(g.rowptr, logits, value, None, wide[:, 7:14])
    assert torch.equal(wide[:, 7:14], run(g, logits, value))
    assert (wide[:, :7] == 5).all() and (wide[:, 14:] == 5).all()


def test_hub() -> None:
    g = star(200_000)
    logits, value = torch.randn(200_000, 3), torch.randn(200_000, 3) + 1
    assert relative_error(run(g, logits, value), reference(g, logits, value)) < 2e-6


@pytest.mark.parametrize("order", ["up", "down", "mixed"])
def test_pieces_of_a_row(order: str) -> None:
    logits, value = 20 * torch.randn(100, 19), torch.randn(100, 19)
    logits = {"up": logits.sort(0)[0], "down": logits.sort(0, descending=True)[0], "mixed": logits}[order]
    want = (logits.double().softmax(0) * value.double()).sum(0)
    assert_close(in_pieces(logits, value, [1, 60, 7, 32]).double(), want, rtol=1e-5, atol=3e-6)


def test_what_is_not_finite_shows_in_its_column() -> None:
    bad = torch.randn(100, 6)
    bad[3, 0], bad[3, 1], bad[:, 2], bad[:50, 3] = math.nan, math.inf, -math.inf, -math.inf
    logits, value = torch.cat([bad, torch.randn(100, 2)], 1), torch.randn(100, 8)
    value[7, 6], value[7, 7] = math.nan, math.inf
    want = (logits.softmax(0) * value).sum(0)
    assert want.isnan().tolist() == [True, True, True, False, False, False, True, False]
    whole = torch.zeros(5, 8)
    ops().softmax_sum(star(100).rowptr, logits, value, None, whole)
    for got in (whole[2], in_pieces(logits, value, [100]), in_pieces(logits, value, [2, 40, 50, 8])):
        assert_close(got, want, equal_nan=True, rtol=1e-5, atol=3e-6)


def test_refusals() -> None:
    g, x = star(3), torch.zeros(3, 2)
    with pytest.raises(RuntimeError, match="4 logits, but 3 edges"):
        run(g, torch.zeros(4, 2), x)
    with pytest.raises(RuntimeError, match="value must have 6 elements"):
        run(g, x, torch.zeros(3, 3))
    with pytest.raises(RuntimeError, match="logits must be Float"):
        run(g, x.double(), x)
    with pytest.raises(RuntimeError, match="out must be float32"):
        ops().softmax_sum(g.rowptr, x, x, None, torch.zeros(5, 3))
    with pytest.raises(RuntimeError, match="state goes with one row"):
        ops().softmax_sum(g.rowptr, x, x, torch.zeros(3, 2), torch.zeros(5, 2))
