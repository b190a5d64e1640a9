"""Bodies on tiles of edges equal the reference, in all kinds of steps, reductions and graphs."""

import re
from enum import IntEnum
from pathlib import Path

import pytest
import torch
from edge_bodies import Groups, edge_bodies, edge_body
from kernel_graphs import (
    GRAPHS,
    Graph,
    random_graph,
    relative_error,
    same_at_any_thread_count,
    star,
    threads,
)
from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv, MessagePassing

import gnnc
from gnnc.ir.edge_gradients import GivenCotangent
from gnnc.ir.message import MESSAGE_REDUCTIONS
from gnnc.ir.vjp import Operand, body_gradients
from gnnc.runtime.cpu.edge_opcodes import Binary, BodyOp, Reduction, Unary
from gnnc.runtime.cpu.edge_ops import translate
from gnnc.runtime.cpu.edge_tables import runs_of
from gnnc.runtime.cpu.parts import Part
from gnnc.runtime.row_program.build import Refusal

HEADER = Path(__file__).parents[2] / "csrc/cpu/edge_body.h"
MLP = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.linear.default(e0, c0, None); t2 = aten.add.Tensor(t0, t1); "
    "t3 = aten.silu.default(t2); t4 = aten.linear.default(t3, c1, c2); t5 = aten.relu.default(t4); return t5"
)
HEADS = (
    "t0 = aten.view.default(j0, [-1, 2, 8]); t1 = aten.mul.Tensor(t0, c3); "
    "t2 = aten.sum.dim_IntList(t1, [2], True); t3 = aten.mul.Tensor(t0, t2); "
    "t4 = aten.linear.default(t3, c4, None); t5 = aten.reshape.default(t4, [-1, 34]); return t5"
)
NORM = (
    "t0 = aten.cat.default([e0, j0], 1); t1 = aten.layer_norm.default(t0, [21], c5, c6); "
    "t2 = aten.slice.Tensor(t1, 1, 3, 20); t3 = aten.stack.default([t2, t2], 2); "
    "t4 = aten.mul.Tensor(t3, 0.5); t5 = aten.amax.default(t4, [2]); return t5"
)
MASKS = (
    "t0 = aten.sub.Tensor(i0, j0); t1 = aten.gt.Scalar(t0, 0.1); t2 = aten.masked_fill.Scalar(t0, t1, 0.25); "
    "t3 = aten.where.self(t1, i0, t2); t4 = aten._to_copy.default(t1, dtype=torch.float32); "
    "t5 = aten.add.Tensor(t3, t4, alpha=2); return t5"
)
BOOLEANS = (
    "t0 = aten.relu.default(j0); t1 = aten._to_copy.default(t0, dtype=torch.bool); "
    "t2 = aten._to_copy.default(t1, dtype=torch.float32); t3 = aten.mul.Tensor(t2, i0); return t3"
)
STEPS = (
    "t0 = aten.sigmoid.default(j0); t1 = aten.softplus.default(i0); t2 = aten.div.Tensor(t0, t1); "
    "t3 = aten.tanh.default(t2); t4 = aten.elu.default(j0); t5 = aten.rsub.Scalar(t4, 1.5); "
    "t6 = aten.maximum.default(t3, t5); t7 = aten.clamp.default(t6, -0.5, 2.0); t8 = aten.exp.default(t7); "
    "t9 = aten.leaky_relu.default(t8, 0.2); t10 = aten.gelu.default(t9); "
    "t11 = aten.pow.Tensor_Scalar(t10, 2); t12 = aten.mean.dim(t11, [1], True); "
    "t13 = aten.mul.Tensor(t12, t8); return t13"
)
BACKWARD = (
    "t0 = aten.t.default(c1); t1 = aten.mm.default(i0, t0); t2 = aten.threshold_backward.default(t1, j0, 0); "
    "t3 = aten.silu_backward.default(t2, j0); t4 = aten.sigmoid_backward.default(t3, i0); "
    "t5 = aten.leaky_relu_backward.default(t4, j0, 0.2, False); t6 = aten.tanh_backward.default(t5, j0); "
    "t7 = aten.softplus_backward.default(t6, i0, 1, 20); t8 = aten.addmm.default(c2, t7, t0); return t8"
)
ROWS_AND_VECTORS = {"i0": (16,), "j0": (16,), "c1": (16, 16), "c2": (16,)}
NORM_BACKWARD = body_gradients(
    "t0 = aten.linear.default(j0, c1, None); t1 = aten.layer_norm.default(t0, [16], c2, c2); return t1",
    GivenCotangent("i0"),
    tuple(Operand(name, sizes, torch.float32) for name, sizes in ROWS_AND_VECTORS.items()),
    ("j0",),
)["j0"]
CHOSEN = (
    "t0 = aten.index_select.default(c1, 0, e1); t1 = aten.mul.Tensor(t0, j0); "
    "t2 = aten.embedding.default(c1, e1); t3 = aten.add.Tensor(t1, t2); return t3"
)
FOLDS = (
    "t0 = aten.view.default(j0, [-1, 2, 4, 2]); t1 = aten.sum.dim_IntList(t0, [2]); "
    "t2 = aten.amax.default(t0, [1]); t3 = aten.sum.dim_IntList(t0, [1, 2]); "
    "t4 = aten.mean.dim(t0, [2], True); t5 = aten.mul.Tensor(t0, t4); "
    "t6 = aten.amax.default(t5, [1, 2], True); "
    "t7 = aten.transpose.int(t5, 1, 3); t8 = aten.sum.dim_IntList(t7, [1]); "
    "t9 = aten.reshape.default(t1, [-1, 4]); t10 = aten.reshape.default(t2, [-1, 8]); "
    "t11 = aten.reshape.default(t6, [-1, 2]); t12 = aten.reshape.default(t8, [-1, 8]); "
    "t13 = aten.cat.default([t9, t10, t3, t11, t12], 1); return t13"
)
MATRICES = (
    "t0 = aten.linear.default(e0, c0, None); t1 = aten.view.default(t0, [-1, 8, 2]); "
    "t2 = aten.view.default(j0, [-1, 2, 8]); t3 = aten.matmul.default(t2, t1); "
    "t4 = aten.transpose.int(t3, 1, 2); t5 = aten.bmm.default(t1, t4); "
    "t6 = aten.view.default(c1, [1, 16, 16]); t7 = aten.view.default(t5, [-1, 1, 16]); "
    "t8 = aten.matmul.default(t7, t6); t9 = aten.matmul.default(t8, c1); "
    "t10 = aten.reshape.default(t9, [-1, 16]); return t10"
)
BODIES = {
    "folds": FOLDS,
    "matrices": MATRICES,
    "chosen": CHOSEN,
    "mlp": MLP,
    "heads": HEADS,
    "norm": NORM,
    "masks": MASKS,
    "booleans": BOOLEANS,
    "steps": STEPS,
    "backward": BACKWARD,
    "norm_backward": NORM_BACKWARD,
}
SUMS = {
    "columns": "t0 = aten.mul.Tensor(i0, j0); t1 = aten.sum.dim_IntList(t0, [0], True); return t1",
    "heads": "t0 = aten.view.default(j0, [-1, 2, 8]); t1 = aten.sum.dim_IntList(t0, [0, 2]); return t1",
    "all": "t0 = aten.mul.Tensor(j0, j0); t1 = aten.sum.default(t0); return t1",
    "weight": "t0 = aten.t.default(j0); t1 = aten.mm.default(t0, e0); t2 = aten.t.default(t1); return t2",
    "rows": (
        "t0 = aten.view.default(j0, [-1, 8]); t1 = aten.view.default(i0, [-1, 8]); t2 = aten.t.default(t0); "
        "t3 = aten.mm.default(t2, t1); return t3"
    ),
}


