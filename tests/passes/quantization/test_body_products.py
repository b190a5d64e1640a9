"""Products inside bodies: which are computed in low precision, which stay, and what they mean then."""

from dataclasses import replace

import pytest
import torch
from gnn_graphs import Layers, arguments, relative_error, run_all

from gnnc.ir.body import parse_body
from gnnc.ir.nodes import argument
from gnnc.ir.source import Source
from gnnc.passes.assign import Assign
from gnnc.passes.exact_values import ExactValues
from gnnc.passes.quantize import Quantize
from gnnc.precision import BF16, FP32, INT8, Precision
from gnnc.target import Target

gnnc = torch.ops.gnnc
aten = torch.ops.aten
FP16 = Precision.parse("fp16")
KERNELS = Target(
    precisions=frozenset({"fp32", "fp16", "bf16", "int8"}), body_products=frozenset({"int8", "bf16"})
)
TENSOR_CORES = Target(
    precisions=frozenset({"fp32", "fp16", "bf16", "int8"}), body_products=frozenset({"fp16", "bf16"})
)

MLP = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.linear.default(t0, c0, c1); t2 = aten.silu.default(t1); "
    "t3 = aten.linear.default(t2, c2, None); return t3"
)
GATE = (
    "t0 = aten.linear.default(e0, c0, None); t1 = aten.t.default(c1); t2 = aten.mm.default(e0, t1); "
    "t3 = aten.sigmoid.default(t0); t4 = aten.mul.Tensor(t2, t3); return t4"
)
HEADS = "t0 = aten.view.default(j0, [-1, 4, 8]); t1 = aten.linear.default(t0, c0, c1); return t1"
NARROW = "t0 = aten.linear.default(j0, c0, None); t1 = aten.linear.default(e0, c1, None); t2 = aten.add.Tensor(t0, t1); return t2"  # noqa: E501
COMPARED = (
    "t0 = aten.linear.default(j0, c0, None); t1 = aten.eq.Tensor(t0, i0); "
    "t2 = aten.mul.Tensor(t0, t1); return t2"
)
NARROW_ROWS = (
    "t0 = aten.linear.default(e0, c0, c1); t1 = aten.sum.dim_IntList(j0, [-1], True); "
    "t2 = aten.mul.Tensor(t0, t1); return t2"
)
EXACT_ROWS = (
    "t0 = aten.linear.default(e0, c0, c1); t1 = aten.sum.dim_IntList(j0, [-1], True); "
    "t2 = aten.gt.Scalar(t1, 0.5); t3 = aten.mul.Tensor(t0, t2); return t3"
)
PLAIN = "t0 = aten.add.Tensor(i0, j0); return t0"


def graph_of(body, edge=(), weights=(), width=32):
    """Return the graph of one message."""
    b = Layers(width)
    edges = [b.edge_input(f"e{k}", size) for k, size in enumerate(edge)]
    consts = [b.weight(f"w{k}", *shape) for k, shape in enumerate(weights)]
    ends = [b.x], [b.x]
    return b.finish(b.call(gnnc.message, b.rowptr, b.col, body, "sum", *ends, edges, consts, b.nodes))


CASES = {
    "mlp": (MLP, (), ((24, 32), (24,), (7, 24))),
    "gate": (GATE, (16,), ((24, 16), (24, 16))),
    "heads": (HEADS, (), ((6, 8), (6,))),
    "narrow": (NARROW, (3,), ((24, 32), (24, 3))),
    "compared": (COMPARED, (), ((32, 32),)),
    "plain": (PLAIN, (), ()),
}


def ran(name, precision=INT8, target=KERNELS):
    """Return the graph before and after the passes, and the notes."""
    before = graph_of(*CASES[name])
    after, ctx = run_all(before, (Assign(), Quantize()), precision=precision, target=target)
    return before, after, [note.text for note in ctx.notes]


def message(gm):
    return next(node for node in gm.graph.nodes if str(node.target) == "gnnc.message.default")


def calls(gm):
    """Return the names of the ops of the body."""
    graph = parse_body(argument(message(gm), "body")).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


