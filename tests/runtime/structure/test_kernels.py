"""Kernels of structure graphs: who is asked, and what a structure program calls."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch_geometric import EdgeIndex
from torch_geometric.nn import GIN

import gnnc
from gnnc.runtime.backend import get_backend
from gnnc.runtime.cpu import structure as cpu
from gnnc.runtime.structure.runner import StructureRunner

ATEN, GNNC = torch.ops.aten, torch.ops.gnnc


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def sort_of(rows: tuple[int, int] = (0, 1), *, copied: bool = False) -> GraphModule:
    """Return a structure graph that sorts two rows of its input, or of a copy of it."""
    graph = Graph()
    edges = graph.placeholder("edge_index")
    if copied:
        edges = graph.call_function(ATEN.clone.default, (edges,))
    ends = [graph.call_function(ATEN.select.int, (edges, 0, row)) for row in rows]
    sort = graph.call_function(GNNC.csr.default, (*ends, 5, 5))
    graph.output((graph.call_function(GNNC.degree.default, (graph.call_function(getitem, (sort, 0)),)),))
    return GraphModule(nn.Module(), graph)


def getitem(values: tuple[torch.Tensor, ...], part: int) -> torch.Tensor:
    return values[part]


def sort(structure: GraphModule) -> Node:
    return structure.graph.find_nodes(op="call_function", target=GNNC.csr.default)[0]


def called(runner: StructureRunner) -> set[object]:
    return {node.target for group in runner.groups for node in group.module.graph.nodes}


@pytest.mark.parametrize(("backend", "name"), [("cpu", "csr_of_edges"), ("reference", "structure_reference")])
def test_the_registry_chooses_the_kernel_of_a_sort(backend: str, name: str) -> None:
    choice = get_backend(backend).choose_structure(sort(sort_of()))
    assert choice.kernel is not None and choice.kernel.name == name
    assert choice.declined == ()


def test_a_sort_of_anything_but_an_argument_is_declined_with_the_reason() -> None:
    choice = get_backend("cpu").choose_structure(sort(sort_of(copied=True)))
    assert choice.kernel is not None and choice.kernel.name == "csr"
    assert [name for name, _ in choice.declined] == ["csr_of_edges"]
    assert "EdgeIndex" in choice.declined[0][1]


def test_a_structure_op_of_a_compute_graph_is_not_offered_to_structure_kernels() -> None:
    choice = get_backend("cpu").choose(sort(sort_of()))
    assert choice.kernel is not None and choice.kernel.name == "reference"


def test_a_program_calls_what_was_chosen() -> None:
    edge_index = torch.randint(5, (2, 20))
    for structure, function in ((sort_of(), cpu.csr_of_edges), (sort_of(copied=True), cpu.csr)):
        runner = get_backend("cpu").structure_program(structure)
        assert {function, cpu.degree} <= called(runner)
        assert not called(runner) & {GNNC.csr.default, GNNC.degree.default}
        assert torch.equal(runner(edge_index)[0], structure(edge_index)[0])


def test_rows_may_be_read_either_way_round() -> None:
    edge_index = torch.randint(5, (2, 20))
    structure = sort_of((1, 0))
    runner = get_backend("cpu").structure_program(structure)
    assert torch.equal(runner(edge_index)[0], structure(edge_index)[0])


def test_a_program_without_kernels_runs_the_graph_as_it_is() -> None:
    runner = StructureRunner(sort_of())
    assert {GNNC.csr.default, GNNC.degree.default} <= called(runner)


def test_a_lowered_structure_graph_names_its_kernels_and_still_runs() -> None:
    compiled = gnnc.compile(GIN(4, 4, 2).eval(), precision="fp32", backend="cpu")
    edge_index = torch.randint(9, (2, 30))
    compiled(torch.randn(9, 4), edge_index)
    structure = compiled.structure_graph_module
    assert structure is not None
    assert [node.meta["kernel"] for node in structure.graph.nodes if "kernel" in node.meta] == [
        "csr_of_edges"
    ]
    assert "csr_of_edges" in str(compiled)
    rowptr, *_ = structure(edge_index, 9)
    assert rowptr.tolist() == GNNC.csr(*edge_index, 9, 9)[0].tolist()


class BothWays(nn.Module):
    """GIN over a list of edges and of their opposites, which forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.gin = GIN(4, 4, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the rows of the last layer."""
        return self.gin(x, torch.cat([edge_index, edge_index.flip(0)], 1))


def test_kernels_that_declined_are_explained() -> None:
    compiled = gnnc.compile(BothWays().eval(), precision="fp32", backend="cpu")
    compiled(torch.randn(9, 4), torch.randint(9, (2, 30)))
    assert "csr: kernel csr_of_edges declined: its ends are not two rows of an argument" in compiled.explain()


def test_the_order_of_an_edge_index_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = EdgeIndex(torch.randint(9, (2, 30)), sparse_size=(9, 9)).sort_by("col").values
    edges.get_csc()
    compiled = gnnc.compile(GIN(4, 4, 2).eval(), precision="fp32", backend="cpu")
    want = compiled(x := torch.randn(9, 4), edges.as_tensor().clone())
    monkeypatch.setattr(cpu, "csr", lambda *given: pytest.fail("sorted again"))
    assert torch.equal(compiled(x, edges), want)