def operands(g: Graph) -> Groups:
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    consts = [rand(16, 5), rand(16, 16), rand(16), rand(1, 2, 8), rand(17, 8), rand(21), rand(21)]
    kinds = torch.arange(g.num_edges) * 7 % 16
    return [rand(g.num_dst, 16)], [rand(g.num_src, 16)], [rand(g.num_edges, 5), kinds], consts


def exact(groups: Groups) -> Groups:
    i, j, e, c = ([t.double() if t.is_floating_point() else t for t in part] for part in groups)
    return i, j, e, c


@pytest.mark.parametrize(
    ("name", "kinds"), [("BodyOp", BodyOp), ("Unary", Unary), ("Binary", Binary), ("Reduction", Reduction)]
)
def test_the_numbers_are_those_of_the_header(name: str, kinds: type[IntEnum]) -> None:
    found = re.search(rf"enum class {name} : int32_t {{([^}}]*)}}", HEADER.read_text())
    assert found is not None
    listed = [word.strip() for word in found[1].split(",")]
    assert listed == [kind.name.lower() for kind in kinds]
    assert list(kinds) == list(range(len(kinds)))


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("body", BODIES)
def test_a_value_for_each_edge(graph: str, body: str) -> None:
    g = GRAPHS[graph]()
    groups = operands(g)
    want = torch.ops.gnnc.edge_map(
        g.rowptr, g.col, BODIES[body].replace("float32", "float64"), *exact(groups)
    )
    got = same_at_any_thread_count(lambda: edge_body(g, BODIES[body], "", groups, tuple(want.shape)))
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("reduce", [*MESSAGE_REDUCTIONS, "sum,max,softmax,mean,softmax"])
def test_reductions(graph: str, reduce: str) -> None:
    g = GRAPHS[graph]()
    groups = operands(g)
    taken = ["t5" if name != "softmax" else "t3, t5" for name in reduce.split(",")]
    body = MLP.replace("return t5", f"return [{', '.join(taken)}]")
    want = torch.ops.gnnc.message(g.rowptr, g.col, body, reduce, *exact(groups), g.num_dst).flatten(1)
    got = same_at_any_thread_count(lambda: edge_body(g, body, reduce, groups, tuple(want.shape)))
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("body", SUMS)
def test_sums_over_all_edges(graph: str, body: str) -> None:
    g = GRAPHS[graph]()
    groups = operands(g)
    want = torch.ops.gnnc.edge_sum(g.rowptr, g.col, SUMS[body], *exact(groups))
    got = same_at_any_thread_count(lambda: edge_body(g, SUMS[body], None, groups, tuple(want.shape)))
    assert relative_error(got, want) < 1e-5


