"""Fuse: which nodes become one kernel, which do not and why, and that no bit changes."""

import pytest
import torch
from gnn_graphs import (
    MODELS,
    Layers,
    arguments,
    before_and_after,
    gat_layer,
    gcn_layer,
    run_all,
    targets,
)
from slow import slow_after

from gnnc.ir.attention import match_attention, sums_columns
from gnnc.ir.row_local import linearize
from gnnc.passes.assign import Assign
from gnnc.passes.cache import Cache
from gnnc.passes.fuse import Fuse
from gnnc.passes.quantize import Quantize
from gnnc.precision import BF16, FP32, INT8
from gnnc.target import Target

gnnc = torch.ops.gnnc
aten = torch.ops.aten
BEFORE = (Assign(), Quantize(), Cache())


def fused(gm, precision=INT8, **options):
    return run_all(gm, (*BEFORE, Fuse()), precision=precision, **options)


def groups(gm):
    """Kind and graph of every fused submodule."""
    return [(n.meta["kind"], gm.get_submodule(n.target)) for n in gm.graph.nodes if n.op == "call_module"]


def kinds(gm):
    return [kind for kind, _ in groups(gm)]


def leftovers(gm):
    """What is computed outside of every group."""
    free = ("sym_size", "unsqueeze", "getitem", "fused_", "view")
    return [name for name in targets(gm) if not name.startswith(free)]


def program(inner):
    """The row program of a submodule, by step."""
    anchors = ("gemm", "spmm", "segment_reduce")
    names = {n: getattr(n.target, "__name__", "").split(".")[0].lstrip("q") for n in inner.graph.nodes}
    start = next((n for n in inner.graph.nodes if names[n] in anchors), None)
    start = start or next(iter(inner.graph.nodes))
    outputs = inner.graph.output_node().args[0]
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [step.kind for op in linearize(start, outputs=outputs) for step in op.steps]


def one(build, width=32):
    b = Layers(width)
    return b.finish(*build(b))


