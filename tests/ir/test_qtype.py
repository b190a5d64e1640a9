"""The type of quantized values: its text, its range, and how nodes of a graph get one."""

import pytest
import torch
from hand_graphs import Builder, aten, fused_layer, gnnc

from gnnc.ir import QType
from gnnc.ir.describe import bits_of, granularity_of, is_quantized, precision_in, precision_of
from gnnc.ir.graph import infer_meta
from gnnc.ir.nodes import qtype_of

TEXTS = (
    "int8/row",
    "int8/row_pow2",
    "int4/column",
    "uint4/tensor",
    "±1/row",
    "int16/row",
    "uint8/tensor/zero=128",
)


@pytest.mark.parametrize("text", [*TEXTS, "int4/row/stride=64", "uint2/row/zero=1/stride=32"])
def test_text_and_type_are_one_to_one(text: str) -> None:
    qtype = QType.parse(text)
    assert str(qtype) == text
    assert QType.parse(str(qtype)) == qtype


def test_text_of_every_field() -> None:
    qtype = QType(4, "unsigned", "tensor", zero_point=8, row_stride=64)
    assert str(qtype) == "uint4/tensor/zero=8/stride=64"
    assert QType.parse(str(qtype)) == qtype
    assert QType() == QType.parse("int8/row")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("row", "is not a quantized type; write one as 'int8/row'"),
        ("int8", "is not a quantized type"),
        ("int8/row/", "is not a quantized type"),
        ("int8/block", "granularity must be one of tensor, row, column, row_pow2, got 'block'"),
        ("int1/row", "2 to 16 bits, got 1"),
        ("int17/row", "2 to 16 bits, got 17"),
        ("uint0/row", "1 to 16 bits, got 0"),
        ("±2/row", "a ±1 type has one bit, got 2"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QType.parse(text)


@pytest.mark.parametrize(
    ("text", "least", "largest", "dtype"),
    [
        ("int8/row", -127, 127, torch.int8),
        ("int4/row", -7, 7, torch.int8),
        ("int2/row", -1, 1, torch.int8),
        ("int16/row", -32767, 32767, torch.int16),
        ("uint2/tensor", 0, 3, torch.uint8),
        ("uint8/tensor", 0, 255, torch.uint8),
        ("uint16/tensor", 0, 65535, torch.uint16),
        ("±1/row", -1, 1, torch.int8),
    ],
)
def test_range_and_dtype(text: str, least: int, largest: int, dtype: torch.dtype) -> None:
    qtype = QType.parse(text)
    assert (qtype.qmin, qtype.qmax, qtype.dtype) == (least, largest, dtype)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("granularity", ["tensor", "row", "column"])
def test_reference_ops_take_any_bits(bits: int, granularity: str) -> None:
    x = torch.randn(9, 7, generator=torch.Generator().manual_seed(0))
    qtype = QType.parse(f"int{bits}/{granularity}")
    scale = gnnc.scale(x, str(qtype))
    quantized = gnnc.quantize(x, scale, str(qtype))
    assert int(quantized.abs().max()) == qtype.qmax
    error = (gnnc.dequantize(quantized, scale, granularity) - x).abs()
    assert bool((error <= scale.max() / 2 + 1e-6).all())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_shifts_use_the_range_of_the_type(bits: int) -> None:
    x = torch.randn(9, 7, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 0, 9)[:, None]
    qtype = QType.parse(f"int{bits}/row_pow2")
    base = gnnc.scale(x, str(qtype))
    shift = gnnc.row_shift(x, base, str(qtype))
    largest = gnnc.quantize(x, base, str(qtype), shift).int().abs().amax(1)
    assert bool((largest[shift < 7] * 2 >= qtype.qmax).all())
    assert int(largest.max()) == qtype.qmax


def _layer(b: Builder, qtype: str):
    x, weight = b.input("x", (b.size("n", 5), 8)), b.parameter("w", 4, 8)
    x_scale, w_scale = (b.call(gnnc.scale, value, qtype) for value in (x, weight))
    quantized = b.call(gnnc.quantize, x, x_scale, qtype)
    viewed = b.call(aten.view, quantized, [-1, 8])
    return quantized, viewed, b.call(gnnc.qgemm, viewed, b.call(gnnc.quantize, weight, w_scale, qtype))


def test_views_keep_the_type_and_products_lose_it() -> None:
    b = Builder()
    quantized, viewed, product = _layer(b, "int4/row")
    gm = b.finish(product)
    for node in gm.graph.nodes:
        node.meta.pop("qtype", None)
    infer_meta(gm)
    assert qtype_of(quantized) == qtype_of(viewed) == QType(4)
    assert qtype_of(product) is None
    assert (precision_of(viewed), precision_in(product), is_quantized(product)) == ("int4", "int4", True)
    assert (granularity_of(product), bits_of("int4"), bits_of("bf16")) == ("row × channel", 4, 16)


def test_results_and_inputs_of_a_fused_graph_have_a_type() -> None:
    gm = fused_layer()
    for graph in (gm.graph, *(module.graph for module in gm.children())):
        for node in graph.nodes:
            node.meta.pop("qtype", None)
    infer_meta(gm)
    first, second = gm.graph.find_nodes(op="call_module")
    shifted = QType(granularity="row_pow2")
    assert first.meta["qtype"] == (shifted, None)
    assert [qtype_of(user) for user in first.users] == [shifted, None]
    inner = gm.get_submodule(str(second.target))
    assert [qtype_of(node) for node in inner.graph.find_nodes(op="placeholder")].count(shifted) == 1
    assert qtype_of(second) is None
