"""The structure runner: groups by dependency set, cached apart."""

import copy
import operator
import weakref

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

import gnnc.ir  # noqa: F401
from gnnc.errors import GraphError
from gnnc.ir.source import Source
from gnnc.runtime.structure.runner import StructureRunner

NUM_NODES = 5


def placeholder(graph: Graph, name: str, kind: str) -> Node:
    node = graph.placeholder(name)
    node.meta["source"] = Source(kind, name)  # type: ignore[arg-type]
    return node


def weighted_structure() -> GraphModule:
    """CSR of edge_index; edge_weight in CSR order, times the destination's degree."""
    graph, ops, aten = Graph(), torch.ops.gnnc, torch.ops.aten
    edge_index = placeholder(graph, "edge_index", "input")
    weight = placeholder(graph, "edge_weight", "input")
    size = placeholder(graph, "n", "size")
    call = graph.call_function
    src = call(aten.select.int, (edge_index, 0, 0))
    dst = call(aten.select.int, (edge_index, 0, 1))
    csr = call(ops.csr.default, (src, dst, size, size))
    rowptr, col, perm = (call(operator.getitem, (csr, i)) for i in range(3))
    double = call(aten.mul.Tensor, (weight, 2))
    ordered = call(aten.index_select.default, (double, 0, perm))
    degree = call(ops.degree.default, (rowptr,))
    rows = call(ops.edge_dst.default, (rowptr, col))
    scaled = call(aten.mul.Tensor, (ordered, call(aten.index_select.default, (degree, 0, rows))))
    doubled = call(operator.mul, (size, 2))
    graph.output((rowptr, col, scaled, doubled))
    return GraphModule(torch.nn.Module(), graph)


def inputs() -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(NUM_NODES, (2, 12), generator=generator)
    return edge_index, torch.rand(12, generator=generator), NUM_NODES


def count_calls(runner: StructureRunner) -> list[int]:
    calls = [0] * len(runner.groups)
    for index, group in enumerate(runner.groups):
        run = group.module.forward

        def counted(*values, i=index, run=run):
            calls[i] += 1
            return run(*values)

        group.module.forward = counted
    return calls


def assert_same(left: tuple, right: tuple) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_equals_the_graph_that_it_runs():
    structure, values = weighted_structure(), inputs()
    runner = StructureRunner(structure)
    assert_same(runner(*values), structure(*values))
    assert_same(runner(*values), structure(*values))


def test_groups_follow_dependency_sets():
    runner = StructureRunner(weighted_structure())
    calls, (edge_index, weight, size) = count_calls(runner), inputs()
    # sizes alone | edge_index | edge_index and edge_weight (takes the cheap edge_weight group in)
    assert len(runner.groups) == 3
    for _ in range(3):
        runner(edge_index, weight, size)
    assert calls == [1, 1, 1]
    for _ in range(3):
        runner(edge_index, weight.clone(), size)
    assert calls == [1, 1, 4]


def test_a_sort_that_only_sums_of_weights_read_is_kept_when_the_weights_are_new():
    structure = weighted_structure()
    output = structure.graph.output_node()
    output.args = ((output.args[0][2],),)
    structure.recompile()
    runner = StructureRunner(structure)
    calls, (edge_index, weight, size) = count_calls(runner), inputs()
    for _ in range(4):
        weight = weight + 1
        assert_same(runner(edge_index, weight, size), structure(edge_index, weight, size))
    assert sorted(calls) == [1, 4], "the sort, and what the weights are read for"


def test_edit_of_edge_index_reruns_all_that_depends_on_it():
    structure = weighted_structure()
    runner = StructureRunner(structure)
    calls, (edge_index, weight, size) = count_calls(runner), inputs()
    runner(edge_index, weight, size)
    edge_index[1, 0] = (edge_index[1, 0] + 1) % NUM_NODES
    assert_same(runner(edge_index, weight, size), structure(edge_index, weight, size))
    assert calls == [1, 2, 2]


def test_another_size_reruns():
    structure = weighted_structure()
    runner = StructureRunner(structure)
    edge_index, weight, size = inputs()
    runner(edge_index, weight, size)
    assert_same(runner(edge_index, weight, size + 2), structure(edge_index, weight, size + 2))


def test_a_structure_that_is_rebuilt_is_seen_once_it_is_shared():
    structure, values = weighted_structure(), inputs()
    runner = StructureRunner(structure)
    calls, before = count_calls(runner), runner(*values)
    outputs, share = runner.rebuild(*values)
    assert_same(outputs, structure(*values))
    assert calls == [2] * len(calls) and outputs[0] is not before[0]
    meanwhile = runner(*values)
    assert calls == [3] * len(calls) and meanwhile[0] is not outputs[0]
    share()
    for _ in range(2):
        assert all(a is b for a, b in zip(runner(*values)[:3], outputs[:3], strict=True))
    assert calls == [3] * len(calls) and len(runner.cache) == len(calls)


