"""Cache: a tensor is quantized once, and not one bit changes."""

import pytest
import torch
from gnn_graphs import MODELS, Layers, arguments, before_and_after, run_all, targets
from slow import slow_after

from gnnc.passes.assign import Assign
from gnnc.passes.cache import Cache, _merge
from gnnc.passes.quantize import Quantize
from gnnc.precision import BF16, FP32, INT8

gnnc = torch.ops.gnnc
aten = torch.ops.aten
BEFORE = (Assign(), Quantize())


def count(gm, name):
    return targets(gm).count(f"{name}.default")


def cached(gm, **options):
    return run_all(gm, (*BEFORE, Cache()), **options)


def two_readers(first, second):
    b = Layers(32)
    return b.finish(first(b), second(b))


def test_two_linears_share_the_quantized_values_of_their_input():
    gm, ctx = cached(MODELS["sage"]())
    before, _ = run_all(MODELS["sage"](), BEFORE)
    assert count(before, "quantize") - count(gm, "quantize") == 2
    assert count(before, "scale") - count(gm, "scale") == 2
    merged = [note for note in ctx.notes if note.pass_name == "cache"]
    assert [note.text for note in merged if note.layer == "conv1"] == [
        "one scale serves 2 consumers",
        "one quantization serves 2 consumers",
    ]


def test_a_gemm_and_an_aggregation_share_quantized_values():
    gm, _ = cached(two_readers(lambda b: b.linear(b.x, 24), lambda b: b.spmm(b.x)))
    assert (count(gm, "scale"), count(gm, "quantize")) == (2, 2)  # of x and of the weight


def test_quantized_values_under_different_scales_stay_apart():
    graph = lambda: two_readers(lambda b: b.linear(b.x, 24), lambda b: b.spmm(b.x))  # noqa: E731
    gm, ctx = cached(graph(), examples=arguments(graph()))
    assert count(gm, "quantize") == 3  # x by row for the GEMM, x by its static scale, the weight
    assert not [note for note in ctx.notes if note.pass_name == "cache"]


def test_casts_merge_by_dtype():
    b = Layers(32)
    low = []
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16):
        node = b.graph.call_function(aten._to_copy.default, (b.x,), {"dtype": dtype})
        node.meta = {**b.x.meta, "val": b.x.meta["val"].to(dtype)}
        low.append(b.spmm(node))
    gm, _ = run_all(b.finish(*low), (Cache(),))
    assert count(gm, "_to_copy") == 2


def test_the_quantized_type_is_part_of_the_key():
    b = Layers(32)
    scales = [b.call(gnnc.scale, b.x, qtype) for qtype in ("int8/row", "int4/row", "int8/row")]
    gm, _ = run_all(b.finish(*scales), (Cache(),))
    assert count(gm, "scale") == 2


def test_numbers_of_other_types_are_other_arguments():
    b = Layers(32)
    scales = [b.call(gnnc.scale, b.x, "int8/row") for _ in range(3)]
    gm = b.finish(*scales)
    nodes = gm.graph.find_nodes(op="call_function", target=gnnc.scale.default)
    for node, number in zip(nodes, (1, 1.0, True), strict=True):
        node.kwargs = {"number": number}
    assert len(_merge(gm.graph)) == 0


def test_a_note_counts_all_consumers():
    b = Layers(32)
    _, ctx = run_all(b.finish(*[b.call(gnnc.scale, b.x, "int8/row") for _ in range(4)]), (Cache(),))
    assert [note.text for note in ctx.notes] == ["one scale serves 4 consumers"]


def test_other_ops_are_left_alone():
    b = Layers(32)
    products = b.mul(b.x, b.norm), b.mul(b.x, b.norm)
    gm, ctx = run_all(b.finish(b.relu(b.x), b.relu(b.x), *products), (Cache(),))
    assert count(gm, "relu") == 2
    assert targets(gm).count("mul.Tensor") == 2, "each is a step of the kernel that reads it"
    assert not ctx.notes


@pytest.mark.first(2)
@pytest.mark.parametrize("precision", slow_after(1, [INT8, BF16, FP32]))
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_not_one_bit_changes(name, static, precision):
    examples = arguments(MODELS[name]()) if static else None
    before, _ = run_all(MODELS[name](), BEFORE, precision=precision, examples=examples)
    after, _ = cached(MODELS[name](), precision=precision, examples=examples)
    for a, b in zip(before(*arguments(before)), after(*arguments(after)), strict=True):
        assert torch.equal(a, b)


def test_again_changes_nothing():
    gm, ctx = run_all(MODELS["sage"](), (*BEFORE, Cache()))
    notes = len(ctx.notes)
    again, ctx = run_all(MODELS["sage"](), (*BEFORE, Cache(), Cache()))
    assert targets(again) == targets(gm)
    assert len(ctx.notes) == notes


def test_golden(golden):
    graph = two_readers(lambda b: b.linear(b.x, 24), lambda b: b.spmm(b.x))
    golden(before_and_after(graph, BEFORE, Cache()))
