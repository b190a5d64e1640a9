"""Sorts that drop self loops and add one for every node."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch_geometric.nn import GAT, GCN, GIN, GATConv, GCNConv, global_mean_pool
from torch_geometric.utils import degree
from zoo import ZOO, prepared
from zoo_layers import LAYERS

import gnnc
from gnnc import api
from gnnc.compiler import dispatch
from gnnc.ir.graph import clone
from gnnc.ir.parts import Parts
from gnnc.passes import Context, run_pass
from gnnc.passes.pipeline import PIPELINE
from gnnc.passes.rewrite.structure_edit import finish
from gnnc.passes.self_loops import SelfLoops, sorts_with_loops
from gnnc.runtime.backend import get_backend
from gnnc.runtime.structure.runner import StructureRunner
from gnnc.target import Target

GNNC = torch.ops.gnnc


def structure_of(model: nn.Module, *others: Tensor, **of_edges: Tensor) -> GraphModule:
    """Return the structure graph, before the pass, of a model called with nodes, edges and what is given."""
    pipeline = [step for step in PIPELINE if not isinstance(step, SelfLoops)]
    compiled = gnnc.compile(model.eval(), precision="fp32", backend="reference", pipeline=pipeline)
    with torch.no_grad():
        compiled(torch.randn(9, 4), torch.randint(0, 4, (2, 20)), *others, **of_edges)
    structure = compiled.structure_graph_module
    assert structure is not None
    return structure


def weighted_structure() -> GraphModule:
    return structure_of(GCN(4, 4, 2), edge_weight=torch.rand(20))


def structure_of_means() -> GraphModule:
    """That of GAT with features of edges: loops get the mean of those of the edges to their node."""
    return structure_of(GAT(4, 4, 2, edge_dim=3), edge_attr=torch.randn(20, 3))


def rewritten(structure: GraphModule) -> GraphModule:
    """Return a structure graph whose sorts add loops."""
    result = clone(structure)
    for loops in sorts_with_loops(result.graph):
        loops.replace()
    finish(result)
    return result


def runner_of(structure: GraphModule) -> StructureRunner:
    """Return a program of a structure graph whose sorts add loops."""
    return StructureRunner(rewritten(structure))


def checks_of(runner: StructureRunner) -> set[tuple[int, ...]]:
    """Return the slots of ids and limits that sorts check before anything reads by the ids."""
    return {check for group in runner.groups for check in group.checks}


def sorts_of(runner: StructureRunner) -> list[Node]:
    target = GNNC.csr_with_loops.default
    return [node for group in runner.groups for node in group.module.graph.nodes if node.target is target]


def targets_of(structure: GraphModule) -> set[Any]:
    return {node.target for node in structure.graph.nodes}


def assert_the_sort_finds_ids(structure: GraphModule, runner: StructureRunner) -> None:
    names = [node.name for node in structure.graph.find_nodes(op="placeholder")]
    assert checks_of(runner) == {(names.index("edge_index"), len(names) - 1)}


def taken_as(structure: GraphModule, *given: Any) -> GraphModule:
    """Return a structure graph whose sorts add loops; its results equal those of the graph, to the bit."""
    taken = rewritten(structure)
    for got, want in zip(taken(*given), structure(*given), strict=True):
        assert torch.equal(got, want) if isinstance(want, Tensor) else got == want
    return taken


def program_of(structure: GraphModule) -> Parts:
    """Return a program whose forward graph reads nothing of its structure graph."""
    compute = GraphModule(nn.Module(), Graph())
    compute.graph.output(())
    compute.recompile()
    return Parts(structure=structure, forward=compute)


@pytest.mark.first(1)
@pytest.mark.parametrize("sorts_with_loops", [True, False])
def test_only_a_backend_whose_sort_adds_loops_gets_the_pass(sorts_with_loops: bool) -> None:
    structure = structure_of(GCN(4, 4, 2))
    context = Context(target=Target(sorts_with_loops=sorts_with_loops))
    after = run_pass(SelfLoops(), program_of(structure), context)
    assert (after.structure is structure) != sorts_with_loops, "without the pass nothing is copied"
    assert after.structure is not None
    assert (GNNC.csr_with_loops.default in targets_of(after.structure)) == sorts_with_loops
    assert [note.pass_name for note in context.notes] == ["self_loops"] * sorts_with_loops
    assert GNNC.csr.default in targets_of(structure), "the graph of the stage before stays as it is"


@pytest.mark.first(1)
@pytest.mark.parametrize("model", [GCN, GAT])
def test_convolutions_that_ask_for_self_loops(model: Callable[..., nn.Module]) -> None:
    structure = structure_of(model(4, 4, 2))
    (found,) = sorts_with_loops(structure.graph)
    assert found.edge_index.op == "placeholder" and found.rows == (0, 1) and found.values == ()
    runner = runner_of(structure)
    (sort,) = sorts_of(runner)
    others = {str(n.target) for group in runner.groups for n in group.module.graph.nodes}
    assert not others & {"aten.index.Tensor", "aten.cat.default", "aten.arange.start", "gnnc.csr.default"}
    names = [node.name for node in structure.graph.find_nodes(op="placeholder")]
    assert checks_of(runner) == {(names.index("edge_index"), names.index(str(sort.args[2])))}


def test_those_of_gin_have_no_loops() -> None:
    structure = structure_of(GIN(4, 4, 2))
    assert not list(sorts_with_loops(structure.graph))
    assert not checks_of(runner_of(structure))


def test_weights_come_with_the_loops() -> None:
    """Those of loops that the caller's graph has stay; nothing is made of a list of edges."""
    structure = weighted_structure()
    (found,) = sorts_with_loops(structure.graph)
    assert len(found.values) == 1
    assert {ATEN.index.Tensor, ATEN.index_put.default} <= {n.target for n in structure.graph.nodes}
    taken = taken_as(structure, *WEIGHTED_EDGES, 4)
    assert not {ATEN.index.Tensor, ATEN.index_put.default} & {n.target for n in taken.graph.nodes}
    want = structure(*WEIGHTED_EDGES, 4)
    assert want[2].tolist() == [2, 5, 1, 3, 4, 1]  # of a loop, 2 -> 1, a new loop, 1 -> 2, a loop, a new loop
    runner = runner_of(structure)
    assert_the_sort_finds_ids(structure, runner)
    first, second = runner.groups
    assert set(first.key) < set(second.key), "new weights do not sort the graph again"


