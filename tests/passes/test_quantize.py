"""Quantize: which integers and scales each primitive takes, and what that costs in accuracy."""

import pytest
import torch
from gnn_graphs import (
    MODELS,
    Layers,
    arguments,
    before_and_after,
    gcn_layer,
    relative_error,
    run_all,
    targets,
)

from gnnc.errors import PrecisionError
from gnnc.ir.qtype import QType
from gnnc.passes.assign import Assign
from gnnc.passes.quantization.number_formats import Option
from gnnc.passes.quantization.observe import CANDIDATES, Observation, choose, observe, row_error, spmm_sum
from gnnc.passes.quantization.saved_plan import Plan
from gnnc.passes.quantize import Quantize
from gnnc.precision import BF16, FP32, INT8, Precision
from gnnc.target import Target

gnnc = torch.ops.gnnc
aten = torch.ops.aten
PASSES = (Assign(min_row_bytes=0), Quantize())


def quantized(gm, *, static=False, **options):
    examples = arguments(gm) if static else None
    return run_all(gm, PASSES, examples=examples, **options)


def one(build, width=32):
    """A graph of one op."""
    b = Layers(width)
    return b.finish(build(b))


def error(gm, original):
    """How far the quantized graph is from the original, on the same values."""
    return relative_error(gm(*arguments(gm)), original(*arguments(original)))


def primitives(gm):
    return [name for name in targets(gm) if not name.startswith(("sym_size", "unsqueeze"))]


def node(gm, name):
    return next(n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == f"{name}.default")


def test_gemm_takes_a_scale_a_row_and_a_scale_a_channel():
    gm, _ = quantized(one(lambda b: b.linear(b.x, 24, bias=True)))
    assert primitives(gm) == [
        "scale.default", "quantize.default", "scale.default", "quantize.default",
        "qgemm.default", "dequantize.default", "dequantize.default", "add.Tensor",
    ]  # fmt: skip
    rows, columns = (n for n in gm.graph.nodes if "dequantize" in str(n.target))
    assert (rows.args[2], columns.args[2]) == ("row", "column")


def test_gemm_with_the_other_weight_layout():
    build = lambda b: b.call(gnnc.gemm, b.x, b.weight("w", 32, 24), None, True)  # noqa: E731
    gm, _ = quantized(one(build))
    assert "t.default" in primitives(gm)
    assert error(gm, one(build)) < 0.02


def test_gemm_of_three_dimensions_works_on_rows():
    def build(b):
        heads = b.call(aten.view, b.x, [-1, 4, 8])
        return b.call(gnnc.gemm, heads, b.weight("w", 6, 8), None, False)

    gm, _ = quantized(one(build))
    assert gm(*arguments(gm))[0].shape == (30, 4, 6)
    assert error(gm, one(build)) < 0.02


def test_gemm_of_a_vector_is_refused_with_a_reason():
    build = lambda b: b.call(gnnc.gemm, b.weight("v", 32), b.weight("w", 6, 32))  # noqa: E731
    gm, ctx = run_all(one(build), (Assign(min_inner_width=0), Quantize()))
    assert primitives(gm) == ["gemm.default"]
    assert ctx.notes[-1].text == "stays FP32: its input is not rows of a fixed width"


def test_spmm_without_examples_folds_row_scales_into_the_edges():
    gm, ctx = quantized(one(lambda b: b.spmm(b.x)))
    assert primitives(gm) == ["scale.default", "quantize.default", "qspmm.default"]
    assert node(gm, "qspmm").args[5] is None
    assert ctx.notes[-1].text == "row scales, taken at each call"


def _spread_rows(b):
    """Rows whose magnitudes differ a lot, as degrees make them."""
    return b.spmm(b.mul(b.x, b.call(aten.exp, b.norm)))


def test_spmm_with_examples_adds_integers_under_one_static_scale():
    gm, ctx = quantized(one(_spread_rows), static=True)
    assert primitives(gm)[-4:] == [
        "row_shift.default", "quantize.default", "qspmm.default", "dequantize.default"
    ]  # fmt: skip
    assert node(gm, "dequantize").args[2:] == ("tensor", -7)
    constant = gm.graph.find_nodes(op="placeholder")[-1]
    assert constant.meta["source"].kind == "constant"
    assert ctx.examples[-1] is constant.meta["value"]
    assert ctx.notes[-1].text.startswith("row_pow2 scales: error on the examples is tensor")