SEVERAL = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.linear.default(t0, c1, c2); t2 = aten.relu.default(t1); "
    "t3 = aten.t.default(t2); t4 = aten.mm.default(t3, e0); t5 = aten.sum.dim_IntList(t2, [0]); "
    "t6 = aten.slice.Tensor(t2, 1, 0, 5); return [t6, t2, t1, t4, t2, t5, t2, e0]"
)
"""Body of seven results: by source, by destination, for each edge, and over all edges."""
PARTS = (
    Part("sources"),
    Part("rows", ("max", "sum")),
    Part("all"),
    Part("edges"),
    Part("all"),
    Part("rows", ("mean",)),
    Part("sources"),
)


def several(g: Graph, groups: Groups) -> list[Tensor]:
    """Return what SEVERAL computes, by the kernel."""
    edges, sources = g.num_edges, g.num_src
    shapes = [(sources, 5), (g.num_dst, 32), (16, 5), (edges, 16), (16,), (g.num_dst, 16), (sources, 5)]
    return edge_bodies(g, SEVERAL, PARTS, groups, shapes)


@pytest.mark.parametrize("graph", GRAPHS)
def test_several_results_in_one_pass(graph: str) -> None:
    g = GRAPHS[graph]()
    groups = operands(g)
    i, j, e, c = exact(groups)
    col, dst = g.col.long(), g.dst()
    logits = torch.nn.functional.linear(i[0][dst] + j[0][col], c[1], c[2])
    state = logits.relu()

    def by_row(reduce: str, value: Tensor) -> Tensor:
        body = "t0 = aten.mul.Tensor(e0, 1.0); return t0"
        return torch.ops.gnnc.message(g.rowptr, g.col, body, reduce, [], [], [value], [], g.num_dst)

    def by_source(value: Tensor) -> Tensor:
        return torch.zeros(g.num_src, 5, dtype=value.dtype).index_add(0, col, value)

    wanted = [
        by_source(state[:, :5]),
        torch.cat([by_row("max", state), by_row("sum", logits)], 1),
        state.t() @ e[0],
        state,
        state.sum(0),
        by_row("mean", state),
        by_source(e[0]),
    ]
    first = several(g, groups)
    for number, want in enumerate(wanted):
        got = same_at_any_thread_count(lambda number=number: several(g, groups)[number])
        assert torch.equal(got, first[number])
        assert relative_error(got, want) < 1e-5