def test_means_of_edges_are_taken_by_the_sort_that_adds_loops() -> None:
    """No list of the edges that are no loops is made, and nothing else is sorted."""
    structure = structure_of_means()
    assert len(structure.graph.find_nodes(op="call_function", target=GNNC.csr.default)) == 2
    assert ATEN.index.Tensor in {n.target for n in structure.graph.nodes}
    taken = taken_as(structure, torch.tensor([[0, 1, 2, 2, 0], [0, 2, 2, 1, 2]]), torch.randn(5, 3), 4)
    assert not {ATEN.index.Tensor, GNNC.csr.default} & {n.target for n in taken.graph.nodes}
    runner = runner_of(structure)
    assert_the_sort_finds_ids(structure, runner)
    first, second = runner.groups
    assert set(first.key) < set(second.key), "new features do not sort the graph again"


def _return_part(structure: GraphModule, part: int, number: int = 0) -> None:
    """Have a part of a sort be a result; the first one, where there are two, sorts edges without loops."""
    sort = structure.graph.find_nodes(op="call_function", target=GNNC.csr.default)[number]
    with structure.graph.inserting_after(sort):
        returned = structure.graph.call_function(operator.getitem, (sort, part))
    output = structure.graph.output_node()
    output.args = ((*output.args[0], returned),)


SUMS: dict[str, Callable[[GraphModule], None]] = {
    "rows are a result": lambda structure: _return_part(structure, 0),
    "columns are a result": lambda structure: _return_part(structure, 1),
    "largest ones": lambda structure: _update(structure, GNNC.segment_reduce.default, 3, "max"),
    "of another order": lambda structure: _update(structure, GNNC.segment_reduce.default, 1, None),
    "by the other end": lambda structure: _sort_by_source(structure),
}


def _update(structure: GraphModule, target: Any, place: int, value: Any) -> None:
    node(structure, target).update_arg(place, value)


def _sort_by_source(structure: GraphModule) -> None:
    (end,) = set(node(structure, GNNC.csr.default).args[:2])
    end.update_arg(2, 0)


@pytest.mark.first(1)
@pytest.mark.parametrize("change", SUMS)
def test_sums_that_look_alike_are_left_alone(change: str) -> None:
    """The sort that adds loops is found all the same, and what it gives stays the same."""
    structure = structure_of_means()
    SUMS[change](structure)
    structure.recompile()
    taken = taken_as(structure, torch.tensor([[0, 1, 2, 2, 0], [0, 2, 2, 1, 2]]), torch.randn(5, 3), 4)
    assert len(taken.graph.find_nodes(op="call_function", target=GNNC.csr.default)) == 1


