"""Metrics against hand-computed cases, the summary table, and what explain() says."""

import math
import re
from collections.abc import Callable
from typing import Any

import hand_graphs
import pytest
import torch
from hand_graphs import Builder, gnnc
from torch.fx import GraphModule

from gnnc.cost.quantization_error import quantization_errors, relative_quantization_error, sqnr_db
from gnnc.ir.parts import FORWARD, Parts
from gnnc.passes.base import Note
from gnnc.report.summary import HEADERS, OPTIONAL, OpRow, summary_rows, summary_table
from gnnc.report.text import ProgramReport, explain_text, header_lines, program_text, summary_text


def report(forward: GraphModule, structure: GraphModule | None = None, **fields: Any) -> ProgramReport:
    given = {"model": "GCN", "precision": "int8", "backend": "cpu", **fields}
    return ProgramReport(parts=Parts(structure=structure, forward=forward), **given)


def test_relative_error_of_a_hand_computed_case() -> None:
    # |1 - 0.5| / (1 + 0.5 + eps), |2 - 2| / ..., |-1 + 0.8| / |-1.8 + eps|, 0 / eps
    x = torch.tensor([1.0, 2.0, -1.0, 0.0])
    x_hat = torch.tensor([0.5, 2.0, -0.8, 0.0])
    expected = (0.5 / 1.5005 + 0 + 0.2 / 1.7995 + 0) / 4
    assert relative_quantization_error(x, x_hat) == pytest.approx(expected, rel=1e-6)


def test_relative_error_of_a_value_rounded_to_zero_is_near_one() -> None:
    error = relative_quantization_error(torch.tensor([1.0]), torch.tensor([0.0]))
    assert error == pytest.approx(1 / 1.0005)


def test_relative_error_takes_epsilon() -> None:
    x, x_hat = torch.tensor([3.0]), torch.tensor([1.0])
    assert relative_quantization_error(x, x_hat, eps=1.0) == pytest.approx(2 / 5)


def test_errors_of_equal_and_of_empty_tensors() -> None:
    x = torch.randn(4, 3)
    assert relative_quantization_error(x, x) == 0
    assert sqnr_db(x, x) == math.inf
    assert relative_quantization_error(x[:0], x[:0]) == 0


def test_sqnr_of_a_hand_computed_case() -> None:
    # signal 3² + 4² = 25, noise 0.3² + 0.4² = 0.25: a factor of 100
    x, x_hat = torch.tensor([3.0, 4.0]), torch.tensor([3.3, 3.6])
    assert sqnr_db(x, x_hat) == pytest.approx(20.0, abs=1e-5)
    assert sqnr_db(torch.zeros(2), torch.ones(2)) == -math.inf


@pytest.mark.parametrize("measure", [relative_quantization_error, sqnr_db])
def test_shapes_must_agree(measure: Callable[..., float]) -> None:
    with pytest.raises(ValueError, match=r"shapes differ: \(2,\) and \(3,\)"):
        measure(torch.zeros(2), torch.zeros(3))


def quantize_graph(qtype: str) -> GraphModule:
    b = Builder()
    x = b.input("x", (b.size("n", 5), 2))
    scale = b.input("scale", (), kind="constant")
    shift = b.call(gnnc.row_shift, x, scale, qtype) if "pow2" in qtype else None
    return b.finish(b.call(gnnc.quantize, x, scale, qtype, shift))


def test_quantization_errors_of_a_tensor_scale() -> None:
    x = torch.tensor([[1.0, 2.4], [-0.6, 300.0]])
    (error,) = quantization_errors(quantize_graph("int8/tensor"), [x, torch.tensor(1.0)]).values()
    x_hat = torch.tensor([[1.0, 2.0], [-1.0, 127.0]])
    assert error.relative == pytest.approx(relative_quantization_error(x, x_hat))
    assert error.sqnr == pytest.approx(sqnr_db(x, x_hat))
    assert error.clipped == 1


def test_quantization_errors_of_power_of_two_row_scales() -> None:
    x = torch.tensor([[100.0, 7.4], [12.0, 3.3]])
    (error,) = quantization_errors(quantize_graph("int8/row_pow2"), [x, torch.tensor(1.0)]).values()
    x_hat = torch.tensor([[100.0, 7.0], [12.0, 3.25]])  # the second row has steps of 1/8
    assert error.relative == pytest.approx(relative_quantization_error(x, x_hat))
    assert error.clipped == 0


