"""Row-local ops: what is recognized, what is refused, and in which order a program runs."""

import pytest
import torch
from gnn_graphs import Layers

from gnnc.ir.nodes import same_shape, shape_or_none
from gnnc.ir.row_local import Accumulator, classify, linearize
from gnnc.ir.row_steps import extent_of

gnnc = torch.ops.gnnc
aten = torch.ops.aten


@pytest.fixture
def b():
    return Layers(24)


@pytest.mark.parametrize(
    ("operand", "acc", "extent"),
    [
        ((5, 3), (5, 3), "full"),
        ((5, 1), (5, 3), "row"),
        ((3,), (5, 3), "col"),
        ((1, 3), (5, 3), "col"),
        ((1,), (5, 3), "scalar"),
        ((), (5, 3), "scalar"),
        ((5,), (5,), "full"),
        ((2, 3), (5, 2, 3), "col"),
        ((5, 1, 1), (5, 2, 3), "row"),
        ((3,), (1, 3), "col"),
        ((5, 2, 1), (5, 2, 3), None),
        ((1, 2, 1), (5, 2, 3), None),
        ((5, 5, 3), (5, 3), None),
        ((4, 3), (5, 3), None),
    ],
)
def test_how_an_operand_spreads(operand, acc, extent):
    assert extent_of(operand, acc) == extent


def test_sizes_are_compared_as_symbols(b):
    assert same_shape(shape_or_none(b.x), (b.n, 24))
    assert not same_shape(shape_or_none(b.x), (b.e, 24))
    assert not same_shape((b.n,), (5,))


def refusals(b):
    x, heads = b.x, b.call(aten.view, b.x, [-1, 4, 6])
    yield "alpha", b.graph.call_function(aten.add.Tensor, (x, x), {"alpha": 2})
    yield "of itself", b.call(aten.mul.Tensor, x, x)
    yield "a factor a head", b.call(aten.mul.Tensor, heads, b.weight("h", 4, 1))
    yield "integers", b.call(aten.add.Tensor, x, b.input("i", (b.n, 24), dtype=torch.int64))
    yield (
        "rounded quotient",
        b.graph.call_function(aten.div.Tensor_mode, (x, 2.0), {"rounding_mode": "floor"}),
    )
    yield "one over", b.call(aten.div.Tensor, b.weight("one", 1), x)
    yield "softmax of heads", b.call(aten.softmax.int, heads, -1)
    norm = b.call(aten.linalg_vector_norm.default, x, 2, [-1], True)
    length = b.call(aten.expand.default, b.call(aten.clamp_min.default, norm, 1e-12), [-1, 24])
    yield "another value by the norm", b.call(aten.div.Tensor, b.call(aten.cumsum.default, x, 0), length)
    yield "softmax over rows", b.call(aten.softmax.int, x, 0)
    yield "norm of a part", b.call(aten.layer_norm, heads, [6])
    yield (
        "training",
        b.call(aten.batch_norm, x, None, None, b.weight("m", 24), b.weight("v", 24), False, 0.1, 1e-5, False),
    )
    yield "odd power", b.call(aten.pow.Tensor_Scalar, x, 3)
    yield "other view", b.call(aten.view, x, [-1])
    yield "mean of rows", b.call(aten.mean.dim, x, [0])
    yield "mean of the last", b.call(aten.mean.dim, heads, [2])
    yield (
        "a row scale from elsewhere",
        b.call(gnnc.quantize, x, b.call(aten.squeeze.dim, b.norm, 1), "int8/row"),
    )
    yield "double", b.graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float64})


def test_what_a_row_program_cannot_do_is_refused(b):
    for reason, node in refusals(b):
        heads = next(n for n in b.graph.nodes if str(n.target) == "aten.view.default")
        if reason == "training":
            node.update_arg(5, True)
        assert classify(node, Accumulator({b.x: None, heads: None})) is None, reason


def test_a_scale_of_the_whole_tensor_is_a_store(b):
    for qtype in ("int8/tensor", "int4/row_pow2"):
        op = classify(b.call(gnnc.scale, b.x, qtype), b.x)
        assert (op.kind, op.role) == ("scale_tensor", "store")
    assert classify(b.call(gnnc.scale, b.x, "int8/row"), b.x) is None


@pytest.mark.parametrize("element", ["int8", "int4", "uint8"])
def test_quantized_rows_of_any_type_are_a_store(b, element):
    quantized = b.call(gnnc.quantize, b.x, b.call(gnnc.scale, b.x, f"{element}/row"), f"{element}/row")
    assert (classify(quantized, b.x).kind, classify(quantized, b.x).role) == ("quant_row", "store")