def test_values_of_loops_that_are_made_otherwise_stay() -> None:
    structure = weighted_structure()
    put = node(structure, ATEN.index_put.default)
    put.args = (*put.args, True)  # adds up what loops of one node have
    structure.recompile()
    taken = taken_as(structure, *WEIGHTED_EDGES, 4)
    assert ATEN.index_put.default in {n.target for n in taken.graph.nodes}


class Coarse(nn.Module):
    """Layers on two poolings over one list of edges: how many nodes there are, data says."""

    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        self.one, self.other, self.weights = GCNConv(4, 4), GCNConv(4, 4), weights

    def forward(self, x: Tensor, edge_index: Tensor, cluster: Tensor, another: Tensor) -> Tensor:
        weight = (edge_index[0] + 2 * edge_index[1]).float() + 1 if self.weights else None
        one = self.one(global_mean_pool(x, cluster), edge_index, weight)
        return one.sum(0) + self.other(global_mean_pool(x, another), edge_index).sum(0)


@pytest.mark.first(1)
@pytest.mark.parametrize("weights", [False, True])
def test_edges_that_several_sorts_share(weights: bool) -> None:
    """Where ids are selected by another part than the sort's, and weights are of the same part."""
    cluster = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3])
    another = torch.tensor([0, 1, 1, 2, 2, 3, 3, 3, 3])
    edge_index = torch.tensor([[0, 1, 2, 2, 3], [0, 2, 2, 1, 0]])
    structure = structure_of(Coarse(weights=weights), cluster, another)
    runner = runner_of(structure)
    assert len(sorts_of(runner)) == 2 and not checks_of(runner)
    tensors = {"x": torch.randn(9, 4), "edge_index": edge_index, "cluster": cluster, "another": another}
    taken_as(structure, *[tensors[each.name] for each in structure.graph.find_nodes(op="placeholder")])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.int8])