@pytest.mark.parametrize(("granularity", "room"), [("row_pow2", 2), ("tensor", 1)])
def test_the_static_scale_is_that_of_the_examples(granularity, room):
    """``row_pow2`` has room for twice the values, which costs it a shift."""
    plan = Plan({"": {"spmm": (Option.parse(f"int8 {granularity}"),)}})
    gm, ctx = quantized(one(_spread_rows), static=True, plan=plan)
    x, norm = (arguments(gm)[i] for i in _positions(gm, "x", "norm"))
    amax = (x * norm.exp()[:, None]).abs().max()
    torch.testing.assert_close(ctx.examples[-1], amax * room / 127)


def _positions(gm, *names):
    sources = [n.meta["source"].name for n in gm.graph.find_nodes(op="placeholder")]
    return [sources.index(name) for name in names]


def test_what_exceeds_the_examples_saturates():
    gm, ctx = quantized(one(lambda b: b.spmm(b.x, reduce="max")), static=True)
    values = list(arguments(gm))
    (x,) = _positions(gm, "x")
    values[x] = values[x] * 100
    assert float(gm(*values)[0].abs().max()) <= float(ctx.examples[-1]) * 127 * 1.0001


def test_edge_weights_are_floats_so_the_sum_is_one_of_floats():
    def build(b):
        return b.spmm(b.x, b.edge_input("edge_weight"))

    gm, _ = quantized(one(build), static=True)
    assert primitives(gm) == ["scale.default", "quantize.default", "qspmm.default"]


def test_attention_values_are_per_head():
    def build(b):
        return b.spmm(b.call(aten.view, b.x, [-1, 4, 8]), b.edge_input("alpha", 4))

    gm, _ = quantized(one(build))
    assert error(gm, one(build)) < 0.02


def test_heads_without_weights_take_a_shift_a_row():
    build = lambda b: b.spmm(b.call(aten.view, b.mul(b.x, b.norm), [-1, 4, 8]))  # noqa: E731
    gm, _ = run_all(one(build), (Assign(), Quantize()), examples=arguments(one(build)))
    assert "flatten.using_ints" in primitives(gm)
    assert error(gm, one(build)) < 0.02


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_every_reduction(reduce, static):
    build = lambda b: b.spmm(b.x, reduce=reduce)  # noqa: E731
    gm, _ = quantized(one(build), static=static)
    assert error(gm, one(build)) < 0.02


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_segment_reduce_becomes_an_spmm_over_its_permutation(reduce):
    def build(b):
        rows = b.call(aten.index_select, b.x, 0, b.col)
        return b.call(gnnc.segment_reduce, b.rowptr, b.perm, rows, reduce, b.nodes)

    gm, _ = quantized(one(build))
    assert node(gm, "qspmm").args[1].meta["source"].name == "perm"
    assert error(gm, one(build)) < 0.02


def test_segment_reduce_in_order_is_refused_with_a_reason():
    def build(b):
        rows = b.call(aten.index_select, b.x, 0, b.col)
        return b.call(gnnc.segment_reduce, b.rowptr, None, rows, "sum", b.nodes)

    gm, ctx = quantized(one(build))
    assert "segment_reduce.default" in primitives(gm)
    assert "read once, in order" in ctx.notes[-1].text


@pytest.mark.parametrize("heads", [None, 4])
def test_a_dot_product_takes_both_ends_scales(heads):
    def build(b):
        x = b.x if heads is None else b.call(aten.view, b.x, [-1, heads, 8])
        return b.call(gnnc.sddmm, b.rowptr, b.col, x, x, "dot")

    gm, _ = quantized(one(build))
    dots = gm.graph.output_node().args[0][0]
    assert str(dots.target) == "gnnc.qsddmm.default"
    assert [str(scale.target) for scale in dots.args[5:]] == ["gnnc.scale.default"] * 2
    assert error(gm, one(build)) < 0.02


FINDS_SCALES = Target("cuda", frozenset({"fp32", "int8"}), tensor_scales=True)
OF_TENSOR = (Assign(min_row_bytes=0), Quantize(dynamic="tensor"))


def product_and_sum(b, *, value=None, reduce="sum"):
    return b.spmm(b.linear(b.x, 16), None if value is None else b.edge_input(value), reduce)


def test_rows_take_fractions_of_the_scale_that_a_product_finds():
    gm, ctx = run_all(one(product_and_sum), OF_TENSOR, target=FINDS_SCALES)
    total = node(gm, "qspmm")
    quantized_rows, x_scale, shift = total.args[3:6]
    rows, base, qtype = quantized_rows.args[:3]
    assert (x_scale, qtype, str(shift.target)) == (None, "int8/row_pow2", "gnnc.row_shift.default")
    assert base.args[1] == "int8/row_pow2" and base.args[0] is rows.args[0].args[0]
    assert rows.args[0].meta["val"].dtype is torch.bfloat16
    assert error(gm, one(product_and_sum)) < 0.02
    assert "fractions of one that is taken of the whole tensor at each call" in ctx.notes[-1].text


