"""What real compiled models say about themselves; goldens are of the reference backend."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch_geometric.nn import models

import gnnc
from gnnc.report.printing import graph_source, namespace

MODELS = {"GCN": {}, "GraphSAGE": {}, "GIN": {}, "GAT": {"heads": 4}}
each_model = pytest.mark.parametrize("name", MODELS)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(120, 50, generator=generator)
    return x, torch.randint(0, 120, (2, 700), generator=generator)


def build(name: str, **options: Any) -> gnnc.CompiledModel:
    torch.manual_seed(2)
    model = getattr(models, name)(50, 64, 2, 7, **MODELS[name]).eval()
    return gnnc.compile(model, **{"backend": "reference", **options})


@cache
def static(name: str) -> gnnc.CompiledModel:
    return build(name, example_inputs=inputs())


@pytest.mark.first(1)
@each_model
def test_str(name: str, golden: Callable[[str], None]) -> None:
    golden(str(static(name)))


@pytest.mark.first(1)
@each_model
def test_cpu_differs_from_reference_in_names_of_kernels_alone(name: str) -> None:
    text = str(build(name, backend="cpu", example_inputs=inputs()))
    names = r"backend \w+|one kernel \(\w+\)| +(structure_reference|csr_of_edges|csr_with_loops|csr|degree)$"
    unnamed = [re.sub(names, "", t, flags=re.MULTILINE) for t in (text, str(static(name)))]
    assert unnamed[0] == unnamed[1]
    assert "one kernel (spmm)" in text or "one kernel (attention)" in text


@pytest.mark.first(1)
@each_model
def test_explain(name: str, golden: Callable[[str], None]) -> None:
    golden(re.sub(r"\d+\.\d+%", "_%", static(name).explain()))


@pytest.mark.first(1)
@each_model
def test_text_is_deterministic(name: str) -> None:
    assert str(build(name, example_inputs=inputs())) == str(static(name))


def test_dynamic_scales(golden: Callable[[str], None]) -> None:
    compiled = build("GCN")
    with torch.no_grad():
        compiled(*inputs())
    golden(str(compiled))


@each_model
def test_printed_compute_part_computes_what_the_graph_does(name: str) -> None:
    compiled = static(name)
    gm = compiled.graph_module
    values = compiled._captured().examples()
    assert values is not None
    names = namespace(gm)
    exec(graph_source(gm), names)
    with torch.no_grad():
        torch.testing.assert_close(names["forward"](*values), gm(*values), rtol=0, atol=0)


@each_model
def test_every_stage_prints_as_python(name: str) -> None:
    for stage, gm in static(name).stages:
        compile(graph_source(gm), stage, "exec")


@each_model
def test_summary_measures_every_quantized_op(name: str) -> None:
    lines = static(name).summary().splitlines()
    quantized = [line for line in lines if "qgemm" in line or "qspmm" in line]
    assert len(quantized) >= 3
    for line in quantized:
        _, _, bits, precision, error, sqnr, clipped = re.split(r"  +", line)[:7]
        assert (
            (bits.split(" + ")[-1], precision.split(" + ")[-1]) == ("8", "int8")
            and 0 < float(error) < 0.1
            and float(sqnr) > 30
            and int(clipped) >= 0
        )


def test_bf16_is_counted_apart() -> None:
    compiled = build("GCN", precision="bf16", example_inputs=inputs())
    first = str(compiled).splitlines()[0]
    assert re.fullmatch(r"quantized 0 of 4 ops \(.*\), 0 of 2 weights, \d ops in bf16", first)


def test_networkx_and_drawing(tmp_path: Path) -> None:
    compiled = static("GAT")
    graph = compiled.to_networkx()
    assert nx.is_directed_acyclic_graph(graph)
    assert {"qgemm", "qspmm", "edge_softmax"} <= {op for _, op in graph.nodes(data="op")}
    compiled.draw(tmp_path / "gat.svg")
    assert "edge_softmax" in (tmp_path / "gat.svg").read_text(encoding="utf-8")


def test_profile_fills_the_measured_column() -> None:
    compiled = build("GCN")
    with torch.no_grad():
        text = compiled.profile(*inputs())
    assert all("-" not in line.split()[-2:] for line in text.splitlines()[2:])


def test_recaptures_are_told() -> None:
    compiled = build("GCN")
    x, edge_index = inputs()
    with torch.no_grad():
        compiled(x, edge_index)
        compiled(x, edge_index, torch.ones(edge_index.shape[1]))
    captures = compiled.explain().split("Captures\n")[1].splitlines()
    assert captures[0] == "  1. the first call"
    assert len(captures) == 2


def test_dump_of_a_compilation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GNNC_DUMP", str(tmp_path))
    compiled = build("GCN", example_inputs=inputs())
    files = sorted(path.name for path in (tmp_path / "000_GCN").iterdir())
    assert len(files) == len(compiled.stages)
    assert files[-1].endswith("_select_format.py")


class Pictures(torch.nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3)
        self.last = torch.nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).relu()).mean((2, 3)))


@torch.no_grad()
def test_products_that_stay_in_aten_count_with_their_weights() -> None:
    compiled = gnnc.compile(Pictures().eval(), "int8", backend="reference")
    compiled(torch.randn(2, 3, 9, 9))
    head = str(compiled).split("\n\n")[0]
    assert head.startswith("quantized 1 of 3 ops (gemm 1/1, conv2d 0/2), 1 of 3 weights")
    assert [line.split(":")[1] for line in head.split("\n")[2:]] == [" first conv2d", " second conv2d"]


@torch.no_grad()
def test_a_row_of_attention_has_the_precision_of_each_op_and_all_layers() -> None:
    torch.manual_seed(0)
    compiled = gnnc.compile(models.GAT(64, 16, 2, 64, heads=4).eval(), "int8", backend="cpu")
    compiled(torch.randn(30, 64), torch.randint(30, (2, 90)))
    counts = "quantized 3 of 8 ops (gemm 2/2, spmm 1/2, sddmm 0/2, softmax 0/2), 2 of 2 weights"
    assert str(compiled).startswith(counts)
    rows = [line for line in compiled.summary().splitlines() if line.startswith("sddmm + edge_softmax")]
    assert [" ".join(row.split()).split(" - ")[0] for row in rows] == [
        "sddmm + edge_softmax + spmm convs.0, act 32 fp32",
        "sddmm + edge_softmax + qspmm convs.1 32 + 32 + 8 fp32 + fp32 + int8",
    ]
