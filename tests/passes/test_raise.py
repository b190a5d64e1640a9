"""Raise: every model of the zoo and every spelling of its formulas becomes primitives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow import slow_after, slow_but
from torch import Tensor, nn
from torch.fx import GraphModule
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GraphConv, SAGEConv, TransformerConv
from traced import Formula, Traced, count, eager, relative_error, trace
from zoo import ZOO, build

from gnnc.errors import GraphError
from gnnc.ir import parse_body
from gnnc.passes.base import Context, run_pass
from gnnc.passes.edges.index_bounds import IndexBound
from gnnc.passes.hoist import Hoist
from gnnc.passes.raise_ import Raise
from gnnc.report.printing import format_graph

MOVES_ROWS = ("scatter", "index", "gather", "embedding", "repeat_interleave")
SIZES = [(31, 120), (1, 0), (7, 0), (1, 1)]


def left_on_compute(raised: GraphModule) -> list[str]:
    """ATen ops of the compute half that read or write rows by an index.

    Not counted: edge values that go back to the caller's order, once all is computed.
    """
    compute = run_pass(Hoist(), raised)
    results = {n for n in compute.graph.output_node().all_input_nodes if is_inverse_read(n)}
    names = [str(n.target) for n in compute.graph.nodes if n.op == "call_function" and n not in results]
    names = [name.split(".")[1] for name in names if name.startswith("aten.")]
    return [name for name in names if name.startswith(MOVES_ROWS)]


def is_inverse_read(node: torch.fx.Node) -> bool:
    return str(node.target) == "aten.index_select.default" and node.args[2].op == "placeholder"


def assert_equals_eager(traced: Traced, *args: Any, limit: float = 1e-5, **kwargs: Any) -> None:
    results = traced.run(traced.raised, *args, **kwargs)
    expected = eager(traced.model, *args, **kwargs)
    assert len(results) == len(expected)
    assert max(map(relative_error, results, expected)) < limit


RAISED_EVERY_TIME = ("gcn", "sage-max", "gin", "gat", "transformer", "index_add")


@pytest.mark.first(1)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("name", slow_but(RAISED_EVERY_TIME, list(ZOO)))
def test_zoo_is_raised_fully(name: str):
    entry, model = ZOO[name], build(name)
    args, kwargs = entry.arguments(23, 80)
    traced = trace(model, *args, **kwargs)
    assert left_on_compute(traced.raised) == []
    assert traced.context.notes == []
    assert count(traced.raised, "edge_softmax") > 0 or not entry.attention
    assert_equals_eager(traced, *args, **kwargs)
    for nodes, edges in SIZES:
        args, kwargs = entry.arguments(nodes, edges, 1)
        assert_equals_eager(traced, *args, **kwargs)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["models.GCN", "models.GraphSAGE", "models.GIN", "models.GAT"])
def test_golden(name: str, golden: Callable[[str], None]):
    args, kwargs = ZOO[name].arguments(23, 80)
    golden(format_graph(trace(build(name), *args, **kwargs).raised))


# spellings of one aggregation

N, F = 9, 20


def graph(nodes: int = N, edges: int = 40) -> tuple[Tensor, Tensor]:
    return torch.randn(nodes, F), torch.randint(nodes, (2, edges))


def formula(function: Callable[..., Tensor]) -> Formula:
    """``function(x, rows read at the sources, src, dst)``."""
    return Formula(lambda x, src, dst: function(x, x[src], src, dst))


def zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def wide(dst: Tensor, m: Tensor) -> Tensor:
    return dst.view(-1, 1).expand_as(m)


def low(x: Tensor) -> Tensor:
    return torch.full_like(x, -torch.inf)


AGGREGATIONS: dict[str, Callable[..., Tensor]] = {
    "index_add": lambda x, m, src, dst: zeros(x).index_add(0, dst, m),
    "index_add_ in place": lambda x, m, src, dst: zeros(x).index_add_(0, dst, m),
    "index_add from the back": lambda x, m, src, dst: zeros(x).index_add(-2, dst, m),
    "scatter_add": lambda x, m, src, dst: zeros(x).scatter_add(0, wide(dst, m), m),
    "scatter_add of repeated index": lambda x, m, src, dst: zeros(x).scatter_add(
        0, dst[:, None].repeat(1, F), m
    ),
    "scatter reduce=add": lambda x, m, src, dst: zeros(x).scatter(0, wide(dst, m), m, reduce="add"),
    "index_put": lambda x, m, src, dst: zeros(x).index_put((dst,), m, accumulate=True),
    "scatter_reduce sum": lambda x, m, src, dst: zeros(x).scatter_reduce(0, wide(dst, m), m, "sum"),
    "scatter_reduce mean": lambda x, m, src, dst: zeros(x).scatter_reduce(
        0, wide(dst, m), m, "mean", include_self=False
    ),
    "mean that counts the base": lambda x, m, src, dst: x.scatter_reduce(0, wide(dst, m), m, "mean"),
    "scatter_reduce amax": lambda x, m, src, dst: zeros(x).scatter_reduce(
        0, wide(dst, m), m, "amax", include_self=False
    ),
    "scatter_reduce amin": lambda x, m, src, dst: zeros(x).scatter_reduce(
        0, wide(dst, m), m, "amin", include_self=False
    ),
    "amax with zero": lambda x, m, src, dst: zeros(x).scatter_reduce(0, wide(dst, m), m, "amax"),
    "amax with the node itself": lambda x, m, src, dst: x.scatter_reduce(0, wide(dst, m), m, "amax"),
    "amax or the node itself": lambda x, m, src, dst: x.scatter_reduce(
        0, wide(dst, m), m, "amax", include_self=False
    ),
    "amax from -inf": lambda x, m, src, dst: (
        low(x).scatter_reduce(0, wide(dst, m), m, "amax").nan_to_num(neginf=0)
    ),
    "index_reduce": lambda x, m, src, dst: zeros(x).index_reduce(0, dst, m, "amax", include_self=False),
    "residual base": lambda x, m, src, dst: x.index_add(0, dst, m),
    "take by gather": lambda x, m, src, dst: zeros(x).index_add(0, dst, x.gather(0, wide(src, m))),
    "take by index_select": lambda x, m, src, dst: zeros(x).index_add(0, dst, x.index_select(-2, src)),
    "take as an embedding": lambda x, m, src, dst: zeros(x).index_add(
        0, dst, nn.functional.embedding(src, x)
    ),
    "normalized by degree": lambda x, m, src, dst: zeros(x).index_add(
        0, dst, m * degree(x, dst)[src].rsqrt()[:, None] * degree(x, dst).rsqrt()[dst][:, None]
    ),
    "divided by an edge value": lambda x, m, src, dst: zeros(x).index_add(
        0, dst, m / (1 + degree(x, dst)[src, None])
    ),
    "work on the sources' rows": lambda x, m, src, dst: zeros(x).index_add(0, dst, (m * 2).relu() + 1),
}


def degree(x: Tensor, dst: Tensor) -> Tensor:
    return torch.ones(x.shape[0]).index_add_(0, dst, torch.ones(dst.shape[0]))


@pytest.mark.first(2)
@pytest.mark.filterwarnings("ignore:index_reduce\\(\\) is in beta")
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_spellings_of_an_aggregation_become_spmm(name: str):
    model = formula(AGGREGATIONS[name])
    traced = trace(model, *graph())
    assert count(traced.raised, "spmm") == 1
    assert left_on_compute(traced.raised) == []
    for sizes in [(N, 40), *SIZES]:
        assert_equals_eager(traced, *graph(*sizes))


def attention(logits: Tensor, x: Tensor, m: Tensor, dst: Tensor, form: str) -> Tensor:
    n = x.shape[0]
    top = torch.full((n,), -torch.inf).scatter_reduce(0, dst, logits, "amax")
    if form == "no maximum":
        weight = logits.exp()
    elif form == "one maximum":
        weight = (logits - logits.max()).exp()
    elif form == "maximum fixed up":
        weight = (logits - torch.where(top.isinf(), torch.zeros_like(top), top)[dst]).exp()
    else:
        weight = (logits - top[dst]).exp()
    total = torch.zeros(n).index_add(0, dst, weight)
    if form == "eps inside":
        alpha = weight / (total + 1e-12)[dst]
    elif form == "clamped":
        alpha = weight / total.clamp(min=1e-12)[dst]
    else:
        alpha = weight / (total[dst] + 1e-12 if form == "eps outside" else total[dst])
    return zeros(x).index_add(0, dst, m * alpha.unsqueeze(-1))


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "form",
    ["plain", "no maximum", "one maximum", "maximum fixed up", "eps inside", "eps outside", "clamped"],
)
def test_spellings_of_a_softmax_become_edge_softmax(form: str):
    def function(x: Tensor, m: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        return attention((m * x[dst]).sum(-1) / F**0.5, x, m, dst, form)

    traced = trace(formula(function), *graph())
    assert count(traced.raised, "edge_softmax") == count(traced.raised, "spmm") == 1
    assert [n.args[4] for n in calls(traced.raised, "sddmm")] == ["dot"]
    assert left_on_compute(traced.raised) == []
    assert_equals_eager(traced, *graph(31, 120))


TOPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "own": lambda logits, top, dst: top[dst],
    "one": lambda logits, top, dst: logits.max(),
    "none": lambda logits, top, dst: torch.zeros_like(logits),
}
BOUNDS: dict[str, tuple[str, Callable[[Tensor], Tensor], bool]] = {
    "of 1e-12": ("own", lambda total: total.clamp(min=1e-12), True),
    "of 0.01": ("own", lambda total: total.clamp(min=0.01), True),
    "of 1": ("own", lambda total: total.clamp(min=1.0), True),
    "clamp_min": ("own", lambda total: total.clamp_min(0.5), True),
    "above one": ("own", lambda total: total.clamp(min=1.5), False),
    "above a lowered sum": ("own", lambda total: (total + -0.5).clamp(min=1.0), False),
    "on both sides": ("own", lambda total: total.clamp(0.5, 1.5), False),
    "by a size": ("own", lambda total: total.clamp(min=total.shape[0]), False),
    "of 0.9 with one maximum": ("one", lambda total: total.clamp(min=0.9), False),
    "of 0 with one maximum": ("one", lambda total: total.clamp(min=0), True),
    "of 5 without a maximum": ("none", lambda total: total.clamp(min=5.0), False),
}


def softmax_formula(
    shift: Callable[[Tensor, Tensor, Tensor], Tensor], bound: Callable[[Tensor], Tensor], lower: float = 0.0
) -> Formula:
    """Attention whose logits lose ``shift``, and whose sums go through ``bound``."""

    def function(x: Tensor, m: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        logits = (m * x[dst]).mean(-1) - lower
        top = low(x[:, 0]).scatter_reduce(0, dst, logits, "amax")
        weight = (logits - shift(logits, top, dst)).exp()
        total = torch.zeros(x.shape[0]).index_add(0, dst, weight)
        return zeros(x).index_add(0, dst, m * (weight / bound(total)[dst])[:, None])

    return formula(function)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_of_the_sum_adds_nothing_to_it(name: str):
    top, bound, is_softmax = BOUNDS[name]
    traced = trace(softmax_formula(TOPS[top], bound), *graph())
    assert count(traced.raised, "edge_softmax") == is_softmax
    sizes = [(31, 120), *SIZES] if top == "own" else [(31, 120)]  # no maximum of no logits
    for nodes, edges in sizes:
        assert_equals_eager(traced, *graph(nodes, edges))


FIXUPS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "nan_to_num": (lambda top: top.nan_to_num(neginf=0), True),
    "where isinf": (lambda top: torch.where(top.isinf(), torch.zeros_like(top), top), True),
    "where isinf, a number": (lambda top: torch.where(top.isinf(), 0.0, top), True),
    "where isfinite": (lambda top: torch.where(top.isfinite(), top, 0.0), True),
    "where not isinf": (lambda top: torch.where(~top.isinf(), top, 0.0), True),
    "where more than -inf": (lambda top: torch.where(top > -torch.inf, top, 0.0), True),
    "masked_fill isneginf": (lambda top: top.masked_fill(top.isneginf(), 0), True),
    "masked_fill == -inf": (lambda top: top.masked_fill(top == -torch.inf, 0), True),
    "clamp": (lambda top: top.clamp(min=0), False),
    "clamp_min": (lambda top: top.clamp_min(0), False),
    "where negative": (lambda top: torch.where(top > 0, top, torch.zeros_like(top)), False),
    "where isinf, the wrong way": (lambda top: torch.where(top.isinf(), top, torch.zeros_like(top)), False),
    "masked_fill negative": (lambda top: top.masked_fill(top < 0, 0), False),
    "masked_fill not isinf": (lambda top: top.masked_fill(~top.isinf(), 0), False),
    "clamp after nan_to_num": (lambda top: top.nan_to_num().clamp(min=0), False),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FIXUPS)
@pytest.mark.parametrize("end", slow_after(1, ["eps", "bound", "neither"]))
def test_maxima_of_rows_with_edges_may_change_only_without_eps(name: str, end: str):
    fixup, is_exact = FIXUPS[name]
    ends = {"eps": lambda t: t + 1e-3, "bound": lambda t: t.clamp(min=0.5), "neither": lambda t: t}
    model = softmax_formula(lambda logits, top, dst: fixup(top)[dst], ends[end], lower=12.0)
    traced = trace(model, *graph())
    assert count(traced.raised, "edge_softmax") == (is_exact or end == "neither")
    for nodes, edges in [(31, 120), *SIZES]:
        assert_equals_eager(traced, *graph(nodes, edges))


def test_exponentials_with_eps_and_no_maximum_are_no_softmax():
    def function(x: Tensor, m: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        weight = (m * x[dst]).mean(-1).exp()
        total = torch.zeros(x.shape[0]).index_add(0, dst, weight) + 1e-3
        return zeros(x).index_add(0, dst, m * (weight / total[dst])[:, None])

    traced = trace(formula(function), *graph())
    assert count(traced.raised, "edge_softmax") == 0
    assert left_on_compute(traced.raised) == []
    assert_equals_eager(traced, *graph(31, 120))


def calls(gm: GraphModule, name: str) -> list[torch.fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and str(n.target) == f"gnnc.{name}.default"]


# bodies

BODIES = {
    "difference": (lambda x, m, src, dst: zeros(x).index_add(0, dst, (m - x[dst]).abs()), "sub abs"),
    "gate": (
        lambda x, m, src, dst: zeros(x).index_add(0, dst, (m + x[dst]).sigmoid() * m),
        "add sigmoid mul",
    ),
    "halves": (
        lambda x, m, src, dst: zeros(x[:, :10]).index_add(0, dst, torch.chunk((m * x[dst]).tanh(), 2, 1)[1]),
        "mul tanh slice",
    ),
    "zeros inside": (
        lambda x, m, src, dst: zeros(x).index_add(0, dst, torch.where(m > x[dst], m, torch.zeros_like(m))),
        "gt where",
    ),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", BODIES)
def test_messages_of_other_forms_run_as_bodies(name: str):
    function, ops = BODIES[name]
    traced = trace(formula(function), *graph())
    (message,) = calls(traced.raised, "message")
    body = [n for n in parse_body(message.args[2]).graph.nodes if n.op == "call_function"]
    assert " ".join(str(n.target).split(".")[1] for n in body) == ops
    assert left_on_compute(traced.raised) == []
    for sizes in [(N, 40), *SIZES]:
        assert_equals_eager(traced, *graph(*sizes))


@pytest.mark.first(1)
@pytest.mark.parametrize("conv", [GATConv, GATv2Conv, TransformerConv])
def test_attention_with_edge_features(conv: type[nn.Module]):
    model = conv(F, 12, heads=2, edge_dim=5).eval()
    traced = trace(model, *graph(), torch.randn(40, 5))
    assert count(traced.raised, "edge_softmax") == 1
    assert set(left_on_compute(traced.raised)) <= {"index_select"}  # edge features in CSR order
    for nodes, edges in [(N, 40), (31, 120), (7, 0)]:
        assert_equals_eager(traced, *graph(nodes, edges), torch.randn(edges, 5))


# products

WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "permute(0, 1)": lambda w: w.permute(0, 1),
    "permute(-2, -1)": lambda w: w.permute(-2, -1),
    "transpose(0, 0)": lambda w: w.transpose(0, 0),
    "transpose(1, -1)": lambda w: w.transpose(1, -1),
    "swapaxes(1, 1)": lambda w: w.swapaxes(1, 1),
    "movedim(0, 0)": lambda w: w.movedim(0, 0),
    "permute(1, 0)": lambda w: w.permute(1, 0),
    "permute(-1, -2)": lambda w: w.permute(-1, -2),
    "transpose(1, 0)": lambda w: w.transpose(1, 0),
    "transpose(-1, 0)": lambda w: w.transpose(-1, 0),
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
}


class Product(nn.Module):
    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.view, self.weight = view, nn.Parameter(torch.randn(F, F))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return zeros(x).index_add(0, edge_index[1], (x @ self.view(self.weight))[edge_index[0]])


@pytest.mark.first(4)
@pytest.mark.parametrize("name", WEIGHTS)
def test_spellings_of_a_weight_become_one_gemm(name: str):
    traced = trace(Product(WEIGHTS[name]), *graph())
    (gemm,) = calls(traced.raised, "gemm")
    assert gemm.args[1].op == "placeholder"
    assert_equals_eager(traced, *graph(31, 120))


TABLES: dict[str, Callable[..., Tensor]] = {
    "times": lambda x, w, src, dst: x[src] * w[src],
    "plus": lambda x, w, src, dst: x[src] + w[src],
    "a column": lambda x, w, src, dst: x[src] * w[:, 0][src][:, None],
    "scores": lambda x, w, src, dst: (x[src] * w[src] * x[dst]).sum(-1, keepdim=True) * x[src],
    "both ends": lambda x, w, src, dst: (x[dst] - w[dst]).relu() + x[src],
}


class TwoTables(nn.Module):
    """A message of two tables with other numbers of rows, which one index reads."""

    def __init__(self, message: Callable[..., Tensor]) -> None:
        super().__init__()
        self.message, self.weight = message, nn.Parameter(torch.randn(50, F))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        return zeros(x).index_add(0, dst, self.message(x, self.weight, src, dst))


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_other_numbers_of_rows_are_not_combined(name: str):
    torch.manual_seed(0)
    traced = trace(TwoTables(TABLES[name]), *graph())
    assert_equals_eager(traced, *graph(31, 120))


# edge outputs


def test_attention_weights_come_back_in_the_callers_order():
    model = GATConv(F, 8, heads=2).eval()
    traced = trace(model, *graph(), return_attention_weights=True)
    assert count(traced.raised, "edge_softmax") == 1
    assert_equals_eager(traced, *graph(31, 120), return_attention_weights=True)


class Decoder(nn.Module):
    """Scores of some pairs of nodes, by dot product or by a small network."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.conv, self.mlp = GCNConv(F, 24), nn.Sequential(nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 1))
        self.deep = deep

    def forward(self, x: Tensor, edge_index: Tensor, pairs: Tensor) -> Tensor:
        z = self.conv(x, edge_index)
        left, right = z[pairs[0]], z[pairs[1]]
        return self.mlp(torch.cat([left, right], -1)).view(-1) if self.deep else (left * right).sum(-1)