def test_a_structure_that_is_rebuilt_is_seen_where_somebody_holds_the_entries_of_before():
    values = inputs()
    runner = StructureRunner(weighted_structure())
    runner(*values)
    before = list(runner.cache._entries.values())
    outputs, share = runner.rebuild(*values)
    meanwhile = runner(*values)
    between = list(runner.cache._entries.values())
    assert not set(between) & set(before) and meanwhile[0] is not outputs[0]
    share()
    assert all(a is b for a, b in zip(runner(*values)[:3], outputs[:3], strict=True))


def test_fresh_graphs_leave_nothing_behind():
    runner = StructureRunner(weighted_structure())
    for step in range(50):
        edge_index, weight, size = inputs()
        runner(edge_index, weight + step, size)
    del edge_index, weight
    assert runner.cache.nbytes == 0


def test_inside_inference_mode():
    structure = weighted_structure()
    runner = StructureRunner(structure)
    with torch.inference_mode():
        edge_index, weight, size = inputs()
        for _ in range(2):
            assert_same(runner(edge_index, weight, size), structure(edge_index, weight, size))
        weight[3] = 9
        assert_same(runner(edge_index, weight, size), structure(edge_index, weight, size))


def test_deepcopy_is_independent():
    structure, values = weighted_structure(), inputs()
    runner = StructureRunner(structure)
    runner(*values)
    other = copy.deepcopy(runner)
    assert len(other.cache) == 0
    assert_same(other(*values), structure(*values))


def test_a_check_runs_when_the_part_that_depends_on_its_inputs_is_built():
    edge_index, weight, size = inputs()
    seen: list[int] = []

    def check(ids: Tensor, limit: int) -> None:
        seen.append(limit)
        if int(ids.max()) >= limit:
            raise GraphError("edge_index is wrong")

    for sorts in (False, True):
        runner = StructureRunner(weighted_structure())
        assert runner.check_inputs((0, 2), check, sorts=sorts)
        assert not runner.check_inputs((3,), check, sorts=sorts)  # no part depends on it
        seen.clear()
        for _ in range(2):
            runner(edge_index, weight, size)
        assert seen == ([] if sorts else [size])  # once a graph, or not at all where sorting checks too
        for _ in range(2):
            with pytest.raises(GraphError, match="edge_index is wrong"):
                runner(edge_index, weight, size - 1)


def test_the_same_tensors_again_make_no_keys(monkeypatch):
    runner, values = StructureRunner(weighted_structure()), inputs()
    expected = runner(*values)
    monkeypatch.setattr(runner.cache, "entry", lambda *_: pytest.fail("looked up"))
    assert all(a is b for a, b in zip(runner(*values)[:3], expected[:3], strict=True))


def test_what_the_cache_has_dropped_is_built_again():
    runner, (edge_index, weight, size) = StructureRunner(weighted_structure(), byte_budget=1), inputs()
    calls, others = count_calls(runner), [torch.zeros(12) for _ in range(4)]
    runner(edge_index, weight, size)
    last = weakref.ref(runner(edge_index, weight, size)[2])
    runner.clear()
    assert last() is None
    runner(edge_index, weight, size)
    assert calls == [2, 2, 2]
    for other in others:  # of a budget for the newest only
        runner(edge_index, other, size)
    assert len(runner.cache) == 3
    runner(edge_index, weight, size)
    assert calls == [2, 2, 7]


def test_memory_behind_the_same_tensor_and_views_of_it_are_seen():
    structure = weighted_structure()
    runner, (edge_index, weight, size) = StructureRunner(structure), inputs()
    part = edge_index[:, 2:]  # a view
    for change in (
        lambda: None,
        lambda: edge_index[0].zero_(),
        lambda: part.fill_(1),
        lambda: setattr(part, "data", torch.full((2, 10), 2)),
        lambda: part.resize_(2, 9),
        lambda: setattr(weight, "data", torch.rand(12)),
    ):
        change()
        used = weight[: part.shape[1]]
        for _ in range(2):
            assert_same(runner(part, used, size), structure(part, used, size))


def test_the_last_call_keeps_no_tensor_alive():
    runner, (edge_index, weight, size) = StructureRunner(weighted_structure()), inputs()
    results = [weakref.ref(result) for result in runner(edge_index, weight, size)[:3]]
    tensors = weakref.ref(edge_index), weakref.ref(weight)
    del edge_index, weight
    assert all(ref() is None for ref in (*results, *tensors))
