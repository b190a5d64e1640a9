"""Hoist: what goes to the structure graph, what stays, and that nothing changes its meaning."""

from collections.abc import Callable
from functools import cache

import pytest
import raised
import torch
from raised import EDGES, NODES, arguments, edge_list, nasty_graphs, rand, run_split, trace
from torch import Tensor, nn
from torch.fx import GraphModule

import gnnc
from gnnc.ir.graph import placeholders
from gnnc.ir.parts import Parts
from gnnc.ir.source import Source, source_of
from gnnc.passes.base import Context, run_pass
from gnnc.passes.hoist import Hoist
from gnnc.passes.rewrite.boundary import drop_structure, whole_examples
from gnnc.report.printing import format_graph
from gnnc.runtime.structure.runner import StructureRunner

ops = torch.ops.gnnc
MODELS: dict[str, Callable[[], GraphModule]] = {
    "gcn": raised.gcn,
    "gcn weighted": lambda: raised.gcn(weighted=True),
    "sage": raised.sage,
    "gin": raised.gin,
    "gat": raised.gat,
    "sgc": raised.sgc,
}
GRAPHS = nasty_graphs()
STEADY_STATE = {"gemm", "spmm", "sddmm", "edge_softmax"}


def hoisted(gm: GraphModule, **context) -> tuple[GraphModule, GraphModule, Context]:
    ctx = Context(**context)
    parts = run_pass(Hoist(), Parts(forward=gm), ctx)
    assert parts.structure is not None
    return parts.forward, parts.structure, ctx


@cache
def model_graph(name: str) -> GraphModule:
    return MODELS[name]()


@cache
def split(name: str) -> tuple[GraphModule, GraphModule, Context]:
    return hoisted(model_graph(name))


def sources(gm: GraphModule, kind: str) -> list[str]:
    found = (node.meta["source"] for node in gm.graph.find_nodes(op="placeholder"))
    return [source.name for source in found if source.kind == kind]


