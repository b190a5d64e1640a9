"""edge_softmax against float64."""

import pytest
import torch
from kernel_graphs import GRAPHS, Graph, ops, relative_error, same_at_any_thread_count, segment_sum, star
from torch import Tensor


def run(g: Graph, logits: Tensor, eps: float = 1e-16) -> Tensor:
    def call() -> Tensor:
        out = torch.full_like(logits, float("nan"))
        ops().edge_softmax(g.rowptr, logits, eps, out)
        return out

    return same_at_any_thread_count(call)


def reference(g: Graph, logits: Tensor, eps: float = 1e-16) -> Tensor:
    logits, dst = logits.double(), g.dst()
    top = torch.zeros(g.num_dst, *logits.shape[1:], dtype=torch.float64)
    index = dst.view(-1, *[1] * (logits.dim() - 1)).expand_as(logits)
    top.scatter_reduce_(0, index, logits, "amax", include_self=False)
    exp = (logits - top[dst]).exp()
    return exp / (segment_sum(g, exp) + eps)[dst]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("heads", [None, 1, 2, 3, 4, 8, 16, 20])
@pytest.mark.parametrize("spread", [1.0, 40.0])
def test_softmax(name: str, heads: int | None, spread: float) -> None:
    g = GRAPHS[name]()
    logits = spread * torch.randn(g.num_edges, *([] if heads is None else [heads]))
    got, want = run(g, logits), reference(g, logits)
    assert relative_error(got, want) < 1e-6
    likely = want > 1e-30
    torch.testing.assert_close(got.double()[likely], want[likely], rtol=1e-5, atol=0)


def test_hub() -> None:
    g = star(300_000)
    logits = torch.randn(300_000, 4)
    assert relative_error(run(g, logits), reference(g, logits)) < 2e-6


def test_eps_counts() -> None:
    g = star(3)
    assert torch.allclose(run(g, torch.zeros(3), 1.0), torch.full((3,), 0.25))


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("num_edges", [5, 100])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_show(heads: int, num_edges: int, bad: float) -> None:
    g = star(num_edges)
    logits = torch.randn(num_edges, heads)
    logits[2, 0] = bad
    out = torch.empty(num_edges, heads)
    ops().edge_softmax(g.rowptr, logits, 1e-16, out)
    assert out[:, 0].isnan().any()
    assert out[:, 1:].isfinite().all()


def test_masked_logits_get_nothing() -> None:
    logits = torch.randn(100, 4)
    logits[::3] = -float("inf")
    got = run(star(100), logits)
    assert (got[::3] == 0).all()
    assert torch.allclose(got, logits.softmax(0), rtol=1e-5)


def test_refusals() -> None:
    g = star(3)
    with pytest.raises(RuntimeError, match="edges"):
        run(g, torch.zeros(4))
    with pytest.raises(RuntimeError, match="logits must be Float"):
        run(g, torch.zeros(3, dtype=torch.float64))