@pytest.mark.parametrize("why", ["kernel", "examples", "weights", "extreme", "input"])
def test_rows_keep_their_own_scales(why):
    build = {
        "weights": lambda b: product_and_sum(b, value="edge_weight"),
        "extreme": lambda b: product_and_sum(b, reduce="max"),
        "input": lambda b: b.spmm(b.x),
    }.get(why, product_and_sum)
    gm = one(build)
    options = {} if why == "kernel" else {"target": FINDS_SCALES}
    gm, _ = run_all(gm, OF_TENSOR, examples=arguments(gm) if why == "examples" else None, **options)
    assert not any("bfloat16" in str(n.kwargs) for n in gm.graph.nodes)
    assert (node(gm, "qspmm").args[4] is None) == (why == "examples")


def test_a_product_finds_the_scale_of_one_value():
    def build(b):
        h = b.linear(b.x, 16)
        return [b.spmm(h), b.spmm(b.relu(h)), b.spmm(h)]

    gm, _ = run_all(one(build), OF_TENSOR, target=FINDS_SCALES)
    sums = [n.args[4] is None for n in gm.graph.nodes if str(n.target) == "gnnc.qspmm.default"]
    assert sums == [True, False, True]


def test_a_dynamic_scale_is_of_a_row_or_of_the_tensor():
    with pytest.raises(PrecisionError, match="dynamic must be 'row' or 'tensor', got 'rows'"):
        Quantize(dynamic="rows")


@pytest.mark.first(1)
@pytest.mark.parametrize("name", MODELS)
def test_models_keep_their_meaning_with_scales_of_tensors(name):
    gm, _ = run_all(MODELS[name](), OF_TENSOR, target=FINDS_SCALES)
    assert error(gm, MODELS[name]()) < 0.03


@pytest.mark.first(2)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models_keep_their_meaning(name, static):
    gm, _ = quantized(MODELS[name](), static=static)
    assert error(gm, MODELS[name]()) < 0.03


@pytest.mark.first(1)
@pytest.mark.parametrize("name", MODELS)
def test_bf16_rounds_operands_and_sums_in_fp32(name):
    gm, _ = quantized(MODELS[name](), precision=BF16)
    assert error(gm, MODELS[name]()) < 0.01
    for gemm in (n for n in gm.graph.nodes if str(n.target) == "gnnc.gemm.default"):
        assert [a.meta["val"].dtype for a in gemm.args[:2]] == [torch.bfloat16] * 2
        assert gemm.meta["val"].dtype is torch.float32


@pytest.mark.first(1)
@pytest.mark.parametrize("name", MODELS)
def test_fp32_is_left_alone(name):
    gm, ctx = quantized(MODELS[name](), precision=FP32)
    assert targets(gm) == targets(run_all(MODELS[name](), PASSES[:1], precision=FP32)[0])
    assert not ctx.notes


def test_new_nodes_say_where_they_come_from():
    gm, _ = quantized(MODELS["gcn"]())
    low = [n for n in gm.graph.nodes if "gnnc" in str(n.target)]
    assert {n.meta["layer"] for n in low} == {"conv1", "conv2"}
    assert all(n.meta["precision"] == INT8 for n in low)


def test_examples_that_are_not_finite_are_refused():
    gm = one(lambda b: b.spmm(b.x))
    values = tuple(v * float("nan") if v.is_floating_point() else v for v in arguments(gm))
    with pytest.raises(PrecisionError, match=r"\[gnnc.quantize\] \S*x .* is not finite"):
        run_all(gm, PASSES, examples=values)


def test_choose_takes_the_cheapest_that_is_good_enough_or_else_the_best():
    errors = dict(zip((c.qtype(INT8) for c in CANDIDATES), (0.02, 0.008, 0.004), strict=True))
    seen = Observation(1.0, errors)

    def chosen(limit, candidates=CANDIDATES, seen=seen):
        return choose(candidates, INT8, seen, limit)[0].granularity

    assert [chosen(limit) for limit in (0.01, 0.03, 0.001)] == ["row_pow2", "row_pow2", "row"]
    assert [chosen(limit, CANDIDATES[::2]) for limit in (0.03, 0.01)] == ["tensor", "row"]
    assert chosen(0.01, seen=None) == "row"