def primitives(gm: GraphModule) -> list[str]:
    targets = [n.target for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return [t._schema.name.removeprefix("gnnc::") for t in targets if t.namespace == "gnnc"]


@pytest.mark.first(2)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("model", MODELS)
def test_leaves_the_meaning_alone(model: str, graph: str):
    gm = model_graph(model)
    values = arguments(gm, *GRAPHS[graph])
    compute, structure, _ = split(model)
    parts = Parts(structure=structure, forward=compute)
    torch.testing.assert_close(run_split(parts, gm, values), gm(*values))


@pytest.mark.parametrize("model", MODELS)
def test_steady_state_sorts_counts_and_normalizes_nothing(model: str):
    compute, structure, _ = split(model)
    assert set(primitives(compute)) <= STEADY_STATE
    assert "csr" in primitives(structure)
    names = [str(node.target) for node in compute.graph.nodes if node.op == "call_function"]
    assert not [n for n in names if "pow" in n or "sort" in n or "index" in n or "scatter" in n]


@pytest.mark.parametrize("model", MODELS)
def test_steady_state_runs_the_structure_once(model: str):
    gm = model_graph(model)
    values = arguments(gm, NODES, edge_list())
    named = dict(zip((n.meta["source"] for n in gm.graph.find_nodes(op="placeholder")), values, strict=True))
    _, structure, _ = split(model)
    args = [raised._value(node, named) for node in structure.graph.find_nodes(op="placeholder")]
    runner, runs = StructureRunner(structure), []
    for group in runner.groups:
        run = group.module.forward
        group.module.forward = lambda *values, run=run: runs.append(1) or run(*values)
    first = runner(*args)
    count = len(runs)
    second = runner(*args)
    assert len(runs) == count
    assert all(a is b for a, b in zip(first, second, strict=True))
    torch.testing.assert_close(first, structure(*args))


@pytest.mark.parametrize("model", MODELS)
def test_compute_has_no_data_dependent_sizes(model: str):
    compute, _, _ = split(model)
    for node in compute.graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else [value]
        symbols = [s for size in sizes if isinstance(size, torch.SymInt) for s in size.node.expr.free_symbols]
        assert not [s for s in symbols if str(s).startswith("u")], node


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_golden(model: str, golden):
    gm = model_graph(model)
    compute, structure, _ = split(model)
    golden(format_graph(gm, name="raised"), "before")
    golden(
        "\n\n".join([format_graph(structure, name="structure"), format_graph(compute, name="compute")]),
        "after",
    )


def test_boundary_is_what_the_kernels_take():
    compute, structure, _ = split("gcn")
    assert sources(compute, "structure") == ["rowptr", "col", "index_select"]
    assert sources(structure, "input") == ["edge_index"]
    assert sources(structure, "size") == ["x.shape[0]"]


def test_edge_weights_are_structure_and_features_are_not():
    compute, structure, _ = split("gcn weighted")
    assert sources(structure, "input") == ["edge_index", "edge_weight"]
    assert sources(compute, "input") == ["x"]


def test_features_stay_even_where_no_parameter_touches_them():
    def propagate(x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col = raised.plain_csr(x, edge_index)
        return ops.spmm(rowptr, col, None, x * 2, "sum", x.shape[0])

    compute, structure, _ = hoisted(trace(propagate, [], ["x", "edge_index"], rand(NODES, 3), edge_list()))
    assert primitives(compute) == ["spmm"] and sources(compute, "input") == ["x"]
    assert primitives(structure) == ["csr"]


def test_integer_features_that_index_nothing_stay():
    def forward(weight: Tensor, kinds: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col = raised.plain_csr(kinds, edge_index)
        return ops.spmm(rowptr, col, None, ops.gemm(kinds.float(), weight), "sum", kinds.shape[0])

    gm = trace(forward, ["w"], ["kinds", "edge_index"], rand(3, 4), torch.ones(NODES, 4).long(), edge_list())
    compute, structure, _ = hoisted(gm)
    assert sources(compute, "input") == ["kinds"]
    assert sources(structure, "input") == ["edge_index"]


def test_reshapes_run_in_compute_and_the_vector_crosses():
    def mean(x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col = raised.plain_csr(x, edge_index)
        total = ops.spmm(rowptr, col, None, x, "sum", x.shape[0])
        return total / ops.degree(rowptr).clamp(1).view(-1, 1).expand(x.shape[0], 3)

    gm = trace(mean, [], ["x", "edge_index"], rand(NODES, 3), edge_list())
    compute, structure, _ = hoisted(gm)
    crossing = [n for n in compute.graph.find_nodes(op="placeholder") if n.meta["source"].kind == "structure"]
    assert [n.meta["val"].dim() for n in crossing] == [1, 1, 1]
    values = arguments(gm, 9, edge_list(9, 20))
    parts = Parts(structure=structure, forward=compute)
    torch.testing.assert_close(run_split(parts, gm, values), gm(*values))


def test_what_sizes_alone_decide_runs_once_where_it_is_more_than_a_shape():
    def encode(x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col = raised.plain_csr(x, edge_index)
        place = torch.arange(x.shape[0]).float().view(-1, 1)
        return ops.spmm(rowptr, col, None, x + place.sin(), "sum", x.shape[0])

    gm = trace(encode, [], ["x", "edge_index"], rand(NODES, 3), edge_list())
    compute, structure, _ = hoisted(gm)
    assert "aten.sin.default" in {str(node.target) for node in structure.graph.nodes}
    assert "aten.sin.default" not in {str(node.target) for node in compute.graph.nodes}
    values = arguments(gm, 9, edge_list(9, 20))
    parts = Parts(structure=structure, forward=compute)
    torch.testing.assert_close(run_split(parts, gm, values), gm(*values))


def test_random_edges_are_drawn_at_each_call_and_noted():
    def drop(x: Tensor, edge_index: Tensor) -> Tensor:
        keep = torch.rand(edge_index.shape[1]) < 0.5
        rowptr, col = raised.plain_csr(x, edge_index[:, keep])
        return ops.spmm(rowptr, col, None, x, "sum", x.shape[0])

    compute, structure, ctx = hoisted(trace(drop, [], ["x", "edge_index"], rand(NODES, 3), edge_list()))
    assert "csr" in primitives(compute) and "csr" not in primitives(structure)
    assert any("draws random numbers" in note.text for note in ctx.notes)


def test_the_size_of_a_computed_tensor_waits_for_it():
    def forward(weight: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        h = ops.gemm(x, weight)
        rowptr, col = raised.plain_csr(x, edge_index)
        return ops.spmm(rowptr, col, None, h, "sum", x.shape[0])

    gm = trace(forward, ["w"], ["x", "edge_index"], rand(3, 4), rand(NODES, 4), edge_list())
    (gemm,) = (node for node in gm.graph.nodes if node.target is ops.gemm.default)
    (csr,) = (node for node in gm.graph.nodes if node.target is ops.csr.default)
    with gm.graph.inserting_after(gemm):
        rows = gm.graph.call_function(torch.ops.aten.sym_size.int, (gemm, 0))
    rows.meta = {"layer": "conv", "val": gemm.meta["val"].shape[0]}
    csr.args = (*csr.args[:2], rows, rows)
    compute, structure, _ = hoisted(gm)
    assert "csr" in primitives(compute) and not primitives(structure)
    values = arguments(gm, 9, edge_list(9, 20))
    parts = Parts(structure=structure, forward=compute)
    torch.testing.assert_close(run_split(parts, gm, values), gm(*values))


def test_of_a_tensor_of_the_structure_its_size_crosses_and_not_the_tensor():
    def forward(x: Tensor, edge_index: Tensor) -> Tensor:
        kept = edge_index[:, edge_index[0] != edge_index[1]]
        rowptr, col = raised.plain_csr(x, kept)
        return ops.spmm(rowptr, col, None, x, "sum", x.shape[0]) / (kept.shape[1] + 1)

    gm = trace(forward, [], ["x", "edge_index"], rand(NODES, 3), edge_list())
    compute, structure, _ = hoisted(gm)
    crossing = [n for n in compute.graph.find_nodes(op="placeholder") if n.meta["source"].kind == "structure"]
    assert sorted(isinstance(node.meta["val"], Tensor) for node in crossing) == [False, True, True]
    for edges in (20, 0):
        values = arguments(gm, 9, edge_list(9, edges))
        parts = Parts(structure=structure, forward=compute)
        torch.testing.assert_close(run_split(parts, gm, values), gm(*values))


def test_what_the_graph_and_constants_alone_decide_is_structure():
    def forward(table: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        order = table.index_select(0, edge_index[0] % 4)
        rowptr, col, _ = ops.csr(edge_index[0], edge_index[1], x.shape[0], x.shape[0])
        return ops.spmm(rowptr, col, order, x, "sum", x.shape[0])

    gm = trace(forward, ["table"], ["x", "edge_index"], rand(4), rand(NODES, 3), edge_list())
    table = gm.graph.find_nodes(op="placeholder")[0]
    table.meta |= {"source": Source("constant", "table"), "value": rand(4)}
    compute, structure, _ = hoisted(gm)
    assert sources(structure, "constant") == ["table"]
    assert "aten.index_select.default" not in {str(node.target) for node in compute.graph.nodes}


def test_result_that_the_caller_gets_is_a_copy_of_the_cached_one():
    def forward(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        rowptr, col = raised.plain_csr(x, edge_index)
        return ops.spmm(rowptr, col, None, x, "sum", x.shape[0]), ops.degree(rowptr)

    gm = trace(forward, [], ["x", "edge_index"], rand(NODES, 3), edge_list())
    compute, _, _ = hoisted(gm)
    degree = compute.graph.output_node().args[0][1]
    assert degree.target is torch.ops.aten.clone.default


def test_graph_kept_as_a_buffer_is_structure():
    def forward(edge_index: Tensor, x: Tensor) -> Tensor:
        rowptr, col = raised.plain_csr(x, edge_index)
        return ops.spmm(rowptr, col, None, x, "sum", x.shape[0])

    gm = trace(forward, ["edge_index"], ["x"], edge_list(), rand(NODES, 3))
    gm.graph.find_nodes(op="placeholder")[0].meta["source"] = Source("buffer", "edge_index")
    compute, structure, _ = hoisted(gm)
    assert primitives(compute) == ["spmm"]
    assert sources(structure, "buffer") == ["edge_index"]


def test_a_model_without_a_graph_is_left_as_it_is():
    def forward(weight: Tensor, x: Tensor) -> Tensor:
        return torch.relu(ops.gemm(x, weight))

    gm = trace(forward, ["w"], ["x"], rand(3, 4), rand(NODES, 4))
    compute, structure, _ = hoisted(gm)
    assert primitives(compute) == ["gemm"]
    assert not structure.graph.find_nodes(op="placeholder")


def test_examples_become_those_of_the_compute_graph():
    gm = raised.gcn()
    values = arguments(gm, NODES, edge_list())
    compute, structure, ctx = hoisted(gm, examples=values)
    torch.testing.assert_close(compute(*ctx.examples), gm(*values))


def test_the_structure_of_the_examples_can_be_dropped_and_made_anew():
    gm = raised.gcn()
    values = arguments(gm, NODES, edge_list())
    compute, structure, ctx = hoisted(gm, examples=values)
    whole = ctx.examples
    drop_structure(compute, ctx)
    shapes = [(v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for v in whole]
    assert [(v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for v in ctx.examples] == shapes
    kinds = [source_of(node).kind for node in placeholders(compute)]
    dropped = [v.is_meta for v in ctx.examples if isinstance(v, torch.Tensor)]
    assert dropped == [kind == "structure" for kind in kinds] and any(dropped)
    torch.testing.assert_close(whole_examples(Parts(structure=structure, forward=compute), ctx), whole)


def test_is_idempotent():
    compute, structure, _ = split("gcn")
    again = run_pass(Hoist(), Parts(structure=structure, forward=compute))
    assert again.structure is not None
    assert format_graph(again.forward) == format_graph(compute)
    assert format_graph(again.structure) == format_graph(structure)


@pytest.mark.first(1)
@pytest.mark.parametrize("hoisted", [True, False])
@torch.no_grad()
def test_numbers_that_cut_rows_are_not_compared_by_example(hoisted: bool):
    class Cuts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 8)

        def forward(self, x: Tensor, edge_index: Tensor, ends: Tensor) -> Tensor:
            counts = ends.new_zeros(2).index_add(0, edge_index[1] % 2, torch.ones_like(edge_index[1]))
            table = counts.flip(0).cumsum(0) if hoisted else ends
            first, last = table[0].item(), table[1].item()
            for end in (first, last):
                torch._check(end >= 0)
                torch._check(end <= x.shape[0])
            sums = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
            return self.lin(sums[first:last]).relu()

    torch.manual_seed(0)
    model, x = Cuts().eval(), torch.randn(9, 6)
    compiled = gnnc.compile(model, "fp32", backend="cpu")
    for edges in ([[3, 1], [8, 2]], [[0, 5], [1, 0]], [[4, 0], [4, 1]]):
        args = x, torch.tensor(edges), torch.tensor(edges)[:, 0].contiguous()
        torch.testing.assert_close(compiled(*args), model(*args))


def test_edges_of_each_call_are_counted_anew():
    gm = model_graph("gcn")
    compute, structure, _ = split("gcn")
    parts = Parts(structure=structure, forward=compute)
    for edges in (EDGES, 3, 0):
        values = arguments(gm, NODES, edge_list(NODES, edges))
        torch.testing.assert_close(run_split(parts, gm, values), gm(*values))