def test_the_largest_quantized_value_is_not_clipped() -> None:
    x = torch.tensor([[127.4, -127.4]])
    (error,) = quantization_errors(quantize_graph("int8/tensor"), [x, torch.tensor(1.0)]).values()
    assert error.clipped == 0


def test_values_beyond_the_range_of_four_bits_are_clipped() -> None:
    x = torch.tensor([[7.4, -9.0], [3.0, 8.0]])
    (error,) = quantization_errors(quantize_graph("int4/tensor"), [x, torch.tensor(1.0)]).values()
    assert error.clipped == 2


def test_errors_are_the_same_fused_and_unfused() -> None:
    flat, fused = hand_graphs.quantized_layer(), hand_graphs.fused_layer()
    measured = [quantization_errors(gm, hand_graphs.values(gm)) for gm in (flat, fused)]
    assert sorted(e.sqnr for e in measured[0].values()) == sorted(e.sqnr for e in measured[1].values())


def test_summary_has_a_row_for_each_launch() -> None:
    gm = hand_graphs.fused_layer()
    rows = summary_rows(gm, values=hand_graphs.values(gm))
    assert [(row.op, row.layer, row.bits) for row in rows] == [
        ("qgemm", "conv1.lin", "8"),
        ("qspmm", "conv1", "8"),
    ]
    assert all(row.error is not None and 0 < row.error < 0.1 for row in rows)


def test_what_is_not_measured_is_a_dash() -> None:
    rows = summary_rows(hand_graphs.float_layer())
    assert {(row.error, row.sqnr, row.gain, row.predicted, row.measured) for row in rows} == {(None,) * 5}
    line = summary_table(rows).splitlines()[2].split()
    assert line[:3] == ["gemm", "conv1.lin", "32"]
    assert line[3:7] == ["fp32", *["-"] * 3] and line[-2:] == ["-", "-"]


def test_costs_of_a_gemm_and_an_spmm() -> None:
    gm = hand_graphs.float_layer()
    rows = {row.op: row for row in summary_rows(gm, values=hand_graphs.values(gm))}
    assert rows["gemm"].flops == 2 * 5 * 16 * 8
    assert rows["gemm"].bytes == 4 * (5 * 16 + 8 * 16 + 5 * 8)
    assert rows["spmm"].flops == 12 * 8
    assert rows["spmm"].bytes == 6 * 8 + 12 * 4 + 12 * 8 * 4 + 5 * 8 * 4


def test_sizes_come_from_the_values() -> None:
    gm = hand_graphs.float_layer()
    values = hand_graphs.values(gm)
    values[0], values[1] = torch.randn(50, 16), torch.tensor([0] + [12] * 50)
    values[3] = torch.ones(50)
    (row,) = [row for row in summary_rows(gm, values=values) if row.op == "gemm"]
    assert row.flops == 2 * 50 * 16 * 8


def test_a_fused_kernel_moves_what_crosses_its_border() -> None:
    gm = hand_graphs.fused_layer()
    gemm, spmm = summary_rows(gm, values=hand_graphs.values(gm))
    assert gemm.bytes == 4 * (5 * 16 + 8 * 16 + 1) + 5 * 8 + 5
    operands = 6 * 8 + 12 * 4 + 5 * 8 + 5 + 4 + 8 * 4
    gathered = 12 * 8 + 12 - 5 * 8 - 5  # 12 rows of quantized values and shifts, beyond one reading of the 5
    assert spmm.bytes == operands + gathered + 5 * 8 * 4


def test_measured_times_are_shown_and_added_up() -> None:
    rows = [
        OpRow(op="gemm", layer="a", measured=0.002, floor=0.001),
        OpRow(op="spmm", layer="b", measured=0.001, floor=0.0005),
    ]
    assert summary_table(rows).splitlines()[-1].split()[-2:] == ["3.000", "0.50"]
    partly = [*rows, OpRow(op="relu", layer="")]
    assert summary_table(partly).splitlines()[-1].split()[-2:] == ["-", "-"]