def test_a_sum_by_source_has_the_same_bits_where_rows_wait_and_where_they_do_not() -> None:
    g = random_graph(900, 3000, 60000)
    j = torch.randn(g.num_src, 70)
    body, parts = "t0 = aten.mul.Tensor(j0, j0); return t0", [Part("sources")]
    one, two = (at_threads(count, g, body, parts, j) for count in (1, 2))
    assert torch.equal(one, two)
    counts = torch.bincount(g.col.long(), minlength=g.num_src).double()
    assert relative_error(one, j.double().square() * counts[:, None]) < 1e-5


def at_threads(count: int, g: Graph, body: str, parts: list[Part], j: Tensor) -> Tensor:
    with threads(count):
        return edge_bodies(g, body, parts, ([], [j], [], []), [(g.num_src, j.shape[1])])[0]


@pytest.mark.parametrize(
    ("parts", "rows", "reason"),
    [
        ([Part("sources"), Part("sources")], [40, 39], "must be in 0..38"),
        ([Part("edges"), Part("sources")], [98, 40], "must have 99 rows"),
        ([Part("rows", ("sum",)), Part("edges")], [29, 99], "must have 30 rows"),
    ],
)
def test_results_with_other_numbers_of_rows_are_refused(
    parts: list[Part], rows: list[int], reason: str
) -> None:
    g = random_graph(40, 30, 99)
    g.col[7] = 39
    body = "t0 = aten.add.Tensor(i0, j0); return [t0, t0]"
    given = [torch.randn(30, 16)], [torch.randn(40, 16)], list[Tensor](), list[Tensor]()
    with pytest.raises(RuntimeError, match=reason):
        edge_bodies(g, body, parts, given, [(count, 16) for count in rows])


def test_a_value_has_the_same_bits_wherever_the_edge_is() -> None:
    g = random_graph(40, 30, 999)
    i, j, e, c = operands(g)
    first = edge_body(g, MLP, "", (i, j, e, c), (999, 16))
    alone = Graph(torch.arange(1000), g.col, 40, 999)  # each edge is a row of its own
    assert torch.equal(edge_body(alone, MLP, "", ([i[0][g.dst()]], j, e, c), (999, 16)), first)
    top = edge_body(g, MLP, "max", (i, j, e, c), (30, 16))
    rows = g.rowptr.diff() > 0
    assert torch.equal(torch.segment_reduce(first, "max", offsets=g.rowptr)[rows], top[rows])


@pytest.mark.parametrize("width", [1, 3, 16, 70])
def test_a_product_that_adds_a_value_has_the_bits_of_both_steps(width: int) -> None:
    g, text = random_graph(40, 30, 300), "t0 = aten.mm.default(e0, c0); t1 = aten.add.Tensor(i0, t0); "
    given = [torch.randn(30, width)], list[Tensor](), [torch.randn(300, 5)], [torch.randn(5, width)]
    operands = {"i0": given[0][0], "e0": given[2][0], "c0": given[3][0]}
    steps = translate(text + "return t1", operands, [Part("edges")]).steps
    assert BodyOp.PRODUCT in {step[0] for step in steps} and BodyOp.BINARY not in {step[0] for step in steps}
    joined = edge_body(g, text + "return t1", "", given, (300, width))
    parts, shapes = [Part("edges")] * 2, [(300, width)] * 2
    apart, _ = edge_bodies(g, text + "return [t1, t0]", parts, given, shapes)  # the product has two readers
    assert torch.equal(joined, apart)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("reduce", MESSAGE_REDUCTIONS)
