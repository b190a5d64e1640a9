"""Which structure formats are noted for sparse ops, printed and explained."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn import GAT, GCN, GINEConv, SAGEConv

import gnnc
from gnnc.ir.describe import reads_edges
from gnnc.ir.format import CSR, RUN_TABLE, WINDOW_TABLE
from gnnc.passes import Context, run_pass
from gnnc.passes.select_format import SelectFormat
from gnnc.runtime import cuda

OFFLINE = "cuda-offline:sm_90"


def has_compiler() -> bool:
    try:
        cuda.load_compiler()
    except gnnc.BackendError:
        return False
    return True


cuda_compiler = pytest.mark.skipif(not has_compiler(), reason="CUDA programs cannot be compiled here")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def compiled(model: nn.Module, backend: str, *others: Any) -> gnnc.CompiledModel:
    result = gnnc.compile(model.eval(), precision="fp32", backend=backend)
    with suppress(gnnc.BackendError):  # an offline program does not run
        result(torch.randn(9, 64), torch.randint(9, (2, 30)), *others)
    return result


def formats_of(result: gnnc.CompiledModel) -> list[tuple[Any, ...]]:
    return [n.meta["format"] for n in result.graph_module.graph.nodes if "format" in n.meta]


@pytest.mark.first(1)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_cpu_has_the_csr_alone_and_explains_no_choice(backend: str) -> None:
    result = compiled(GCN(64, 64, 2), backend)
    assert formats_of(result) == [(CSR,)] * 2
    assert "Formats" not in result.explain()
    assert "; csr" in str(result)


@cuda_compiler
def test_a_plain_sum_on_cuda_may_read_both_tables() -> None:
    result = compiled(GCN(64, 64, 2), OFFLINE)
    assert formats_of(result) == [(RUN_TABLE, WINDOW_TABLE)] * 2
    assert "kernel spmm reads runs or window, whichever costs less for a graph" in result.explain()
    assert "; runs|window" in str(result)


@pytest.mark.first(1)
@cuda_compiler
@pytest.mark.parametrize(
    ("model", "others"), [(GAT(64, 64, 1), ()), (SAGEConv(64, 64, aggr="max"), ())], ids=["gat", "max"]
)
def test_other_sums_on_cuda_read_the_run_table(model: nn.Module, others: tuple[Any, ...]) -> None:
    result = compiled(model, OFFLINE, *others)
    assert set(formats_of(result)) == {(RUN_TABLE,)}
    assert "reads runs: it has no form for window or edges" in result.explain()


@cuda_compiler
def test_a_message_on_cuda_reads_the_run_table() -> None:
    layer = GINEConv(nn.Linear(64, 8), edge_dim=64)
    result = compiled(layer, OFFLINE, torch.randn(30, 64))
    assert (RUN_TABLE,) in formats_of(result)


def test_ops_without_edges_have_no_format() -> None:
    nodes = compiled(GCN(64, 64, 2), "cpu").graph_module.graph.nodes
    assert {reads_edges(node) for node in nodes if "format" not in node.meta} == {False}


def test_a_graph_that_is_not_lowered_stays_as_it_is() -> None:
    stages = dict(compiled(GCN(64, 64, 2), "reference").stages)
    context = Context()
    after = run_pass(SelectFormat(), stages["lower"], context)
    assert not any("format" in node.meta for node in after.graph.nodes) and context.notes == []


def test_formats_change_nothing_of_a_program() -> None:
    model = GCN(64, 64, 2).eval()
    passes = [step for step in gnnc.passes.PIPELINE if step.name != "select_format"]
    given = torch.randn(9, 64), torch.randint(9, (2, 30))
    plain = gnnc.compile(model, precision="fp32", backend="cpu", pipeline=passes)
    chosen = gnnc.compile(model, precision="fp32", backend="cpu")
    assert torch.equal(plain(*given), chosen(*given))