def assert_same_bits(original, precision=INT8, examples=None):
    before, _ = run_all(original(), BEFORE, precision=precision, examples=examples)
    after, _ = fused(original(), precision, examples=examples)
    for a, b in zip(before(*arguments(before)), after(*arguments(after)), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.first(2)
@pytest.mark.parametrize("precision", slow_after(1, [INT8, BF16, FP32]))
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_not_one_bit_changes(name, static, precision):
    examples = arguments(MODELS[name]()) if static else None
    assert_same_bits(MODELS[name], precision, examples)


EXPECTED = {
    "gcn": ["gemm", "spmm"] * 2,
    "sage": ["map", "gemm", "spmm", "gemm", "gemm", "spmm", "gemm"],
    "gin": ["gemm", "spmm", "gemm", "gemm", "spmm", "gemm"],
    "gat": ["gemm", "attention"] * 2,
}


@pytest.mark.first(1)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_a_few_kernels(name, static):
    gm, _ = fused(MODELS[name](), examples=arguments(MODELS[name]()) if static else None)
    assert kinds(gm) == EXPECTED[name]
    assert leftovers(gm) == []


def test_gcn_kernels():
    gm, _ = fused(MODELS["gcn"]())
    assert [program(inner) for _, inner in groups(gm)] == [
        ["mul_row", "mul_col", "mul_row", "quant_row"],
        ["mul_row", "add_col", "relu", "quant_row"],
        ["mul_row", "mul_col", "mul_row", "quant_row"],
        ["mul_row", "add_col", "store_f32"],
    ]


def test_gcn_kernels_with_static_scales():
    def spread():
        """Rows of different magnitude, so that power-of-two row scales are chosen."""
        b = Layers(32)
        h = b.mul(b.linear(b.x, 24), b.call(aten.exp, b.norm))
        return b.finish(b.relu(b.spmm(h)))

    gm, _ = fused(spread(), examples=arguments(spread()))
    assert [program(inner) for _, inner in groups(gm)] == [
        ["mul_row", "mul_col", "mul_row", "quant_pow2"],
        ["mul_const", "mul_tensor", "relu", "store_f32"],
    ]


def test_gat_kernels():
    gm, _ = fused(MODELS["gat"]())
    inner = [inner for _, inner in groups(gm)]
    assert program(inner[0]) == ["mul_row", "mul_col", "row_dot", "row_dot", "quant_row"]
    assert program(inner[1]) == ["add_col", "elu", "quant_row"]
    assert program(inner[3]) == ["head_mean", "add_col", "store_f32"]
    aggregate = next(n for n in inner[1].graph.nodes if "qspmm" in str(n.target))
    attention = match_attention(aggregate)
    assert (attention.kind, attention.slope, attention.eps) == ("add", 0.2, 1e-16)


def test_the_input_is_quantized_on_load_where_one_gemm_reads_it():
    gm, _ = fused(one(lambda b: [b.linear(b.x, 24)]))
    ((_, inner),) = groups(gm)
    assert targets(inner)[:5] == [
        "scale.default", "quantize.default", "scale.default", "quantize.default", "qgemm.default",
    ]  # fmt: skip


def test_products_of_one_matrix_are_one_kernel_that_reads_it_once():
    def build(b):
        a, c = b.linear(b.x, 24, name="a"), b.linear(b.x, 20, name="b")
        return [b.relu(a), b.call(aten.sigmoid, c)]

    gm, _ = fused(one(build))
    assert kinds(gm) == ["gemm"]
    ((_, inner),) = groups(gm)
    assert sum(name == "quantize.default" for name in targets(inner)) == 3
    assert leftovers(gm) == []
    assert_same_bits(lambda: one(build))


def test_a_product_of_the_same_matrix_stays_behind_what_stands_between():
    def build(b):
        gate = b.call(aten.sigmoid, b.linear(b.x, 32, name="a"))
        return [b.linear(b.mul(gate, b.x), 24, name="b"), b.linear(b.x, 20, name="c")]

    gm, _ = fused(one(build))
    assert kinds(gm) == ["map", "gemm", "gemm", "gemm"]
    assert_same_bits(lambda: one(build))


def test_a_backend_joins_as_many_products_as_its_kernel_has():
    def build(b):
        return [b.linear(b.x, width, name=f"w{width}") for width in (20, 21, 22, 23)]

    for limit, expected in ((20, 4), (41, 3), (45, 2), (100, 1)):
        target = Target(joins_products=lambda dtype, columns, widths, most=limit: sum(widths) <= most)
        assert kinds(fused(one(build), target=target)[0]).count("gemm") == expected, limit


def test_products_that_are_added_up_stay_apart_and_one_adds_the_other():
    gm, _ = fused(one(lambda b: [b.add(b.linear(b.x, 24, name="a"), b.linear(b.x, 24, name="b"))]))
    assert kinds(gm) == ["map", "gemm", "gemm"]
    assert leftovers(gm) == []


def test_a_weight_is_quantized_in_each_kernel_that_uses_it():
    def build(b):
        w = b.weight("w", 32, 32)
        h = b.relu(b.call(gnnc.gemm, b.x, w, None, False))
        return [b.call(gnnc.gemm, h, w, None, False)]

    gm, _ = fused(one(build))
    assert kinds(gm) == ["gemm", "gemm"]
    assert leftovers(gm) == []
    assert_same_bits(lambda: one(build))


def test_norms_activations_and_softmax_follow_their_producer():
    def build(b):
        h = b.batch_norm(b.linear(b.x, 24, bias=True))
        h = b.call(aten.leaky_relu, h, 0.1)
        h = b.call(aten.layer_norm, h, [24], b.weight("ln.w", 24), b.weight("ln.b", 24), 1e-5)
        norm = b.call(aten.linalg_vector_norm, h, 2.0, [-1], True)
        bounded = b.call(aten.clamp_min, norm, 1e-12)
        h = b.call(aten.div.Tensor, h, b.call(aten.expand, bounded, [b.nodes, 24]))
        return [b.call(aten.log_softmax.int, h, -1)]

    gm, _ = fused(one(build))
    ((_, inner),) = groups(gm)
    assert program(inner)[2:] == [
        "add_col", "batch_norm", "leaky_relu", "layer_norm", "l2_normalize", "log_softmax",
        "store_f32",
    ]  # fmt: skip
    assert_same_bits(lambda: one(build))


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("target", "args", "steps"),
    [
        (aten.sigmoid.default, (), ["sigmoid"]),
        (aten.gelu.default, (), ["gelu"]),
        (aten.silu.default, (), ["silu"]),
        (aten.elu.default, (0.5,), ["elu"]),
        (aten.clamp.default, (-1.0, 1.0), ["clamp_min", "clamp_max"]),
        (aten.clamp.default, (0.1,), ["clamp_min"]),
        (aten.pow.Tensor_Scalar, (2,), ["square"]),
        (aten.add.Tensor, (1.5,), ["add_const"]),
        (aten.sub.Tensor, (1.5,), ["add_const"]),
        (aten.rsub.Scalar, (1.5,), ["neg", "add_const"]),
        (aten.mul.Tensor, (1.5,), ["mul_const"]),
        (aten.div.Tensor, (4.0,), ["mul_const"]),
        (aten.neg.default, (), ["neg"]),
    ],
)
def test_elementwise_ops_with_constants(target, args, steps):
    build = lambda b: [b.call(target, b.linear(b.x, 24), *args)]  # noqa: E731
    gm, _ = fused(one(build))
    ((_, inner),) = groups(gm)
    assert program(inner)[2:-1] == steps
    assert_same_bits(lambda: one(build))


