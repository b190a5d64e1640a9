"""General messages in blocks of edges equal the reference, hubs and empty rows included."""

import pytest
import torch
from kernel_graphs import same_at_any_thread_count

from gnnc.ir.body import measure_body
from gnnc.runtime.backend import get_backend
from gnnc.runtime.cpu.message import BLOCK_VALUES, Part, Plan, run_blocks, split

GATV2 = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.leaky_relu.default(t0, 0.2); "
    "t2 = aten.mul.Tensor(t1, c0); t3 = aten.sum.dim_IntList(t2, [-1]); return t3"
)
EDGE = "t0 = aten.add.Tensor(j0, e0); t1 = aten.relu.default(t0); return t1"
NUM_DST, NUM_SRC = 40, 30


@pytest.fixture(scope="module", autouse=True)
def kernels():
    get_backend("cpu")


def graph(edges: int, hub: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    dst = torch.randint(NUM_DST - 3, (edges,), generator=generator)
    dst[:hub] = 7
    src = torch.randint(NUM_SRC, (edges,), generator=generator)
    rowptr, col, _ = torch.ops.gnnc.csr(src, dst, NUM_SRC, NUM_DST)
    return rowptr, col


def operands(edges: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {"i": rand(NUM_DST, 2, 3), "j": rand(NUM_SRC, 2, 3), "e": rand(edges, 2, 3), "c": rand(1, 2, 3)}


GRAPHS = pytest.mark.parametrize(("edges", "hub"), [(0, 0), (1, 0), (200, 0), (200, 150), (200, 200)])


@GRAPHS
@pytest.mark.parametrize("size", [1, 16, 1000])
def test_blocks_cover_every_edge_once(edges, hub, size):
    rowptr, _ = graph(edges, hub)
    seen = []
    for block in split(rowptr, edges, size):
        assert rowptr[block.first_row] <= block.first_edge < block.last_edge <= rowptr[block.last_row]
        assert block.whole or block.last_row == block.first_row + 1
        seen += range(block.first_edge, block.last_edge)
    assert seen == list(range(edges))


@GRAPHS
@pytest.mark.parametrize("size", [1, 16, 1000])
def test_a_value_for_each_edge(edges, hub, size):
    rowptr, col = graph(edges, hub)
    x = operands(edges)
    expected = torch.ops.gnnc.edge_map(rowptr, col, GATV2, [x["i"]], [x["j"]], [], [x["c"]])
    out = torch.full((edges, 2), float("nan"))
    run_blocks(Plan(GATV2, (Part("edges"),), size), rowptr, col, [x["i"]], [x["j"]], [], [x["c"]], [out])
    torch.testing.assert_close(out, expected)


WEIGHT_GRADIENT = (
    "t0 = aten.add.Tensor(j0, e0); t1 = aten.view.default(t0, [-1, 6]); t2 = aten.view.default(i0, [-1, 6]); "
    "t3 = aten.t.default(t1); t4 = aten.mm.default(t3, t2); return t4"
)


@GRAPHS
@pytest.mark.parametrize("size", [1, 16, 1000])
def test_sums_over_all_edges(edges, hub, size):
    rowptr, col = graph(edges, hub)
    given = operands(edges)
    groups = [given["i"]], [given["j"]], [given["e"]], []
    out = torch.full((6, 6), float("nan"))
    _, shared = measure_body(WEIGHT_GRADIENT, {"i0": given["i"], "j0": given["j"], "e0": given["e"]})
    run_blocks(Plan(WEIGHT_GRADIENT, (Part("all"),), size, shared), rowptr, col, *groups, [out])
    expected = torch.ops.gnnc.edge_sum(rowptr, col, WEIGHT_GRADIENT, *groups)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


@GRAPHS
@pytest.mark.parametrize("size", [1, 16, 1000])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_reductions(edges, hub, size, reduce):
    rowptr, col = graph(edges, hub)
    x = operands(edges)
    expected = torch.ops.gnnc.message(rowptr, col, EDGE, reduce, [], [x["j"]], [x["e"]], [], NUM_DST)
    out = torch.full((NUM_DST, 6), float("nan"))
    run_blocks(Plan(EDGE, (Part("rows", (reduce,)),), size), rowptr, col, [], [x["j"]], [x["e"]], [], [out])
    torch.testing.assert_close(out, expected.reshape(NUM_DST, 6), rtol=1e-5, atol=1e-5)


@GRAPHS
@pytest.mark.parametrize("size", [1, 16, 1000])
@pytest.mark.parametrize("names", ["softmax", "max,softmax,softmax"])
def test_sums_by_the_softmax_of_another_value(edges, hub, size, names):
    rowptr, col = graph(edges, hub)
    x = operands(edges)
    values = "t2, t1" if names == "softmax" else "t0, t2, t1, t0, t2"
    body = f"{EDGE[:-9]}t2 = aten.mul.Tensor(t1, 5.0); return [{values}]"
    given = [], [x["j"]], [x["e"]], []
    expected = torch.ops.gnnc.message(rowptr, col, body, names, *given, NUM_DST).flatten(1)
    out = torch.full(expected.shape, float("nan"))
    run_blocks(Plan(body, (Part("rows", tuple(names.split(","))),), size), rowptr, col, *given, [out])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@GRAPHS
@pytest.mark.parametrize("size", [1, 16, 1000])
def test_several_reductions_in_one_pass(edges, hub, size):
    rowptr, col = graph(edges, hub)
    x = operands(edges)
    body, names = f"{EDGE[:-9]}t2 = aten.mul.Tensor(t1, t1); return [t2, t1, t0, t1]", "sum,max,min,mean"
    expected = torch.ops.gnnc.message(rowptr, col, body, names, [], [x["j"]], [x["e"]], [], NUM_DST)
    assert expected.shape == (NUM_DST, 4, 2, 3)
    out = torch.full((NUM_DST, 24), float("nan"))
    run_blocks(
        Plan(body, (Part("rows", tuple(names.split(","))),), size),
        rowptr,
        col,
        [],
        [x["j"]],
        [x["e"]],
        [],
        [out],
    )
    torch.testing.assert_close(out, expected.reshape(NUM_DST, 24), rtol=1e-5, atol=1e-5)


@GRAPHS
@pytest.mark.parametrize("size", [1, 16, 1000])
def test_results_of_every_kind_in_one_pass(edges, hub, size):
    rowptr, col = graph(edges, hub)
    x = operands(edges)
    body = (
        "t0 = aten.add.Tensor(j0, e0); t1 = aten.exp.default(t0); t2 = aten.view.default(t1, [-1, 6]); "
        "t3 = aten.view.default(i0, [-1, 6]); t4 = aten.t.default(t2); t5 = aten.mm.default(t4, t3); "
        "return [t1, t0, t1, t1, t5]"
    )
    names = {"i0": x["i"], "j0": x["j"], "e0": x["e"]}
    parts = Part("edges"), Part("rows", ("max", "mean")), Part("sources"), Part("all")
    given = [x["i"]], [x["j"]], [x["e"]], []
    outs = [torch.full(shape, float("nan")) for shape in ((edges, 6), (NUM_DST, 12), (NUM_SRC, 6), (6, 6))]
    plan = Plan(body, parts, size, measure_body(body, names)[1])
    assert plan.shared
    run_blocks(plan, rowptr, col, *given, outs)
    rows = torch.repeat_interleave(torch.arange(NUM_DST), rowptr.diff())
    values = (x["j"][col] + x["e"]).double().reshape(-1, 6)
    exps = values.exp()
    highest = (
        torch.zeros(NUM_DST, 6)
        .double()
        .scatter_reduce(0, rows[:, None].expand(-1, 6), values, "amax", include_self=False)
    )
    mean = torch.zeros(NUM_DST, 6).double().index_add(0, rows, exps) / rowptr.diff().clamp(min=1)[:, None]
    by_source = torch.zeros(NUM_SRC, 6).double().index_add(0, col, exps)
    product = exps.t() @ x["i"][rows].double().reshape(-1, 6)
    for out, expected in zip(outs, (exps, torch.cat([highest, mean], 1), by_source, product), strict=True):
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_pieces_of_a_hub_have_the_same_bits_at_any_thread_count(reduce):
    edges = 3 * BLOCK_VALUES
    rowptr, col, x = torch.tensor([0, 3, edges]), torch.zeros(edges, dtype=torch.int32), torch.randn(edges, 1)

    def run():
        out = torch.empty(2, 1)
        body = "t0 = aten.mul.Tensor(j0, e0); return t0"
        run_blocks(
            Plan(body, (Part("rows", (reduce,)),), BLOCK_VALUES),
            rowptr,
            col,
            [],
            [torch.ones(1, 1)],
            [x],
            [],
            [out],
        )
        return out

    same_at_any_thread_count(run)


def test_sums_by_source_have_the_same_bits_at_any_thread_count():
    edges = 20_000
    rowptr, col = torch.arange(0, edges + 1, 4), torch.randint(50, (edges,)).int()
    body = "t0 = aten.mul.Tensor(j0, e0); return t0"
    given = [], [torch.randn(50, 33)], [torch.randn(edges, 33)], []

    def run():
        out = torch.empty(50, 33)
        run_blocks(Plan(body, (Part("sources"),), 4096), rowptr, col, *given, [out])
        return out

    same_at_any_thread_count(run)