@pytest.mark.first(1)
@pytest.mark.parametrize("deep", [False, True])
def test_scores_of_pairs(deep: bool):
    traced = trace(Decoder(deep).eval(), *graph(), torch.randint(N, (2, 15)))
    assert count(traced.raised, "csr") == 2
    assert count(traced.raised, "edge_map") == int(deep)
    assert count(traced.raised, "sddmm") == 2 - int(deep)
    for pairs in (15, 1, 0):
        assert_equals_eager(traced, *graph(31, 120), torch.randint(31, (2, pairs)))


def test_a_lookup_stays_and_says_why():
    class Lookup(nn.Module):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return x[ids].relu()

    traced = trace(Lookup(), torch.randn(9, 4), torch.randint(9, (5,)))
    (note,) = traced.context.notes
    assert "a lookup of rows by one index" in note.text


# what stays, and why

REFUSED = {
    "overwrites rows": lambda x, m, src, dst: zeros(x).index_put((dst,), m),
    "along another dimension than 0": lambda x, m, src, dst: (
        torch.zeros(F, x.shape[0]).index_add(1, dst, m.t()).t()
    ),
    "reduction 'prod'": lambda x, m, src, dst: torch.ones_like(x).scatter_reduce(0, wide(dst, m), m, "prod"),
    "product of two computed tensors": lambda x, m, src, dst: x @ x.t(),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_say_why(reason: str):
    traced = trace(formula(REFUSED[reason]), *graph(9, 9))
    assert any(reason in note.text for note in traced.context.notes), traced.context.notes


def test_a_similarity_of_messages_with_one_row_stays():
    def function(x: Tensor, m: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        return zeros(x).index_add(0, dst, m * nn.functional.cosine_similarity(x[0], m, dim=-1)[:, None])

    assert_equals_eager(trace(formula(function), *graph()), *graph(31, 120))


SPREADS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "expand": lambda index, n: index.expand(n, n),
    "expand twice": lambda index, n: index.expand(1, n).expand(n, n),
    "repeat": lambda index, n: index.repeat(n, 1),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", SPREADS)
@pytest.mark.parametrize("reads", [True, False])
def test_an_index_of_the_columns_is_not_one_of_the_rows(name: str, reads: bool):
    class Square(nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            n, rows = x.shape[0], x[index]
            spread = SPREADS[name](index, n)
            if reads:
                return zeros(x).index_add(0, index, x.gather(0, spread) * 2.0 + rows)
            return zeros(x).scatter_add(0, spread, x * rows)

    args = torch.randn(F, F), torch.randint(F, (F,))
    traced = trace(Square(), *args)
    assert_equals_eager(traced, *args)


def test_bits_of_messages_are_no_reshape():
    def function(x: Tensor, m: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        powers = (m.view(torch.int32) & 0x7F800000).view(torch.float32)
        return zeros(x).index_add(0, dst, powers * x[dst])

    traced = trace(formula(function), *graph())
    for nodes, edges in [(31, 120), *SIZES]:
        assert_equals_eager(traced, *graph(nodes, edges))


# structure


def test_layers_share_one_csr():
    args, _ = ZOO["models.GAT"].arguments(23, 80)
    assert count(trace(build("models.GAT"), *args).raised, "csr") == 1


def test_bipartite_pairs():
    model = SAGEConv((F, F), 8)
    args = (torch.randn(6, F), torch.randn(4, F)), torch.stack([torch.arange(6), torch.arange(6) % 4])
    traced = trace(model, *args)
    (csr,) = calls(traced.raised, "csr")
    assert csr.args[2] is not csr.args[3]
    other = (torch.randn(9, F), torch.randn(3, F)), torch.stack([torch.arange(9), torch.arange(9) % 3])
    assert_equals_eager(traced, *other)


def test_index_bounds():
    traced = trace(GraphConv(F, 8), *graph())
    assert set(traced.raised.meta["index_bounds"]) == {
        IndexBound("edge_index", 0, ("x", 0), traced.raised.meta["index_bounds"][0].text),
        IndexBound("edge_index", 1, ("x", 0), traced.raised.meta["index_bounds"][0].text),
    }


def test_a_bad_index_is_named():
    traced = trace(GraphConv(F, 8), *graph())
    with pytest.raises(GraphError, match=r"src\[1\] = 9 is not a source node"):
        traced.run(traced.raised, torch.randn(9, F), torch.tensor([[0, 9], [1, 2]]))


def test_primitives_keep_their_layer():
    args, _ = ZOO["models.GCN"].arguments(23, 80)
    raised = trace(build("models.GCN"), *args).raised
    assert [n.meta["layer"] for n in calls(raised, "spmm")] == ["convs.0", "convs.1"]
    assert [n.meta["layer"] for n in calls(raised, "gemm")] == ["convs.0.lin", "convs.1.lin"]


def test_is_idempotent():
    args, _ = ZOO["models.GAT"].arguments(23, 80)
    raised = trace(build("models.GAT"), *args).raised
    assert format_graph(run_pass(Raise(), raised, Context())) == format_graph(raised)


def test_half_precision_models_keep_their_dtype():
    model = GraphConv(F, 8).bfloat16()
    x, edge_index = graph()
    traced = trace(model, x.bfloat16(), edge_index)
    assert_equals_eager(traced, x.bfloat16(), edge_index, limit=2e-2)