def test_rows_of_16_bits_are_widened_first(b):
    narrow = b.input("h", (b.n, 24), dtype=torch.bfloat16)
    wide = b.graph.call_function(aten._to_copy.default, (narrow,), {"dtype": torch.float32})
    wide.meta = dict(b.x.meta)
    relu = b.relu(wide)
    assert [(op.kind, op.role) for op in linearize(narrow)] == [("view", "chain"), ("relu", "chain")]
    assert classify(relu, narrow) is None


@pytest.mark.parametrize(("granularity", "step"), [("row", "mul_row"), ("tensor", "mul_tensor")])
def test_int8_rows_are_dequantized_first(b, granularity, step):
    q = b.input("q", (b.n, 24), dtype=torch.int8)
    scale = b.call(gnnc.scale, b.x, f"int8/{granularity}")
    wide = b.call(gnnc.dequantize, q, scale, granularity)
    relu = b.relu(wide)
    assert [(op.kind, op.role) for op in linearize(q)] == [(step, "chain"), ("relu", "chain")]
    assert classify(relu, q) is None


def test_a_result_wider_than_the_accumulator_is_refused(b):
    node = b.call(aten.add.Tensor, b.norm, b.x)
    assert classify(node, b.norm) is None
    assert classify(node, b.x).kind == "add_row"


def test_numbers_that_are_symbols_are_no_constants(b):
    node = b.graph.call_function(aten.mul.Tensor, (b.x, b.nodes))
    node.meta = dict(b.x.meta)
    assert classify(node, b.x) is None


def test_order_of_a_program(b):
    h = b.linear(b.x, 24)
    first = b.relu(h)
    scale = b.call(gnnc.scale, first, "int8/row")
    quantized = b.call(gnnc.quantize, first, scale, "int8/row")
    second = b.add(first, b.weight("bias", 24))
    b.finish(h, quantized, scale, second)
    program = linearize(h, outputs=(h, quantized, scale, second))
    assert [(op.kind, op.role) for op in program] == [
        ("store_f32", "store"),
        ("relu", "chain"),
        ("quant_row", "store"),
        ("add_col", "chain"),
        ("store_f32", "store"),
    ]
    assert program[2].covers == (scale, quantized)
    assert [op.root for op in program if op.kind == "store_f32"] == [h, second]


def test_a_view_is_another_name_of_the_accumulator(b):
    h = b.linear(b.x, 24)
    heads = b.call(aten.view, h, [-1, 4, 6])
    attention = b.weight("att", 1, 4, 6)
    dots = b.call(aten.sum.dim_IntList, b.mul(heads, attention), [-1])
    flat = b.relu(h)
    b.finish(dots, flat, heads)
    program = linearize(h, outputs=(dots, flat, heads))
    assert [op.kind for op in program] == ["view", "row_dot", "store_f32", "relu", "store_f32"]
    (step,) = program[1].steps
    assert (step.operands, step.consts) == ((attention,), (4,))


def test_admit_decides_which_branch_continues(b):
    h = b.linear(b.x, 24)
    left, right = b.relu(h), b.call(aten.sigmoid, h)
    b.finish(left, right)
    assert [op.kind for op in linearize(h)] == ["relu"]
    assert [op.kind for op in linearize(h, lambda op: op.root is not left)] == ["sigmoid"]
    assert linearize(h, lambda op: False) == []


def test_rows_quantized_under_powers_of_two(b):
    base = b.input("base", (), kind="constant")
    shift = b.call(gnnc.row_shift, b.x, base, "int8/row_pow2")
    quantized = b.call(gnnc.quantize, b.x, base, "int8/row_pow2", shift)
    op = classify(quantized, b.x)
    assert (op.kind, op.covers, list(op.operands)) == ("quant_pow2", (shift, quantized), [base])
    other = b.call(gnnc.quantize, b.x, b.input("other", (), kind="constant"), "int8/row_pow2", shift)
    assert classify(other, b.x) is None


def test_a_dequantized_sum_applies_the_exponent_first(b):
    acc = b.spmm(b.x)
    node = b.call(gnnc.dequantize, acc, b.input("base", (), kind="constant"), "tensor", -7)
    op = classify(node, acc)
    assert [step.kind for step in op.steps] == ["mul_const", "mul_tensor"]
    assert op.steps[0].consts == (2.0**-7,)
