"""Printed programs, stages, summaries and explanations of programs that compute gradients."""

import re

import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, MessagePassing

import gnnc
from gnnc.ir.parts import BACKWARD, FORWARD


@pytest.fixture(scope="module")
def compiled() -> gnnc.CompiledModel:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = GCNConv(6, 8), GCNConv(8, 3)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    compiled = gnnc.compile(Net().train(), "fp32")
    compiled(torch.randn(10, 6), torch.randint(10, (2, 30))).sum().backward()
    return compiled


def test_all_parts_are_printed(compiled: gnnc.CompiledModel) -> None:
    text = str(compiled)
    assert [f"def {part}(" in text for part in ("structure", "compute", "backward")] == [True] * 3
    assert "conv1.lin (backward)" in text
    assert compiled.backward_graph_module is not None


def test_what_crosses_to_the_backward_graph_has_one_name_in_both(compiled: gnnc.CompiledModel) -> None:
    forward, backward = str(compiled).split("# runs when gradients are computed\n")
    assert backward.splitlines()[:3] == [
        "# saved by compute, 57*N bytes: h2, h5, h5_mask",
        "# read by both: g2, rowptr_t, col_t, conv2_lin_weight",
        "# computed again: nothing",
    ]
    returned = forward.rstrip().splitlines()[-1]
    for name in ("h2", "h5", "h5_mask"):
        assert name in returned
        assert f"    {name}, " in backward


def test_stages_hold_the_joint_graph_until_it_is_cut(compiled: gnnc.CompiledModel) -> None:
    outputs = {name: len(gm.graph.output_node().args[0]) for name, gm in compiled.stages}
    assert outputs["reorder"] == 1
    assert outputs["joint"] == outputs["cache"] == 1 + 4  # the output and four gradients
    assert "csr_transpose" in str(compiled.structure_graph_module.graph)  # pyright: ignore


def test_summary_and_explain_tell_of_both_sides(compiled: gnnc.CompiledModel) -> None:
    assert "conv2.lin (backward)" in compiled.summary()
    saved = compiled.explain().partition("Saved for the backward graph\n")[2].partition("\n\n")[0]
    assert "h5, f32[N, 8], 32*N bytes" in saved
    assert "together: 57*N bytes" in saved


def test_times_are_those_of_the_op_in_its_own_graph(compiled: gnnc.CompiledModel) -> None:
    compiled.profile(torch.randn(10, 6), torch.randint(10, (2, 30)))
    program = compiled._dispatch.last
    names = {part: {name for graph, name in program.timings if graph == part} for part in (FORWARD, BACKWARD)}
    assert names[FORWARD] & names[BACKWARD]
    for part, seconds in ((FORWARD, 1.0), (BACKWARD, 2.0)):
        program.timings |= {(part, name): seconds for name in names[part]}
    table = compiled.summary().splitlines()
    assert all("2,000.000" in row for row in table if "(backward)" in row)
    assert any("1,000.000" in row for row in table)
    assert not any("1,000.000" in row for row in table if "(backward)" in row)


def test_an_inference_program_has_no_backward_graph(compiled: gnnc.CompiledModel) -> None:
    twin = gnnc.compile(compiled.model, "fp32")
    with torch.no_grad():
        twin(torch.randn(10, 6), torch.randint(10, (2, 30)))
    assert twin.backward_graph_module is None
    assert "Saved for" not in twin.explain()


@pytest.fixture(scope="module")
def attention() -> gnnc.CompiledModel:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = GATConv(32, 8, heads=4), GATConv(32, 7)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    torch.manual_seed(0)
    compiled = gnnc.compile(Net().train(), "int8", backend="cpu")
    compiled(torch.randn(50, 32), torch.randint(50, (2, 200))).sum().backward()
    return compiled