def test_ids_of_few_bits_that_the_loops_widen(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x, edge_index = GCNConv(4, 3).eval(), torch.randn(5, 4), torch.randint(5, (2, 12)).to(dtype)
    torch.testing.assert_close(gnnc.compile(model, "fp32")(x, edge_index), model(x, edge_index))


@pytest.mark.parametrize("bad", [-1, -(2**40), 5, 2**40])
def test_ids_out_of_range_do_no_harm_to_values_of_loops(bad: int) -> None:
    edge_index = torch.tensor([[0, bad, bad, 3], [1, 2, bad, 3]])
    values = GNNC.values_of_loops(torch.ones(5), edge_index, torch.tensor([2.0, 3, 4, 5]))
    assert values[3] == 5 and values.shape == (5,)
    assert GNNC.values_of_loops(torch.ones(0), edge_index, torch.rand(4)).shape == (0,)


@pytest.mark.parametrize("width", [(), (3,)])
def test_values_of_loops_are_those_of_the_reference(width: tuple[int, ...]) -> None:
    src, dst = torch.randint(0, 50, (2, 400))
    loop = torch.randperm(400)[:20]
    src[loop] = dst[loop] = torch.arange(20)  # a node has one loop at most: with more, any of them counts
    dst[(src == dst) & ~torch.isin(torch.arange(400), loop)] += 1
    start, values = torch.rand(51, *width), torch.rand(400, *width)
    is_loop = src == dst
    want = start.index_put([src[is_loop]], values[is_loop])
    assert torch.equal(GNNC.values_of_loops(start, torch.stack([src, dst]), values), want)


ATEN = torch.ops.aten
WEIGHTED_EDGES = torch.tensor([[0, 1, 2, 2], [0, 2, 2, 1]]), torch.tensor([2.0, 3, 4, 5])
FLOWS = ("source_to_target", "target_to_source")


def node(structure: GraphModule, target: Any) -> Node:
    return structure.graph.find_nodes(op="call_function", target=target)[0]


def swap(target: Any, **places: Any) -> Callable[[GraphModule], None]:
    """Return what gives a node of ``target`` other arguments: ``a1`` is the second, "0" is the first one."""

    def change(structure: GraphModule) -> None:
        each = node(structure, target)
        for place, value in places.items():
            each.update_arg(int(place[1:]), each.args[int(value)] if isinstance(value, str) else value)

    return change


def keep_loops(structure: GraphModule) -> None:
    node(structure, ATEN.ne.Tensor).target = ATEN.eq.Tensor


CHANGES: dict[str, Callable[[GraphModule], None]] = {
    "another number of sources": swap(GNNC.csr.default, a2=5),
    "another number of destinations": swap(GNNC.csr.default, a3=5),
    "both ends are sources": swap(GNNC.csr.default, a1="0"),
    "loops are what is left": keep_loops,
    "one end alone is compared": swap(ATEN.ne.Tensor, a1="0"),
    "loops of some nodes": swap(ATEN.arange.start, a0=1),
    "loops of other nodes": swap(ATEN.arange.start, a1=5),
    "two loops a node": swap(ATEN.repeat.default, a1=[2, 2]),
    "edges above each other": swap(ATEN.cat.default, a1=0),
}


def test_the_sort_takes_the_edges_as_they_are() -> None:
    structure = structure_of(GCN(4, 4, 2))
    (found,) = sorts_with_loops(structure.graph)
    found.replace()
    structure.recompile()
    assert not structure.graph.find_nodes(op="call_function", target=ATEN.cat.default)
    rowptr, col, _ = structure(torch.tensor([[0, 1, 2, 2], [0, 2, 2, 1]]), 3)
    assert rowptr.tolist() == [0, 1, 3, 5] and col.tolist() == [0, 2, 1, 1, 2]


WEIGHTED: dict[str, Callable[[GraphModule], None]] = {
    "weights of other edges": lambda structure: _swap_weights(structure),
    "weights are a result": lambda structure: _return(structure, ATEN.cat.default),
    "positions of something else": swap(GNNC.segment_reduce.default, a2="1"),
}


def _swap_weights(structure: GraphModule) -> None:
    """Have weights of self loops where those of the others stand."""
    (both,) = (n for n in structure.graph.nodes if n.target is ATEN.cat.default and len(n.args) == 1)
    (others, loops), loop_weights = both.args[0], both.args[0][1].args[2]
    assert others is not loop_weights
    both.args = ([loop_weights, loops],)


def _return(structure: GraphModule, target: Any) -> None:
    output = structure.graph.output_node()
    output.args = ((*output.args[0], node(structure, target)),)


@pytest.mark.first(1)
@pytest.mark.parametrize("change", CHANGES)
def test_what_looks_alike_is_left_alone(change: str) -> None:
    structure = structure_of(GCN(4, 4, 2))
    assert len(list(sorts_with_loops(structure.graph))) == 1
    CHANGES[change](structure)
    assert not list(sorts_with_loops(structure.graph))


@pytest.mark.first(1)
@pytest.mark.parametrize("change", WEIGHTED)
def test_weights_that_are_not_only_read_in_order_are_lists_without_loops(change: str) -> None:
    """The sort adds the loops all the same, and says how long the lists are."""
    structure = weighted_structure()
    WEIGHTED[change](structure)
    structure.recompile()
    (found,) = sorts_with_loops(structure.graph)
    assert found.values is None
    check_lists(structure, torch.rand(4))


def test_columns_of_weights_are_not_read_in_the_order_of_edges() -> None:
    structure = weighted_structure()
    swap(ATEN.index_select.default, a1=1)(structure)
    (found,) = sorts_with_loops(structure.graph)
    assert found.values is None


def test_positions_that_are_a_result_are_those_in_lists_without_loops() -> None:
    """As where a product of edge features is computed in the order of the caller's edges."""
    structure = structure_of_means()
    _return_part(structure, 2, number=1)
    structure.recompile()
    taken = check_lists(structure, torch.rand(4, 3))
    assert GNNC.without_loops.default in {n.target for n in taken.graph.nodes}


def test_a_list_of_edges_by_another_mask_is_not_taken_for_the_sorts() -> None:
    """That stands before the sort, which has to come before its own mask."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(4, 4)
            self.register_buffer("table", torch.rand(9))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            others = edge_index[:, edge_index[1] != edge_index[0]]
            counts = degree(others[1], x.shape[0])
            return self.conv(x, edge_index, self.table[edge_index[0]]) * counts[:, None]

    check_model(Model())


class Gathers(nn.Module):
    """Reads something by ids before anything sorts them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GATConv(4, 4, edge_dim=1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index, torch.arange(x.shape[0], device=x.device)[edge_index[0]] / 10)


def test_ids_by_which_others_read_are_looked_at_before() -> None:
    structure, _ = check_model(Gathers())
    assert not checks_of(runner_of(structure))


class BothWays(nn.Module):
    """Two sorts share a list of features."""

    def __init__(self, first: str, then: str) -> None:
        super().__init__()
        self.one, self.other = (GATConv(4, 4, edge_dim=3, flow=flow) for flow in (first, then))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        features = torch.stack([edge_index[0] * 3 % 7, edge_index[1] % 5, edge_index[0]], 1).float()
        return self.other(self.one(x, edge_index, features), edge_index, features)


@pytest.mark.first(1)
@pytest.mark.parametrize("flows", [FLOWS, FLOWS[::-1]])
def test_features_that_sorts_of_both_directions_share(flows: tuple[str, str]) -> None:
    """Means are of edges to a node, whichever way messages go: the sort by destination has them."""
    _, taken = check_model(BothWays(*flows))
    assert not {ATEN.index.Tensor, GNNC.csr.default} & {n.target for n in taken.graph.nodes}


def test_lists_of_weights_wait_for_no_list_of_loops() -> None:
    structure = weighted_structure()
    _return_part(structure, 2)
    structure.recompile()
    taken = taken_as(structure, *WEIGHTED_EDGES, 4)
    assert not {ATEN.index.Tensor, ATEN.index_put.default} & {n.target for n in taken.graph.nodes}


def check_model(model: nn.Module) -> tuple[GraphModule, GraphModule]:
    """Check that loops are found in a structure and leave it what it is; return it, and as it is taken."""
    structure = structure_of(model)
    assert list(sorts_with_loops(structure.graph))
    tensors = {"x": torch.randn(9, 4), "edge_index": torch.randint(0, 9, (2, 30))}
    given = [tensors.get(each.name, 9) for each in structure.graph.find_nodes(op="placeholder")]
    return structure, taken_as(structure, *given)


def test_positions_of_edges_without_values() -> None:
    structure = structure_of(GCN(4, 4, 2))
    _return_part(structure, 2)
    structure.recompile()
    check_lists(structure)


def test_lists_are_not_made_before_the_number_of_nodes_is_known() -> None:
    structure = structure_of(GCN(4, 4, 2))
    _return_part(structure, 2)
    sort = node(structure, GNNC.csr.default)
    nodes = sort.args[2]
    with structure.graph.inserting_before(sort):
        known = structure.graph.call_function(operator.add, (nodes, 0))
    sort.args = (*sort.args[:2], known, known)
    node(structure, ATEN.arange.start).update_arg(1, known)
    assert not list(sorts_with_loops(structure.graph))


def check_lists(structure: GraphModule, *values: Tensor) -> GraphModule:
    """Check that sorts add loops and positions are those in lists; return the graph that does so."""
    taken = taken_as(structure, torch.tensor([[0, 1, 2, 2], [0, 2, 2, 1]]), *values, 4)
    taken_as(structure, torch.tensor([[1, 1, 2, 0], [1, 1, 2, 0]]), *values, 4)
    targets = {n.target for n in taken.graph.nodes}
    assert {GNNC.csr_with_loops.default, GNNC.positions_without_loops.default} <= targets
    assert GNNC.csr.default not in targets
    assert_the_sort_finds_ids(structure, runner_of(structure))
    return taken


@pytest.mark.cuda
@pytest.mark.parametrize("model", [GCN, GAT])
@pytest.mark.parametrize("bad", [(0, 90), (90, 90), (-1, -1)])
@torch.no_grad()
def test_ids_out_of_range_are_named_as_the_caller_knows_them(
    model: Callable[..., nn.Module], bad: tuple[int, int]
) -> None:
    x, edge_index = torch.randn(90, 8).cuda(), torch.randint(0, 90, (2, 400)).cuda()
    compiled = gnnc.compile(model(8, 8, 2).cuda().eval(), precision="fp32")
    want = compiled(x, edge_index)
    wrong = edge_index.clone()
    wrong[:, 7] = torch.tensor(bad)
    row = 0 if not 0 <= bad[0] < 90 else 1
    with pytest.raises(gnnc.GraphError, match=rf"edge_index\[{row}, 7\] = {bad[row]} .*0\.\.89"):
        compiled(x, wrong)
    assert torch.equal(compiled(x, edge_index.clone()), want)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["gcn-edge-weight", "gat-edges", "gatv2-edges", "dna", "pdn", "ppf"])
def test_a_program_takes_the_results_of_the_rewritten_structure(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that other nodes replace keep their place, whatever they are called."""
    reference = get_backend("reference")
    target = replace(reference.target, sorts_with_loops=True)  # as on CUDA
    for module in (api, dispatch):
        monkeypatch.setattr(module, "get_backend", lambda *given: replace(reference, target=target))
    entry = (ZOO | LAYERS)[name]
    compiled = gnnc.compile(prepared(entry), precision="fp32", backend="reference")
    for seed, sizes in enumerate(((60, 400), (7, 0))):
        args, kwargs = entry.arguments(*sizes, seed)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*args, **kwargs), compiled.model(*args, **kwargs))
    assert "csr_with_loops" in str(compiled)