QUANTIZED = [f"gnnc.{op}.default" for op in ("scale", "quantize", "qgemm", "dequantize", "dequantize")]


def test_products_of_a_chain_are_quantized_one_by_one():
    _, gm, notes = ran("mlp")
    assert calls(gm) == ["aten.add.Tensor", *QUANTIZED, "aten.add.Tensor", "aten.silu.default", *QUANTIZED]
    assert message(gm).meta["precision"] == INT8
    assert "2 of 2 products of its body in int8" in notes


def test_weights_are_quantized_outside_the_body_and_replaced():
    _, gm, _ = ran("mlp")
    consts = argument(message(gm), "const")
    kinds = [(str(value.target), value.meta["val"].dtype) for value in consts]
    quantized = ("gnnc.quantize.default", torch.int8), ("gnnc.scale.default", torch.float32)
    assert kinds == [("in_w1", torch.float32), *quantized, *quantized]


def test_products_of_one_value_share_what_it_is_quantized_to():
    _, gm, _ = ran("gate")
    assert calls(gm).count("gnnc.quantize.default") == 1
    assert calls(gm).count("gnnc.qgemm.default") == 2


def test_products_of_16_bits_are_those_of_rounded_operands():
    for precision, target, dtype in ((BF16, KERNELS, torch.bfloat16), (FP16, TENSOR_CORES, torch.float16)):
        _, gm, _ = ran("mlp", precision, target)
        product = ["aten._to_copy.default", "gnnc.gemm.default"]
        assert calls(gm) == ["aten.add.Tensor", *product, "aten.add.Tensor", "aten.silu.default", *product]
        dtypes = {value.meta["val"].dtype for value in argument(message(gm), "const")}
        assert dtypes == {torch.float32, dtype}


def test_integers_without_a_kernel_in_bodies_become_fp16():
    _, gm, notes = ran("mlp", INT8, TENSOR_CORES)
    assert "gnnc.gemm.default" in calls(gm)
    assert "2 of 2 products of its body in fp16" in notes


def ran_in_training(target):
    """Return the message of a program in fp16 whose rows of nodes are a gradient, and the notes."""
    gm = graph_of(NARROW, (16,), ((24, 32), (24, 16)))
    rows = argument(message(gm), "src")[0]
    rows.meta["source"] = Source("tangent", "x")
    after, ctx = run_all(gm, (Assign(), Quantize()), precision=FP16, target=target)
    return message(after), [note.text for note in ctx.notes]


def test_products_with_gradients_are_bf16_where_others_are_fp16():
    node, notes = ran_in_training(TENSOR_CORES)
    converted = [
        (str(inner.args[0]), argument(inner, "dtype"))
        for inner in parse_body(argument(node, "body")).graph.find_nodes(
            op="call_function", target=aten._to_copy.default
        )
    ]
    assert sorted(converted) == [("e0", torch.float16), ("j0", torch.bfloat16)]
    assert {value.meta["val"].dtype for value in argument(node, "const")} == {torch.float16, torch.bfloat16}
    assert "1 of 2 products of its body in bf16 and 1 of 2 products of its body in fp16" in notes


def test_products_with_gradients_stay_where_no_kernel_multiplies_in_bf16():
    only_fp16 = replace(TENSOR_CORES, body_products=frozenset({"fp16"}))
    node, notes = ran_in_training(only_fp16)
    assert [str(inner.target) for inner in parse_body(argument(node, "body")).graph.nodes].count(
        "aten.linear.default"
    ) == 1
    assert any("1 of 2 products of its body in fp16; one in FP32: gradients in a body" in n for n in notes)


GATHERS = replace(TENSOR_CORES, rounds_body_rows=True)


def test_rows_of_sources_are_gathered_in_the_16_bits_of_the_products():
    before, gm, notes = ran("mlp", FP16, GATHERS)
    (rows,) = argument(message(gm), "src")
    assert rows.meta["val"].dtype == torch.float16
    assert calls(gm)[:2] == ["aten._to_copy.default", "aten.add.Tensor"]
    assert argument(message(gm), "dst")[0].meta["val"].dtype == torch.float32
    assert "gathers rows of sources in fp16" in notes
    assert 0 < relative_error(gm(*arguments(gm)), before(*arguments(before))) < 0.002