@pytest.fixture(scope="module")
def maximum() -> gnnc.CompiledModel:
    class Conv(MessagePassing):
        def __init__(self) -> None:
            super().__init__(aggr="max")
            self.lin = nn.Linear(12, 8)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_i: torch.Tensor, x_j: torch.Tensor) -> torch.Tensor:
            return self.lin(torch.cat([x_i, x_i * x_j], -1)).sigmoid()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.conv = nn.Linear(6, 6), Conv()

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.conv(self.lin(x), edge_index)

    compiled = gnnc.compile(Net().train(), "int8", backend="cpu")
    compiled(torch.randn(50, 6), torch.randint(50, (2, 200))).sum().backward()
    return compiled


def test_a_kernel_that_dequantizes_what_it_loads_counts_as_quantized(attention: gnnc.CompiledModel) -> None:
    stayed = attention.explain().partition("Stayed FP32\n")[2].partition("\n\n")[0]
    assert "conv1 (backward) attention_backward" not in stayed
    assert "conv2 (backward) attention_backward: a row of 7 FP32 values" in stayed
    counts = "quantized 5 of 13 ops (gemm 3/5, spmm 2/4, sddmm 0/2, softmax 0/2), 1 of 2 weights"
    head = f"{counts}; forward 2 of 8, backward 3 of 5\nNet, int8 on backend cpu\n"
    assert str(attention).startswith(head) and attention.explain().startswith(head)
    rows = [row for row in attention.summary().splitlines() if row.startswith("attention_backward")]
    assert sorted(" ".join(row.split()).split(" - ")[0] for row in rows) == [
        "attention_backward conv1, conv1 (backward) 8 int8",
        "attention_backward conv2 (backward) 32 fp32",
    ]


def section(compiled: gnnc.CompiledModel, title: str) -> list[str]:
    """Return the lines of a section of explain()."""
    return compiled.explain().partition(f"\n\n{title}\n  ")[2].partition("\n\n")[0].split("\n  ")


def test_what_a_kernel_of_the_backend_computes_has_not_stayed_in_aten(attention: gnnc.CompiledModel) -> None:
    converted = [line for line in str(attention).splitlines() if "aten._to_copy(" in line]
    assert [line.split()[-1] for line in converted if line.startswith("    d")] == ["map"] * 3
    assert section(attention, "Stayed ATen") == ["conv2 (backward) sum: runs by itself, in its own precision"]


def test_why_an_op_runs_by_itself_is_told_once(maximum: gnnc.CompiledModel) -> None:
    reason = "conv (backward) div: runs by itself: it is not local to a row"
    assert reason in section(maximum, "Stayed ATen")
    assert maximum.explain().count(reason) == 1
    assert "fuse: conv message: runs by itself: it is not local to a row" in maximum.explain()


def test_a_comparison_that_forward_does_not_make_is_said_to_be_of_a_gradient(
    maximum: gnnc.CompiledModel,
) -> None:
    feeds = "its result feeds ne, a comparison in the gradient of conv, which reads no rounded values"
    assert {f"lin gemm: {feeds}", f"conv message: {feeds}"} <= set(section(maximum, "Stayed FP32"))


def test_a_body_has_one_name_in_the_whole_program(maximum: gnnc.CompiledModel) -> None:
    text = str(maximum)
    defined = re.findall(r"^(body\d+) = \(.*?^\)$", text, re.MULTILINE | re.DOTALL)
    assert defined == [f"body{place}" for place in range(len(defined))] and len(defined) > 2
    texts = re.findall(r"^body\d+ = (\(.*?^\))$", text, re.MULTILINE | re.DOTALL)
    assert len(set(texts)) == len(texts)
    used = set(re.findall(r"[(\[ ](body\d+)[,\]]", text))
    assert used == set(defined)


def test_what_belongs_to_no_layer_belongs_to_the_model(attention: gnnc.CompiledModel) -> None:
    line = "<model> (backward) relu_backward: relu_backward has no low-precision form"
    assert line in section(attention, "Stayed FP32")
    assert "<model> (backward)" in attention.summary()
