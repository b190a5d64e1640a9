"""Regions: one order of the edges, whenever a model reads which there are, and factors of one rank."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import HypergraphConv
from torch_geometric.utils import softmax
from traced import count, eager, relative_error, trace

N, F = 9, 20


class Spelled(nn.Module):
    """A model that is a function, which reads the edges itself."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.function(x, edge_index)


def graph(nodes: int = N, edges: int = 40) -> tuple[Tensor, Tensor]:
    return torch.randn(nodes, F), torch.randint(nodes, (2, edges))


def summed(rows: Tensor, index: Tensor, nodes: int) -> Tensor:
    return rows.new_zeros(nodes, *rows.shape[1:]).index_add(0, index, rows)


def degrees_first(x: Tensor, edge_index: Tensor) -> Tensor:
    dst = edge_index[1]
    degree = summed(torch.ones(dst.shape[0]), dst, x.shape[0]) + 1
    src = edge_index[0]
    return summed(x[src] / degree[src][:, None], dst, x.shape[0])


def total_of_values_first(x: Tensor, edge_index: Tensor) -> Tensor:
    dst = edge_index[1]
    total = summed(x[: dst.shape[0], 0].exp().expand(dst.shape[0]), dst, x.shape[0]).clamp(min=1)
    src = edge_index[0]
    return summed(x[src], dst, x.shape[0]) / total[:, None]


def sources_are_made_of_degrees(x: Tensor, edge_index: Tensor) -> Tensor:
    dst = edge_index[1]
    degree = summed(torch.ones(dst.shape[0]), dst, x.shape[0])
    largest = degree.argmax().expand(dst.shape[0])
    return summed(x[torch.minimum(largest, edge_index[0])], dst, x.shape[0]) / (degree + 1)[:, None]


def sources_of_two_kinds(x: Tensor, edge_index: Tensor) -> Tensor:
    dst = edge_index[1]
    degree = summed(torch.ones(dst.shape[0]), dst, x.shape[0]) + 1
    reverse = edge_index[0].flip(0)
    first = summed(x[reverse], dst, x.shape[0]) / degree[:, None]
    src = edge_index[0]
    return first + summed(x[src] * x[dst].mean(), dst, x.shape[0])


def scaled_on_both_ends(x: Tensor, edge_index: Tensor) -> Tensor:
    src, dst = edge_index
    degree = summed(torch.ones(dst.shape[0]), dst, x.shape[0]) + 1
    weight = 2 * degree[src].pow(-0.5) * degree[dst].sqrt()
    return summed(x[src] * weight[:, None], dst, x.shape[0])


def softmax_before_the_sources(x: Tensor, edge_index: Tensor) -> Tensor:
    dst = edge_index[1]
    weight = x[dst].mean(-1).exp()
    weight = weight / summed(weight, dst, x.shape[0])[dst]
    src = edge_index[0]
    return summed(x[src] * weight[:, None], dst, x.shape[0])


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("function", "orders"),
    [
        (degrees_first, 1),
        (total_of_values_first, 1),
        (sources_are_made_of_degrees, 2),
        (sources_of_two_kinds, 2),
        (softmax_before_the_sources, 1),
        (scaled_on_both_ends, 1),
    ],
)
def test_indices_may_be_read_in_any_order(function: Callable[..., Tensor], orders: int) -> None:
    model = Spelled(function)
    sizes = [(41, 40), (60, 7)] if function is total_of_values_first else [(N, 40), (31, 120), (7, 0)]
    traced = trace(model, *graph(*sizes[0]))
    traced.raised.graph.lint()
    assert count(traced.raised, "csr") == orders
    for nodes, edges in sizes:
        args = graph(nodes, edges)
        (got,), (want,) = traced.run(traced.raised, *args), eager(model, *args)
        assert relative_error(got, want) < 1e-5


# pairs of ends

PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "source less target": lambda s, t: s - t,
    "target less source": lambda s, t: t - s,
    "less twice": lambda s, t: torch.sub(s, t, alpha=2),
    "less twice the source": lambda s, t: torch.sub(t, s, alpha=2),
    "plus a negative": lambda s, t: torch.add(t, s, alpha=-3),
    "product": lambda s, t: t * s,
    "dot": lambda s, t: (s * t).sum(-1, keepdim=True),
    "dot of differences": lambda s, t: ((s - t) * (t - 2 * s)).sum(-1, keepdim=True),
    "with itself": lambda s, t: s - s * t,
}


@pytest.mark.parametrize("columns", [1, 2, F])
@pytest.mark.parametrize("name", PAIRS)
def test_which_end_is_which(name: str, columns: int) -> None:
    def function(x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        h = x[:, :columns]
        return summed(PAIRS[name](h[src], h[dst]).tanh(), dst, x.shape[0])

    model = Spelled(function)
    traced = trace(model, *graph())
    for nodes, edges in [(N, 40), (31, 120), (7, 0)]:
        args = graph(nodes, edges)
        (got,), (want,) = traced.run(traced.raised, *args), eager(model, *args)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_difference_of_a_node_with_itself_is_positive_zero(sign: int) -> None:
    """A self loop has the angle zero, and not pi, whichever end is read first."""

    def function(x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        s, t = (x[:, :2][src], x[:, :2][dst])[::sign]
        difference = s - t
        return summed(torch.atan2(difference[:, :1], difference[:, 1:]), dst, x.shape[0])

    model, (x, edge_index) = Spelled(function), graph()
    args = x, torch.cat([edge_index, torch.arange(N).expand(2, N)], 1)
    traced = trace(model, *args)
    assert count(traced.raised, "sddmm") == 1
    (got,), (want,) = traced.run(traced.raised, *args), eager(model, *args)
    assert relative_error(got, want) < 1e-5


# factors of other ranks than the attention's


def heads_by_norm(x: Tensor, edge_index: Tensor, heads: int) -> Tensor:
    """Attention of several heads times a weight of the edge, and times one of its destination."""
    src, dst = edge_index
    h = x.view(-1, heads, F // heads)
    weight = softmax(h[src].mean(-1) + h[dst].amax(-1), dst, num_nodes=x.shape[0])
    degree = summed(torch.ones(dst.shape[0]), dst, x.shape[0])
    parity = ((src + dst) % 3).float() + 0.5
    message = weight.unsqueeze(-1) * (parity.view(-1, 1, 1) * h[src])
    return summed(message / degree[dst].view(-1, 1, 1), dst, x.shape[0]).mean(1)


@pytest.mark.first(1)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_weights_of_edges_multiply_those_of_heads(heads: int) -> None:
    model = Spelled(partial(heads_by_norm, heads=heads))
    traced = trace(model, *graph())
    (spmm,) = (n for n in traced.raised.graph.nodes if str(n.target) == "gnnc.spmm.default")
    assert tuple(spmm.args[2].meta["val"].shape[1:]) == (heads,)
    for nodes, edges in [(N, 40), (31, 120), (7, 0)]:
        args = graph(nodes, edges)
        (got,), (want,) = traced.run(traced.raised, *args), eager(model, *args)
        assert relative_error(got, want) < 1e-5


def test_rows_of_a_transposed_copy() -> None:
    """What edges view is dense, the nodes' rows that are viewed instead are not."""

    def function(x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        h = x.view(-1, 4, F // 4).transpose(1, 2).contiguous()
        return summed(h[src].view(-1, F) * x[dst], dst, x.shape[0])

    model, args = Spelled(function), graph()
    traced = trace(model, *args)
    (got,), (want,) = traced.run(traced.raised, *args), eager(model, *args)
    assert relative_error(got, want) < 1e-5


@pytest.mark.first(1)
@pytest.mark.parametrize("heads", [1, 2])
def test_attention_on_a_hypergraph(heads: int) -> None:
    conv = HypergraphConv(F, 8, use_attention=True, heads=heads, concat=False)
    x, members = torch.randn(N, F), torch.stack([torch.arange(N), torch.arange(N) % N])
    given = x, members, None, torch.randn(N, F)
    traced = trace(conv, *given)
    (got,), (want,) = traced.run(traced.raised, *given), eager(conv, *given)
    assert relative_error(got, want) < 1e-5