def test_row_error_of_rows_of_different_magnitude():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 64, generator=generator) * torch.logspace(-2, 0, 200)[:, None]
    base = x.abs().max() / 127
    tensor, pow2, row = (row_error(x, candidate.qtype(INT8), base) for candidate in CANDIDATES)
    assert row < pow2 < 0.015 < tensor
    assert row_error(torch.zeros(3, 4), QType(), torch.tensor(0.0)) == 0.0


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_golden(golden, static):
    examples = arguments(gcn_layer()) if static else None
    golden(before_and_after(gcn_layer(), PASSES[:1], Quantize(), examples=examples))


def casts(gm):
    return [n.args[0].name for n in gm.graph.nodes if n.kwargs.get("dtype") is torch.bfloat16]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["sage", "gin"])
def test_a_term_that_a_later_kernel_adds_travels_in_bf16(name):
    gm, ctx = quantized(MODELS[name]())
    assert len(casts(gm)) == 2
    assert [n.layer for n in ctx.notes if "waits for this sum in bf16" in n.text] == ["conv1", "conv2"]
    exact, _ = run_all(MODELS[name](), (Assign(min_row_bytes=0), Quantize(bf16_partials=False)))
    assert casts(exact) == []
    assert relative_error(gm(*arguments(gm)), exact(*arguments(exact))) < 0.005


def test_a_residual_travels_in_bf16_and_twice_used_is_cast_once():
    def build(b):
        h = b.relu(b.linear(b.x, 24, name="a"))
        g = b.add(b.relu(b.linear(h, 24, name="b")), h)
        return b.add(b.relu(b.linear(g, 24, name="c")), h)

    gm, _ = quantized(one(build))
    assert len(casts(gm)) == 1


@pytest.mark.parametrize(
    "build",
    [
        lambda b: b.add(b.linear(b.x, 24, name="a"), b.weight("v", 24)),
        lambda b: b.add(b.linear(b.x, 32, name="a"), b.x),
        lambda b: b.add(b.relu(h := b.linear(b.x, 24, name="a")), h),
        lambda b: b.add(b.linear(b.x, 8, name="a"), b.linear(b.x, 8, name="b")),
        lambda b: b.add(b.linear(b.relu(h := b.linear(b.x, 24)), 24, name="b"), h),
    ],
    ids=["a bias", "an input", "one kernel", "narrow", "read in FP32 too"],
)
def test_other_terms_stay_fp32(build):
    gm, _ = quantized(one(build))
    assert casts(gm) == []


def test_fp32_programs_carry_fp32():
    gm, _ = quantized(MODELS["sage"](), precision=FP32)
    assert casts(gm) == []


@pytest.mark.parametrize("shape", [(), (7,), (2, 3)], ids=["vector", "matrix", "heads"])
@pytest.mark.parametrize("weights", [None, "edge", "head"])
@pytest.mark.parametrize("edges", [0, 40])
def test_the_observers_spmm_is_the_reference(shape, weights, edges):
    if weights == "head" and len(shape) != 2:
        pytest.skip("weights per head need heads")
    generator = torch.Generator().manual_seed(0)
    src, dst = (torch.randint(9, (edges,), generator=generator) for _ in range(2))
    rowptr, col, _ = gnnc.csr(src, dst, 9, 9)
    sizes = {None: None, "edge": (edges,), "head": (edges, 2)}[weights]
    value = None if sizes is None else torch.randn(sizes, generator=generator)
    x = torch.randn(9, *shape, generator=generator)
    want = gnnc.spmm(rowptr, col, value, x, "sum", 9)
    torch.testing.assert_close(spmm_sum(rowptr, col, value, x, 9), want)


def test_the_observer_runs_no_more_than_it_needs():
    gm = one(lambda b: b.call(aten.cumsum, b.spmm(b.relu(b.x)), 0))
    relu = next(n for n in gm.graph.nodes if "relu" in str(n.target))
    seen = observe(gm, arguments(gm), {relu: [QType()]})
    (observation,) = seen.values()
    assert observation.amax == float(arguments(gm)[_positions(gm, "x")[0]].relu().max())


def test_a_bias_is_not_divided_by_the_power_of_two_of_a_gradient():
    b = Layers(32)
    gradient = b.input("grad", (b.n, 32), kind="tangent")
    gm = b.finish(b.linear(gradient, 24, bias=True))
    values = arguments(gm)
    values = (*values[:-1], 10 * values[-1])
    want = gm(*values)
    target = Target("cuda", frozenset({"fp32", "fp16"}))
    low, _ = run_all(gm, (Assign(), Quantize()), precision=Precision.parse("fp16"), target=target)
    assert "_to_copy.default" in targets(low)
    assert relative_error(low(*values), want) < 2e-3
