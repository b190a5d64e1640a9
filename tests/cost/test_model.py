"""Work of launches, and its time, against cases computed by hand."""

import math

import hand_graphs
import pytest
import sympy
import torch
from fixed_rates import FIXED
from gnn_graphs import Layers, arguments, gcn, run_all

from gnnc.cost import model
from gnnc.cost.model import ALONE, KNOTS, Rates, Term
from gnnc.ir import describe
from gnnc.passes.assign import Assign
from gnnc.passes.cache import Cache
from gnnc.passes.fuse import Fuse
from gnnc.passes.quantize import Quantize
from gnnc.precision import FP32, INT8

ops = torch.ops.gnnc


def numbers(terms, gm):
    sizes = model.sizes_of(gm.graph.find_nodes(op="placeholder"), arguments(gm))
    return {t.name: t.at(lambda e: model.evaluate(e, sizes)) for t in terms}


def primitive(gm, name):
    return next(n for n in gm.graph.nodes if str(n.target) == f"gnnc.{name}.default")


def test_a_gemm_multiplies_rows_by_columns_by_inner_width() -> None:
    b = Layers(32)
    gm = b.finish(b.linear(b.x, 24))
    terms = numbers(model.op_terms(primitive(gm, "gemm"), "int8"), gm)
    assert terms == {"dot.int8": Term("dot.int8", 30 * 24 * 32)}


def test_an_spmm_fetches_cache_lines_from_its_table() -> None:
    b = Layers(20)
    gm = b.finish(b.spmm(b.x))
    node = primitive(gm, "spmm")
    terms = numbers(model.op_terms(node, "fp32"), gm)
    assert terms["edge.fp32"].amount == 150 and terms["row"].amount == 30
    assert terms["gather.fp32"] == Term("gather.fp32", 150 * 128, 30 * 80)
    narrow = numbers(model.op_terms(node, "int8.row", 1), gm)
    assert narrow["gather.int8.row"] == Term("gather.int8.row", 150 * 64, 30 * 32)


def lowered(precision):
    gm, _ = run_all(gcn(), (Assign(min_row_bytes=0), Quantize(), Cache(), Fuse()), precision=precision)
    return gm


@pytest.mark.parametrize("precision", [FP32, INT8], ids=str)
def test_every_launch_of_a_model_has_work_of_known_sizes(precision) -> None:
    gm = lowered(precision)
    found = model.launches(describe.inline(gm))
    assert [launch.family for launch in found] == ["gemm", "spmm", "gemm", "spmm"]
    for launch in found:
        terms = numbers(model.work(launch), gm)
        assert terms["launch"].amount == 1
        assert all(t.amount is not None and t.amount >= 0 for t in terms.values())
        assert FIXED.seconds(launch.family, terms.values()) > 1e-6


def test_modes_tell_how_integers_are_added() -> None:
    modes = [
        model.mode_of(n)
        for launch in model.launches(describe.inline(lowered(INT8)))
        for n in launch.primitives
    ]
    assert modes == ["int8", "int8.row", "int8", "int8.row"]


def test_a_term_is_split_between_the_knots_around_its_memory() -> None:
    middle = math.sqrt(KNOTS[1] * KNOTS[2])
    assert model.parts(Term("read", 8, middle)) == [
        ("read@1", pytest.approx(4)), ("read@2", pytest.approx(4)),
    ]  # fmt: skip
    assert model.parts(Term("read", 8, 1)) == [("read@0", 8.0)]
    assert model.parts(Term("read", 8, KNOTS[2])) == [("read@2", 8.0)]
    assert model.parts(Term("read", 8, 1e15)) == [(f"read@{len(KNOTS) - 1}", 8.0)]
    assert model.parts(Term("row", 8)) == [("row", 8.0)]


def test_seconds_add_up_and_fall_back() -> None:
    rates = Rates({"gemm": {"launch": 1.0, "read@1": 2.0}, ALONE: {"step": 3.0}})
    assert rates.seconds("gemm", [Term("launch", 1), Term("read", 5, KNOTS[1])]) == 11
    assert rates.seconds("gemm", [Term("read", 5, KNOTS[3])]) == 10, "the nearest knot that was measured"
    assert rates.seconds("gemm", [Term("step", 2)]) == 6, "as for what runs alone"
    free = Rates({"gemm": {"step": 0.0}, ALONE: {"step": 3.0}})
    assert free.seconds("gemm", [Term("step", 2)]) == 0, "nothing is a rate too"
    assert rates.seconds("never seen", [Term("step", 2)]) == 6
    assert rates.seconds("gemm", [Term("unheard of", 2)]) == 0


def test_sizes_come_from_values_or_from_the_capture() -> None:
    b = Layers(4)
    gm = b.finish(b.relu(b.x))
    inputs = gm.graph.find_nodes(op="placeholder")
    n = b.n.node.expr
    assert model.sizes_of(inputs, None)[n] == 5
    assert model.sizes_of(inputs, arguments(gm))[n] == 30
    assert model.evaluate(n * 2, {n: 3}) == 6
    assert model.evaluate(sympy.Symbol("k"), {}) is None


def test_the_floor_of_a_launch_is_its_operands_and_results_once() -> None:
    graph = hand_graphs.fused_layer()
    values = hand_graphs.values(graph)
    floors = model.floor_times(graph, values, bandwidth=1.0)
    sizes = model.sizes_of(graph.graph.find_nodes(op="placeholder"), values)
    for launch in model.launches(describe.inline(graph)):
        gathered = model.evaluate(model.traffic(launch), sizes) - floors[launch.name]
        assert floors[launch.name] > 0 and gathered >= 0
    assert model.floor_times(graph, values, bandwidth=2.0) == {name: s / 2 for name, s in floors.items()}


def test_bytes_of_quantized_values_follow_their_bits() -> None:
    b = hand_graphs.Builder()
    narrow, wide = (b.input(f"x{bits}", (7, 64), qtype=f"int{bits}/row") for bits in (4, 8))
    strided = b.input("strided", (7, 64), qtype="int4/row/stride=128")
    assert [model.held(node) for node in (narrow, wide)] == [7 * 32, 7 * 64]
    assert [model.padded(node, 1) for node in (narrow, strided)] == [7 * 64, 7 * 128]


def traffic_of_sum(bits: int) -> sympy.Expr:
    b = hand_graphs.Builder()
    rowptr = b.input("rowptr", (6,), dtype=torch.int64, kind="structure")
    col = b.input("col", (12,), dtype=torch.int32, kind="structure")
    x = b.input("x", (5, 64), qtype=f"int{bits}/tensor")
    gm = b.finish(b.call(ops.qspmm, rowptr, col, None, x, None, None, "sum", 5))
    (launch,) = model.launches(describe.inline(gm))
    return model.traffic(launch)


def test_edges_gather_the_bytes_of_a_row() -> None:
    assert traffic_of_sum(8) - traffic_of_sum(4) == 12 * 32