def test_table_golden(golden: Callable[[str], None]) -> None:
    full = OpRow(
        op="qgemm", layer="conv1.lin", bits="8", error=0.01234, sqnr=41.25, clipped=3, gain=0.5,
        bytes=12_345_678, flops=999, predicted=0.00123, measured=1.5, floor=0.9, precision="int8",
        sensitivity=0.0042, alternative=("bf16", 0.00012, 0.0016),
    )  # fmt: skip
    golden(summary_table([full, OpRow(op="relu", layer="", sqnr=math.inf, bytes=1000)]))


def test_table_without_rows_has_headers() -> None:
    assert summary_table([]).split()[:3] == list(HEADERS[:3])


def test_header_counts_what_is_quantized() -> None:
    first, second = header_lines(report(hand_graphs.fused_layer()))
    assert first == "quantized 2 of 2 ops (gemm 1/1, spmm 1/1), 1 of 1 weights"
    assert second == "GCN, int8 on backend cpu"


NOTES = (
    Note("raise", "topk", "pool", "aten.topk matches no primitive"),
    Note("assign", "gemm_default", "conv1", "stays FP32: the override says fp32"),
    Note("lower", "sddmm_default", "conv1", "kernel sddmm_avx512 declined: 3 heads", "declined"),
)


def test_header_says_why_an_op_stayed_fp32(golden: Callable[[str], None]) -> None:
    golden("\n".join(header_lines(report(hand_graphs.attention_layer(), notes=NOTES))))


def test_explain(golden: Callable[[str], None]) -> None:
    captures = ("the first call", "x has 2 columns, not 16")
    golden(explain_text(report(hand_graphs.attention_layer(), notes=NOTES, captures=captures)))


@pytest.mark.parametrize(("cuts", "lines"), [(["one", "two"], "  one\n  two"), ([], "  none")])
def test_explain_says_which_cuts_were_measured(cuts: list[str], lines: str) -> None:
    text = explain_text(report(hand_graphs.attention_layer(), cuts=cuts))
    assert f"\n\nCuts of the graph, measured\n{lines}\n\nStayed FP32\n" in text


def test_fp32_program_gives_the_request_as_the_reason() -> None:
    lines = header_lines(report(hand_graphs.float_layer(), precision="fp32"))
    assert lines[0] == "quantized 0 of 2 ops (gemm 0/1, spmm 0/1), 0 of 1 weights"
    assert "stayed FP32: conv1 spmm: fp32 was asked for" in lines


def test_program_text_is_header_and_program() -> None:
    text = program_text(report(hand_graphs.fused_layer(), structure=hand_graphs.structure()))
    assert text.startswith("quantized 2 of 2 ops")
    assert text.index("def structure(") < text.index("def compute(")


def test_summary_text_takes_times_by_graph_and_node() -> None:
    text = summary_text(report(hand_graphs.fused_layer(), measured={(FORWARD, "fused_0"): 0.004}))
    (line,) = [line for line in text.splitlines() if line.startswith("qgemm")]
    assert line.split()[-1] == "4.000"


def test_a_time_below_the_floor_has_no_fraction_of_it() -> None:
    """Operands of small launches come from a cache, faster than from memory."""
    row = OpRow(op="gemm", layer="a", measured=0.001, floor=0.031)
    table = summary_table([row, OpRow(op="spmm", layer="a", measured=0.001, floor=0.0005)]).splitlines()
    assert table[2].split()[-2:] == ["1.000", "-"] and table[3].split()[-2:] == ["1.000", "0.50"]


def test_columns_of_optional_knowledge_are_left_out_where_nothing_is_known() -> None:
    bare = summary_table([OpRow(op="gemm", layer="a")]).splitlines()[0]
    kept = [header for header in HEADERS if header not in OPTIONAL]
    assert re.split(r"  +", bare) == kept
    assert {"op", "layer", "bits", "error (eq. 4)", "SQNR dB", "RF gain", "bytes", "flops"} < set(kept)
    known = summary_table([OpRow(op="gemm", layer="a", sensitivity=0.1, clipped=0)]).splitlines()[0]
    assert set(re.split(r"  +", known)) - set(kept) == {"sensitivity", "clipped"}


def test_a_launch_that_only_quantizes_has_both_precisions() -> None:
    (row,) = summary_rows(quantize_graph("int8/tensor"))
    assert (row.op, row.bits, row.precision) == ("quantize", "32→8", "fp32→int8")
