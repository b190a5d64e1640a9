"""Assign: a precision for every primitive, and why some stay FP32."""

from types import SimpleNamespace

import pytest
import torch
from gnn_graphs import Layers, before_and_after, gat, gat_layer, gcn, run_all, targets

from gnnc.errors import PrecisionError, UnsupportedError
from gnnc.passes.assign import Assign
from gnnc.passes.quantization.number_formats import Option
from gnnc.precision import AUTO, BF16, FP32, INT8, Precision

gnnc = torch.ops.gnnc


def precisions(gm):
    return {
        (n.meta["layer"], n.target.__name__.split(".")[0]): n.meta["precision"].name
        for n in gm.graph.nodes
        if "precision" in n.meta
    }


def texts(ctx):
    return [(note.layer, note.text) for note in ctx.notes]


@pytest.mark.parametrize("precision", [INT8, BF16, FP32])
def test_uniform(precision):
    gm, ctx = run_all(gcn(), [Assign()], precision=precision)
    assert set(precisions(gm).values()) == {precision.name}
    assert not ctx.notes


def test_softmax_and_its_logits_stay_fp32_and_say_so():
    gm, ctx = run_all(gat(), [Assign()])
    assert precisions(gm) == {
        (layer, op): "int8" if op in ("gemm", "spmm") else "fp32"
        for layer in ("conv1", "conv2")
        for op in ("gemm", "spmm", "sddmm", "edge_softmax")
    }
    assert ("conv1", "stays FP32: edge softmax is computed in FP32") in texts(ctx)
    assert ("conv2", "stays FP32: its result is the logits of an edge softmax") in texts(ctx)


def test_a_dot_product_that_feeds_no_softmax_is_quantized():
    b = Layers(32)
    gm = b.finish(b.call(gnnc.sddmm, b.rowptr, b.col, b.x, b.x, "dot"))
    gm, _ = run_all(gm, [Assign()])
    assert precisions(gm) == {("", "sddmm"): "int8"}


def test_overrides_go_by_layer():
    gm, _ = run_all(gcn(), [Assign()], overrides={"conv1": FP32, "conv*": BF16})
    assert set(precisions(gm).items()) == {
        (("conv1", "gemm"), "fp32"),
        (("conv1", "spmm"), "fp32"),
        (("conv2", "gemm"), "bf16"),
        (("conv2", "spmm"), "bf16"),
    }


@pytest.mark.parametrize("glob", ["convs.0", "convs.*", "*.lin", "convs.0.lin", "c*s"])
def test_naming_a_module_names_what_it_holds(glob):
    b = Layers(32)
    b.layer = "convs.0.lin"
    gm, _ = run_all(b.finish(b.linear(b.x, 24)), [Assign()], overrides={glob: FP32})
    assert precisions(gm) == {("convs.0.lin", "gemm"): "fp32"}


@pytest.mark.parametrize("glob", ["lin", "conv", "convs.0.lin.weight", "convs.1", "", "convs.00"])
def test_what_does_not_name_it(glob):
    b = Layers(32)
    b.layer = "convs.0.lin"
    with pytest.raises(PrecisionError, match="matches no layer"):
        run_all(b.finish(b.linear(b.x, 24)), [Assign()], overrides={glob: FP32})


def test_an_override_that_matches_nothing_names_close_layers():
    with pytest.raises(PrecisionError, match=r"'convs.1' matches no layer.*'conv1'"):
        run_all(gcn(), [Assign()], overrides={"convs.1": FP32})


@pytest.mark.parametrize("name", ["int4", "fp16", "binary", "w4a8"])
def test_a_precision_that_the_backend_lacks(name):
    with pytest.raises(UnsupportedError, match=f"no {name} kernels yet; it has bf16, fp32, int8"):
        run_all(gcn(), [Assign()], precision=Precision.parse(name))


def _narrow(width):
    b = Layers(width)
    b.layer = "conv"
    return b.finish(b.spmm(b.x), b.linear(b.x, 24))


@pytest.mark.parametrize(
    ("width", "op", "reason"),
    [(16, "spmm", "a row of 16 FP32 values fits"), (3, "gemm", "an inner width of 3 is less")],
)
def test_what_cannot_pay_stays_fp32_unless_named(width, op, reason):
    gm, ctx = run_all(_narrow(width), [Assign()])
    assert precisions(gm)["conv", op] == "fp32"
    assert any(reason in note.text for note in ctx.notes)
    gm, _ = run_all(_narrow(width), [Assign()], overrides={"conv": INT8})
    assert precisions(gm)["conv", op] == "int8"


def test_the_rules_are_options():
    gm, ctx = run_all(_narrow(3), [Assign(min_row_bytes=0, min_inner_width=1)])
    assert set(precisions(gm).values()) == {"int8"}
    assert not ctx.notes


def test_one_integer_dot_instruction_is_wide_enough():
    gm, _ = run_all(_narrow(4), [Assign(min_row_bytes=0)])
    assert set(precisions(gm).values()) == {"int8"}


def test_bf16_has_no_width_rule():
    gm, _ = run_all(_narrow(3), [Assign()], precision=BF16)
    assert set(precisions(gm).values()) == {"bf16"}


def test_a_named_precision_keeps_the_granularity_that_auto_chose():
    chosen = SimpleNamespace(option=lambda name: Option(INT8, "row"))
    gm, _ = run_all(
        gcn(), [Assign()], precision=AUTO, choice=chosen, overrides={"conv1": INT8, "conv2": BF16}
    )
    assert {
        (n.meta["layer"], n.target.__name__.split(".")[0]): (n.meta["precision"].name, n.meta["granularity"])
        for n in gm.graph.nodes
        if "precision" in n.meta
    } == {
        ("conv1", "gemm"): ("int8", "row"),
        ("conv1", "spmm"): ("int8", "row"),
        ("conv2", "gemm"): ("bf16", None),
        ("conv2", "spmm"): ("bf16", None),
    }


def test_an_op_whose_quantized_form_is_missing_stays_fp32():
    b = Layers(32)
    ends = [b.input(name, (b.n, 2)) for name in ("a_dst", "a_src")]
    rows = [b.input(name, (b.n, 2, 16)) for name in ("h", "grad")]
    csr = b.rowptr, b.col
    node = b.call(gnnc.attention_backward, *csr, *csr, *ends, *rows, None, None, 0.2, 0.0)
    gm, ctx = run_all(b.finish(b.parts(node)[0]), [Assign()])
    assert precisions(gm) == {("", "attention_backward"): "fp32"}
    assert ("", "stays FP32: attention_backward has no quantized form") in texts(ctx)


def test_an_op_without_a_low_form_stays_fp32():
    b = Layers(32)
    gm = b.finish(b.call(gnnc.sddmm, b.rowptr, b.col, b.x, b.x, "add"))
    gm, ctx = run_all(gm, [Assign()])
    assert precisions(gm) == {("", "sddmm"): "fp32"}
    assert texts(ctx) == [("", "stays FP32: sddmm has no low-precision form")]


def test_only_annotates():
    gm, _ = run_all(gcn(), [Assign()])
    assert targets(gm) == targets(gcn())


def test_golden(golden):
    golden(before_and_after(gat_layer(), [], Assign()))