def test_what_is_not_finite_stays_so(bad: float, reduce: str) -> None:
    for g in (random_graph(60, 50, 700), star(700)):
        i, j = torch.randn(g.num_dst, 5), torch.randn(g.num_src, 5)
        j[7] = bad
        value = "[i0, t0]" if reduce == "softmax" else "t0"
        body = f"t0 = aten.add.Tensor(i0, j0); return {value}"
        got = edge_body(g, body, reduce, ([i], [j], [], []), (g.num_dst, 5)).double()
        want = torch.ops.gnnc.message(
            g.rowptr, g.col, body, reduce, [i.double()], [j.double()], [], [], g.num_dst
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("t0 = aten.sin.default(j0); return t0", "no step computes"),
        ("t0 = aten.cat.default([j0, j0], 0); return t0", "joins rows"),
        ("t0 = aten.permute.default(j0, [1, 0]); return t0", "dimension of edges"),
        ("t0 = aten.select.int(j0, 0, 0); return t0", "rows of edges|dimension of edges"),
        ("t0 = aten.mm.default(c0, c1); t1 = aten.mm.default(j0, t0); return t1", "weight"),
        ("t0 = aten.add.Tensor(j1, j1); return t0", "int64"),
        ("t0 = aten._to_copy.default(e0, dtype=torch.float32); return t0", "integers of the edges"),
        (
            "t0 = aten.view.default(j0, [-1, 2, 4, 2]); t1 = aten.transpose.int(t0, 2, 3); "
            "t2 = aten.matmul.default(t0, t1); return t2",
            "single matrix",
        ),
        (
            "t0 = aten.view.default(j0, [-1, 4, 4]); t1 = aten.view.default(t0, [-1, 2, 2]); "
            "t2 = aten.bmm.default(t1, t1); return t2",
            "single matrix",
        ),
    ],
)
def test_refuses(body: str, reason: str) -> None:
    given = {
        "j0": torch.randn(5, 16),
        "j1": torch.arange(5),
        "e0": torch.arange(5),
        "c0": torch.randn(16, 16),
    }
    with pytest.raises(Refusal, match=reason):
        translate(body, given | {"c1": torch.randn(16, 16)}, [Part("edges")])


@pytest.mark.parametrize("bad", [-1, 16, 2**40])
def test_ids_out_of_range_are_refused(bad: int) -> None:
    g = random_graph(40, 30, 99)
    i, j, e, c = operands(g)
    e[1][50] = bad
    with pytest.raises(RuntimeError, match="out of bounds"):
        edge_body(g, CHOSEN, "", (i, j, e, c), (99, 16))


@pytest.mark.parametrize("dims", [[1], [2], [3], [1, 2], [2, 3], [1, 2, 3]])
def test_sums_over_adjacent_dimensions_move_nothing(dims: list[int]) -> None:
    body = (
        f"t0 = aten.view.default(j0, [-1, 2, 4, 2]); t1 = aten.sum.dim_IntList(t0, {dims}, True); return t1"
    )
    steps = translate(body, {"j0": torch.randn(5, 16)}, [Part("edges")]).steps
    assert [step[0] for step in steps] == [BodyOp.LOAD, BodyOp.FOLD, BodyOp.KEEP]


def test_runs_put_elements_in_order() -> None:
    sources = [0, 0, 0, 5, 6, 7, 2, 9, 1]
    got = [-1] * 9
    for place, source, length, step in runs_of(range(9), sources):
        got[place : place + length] = [source + k * step for k in range(length)]
    assert got == sources


class Sine(MessagePassing):
    """Largest product of features with a weight, of which one reader is in an op that tiles have not."""

    def __init__(self) -> None:
        super().__init__(aggr="max")
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Reduce the messages."""
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        """Multiply the features of both ends."""
        return torch.sin(self.lin(torch.nn.functional.silu(x_j * x_i)))


@pytest.mark.filterwarnings("ignore:The usage of `scatter")
def test_kernels_of_compared_values_compute_the_same_bits() -> None:
    model, x = Sine(), torch.randn(30, 4, requires_grad=True)
    compiled = gnnc.compile(model, "fp32", backend="cpu")
    compiled(x, torch.randint(30, (2, 200))).sum().backward()
    parts = compiled._dispatch.last.parts
    arithmetic = {
        node.meta["choice"].kernel.arithmetic
        for _, gm in parts.per_call()
        for node in gm.graph.nodes
        if "choice" in node.meta and " aten.eq." in str(node.args) or "max" in map(str, node.args)
    }
    assert len(arithmetic) == 1


@torch.no_grad()
def test_gatv2_runs_on_tiles() -> None:
    model = GATv2Conv(12, 8, heads=3).eval()
    given = torch.randn(25, 12), torch.randint(25, (2, 100))
    compiled = gnnc.compile(model, "fp32", backend="cpu")
    torch.testing.assert_close(compiled(*given), model(*given), rtol=1e-4, atol=1e-5)
    assert "edge_body" in {kernel for _, kernel in compiled._dispatch.last.executable.kernels}