@pytest.mark.first(1)
@pytest.mark.parametrize("verb", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("extent", ["row", "col", "full", "tensor"])
def test_elementwise_ops_with_operands(verb, extent):
    def build(b):
        other = {
            "row": lambda: b.norm,
            "col": lambda: b.weight("c", 24),
            "full": lambda: b.input("other", (b.n, 24)),
            "tensor": lambda: b.weight("s", 1),
        }[extent]()
        return [b.call(getattr(aten, verb).Tensor, b.linear(b.x, 24), other)]

    gm, _ = fused(one(build))
    ((_, inner),) = groups(gm)
    found = program(inner)[2:-1]
    if (verb, extent) == ("div", "tensor"):
        assert found == []
    elif verb == "sub":
        assert found == ["neg", f"add_{extent}", "neg"]
    else:
        assert found == [f"{verb}_{extent}"]
    assert_same_bits(lambda: one(build))


def test_a_division_that_no_instruction_does_stays_out_with_a_reason():
    gm, ctx = fused(one(lambda b: [b.call(aten.div.Tensor, b.linear(b.x, 24), 3.0)]))
    assert leftovers(gm) == ["div.Tensor"]
    assert ctx.notes[-1].text == "runs by itself: it is not local to a row"


def test_a_residual_is_added_by_the_later_kernel():
    def build(b):
        h = b.relu(b.linear(b.x, 24))
        return [b.add(b.spmm(h), h)]

    gm, _ = fused(one(build))
    assert [program(inner) for _, inner in groups(gm)] == [
        ["mul_row", "mul_col", "relu", "store_bf16", "quant_row"],
        ["add_full", "store_f32"],
    ]
    assert_same_bits(lambda: one(build))


def test_two_kernels_that_need_each_others_results_do_not_merge_into_a_cycle():
    def build(b):
        a, c = b.linear(b.x, 24, name="a"), b.linear(b.x, 24, name="c")
        left, right = b.add(a, b.relu(c)), b.add(c, b.relu(a))
        return [b.mul(left, right)]

    gm, _ = fused(one(build))
    gm.graph.lint()
    assert_same_bits(lambda: one(build))


def test_one_continuation_a_row_the_other_runs_by_itself():
    def build(b):
        h = b.linear(b.x, 24)
        return [b.relu(h), b.call(aten.sigmoid, h)]

    gm, ctx = fused(one(build))
    assert leftovers(gm) == ["sigmoid.default"]
    assert ctx.notes[-1].text == "runs by itself: another op continues the same row"
    assert_same_bits(lambda: one(build))


def test_a_gate_reads_a_value_that_the_row_program_no_longer_has():
    def build(b):
        h = b.linear(b.x, 24)
        return [b.mul(b.call(aten.sigmoid, h), h)]

    gm, ctx = fused(one(build))
    assert leftovers(gm) == ["mul.Tensor"]
    assert "a row program keeps no value but the latest" in ctx.notes[-1].text
    assert_same_bits(lambda: one(build))


def test_a_norm_over_all_nodes_needs_the_whole_result_first():
    def build(b):
        h = b.linear(b.x, 24)
        return [b.call(aten.sub.Tensor, h, b.call(aten.mean, h))]

    gm, ctx = fused(one(build))
    assert leftovers(gm) == ["mean.default", "sub.Tensor"]
    assert "needs a value that is made from the whole" in ctx.notes[-1].text


def test_ops_across_rows_stay_out():
    build = lambda b: [b.call(aten.cumsum, b.linear(b.x, 24), 0)]  # noqa: E731
    gm, ctx = fused(one(build))
    assert leftovers(gm) == ["cumsum.default"]
    assert "not local to a row" in ctx.notes[-1].text


def test_softmax_over_nodes_is_not_taken_for_one_over_rows():
    gm, _ = fused(one(lambda b: [b.call(aten.softmax.int, b.linear(b.x, 24), 0)]))
    assert leftovers(gm) == ["softmax.int"]


def test_a_chain_without_a_producer_is_a_map():
    build = lambda b: [b.relu(b.add(b.x, 1.0))]  # noqa: E731
    gm, _ = fused(one(build))
    assert kinds(gm) == ["map"]
    assert kinds(fused(one(lambda b: [b.relu(b.x)]))[0]) == []


def test_a_chain_of_columns_of_one_value_is_none():
    build = lambda b: [b.relu(b.add(b.norm, 1.0))]  # noqa: E731
    assert kinds(fused(one(build))[0]) == []


def test_one_kernel_finds_one_scale_of_a_tensor():
    target = Target("cuda", frozenset({"fp32", "int8"}), tensor_scales=True)

    def build(b):
        h = b.linear(b.x, 16)
        return [b.call(gnnc.scale, h, "int8/tensor"), b.call(gnnc.scale, b.relu(h), "int8/tensor")]

    gm, _ = run_all(one(build), (Fuse(),), precision=INT8, target=target)
    inside = [node for _, inner in groups(gm) for node in inner.graph.nodes]
    assert sum(str(node.target) == "gnnc.scale.default" for node in inside) == 1
    assert leftovers(gm).count("scale.default") == 1


def test_the_bias_of_a_product_of_three_dimensions_stays_in_it():
    b = Layers(32)
    heads = b.call(aten.view, b.x, [-1, 4, 8])
    product = b.call(gnnc.gemm, heads, b.weight("weight", 6, 8), b.weight("bias", 6), False)
    gm, _ = run_all(b.finish(product), (Fuse(),))
    (left,) = [node for node in gm.graph.nodes if str(node.target) == "gnnc.gemm.default"]
    assert left.args[2] is not None


def test_a_view_that_only_the_caller_reads_stays_out():
    def build(b):
        h = b.linear(b.x, 24)
        return [h, b.call(aten.view, h, [-1, 4, 6])]

    gm, _ = fused(one(build))
    ((_, inner),) = groups(gm)
    assert "view.default" not in targets(inner)
    assert_same_bits(lambda: one(build))


def _attention(b, logits, heads=4):
    alpha = b.call(gnnc.edge_softmax, b.rowptr, logits)
    return alpha, b.spmm(b.call(aten.view, b.x, [-1, heads, 8]), alpha)


def _dots(b, heads=4):
    x = b.call(aten.view, b.x, [-1, heads, 8])
    return b.call(gnnc.sddmm, b.rowptr, b.col, x, x, "dot")


ATTENTIONS = {
    "dot": (lambda b: _dots(b), ("dot", 1.0, 1.0)),
    "scaled": (lambda b: b.call(aten.div.Tensor, _dots(b), 2.0), ("dot", 0.5, 1.0)),
    "with edges": (lambda b: b.add(_dots(b), b.edge_input("edge", 4)), ("dot", 1.0, 1.0)),
    "given logits": (lambda b: b.edge_input("logits", 4), ("logits", 1.0, 1.0)),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_forms_of_attention(name):
    make, want = ATTENTIONS[name]
    build = lambda b: [_attention(b, make(b))[1]]  # noqa: E731
    gm, _ = fused(one(build))
    assert kinds(gm) == ["map", "attention"]
    inner = groups(gm)[1][1]
    found = match_attention(next(n for n in inner.graph.nodes if "qspmm" in str(n.target)))
    assert (found.kind, found.scale, found.slope) == want
    assert (found.edge is not None) == (name in ("with edges", "given logits"))
    assert_same_bits(lambda: one(build))


GATV2 = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.leaky_relu.default(t0, 0.2); t2 = aten.mul.Tensor(t1, c0); "
    "t3 = aten.sum.dim_IntList(t2, [2]); return t3"
)
TWO_SUMS = (
    "t0 = aten.sum.dim_IntList(i0, [2]); t1 = aten.sum.dim_IntList(j0, [2]); t2 = aten.add.Tensor(t0, t1); "
    "return t2"
)
PRODUCT = "t0 = aten.bmm.default(i0, j0); t1 = aten.sum.dim_IntList(t0, [2]); return t1"


def _body_logits(b, text):
    x = b.call(aten.view, b.x, [-1, 4, 8])
    constants = [b.weight("att", 1, 4, 8)] if "c0" in text else []
    return b.call(gnnc.edge_map, b.rowptr, b.col, text, [x], [x], [], constants)


@pytest.mark.parametrize("bodies", [True, False])
def test_a_body_gives_the_logits_where_the_kernel_computes_it(bodies):
    build = lambda b: [_attention(b, _body_logits(b, GATV2))[1]]  # noqa: E731
    gm, _ = run_all(one(build), (Fuse(),), target=Target(attention_bodies=bodies))
    ((_, inner),) = [(kind, inner) for kind, inner in groups(gm) if "edge_softmax.default" in targets(inner)]
    assert ("edge_map.default" in targets(inner)) == bodies
    assert_same_bits(lambda: one(build))


@pytest.mark.parametrize("text", [TWO_SUMS, PRODUCT])
def test_logits_that_are_no_sum_of_elementwise_terms_are_given(text):
    gm = one(lambda b: [_attention(b, b.edge_input("logits", 4))[1]])
    aggregate = next(node for node in gm.graph.nodes if "spmm" in str(node.target))
    assert match_attention(aggregate, bodies=True).kind == "logits"
    assert not sums_columns(text) and sums_columns(GATV2)


def test_attention_weights_that_are_asked_for_come_out():
    build = lambda b: list(_attention(b, _dots(b)))  # noqa: E731
    gm, _ = fused(one(build))
    assert kinds(gm) == ["map", "attention"]
    assert len(groups(gm)[1][1].graph.output_node().args[0]) == 2
    assert_same_bits(lambda: one(build))


def test_logits_that_are_asked_for_are_computed_before():
    def build(b):
        logits = _dots(b)
        return [logits, _attention(b, logits)[1]]

    gm, _ = fused(one(build))
    assert leftovers(gm) == ["sddmm.default"]
    assert_same_bits(lambda: one(build))


def test_an_integer_dot_product_keeps_its_scales():
    gm, _ = fused(one(lambda b: [_dots(b)]))
    assert kinds(gm) == ["map"]
    assert leftovers(gm) == ["qsddmm.default"]
    assert_same_bits(lambda: one(lambda b: [_dots(b)]))


@pytest.mark.parametrize("finds", [True, False])
def test_the_scale_of_a_whole_product_is_found_where_the_kernel_can(finds):
    target = Target("cuda", frozenset({"fp32", "int8"}), tensor_scales=finds)

    def build(b):
        h = b.linear(b.x, 16)
        return [b.spmm(h), b.call(gnnc.scale, h, "int8/tensor")]

    gm, _ = run_all(one(build), (*BEFORE, Fuse()), precision=INT8, target=target)
    assert ("scale.default" in leftovers(gm)) != finds
    product = dict(groups(gm))["gemm"]
    assert any(n.args[1:] == ("int8/tensor",) for n in product.graph.nodes) == finds


def test_rows_go_on_from_the_16_bits_that_a_product_wrote():
    target = Target("cuda", frozenset({"fp32", "int8"}), tensor_scales=True)
    passes = (Assign(min_row_bytes=0), Quantize(dynamic="tensor"), Cache(), Fuse())
    gm, _ = run_all(one(lambda b: [b.spmm(b.linear(b.x, 16))]), passes, precision=INT8, target=target)
    assert kinds(gm) == ["gemm", "map", "spmm"]
    assert leftovers(gm) == []
    (product, rows) = (inner for _, inner in groups(gm)[:2])
    stored = [str(n.meta["val"].dtype) for n in product.graph.output_node().args[0]]
    assert sorted(stored) == ["torch.bfloat16", "torch.float32"]
    assert targets(rows) == ["_to_copy.default", "row_shift.default", "quantize.default"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rounded", [frozenset(), frozenset({"fp16"})])
def test_rows_are_widened_as_they_are_loaded_where_kernels_have_their_type(rounded, dtype):
    target = Target("cpu", widens_operands=True, rounded=rounded)

    def build(b):
        half = b.input("half", (b.n, 32), dtype=dtype)
        wide = b.graph.call_function(aten._to_copy.default, (half,), {"dtype": torch.float32})
        wide.meta["val"] = half.meta["val"].float()
        return [b.mul(b.linear(b.x, 32), wide)]

    gm, _ = run_all(one(build), (Fuse(),), precision=FP32, target=target)
    is_widened = "_to_copy.default" in targets(dict(groups(gm))["gemm"])
    assert is_widened == (dtype == torch.bfloat16 or not rounded)


def test_a_scale_of_a_tensor_stays_out_of_what_cannot_find_it():
    def build(b):
        h = b.relu(b.relu(b.x))
        return [h, b.call(gnnc.scale, h, "int8/tensor")]

    gm, _ = run_all(one(build), (Fuse(),), target=Target("cuda", tensor_scales=True))
    assert "scale.default" in leftovers(gm)


def test_groups_say_where_they_come_from():
    gm, _ = fused(MODELS["gcn"]())
    calls = [n for n in gm.graph.nodes if n.op == "call_module"]
    assert [n.target for n in calls] == [f"fused_{i}" for i in range(4)]
    assert [n.meta["layer"] for n in calls] == ["conv1", "conv1", "conv2", "conv2"]
    assert all(n.meta["fused"] and n.meta["precision"] == INT8 for n in calls)
    assert all("val" in n.meta for _, inner in groups(gm) for n in inner.graph.nodes)


def test_again_changes_nothing():
    gm, _ = fused(MODELS["sage"]())
    again, _ = run_all(gm, (Fuse(),))
    assert targets(again) == targets(gm)


@pytest.mark.parametrize("layer", [gcn_layer, gat_layer])
def test_golden(golden, layer):
    golden(before_and_after(layer(), BEFORE, Fuse()))


def scaled_residual(b, scalar, *, by_hand=False):
    """Return ``spmm(x) + factor * x`` with the factor that ``scalar`` makes of a weight."""
    factor = scalar(b, b.weight("eps", 1))
    product = b.mul(factor, b.x) if by_hand else b.mul(b.x, factor)
    return b.add(b.spmm(b.x), product), product, factor


@pytest.mark.parametrize(
    "scalar",
    [
        lambda b, eps: b.call(aten.add.Tensor, eps, 1),
        lambda b, eps: b.call(aten.add.Tensor, 1, eps),
        lambda b, eps: eps,
        lambda b, eps: 0.5,
    ],
)
def test_a_factor_and_its_product_join_the_kernel_that_adds_them(scalar):
    def build(b):
        return [scaled_residual(b, scalar)[0]]

    gm, _ = fused(one(build), FP32)
    assert [program(inner) for _, inner in groups(gm)] == [["add_scaled", "store_f32"]]
    assert leftovers(gm) == []
    assert_same_bits(lambda: one(build))


def test_a_factor_that_others_read_is_an_operand():
    def build(b):
        added, _, factor = scaled_residual(b, lambda b, eps: b.call(aten.add.Tensor, eps, 1))
        return [added, b.mul(b.x, factor)]

    gm, _ = fused(one(build), FP32)
    assert [program(inner) for _, inner in groups(gm)] == [["add_scaled", "store_f32"]]
    assert sorted(leftovers(gm)) == ["add.Tensor", "mul.Tensor"]
    assert_same_bits(lambda: one(build))


def test_a_product_that_others_read_is_added_as_it_is():
    def build(b):
        added, product, _ = scaled_residual(b, lambda b, eps: b.call(aten.add.Tensor, eps, 1))
        return [added, product]

    gm, _ = fused(one(build), FP32)
    assert ["add_full", "store_f32"] in [program(inner) for _, inner in groups(gm)]
    assert_same_bits(lambda: one(build))


def test_a_product_takes_the_constant_of_its_factor():
    def build(b):
        return [b.mul(b.linear(b.x, 24), b.call(aten.add.Tensor, b.weight("eps", 1), 1))]

    gm, _ = fused(one(build), FP32)
    assert [program(inner) for _, inner in groups(gm)] == [["mul_shifted", "store_f32"]]
    assert_same_bits(lambda: one(build))
