"""Reorder: each rewrite fires, refuses with a reason, and leaves the meaning alone."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import raised
import torch
from raised import NODES, arguments, edge_list, gcn_norm, nasty_graphs, plain_csr, rand, run_split, trace
from torch import Tensor
from torch.fx import GraphModule, Node

import gnnc
from gnnc.ir.op import op_of
from gnnc.ir.parts import Parts
from gnnc.passes.base import Context, run_pass
from gnnc.passes.hoist import Hoist
from gnnc.passes.reorder import Reorder
from gnnc.report.printing import format_graph

ops = torch.ops.gnnc
WIDE, NARROW = 16, 4
GRAPHS = nasty_graphs()


def linear(
    build: Callable[..., Any], *weights: Tensor, width: int = WIDE, weighted: bool = False
) -> GraphModule:
    """A model of its own: ``build(*weights, x, edge_index[, edge_weight])``."""
    inputs = ["x", "edge_index", *(["edge_weight"] if weighted else [])]
    values = [rand(NODES, width), edge_list(), *([torch.rand(raised.EDGES)] if weighted else [])]
    return trace(build, [f"w{i}" for i in range(len(weights))], inputs, *weights, *values)


def gin_of_heads() -> GraphModule:
    def forward(w: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col = plain_csr(x, edge_index)
        heads = ops.spmm(rowptr, col, None, x.view(-1, 2, WIDE // 2), "sum", x.shape[0])
        return ops.gemm(heads.view(-1, WIDE), w)

    return linear(forward, rand(NARROW, WIDE))


def nonlinear() -> GraphModule:
    def forward(w: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col = plain_csr(x, edge_index)
        return ops.gemm(torch.relu(ops.spmm(rowptr, col, None, x, "sum", x.shape[0])), w)

    return linear(forward, rand(NARROW, WIDE))


def read_twice() -> GraphModule:
    def forward(w: Tensor, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        rowptr, col = plain_csr(x, edge_index)
        total = ops.spmm(rowptr, col, None, x, "sum", x.shape[0])
        return ops.gemm(total, w), total

    return linear(forward, rand(NARROW, WIDE))


def bias_inside() -> GraphModule:
    def forward(w: Tensor, bias: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col = plain_csr(x, edge_index)
        return ops.spmm(rowptr, col, None, ops.gemm(x, w, bias), "sum", x.shape[0])

    return linear(forward, rand(WIDE, NARROW), rand(WIDE), width=NARROW)


def appnp() -> GraphModule:
    def forward(w: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col, value = gcn_norm(x, edge_index)
        start = h = ops.gemm(x, w)
        for _ in range(2):
            h = ops.spmm(rowptr, col, value, h, "sum", x.shape[0]) * 0.9 + start * 0.1
        return h

    return linear(forward, rand(WIDE, NARROW), width=NARROW)


def divided_mean() -> GraphModule:
    """SAGE as PyG writes it: a sum, divided by the expanded degree."""

    def forward(w: Tensor, bias: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col = plain_csr(x, edge_index)
        total = ops.spmm(rowptr, col, None, x, "sum", x.shape[0])
        count = ops.degree(rowptr).clamp(1).view(-1, 1).expand(x.shape[0], WIDE)
        return ops.gemm(total / count, w, bias)

    return linear(forward, rand(NARROW, WIDE), rand(NARROW))


def sddmm_norm() -> GraphModule:
    """GCN's normalization as raise leaves it, times a constant."""

    def forward(x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col = plain_csr(x, edge_index)
        inv = (ops.degree(rowptr) + 1).rsqrt()
        value = ops.sddmm(rowptr, col, inv, inv, "mul") * 0.5
        return ops.spmm(rowptr, col, value, x, "sum", x.shape[0])

    return linear(forward)


def quotient_norm() -> GraphModule:
    """Weights divided by the sum of the destination's: a random walk."""

    def forward(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        n, src, dst = x.shape[0], edge_index[0], edge_index[1]
        rowptr, col, perm = ops.csr(src, dst, n, n)
        total = ops.segment_reduce(rowptr, perm, weight, "sum", n) + 1
        value = (weight / total[dst]).unsqueeze(-1).view(-1)
        return ops.spmm(rowptr, col, value.index_select(0, perm), x, "sum", n)

    return linear(forward, weighted=True)


def careless_norm() -> GraphModule:
    """Both ends divide by their degree, infinite at nodes that no edge touches."""

    def forward(x: Tensor, edge_index: Tensor) -> Tensor:
        n, src, dst = x.shape[0], edge_index[0], edge_index[1]
        rowptr, col, perm = ops.csr(src, dst, n, n)
        incoming = ops.degree(rowptr)
        outgoing = ops.degree(ops.csr_transpose(rowptr, col, n)[0])
        value = 1.0 / incoming[dst] * outgoing.pow(-0.5)[src]
        return ops.spmm(rowptr, col, value.index_select(0, perm), x, "sum", n)

    return linear(forward)


def body_norm() -> GraphModule:
    """The same kind of weight, as the body of an edge map."""
    body = "t0 = aten.mul.Tensor(i0, j0); t1 = aten.pow.Tensor_Scalar(t0, -0.5); return t1"
    plain = "t0 = aten.mul.Tensor(i0, j0); t1 = aten.mul.Tensor(t0, e0); return t1"

    def forward(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        n = x.shape[0]
        rowptr, col, perm = ops.csr(edge_index[0], edge_index[1], n, n)
        deg = ops.degree(rowptr) + 1
        value = ops.edge_map(rowptr, col, plain, [deg], [deg], [weight.index_select(0, perm)], [])
        other = ops.edge_map(rowptr, col, body, [deg], [deg], [], [])
        h = ops.spmm(rowptr, col, value, x, "sum", n)
        return ops.spmm(rowptr, col, other, h, "sum", n)

    return linear(forward, weighted=True)


def own_weight(reduce: str = "sum") -> GraphModule:
    def forward(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        n = x.shape[0]
        rowptr, col, perm = ops.csr(edge_index[0], edge_index[1], n, n)
        return ops.spmm(rowptr, col, weight.index_select(0, perm), x, reduce, n)

    return linear(forward, weighted=True)


def normalized_max() -> GraphModule:
    def forward(x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col, value = gcn_norm(x, edge_index)
        return ops.spmm(rowptr, col, value, x, "max", x.shape[0])

    return linear(forward)


def edge_mlp() -> GraphModule:
    """A linear layer on ``[x_i, x_j, e]`` and an activation on gathered rows, both at every edge."""

    def forward(w: Tensor, bias: Tensor, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        n = x.shape[0]
        rowptr, col, perm = ops.csr(edge_index[0], edge_index[1], n, n)
        x_i = ops.sddmm(rowptr, col, x, None, "copy_dst")
        x_j = torch.sigmoid(ops.sddmm(rowptr, col, None, x, "copy_src"))
        e = weight.index_select(0, perm).unsqueeze(1)
        message = torch.relu(ops.gemm(torch.cat([x_i, x_j, e], 1), w, bias))
        return ops.segment_reduce(rowptr, None, message, "sum", n)

    return linear(forward, rand(3, 2 * WIDE + 1), rand(3), weighted=True)


def scaled_sum() -> GraphModule:
    """A linear layer of the rows of neighbors plus twice a node's own."""

    def forward(w: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col = plain_csr(x, edge_index)
        return ops.gemm(torch.add(ops.spmm(rowptr, col, None, x, "sum", x.shape[0]), x, alpha=2), w)

    return linear(forward, rand(NARROW, WIDE))


WEIGHTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "two constants": lambda src, dst, deg: torch.where(src == dst, torch.full_like(deg[src], 2.0), 1.0),
    "constants in turn": lambda src, dst, deg: torch.cat(
        [torch.ones_like(src[: src.shape[0] // 2]), torch.full_like(src[src.shape[0] // 2 :], 3)]
    ).float(),
    "counts": lambda src, dst, deg: torch.ones_like(deg[src]).index_put(
        (torch.arange(src.shape[0]) // 2,), torch.ones_like(deg[src]), accumulate=True
    ),
    "power of a multiple": lambda src, dst, deg: (2 * deg[dst]) ** -0.5,
    "square of a negative": lambda src, dst, deg: (-deg[src]) ** 2,
    "share of a multiple": lambda src, dst, deg: deg[src] / (2 * deg[dst]),
    "negative": lambda src, dst, deg: -deg[src] * deg[dst],
}
"""Weights of edges, by the ends and a value of each node, of which the factors of ends are a part."""


def with_weights(name: str) -> GraphModule:
    def forward(x: Tensor, edge_index: Tensor) -> Tensor:
        n, (src, dst) = x.shape[0], (edge_index[0], edge_index[1])
        rowptr, col, perm = ops.csr(src, dst, n, n)
        value = WEIGHTS[name](src, dst, ops.degree(rowptr) + 1)
        return ops.spmm(rowptr, col, value.index_select(0, perm), x, "sum", n)

    return linear(forward)


def weights_of_other_order() -> GraphModule:
    """Weights by ends in the order of the reversed graph, as if they were those of this one."""

    def forward(x: Tensor, edge_index: Tensor) -> Tensor:
        n = x.shape[0]
        rowptr, col, _ = ops.csr(edge_index[0], edge_index[1], n, n)
        reversed_rowptr, reversed_col, _ = ops.csr(edge_index[1], edge_index[0], n, n)
        inv = (ops.degree(rowptr) + 1).rsqrt()
        value = ops.sddmm(reversed_rowptr, reversed_col, inv, None, "copy_dst")
        return ops.spmm(rowptr, col, value, x, "sum", n)

    return linear(forward)


OTHERS = {
    "scaled sum": scaled_sum,
    "weights of other order": weights_of_other_order,
    **{name: partial(with_weights, name) for name in WEIGHTS},
}


@pytest.mark.parametrize("name", OTHERS)
def test_numbers_on_the_way_keep_their_part(name: str):
    gm = OTHERS[name]()
    parts = run_pass(Reorder(), run_pass(Hoist(), Parts(forward=gm)))
    for graph in GRAPHS.values():
        values = arguments(gm, *graph)
        torch.testing.assert_close(run_split(parts, gm, values), gm(*values), rtol=1e-5, atol=1e-4)


MODELS: dict[str, Callable[[], GraphModule]] = {
    "gcn": lambda: raised.gcn(WIDE, NARROW),
    "gcn widens": lambda: raised.gcn(NARROW, WIDE),
    "gcn weighted": lambda: raised.gcn(WIDE, NARROW, weighted=True),
    "sage": lambda: raised.sage(WIDE, NARROW),
    "sage widens": lambda: raised.sage(NARROW, WIDE),
    "sage max": lambda: raised.sage(WIDE, NARROW, "max"),
    "gin": lambda: raised.gin(WIDE, NARROW),
    "gin widens": lambda: raised.gin(NARROW, WIDE),
    "gat": raised.gat,
    "sgc": lambda: raised.sgc(WIDE, NARROW),
    "sgc widens": lambda: raised.sgc(NARROW, WIDE),
    "appnp": appnp,
    "divided mean": divided_mean,
    "heads": gin_of_heads,
    "nonlinear": nonlinear,
    "read twice": read_twice,
    "bias inside": bias_inside,
    "sddmm norm": sddmm_norm,
    "quotient norm": quotient_norm,
    "careless norm": careless_norm,
    "body norm": body_norm,
    "own weight": own_weight,
    "own weight mean": lambda: own_weight("mean"),
    "normalized max": normalized_max,
    "edge mlp": edge_mlp,
}


@cache
def reordered(name: str, **options) -> tuple[GraphModule, Parts, Parts, Context]:
    """The model, the graphs after hoist and after reorder, and what the passes noted."""
    gm, ctx = MODELS[name](), Context()
    before = run_pass(Hoist(), Parts(forward=gm), ctx)
    return gm, before, run_pass(Reorder(**options), before, ctx), ctx


def chain(name: str, **options) -> list[str]:
    """What the compute graph does, primitives and elementwise ops by their short names."""
    after = reordered(name, **options)[2].forward
    return [_short(node) for node in after.graph.nodes if node.op == "call_function" and _short(node)]


def _short(node: Node) -> str:
    op = op_of(node)
    name = op.name if op is not None else getattr(node.target, "__name__", "").split(".")[0]
    return "" if name in ("sym_size", "unsqueeze", "view", "getitem") else name


def notes(name: str) -> list[str]:
    return [note.text for note in reordered(name)[3].notes]


def aggregations(name: str) -> list[Node]:
    return [n for n in reordered(name)[2].forward.graph.nodes if _short(n) == "spmm"]


def widths(name: str) -> list[int]:
    return [int(node.meta["val"].shape[-1]) for node in aggregations(name)]


@pytest.mark.first(10)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", MODELS)
def test_leaves_the_meaning_alone(name: str, graph: str):
    gm, before, after, _ = reordered(name)
    values = arguments(gm, *GRAPHS[graph])
    expected = gm(*values)
    torch.testing.assert_close(run_split(before, gm, values), expected)
    torch.testing.assert_close(run_split(after, gm, values), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["gcn", "gcn widens", "sage", "gin", "gat", "sgc"])
def test_golden(name: str, golden):
    _, before, after, _ = reordered(name)
    for stage, parts in (("before", before), ("after", after)):
        texts = [
            format_graph(parts.structure, name="structure"),
            format_graph(parts.forward, name="compute"),
        ]
        golden("\n\n".join(texts), stage)


@pytest.mark.parametrize("name", ["sage", "gin", "sgc", "divided mean"])
def test_linear_moves_before_the_aggregation_where_rows_get_narrower(name: str):
    assert set(widths(name)) == {NARROW}
    assert any("moved before the aggregation" in text for text in notes(name))


@pytest.mark.parametrize("name", ["gcn widens"])
def test_linear_moves_after_the_aggregation_where_rows_get_wider(name: str):
    assert set(widths(name)) == {NARROW}
    assert any("moved after the aggregation" in text for text in notes(name))


@pytest.mark.parametrize("name", ["gcn", "sage widens", "gin widens", "sgc widens"])
def test_linear_stays_where_it_is_cheapest(name: str):
    assert set(widths(name)) == {NARROW}
    assert any("cheaper so" in text for text in notes(name))


def test_gin_shares_one_gemm():
    assert chain("gin") == ["gemm", "spmm", "add", "mul", "add", "add", "relu"]


def test_bias_stays_outside_of_the_mean():
    assert chain("sage") == ["gemm", "gemm", "spmm", "mul", "add", "add"]


def test_products_of_one_matrix_stand_side_by_side():
    gm = reordered("sage")[2].forward
    first, second = (node for node in gm.graph.nodes if _short(node) == "gemm")
    assert first.next is second and first.args[0] is second.args[0]


def test_all_hops_see_the_narrow_rows():
    assert chain("sgc") == ["gemm", "mul", "spmm", "mul", "mul", "spmm", "mul", "add"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sage max", "max does not commute"),
        ("read twice", "others read the aggregated rows too"),
        ("bias inside", "its bias is aggregated too"),
    ],
)
def test_linear_refuses_with_a_reason(name: str, reason: str):
    assert any(reason in text for text in notes(name)), notes(name)
    assert "moved" not in " ".join(notes(name))


@pytest.mark.parametrize("name", ["nonlinear", "heads", "appnp"])
def test_linear_stops_at_what_is_not_linear_in_rows(name: str):
    _, before, after, _ = reordered(name)
    order = [_short(n) for n in after.forward.graph.nodes if _short(n) in ("gemm", "spmm", "relu")]
    assert order == [_short(n) for n in before.forward.graph.nodes if _short(n) in ("gemm", "spmm", "relu")]


@pytest.mark.parametrize("name", ["gcn", "gcn widens", "sgc", "sage", "appnp", "sddmm norm"])
def test_separable_weights_leave_the_kernel(name: str):
    assert all(node.args[2] is None and node.args[4] == "sum" for node in aggregations(name))


@pytest.mark.parametrize("name", ["gcn weighted", "quotient norm", "own weight mean"])
def test_only_the_edges_own_weight_stays(name: str):
    _, _, after, _ = reordered(name)
    (spmm,) = aggregations(name)
    assert any("edge weights separate" in text for text in notes(name))
    assert spmm.args[2] is not None and spmm.args[4] == "sum"
    outputs = after.structure.graph.output_node().args[0]
    kept = next(node for node in outputs if node.name == spmm.args[2].meta["source"].name)
    assert kept.target is torch.ops.aten.index_select.default


def test_vectors_that_leave_the_edges_are_finite():
    gm, _, after, _ = reordered("careless norm")
    assert all(node.args[2] is None for node in aggregations("careless norm"))
    edge_index = torch.tensor([[0, 1, 1], [2, 2, 0]])
    out = run_split(after, gm, arguments(gm, 6, edge_index))
    assert all(tensor.isfinite().all() for tensor in out)
    structure = after.structure
    assert all(value.isfinite().all() for value in structure(edge_index, 6))


def test_bodies_are_looked_into():
    first, second = aggregations("body norm")
    assert first.args[2] is not None and "norm" in str(first.args[3].args[1].args[0])
    # A power of a product of both ends is no product of gathers as it stands: it stays.
    assert second.args[2] is not None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("own weight", "no factor belongs to a node"),
        ("normalized max", "max does not commute"),
        ("gat", "depend on features or parameters"),
    ],
)
def test_separation_refuses_with_a_reason(name: str, reason: str):
    assert any(reason in text for text in notes(name)), notes(name)
    assert all(node.args[2] is not None for node in aggregations(name))


@pytest.mark.parametrize("name", ["gcn", "gcn widens", "sgc"])
def test_structure_keeps_no_edge_tensor_but_the_graph(name: str):
    structure = reordered(name)[2].structure
    assert [node.name for node in structure.graph.output_node().args[0]] == ["rowptr", "col", "norm"]


def test_division_by_the_degree_becomes_a_product():
    assert "div" not in chain("divided mean") and "mul" in chain("divided mean")


def test_edge_work_moves_to_the_nodes():
    after = reordered("edge mlp")[2].forward
    rows = {_short(n): n.meta["val"].shape[0] for n in after.graph.nodes if _short(n) in ("sigmoid",)}
    x = next(n for n in after.graph.nodes if n.name == "x")
    assert rows["sigmoid"] == x.meta["val"].shape[0]
    gemms = [n for n in after.graph.nodes if _short(n) == "gemm"]
    assert [n.args[0].meta["val"].shape[1] for n in gemms] == [WIDE, WIDE, 1]
    assert any("moved from the edges to the nodes" in text for text in notes("edge mlp"))


def test_edge_work_stays_where_nodes_outnumber_edges():
    gm, ctx = MODELS["edge mlp"](), Context()
    ctx.examples = arguments(gm, 40, edge_list(40, 5))
    after = run_pass(Reorder(), run_pass(Hoist(), Parts(forward=gm), ctx), ctx).forward
    assert any("stays on the edges" in note.text for note in ctx.notes)
    assert len([n for n in after.graph.nodes if _short(n) == "gemm"]) == 1


def test_examples_follow_the_new_boundary():
    gm, ctx = MODELS["gcn"](), Context()
    values = ctx.examples = arguments(gm, NODES, edge_list())
    after = run_pass(Reorder(), run_pass(Hoist(), Parts(forward=gm), ctx), ctx).forward
    torch.testing.assert_close(after(*ctx.examples), gm(*values), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gcn", "gcn widens", "sage", "gin", "sgc", "gcn weighted"])
def test_is_idempotent(name: str):
    _, _, after, _ = reordered(name)
    again = run_pass(Reorder(), after)
    assert format_graph(again.forward) == format_graph(after.forward)


def test_runs_without_a_structure_graph():
    gm = MODELS["gin"]()
    after = run_pass(Reorder(), gm)
    values = arguments(gm, NODES, edge_list())
    torch.testing.assert_close(after(*values), gm(*values), rtol=1e-5, atol=1e-4)


class FixedNodes(torch.nn.Module):
    """Its norm is of 60 nodes, whatever the number of rows of ``x``."""

    def forward(self, x, edge_index):
        src, dst = edge_index
        norm = x.new_zeros(60).index_add(0, dst, x.new_ones(dst.shape[0])).clamp(min=1).rsqrt()
        weight = (norm[src] * norm[dst]).unsqueeze(1)
        return x.new_zeros(60, x.shape[1]).index_add(0, dst, x[src] * weight)


@pytest.mark.parametrize("nodes", [60, 80])
@torch.no_grad()
def test_weights_of_other_nodes_than_the_rows_stay(nodes):
    model = FixedNodes()
    compiled = gnnc.compile(model, "fp32")
    x, edge_index = torch.randn(nodes, 16), torch.randint(60, (2, 300))
    torch.testing.assert_close(compiled(x, edge_index), model(x, edge_index))
    assert "their nodes are not the rows of the features" in compiled.explain()