@pytest.mark.parametrize(
    ("name", "width", "target"), [("mlp", 32, TENSOR_CORES), ("offset", 3, GATHERS), ("exact", 32, GATHERS)]
)
def test_other_rows_of_sources_stay(name, width, target):
    bodies = {"mlp": MLP, "offset": NARROW_ROWS, "exact": EXACT_ROWS}
    before = graph_of(bodies[name], (16,), ((24, 16 if name != "mlp" else width), (24,), (7, 24)), width)
    gm, ctx = run_all(before, (ExactValues(), Assign(), Quantize()), precision=FP16, target=target)
    assert "gnnc.gemm.default" in calls(gm)
    assert argument(message(gm), "src")[0].meta["val"].dtype == torch.float32
    assert not any("gathers" in note.text for note in ctx.notes)


@pytest.mark.parametrize(
    ("precision", "dtype", "note"),
    [
        (FP16, torch.float16, "gathers rows of sources in fp16"),
        (BF16, torch.bfloat16, "gathers rows of sources in bf16"),
        (INT8, torch.bfloat16, "gathers rows of sources in bf16, not int8: it adds no integers"),
    ],
    ids=str,
)
def test_messages_without_products_gather_16_bits(precision, dtype, note):
    before, gm, notes = ran("plain", precision, GATHERS)
    assert argument(message(gm), "src")[0].meta["val"].dtype == dtype
    assert argument(message(gm), "dst")[0].meta["val"].dtype == torch.float32
    assert calls(gm) == ["aten._to_copy.default", "aten.add.Tensor"] and note in notes
    assert message(gm).meta["precision"] == precision
    assert 0 < relative_error(gm(*arguments(gm)), before(*arguments(before))) < 0.01


@pytest.mark.parametrize(
    ("body", "width"),
    [
        (PLAIN, 7),
        ("t0 = aten.gt.Tensor(i0, j0); t1 = aten.mul.Tensor(i0, t0); return t1", 32),
        ("t0 = aten.sub.Tensor(j0, i0); t1 = aten.mul.Tensor(t0, t0); return t1", 32),
    ],
)
def test_messages_without_products_stay_where_rows_are_narrow_compared_or_subtracted(body, width):
    gm, ctx = run_all(graph_of(body, width=width), (Assign(), Quantize()), precision=FP16, target=GATHERS)
    assert argument(message(gm), "src")[0].meta["val"].dtype == torch.float32
    assert any("message has no low-precision form" in note.text for note in ctx.notes)


@pytest.mark.parametrize("name", ["mlp", "gate", "heads", "narrow"])
@pytest.mark.parametrize(("precision", "most"), [(INT8, 0.02), (BF16, 0.01)], ids=str)
def test_the_meaning_stays(name, precision, most):
    before, after, _ = ran(name, precision)
    assert 0 < relative_error(after(*arguments(after)), before(*arguments(before))) < most


def test_narrow_products_stay():
    _, gm, notes = ran("narrow")
    assert calls(gm).count("aten.linear.default") == 1
    assert any("1 of 2 products of its body in int8; one in FP32: an inner width of 3" in n for n in notes)


@pytest.mark.parametrize(
    ("name", "precision", "target", "reason"),
    [
        ("compared", INT8, KERNELS, "its result feeds eq in the body"),
        ("plain", INT8, KERNELS, "message has no low-precision form"),
        ("mlp", INT8, Target(), "no kernel of bodies multiplies in int8 on this backend"),
        ("mlp", FP16, KERNELS, "no kernel of bodies multiplies in fp16 on this backend"),
    ],
)
def test_it_refuses(name, precision, target, reason):
    before, after, notes = ran(name, precision, target)
    assert message(after).meta["precision"] == FP32
    assert argument(message(after), "body") == argument(message(before), "body")
    assert any(reason in note for note in notes)
