"""The verifier refuses graphs that break an invariant, and says what, where and what to do."""

import operator
import re
from collections.abc import Callable

import pytest
import torch
from hand_graphs import LAYERS, Builder
from torch import fx

from gnnc.errors import VerifyError
from gnnc.ir import Source
from gnnc.ir.qtype import QType
from gnnc.ir.verify import verify

gnnc = torch.ops.gnnc
aten = torch.ops.aten
Breaker = Callable[["Graph"], fx.Node | None]


class Graph(Builder):
    """Five rows, twelve edges, and the tensors that ops take; broken by one function each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = "conv1"
        self.x = self.input("x", (5, 8))
        self.rowptr = self.input("rowptr", (6,), dtype=torch.int64, kind="structure")
        self.col = self.input("col", (12,), dtype=torch.int32, kind="structure")
        self.w = self.parameter("weight", 4, 8)
        self.scale = self.input("scale", (5,))
        self.base = self.input("base", ())
        self.quantized = self.input("quantized", (5, 8), qtype="int8/row")
        self.fake_int8 = self.input("fake_int8", (5, 8))
        self.fake_int8.meta["qtype"] = QType.parse("int8/row")
        self.shift = self.input("shift", (5,), dtype=torch.uint8)

    def raw(self, target: object, *args: object, like: fx.Node | None = None) -> fx.Node:
        """A call that is not run: it holds what ``like`` (x) holds."""
        node = self.graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta = {"val": (like or self.x).meta["val"], "layer": self.layer}
        return node

    def spmm(self, **changed: object) -> fx.Node:
        args = {"rowptr": self.rowptr, "col": self.col, "value": None, "x": self.x, "reduce": "sum"}
        return self.raw(gnnc.spmm.default, *((args | {"num_dst": 5}) | changed).values())

    def inner(self, *widths: int, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
        """A fused graph that adds one to its first input."""
        b = Builder(self)
        inputs = [b.input(f"i{at}", (5, width), dtype=dtype) for at, width in enumerate(widths)]
        return b.finish(b.call(aten.add.Tensor, inputs[0], 1))


# The graph


def used_before_it_is_made(g: Graph) -> None:
    late = g.call(aten.relu, g.x)
    early = g.call(aten.neg, g.x)
    late.append(g.graph.call_function(aten.relu.default, (g.x,)))
    early.append(late)
    early.update_arg(0, late)


def of_another_graph(g: Graph) -> fx.Node:
    return g.raw(aten.relu.default, fx.Graph().placeholder("elsewhere"))


def one_value(g: Graph) -> None:
    g.graph.output(g.x)


# Placeholders


def no_source(g: Graph) -> fx.Node:
    del g.x.meta["source"]
    return g.x


def unknown_source(g: Graph) -> fx.Node:
    g.x.meta["source"] = Source("weights", "x")  # type: ignore[arg-type]
    return g.x


def constant_without_value(g: Graph) -> fx.Node:
    g.base.meta["source"] = Source("constant", "base")
    return g.base


def size_that_is_a_tensor(g: Graph) -> fx.Node:
    g.base.meta["source"] = Source("size", "x.shape[0]")
    return g.base


def parameter_that_is_a_number(g: Graph) -> fx.Node:
    g.w.meta["val"] = 3
    return g.x


# Calls


def no_value(g: Graph) -> fx.Node:
    return g.graph.call_function(aten.relu.default, (g.x,))


def method_call(g: Graph) -> fx.Node:
    node = g.graph.call_method("relu", (g.x,))
    node.meta["val"] = g.x.meta["val"]
    return node


def foreign_call(g: Graph) -> fx.Node:
    return g.raw(print, g.x)


def mutation(g: Graph) -> fx.Node:
    return g.raw(aten.relu_.default, g.x)


def result_out_of_range(g: Graph) -> fx.Node:
    csr = g.call(gnnc.csr, g.col, g.col, 5, 5)
    return g.raw(operator.getitem, csr, 3)


def argument_left_out(g: Graph) -> fx.Node:
    return g.raw(gnnc.spmm.default, g.rowptr, g.col, None, g.x, "sum")


def argument_too_many(g: Graph) -> fx.Node:
    return g.raw(gnnc.degree.default, g.rowptr, g.col)


# Types of arguments


def floats_for_quantized(g: Graph) -> fx.Node:
    return g.raw(gnnc.qgemm.default, g.x, g.w)


def quantized_for_numbers(g: Graph) -> fx.Node:
    return g.spmm(x=g.quantized)


def quantized_in_aten(g: Graph) -> fx.Node:
    quantized = g.call(gnnc.quantize, g.x, g.base, "int8/tensor")
    return g.raw(aten.add.Tensor, g.call(aten.view, quantized, [5, 8]), 1)


def narrow_rowptr(g: Graph) -> fx.Node:
    return g.spmm(rowptr=g.input("narrow", (6,), dtype=torch.int32, kind="structure"))


def float_columns(g: Graph) -> fx.Node:
    return g.spmm(col=g.scale)


def half_scale(g: Graph) -> fx.Node:
    half = g.input("half", (5,), dtype=torch.bfloat16)
    return g.raw(gnnc.quantize.default, g.x, half, "int8/row", like=g.quantized)


def stale_result(g: Graph) -> fx.Node:
    return g.raw(gnnc.quantize.default, g.x, g.base, "int8/tensor")


def stale_qtype(g: Graph) -> fx.Node:
    node = g.call(gnnc.quantize, g.x, g.base, "int8/tensor")
    node.args = (g.x, g.base, "int4/tensor")
    return node


def lost_qtype(g: Graph) -> fx.Node:
    node = g.call(aten.view, g.quantized, [-1, 8])
    del node.meta["qtype"]
    return node


def another_dtype_than_the_qtype(g: Graph) -> fx.Node:
    return g.raw(gnnc.dequantize.default, g.fake_int8, g.scale, "row")


# Literals


def unknown_reduction(g: Graph) -> fx.Node:
    return g.spmm(reduce="median")


def unknown_granularity(g: Graph) -> fx.Node:
    return g.raw(gnnc.dequantize.default, g.quantized, g.base, "block")


def unknown_qtype(g: Graph) -> fx.Node:
    return g.raw(gnnc.scale.default, g.x, "row", like=g.base)


def no_shift_of_shifted_rows(g: Graph) -> fx.Node:
    return g.raw(gnnc.quantize.default, g.x, g.base, "int8/row_pow2", like=g.quantized)


def shifts_of_plain_rows(g: Graph) -> fx.Node:
    return g.raw(gnnc.row_shift.default, g.x, g.base, "int8/row", like=g.shift)


def unknown_edge_op(g: Graph) -> fx.Node:
    return g.raw(gnnc.sddmm.default, g.rowptr, g.col, g.x, g.x, "pow")


def too_many_bits(g: Graph) -> fx.Node:
    return g.raw(gnnc.pack.default, g.quantized, 99, like=g.shift)


# Sizes


def rows_that_rowptr_lacks(g: Graph) -> fx.Node:
    return g.spmm(num_dst=7)


def too_few_edge_values(g: Graph) -> fx.Node:
    return g.spmm(value=g.scale)


def values_for_other_heads(g: Graph) -> fx.Node:
    heads = g.input("heads", (5, 2, 4))
    return g.spmm(value=g.input("alpha", (12, 3)), x=heads)


def too_few_row_scales(g: Graph) -> fx.Node:
    args = (g.rowptr, g.col, None, g.quantized, g.input("four", (4,)), None, "sum", 5)
    return g.raw(gnnc.qspmm.default, *args)


def two_kinds_of_row_scale(g: Graph) -> fx.Node:
    return g.raw(gnnc.qspmm.default, g.rowptr, g.col, None, g.quantized, g.scale, g.shift, "sum", 5)


def too_few_scales_of_destinations(g: Graph) -> fx.Node:
    return g.raw(
        gnnc.qsddmm.default, g.rowptr, g.col, g.quantized, g.quantized, "dot", g.input("few", (4,)), g.scale
    )


def scales_of_one_end(g: Graph) -> fx.Node:
    return g.raw(gnnc.qsddmm.default, g.rowptr, g.col, g.quantized, g.quantized, "dot", g.scale)


def inner_widths_differ(g: Graph) -> fx.Node:
    return g.raw(gnnc.gemm.default, g.x, g.w, None, True)


def scale_of_another_granularity(g: Graph) -> fx.Node:
    return g.raw(gnnc.quantize.default, g.x, g.scale, "int8/tensor", like=g.quantized)


def a_scale_a_row_for_columns(g: Graph) -> fx.Node:
    return g.raw(gnnc.dequantize.default, g.quantized, g.scale, "column")


# Bodies


def _message(g: Graph, body: str) -> fx.Node:
    return g.raw(gnnc.message.default, g.rowptr, g.col, body, "sum", [g.x], [], [], [], 5)


def unreadable_body(g: Graph) -> fx.Node:
    return _message(g, "import os")


def body_without_its_operand(g: Graph) -> fx.Node:
    return _message(g, "t0 = aten.mul.Tensor(i0, j0); return t0")


def values_that_nothing_reduces(g: Graph) -> fx.Node:
    return _message(g, "t0 = aten.relu.default(i0); return [i0, t0]")


def logits_without_values(g: Graph) -> fx.Node:
    node = _message(g, "t0 = aten.relu.default(i0); return t0")
    node.update_arg(3, "softmax")
    return node


# Fused graphs


def not_a_graph(g: Graph) -> fx.Node:
    node = g.fused("fused_0", "map", g.inner(8), g.x)
    g._modules.add_module("fused_0", torch.nn.ReLU())
    return node


def fused_for_nothing(g: Graph) -> fx.Node:
    node = g.fused("fused_0", "map", g.inner(8), g.x)
    del node.meta["kind"]
    return node


def fused_with_too_few_arguments(g: Graph) -> fx.Node:
    return g.fused("fused_0", "map", g.inner(8, 8), g.x)


def fused_for_another_type(g: Graph) -> fx.Node:
    return g.fused("fused_0", "map", g.inner(8), g.quantized)


def fused_makes_another_type(g: Graph) -> fx.Node:
    node = g.fused("fused_0", "map", g.inner(8), g.x)
    node.meta["val"] = (g.quantized.meta["val"],)
    return node


def broken_inside(g: Graph) -> fx.Node:
    inner = g.inner(8)
    add = next(node for node in inner.graph.nodes if node.op == "call_function")
    add.target = aten.add_.Tensor
    return g.fused("fused_0", "map", inner, g.x)


BROKEN: dict[Breaker, str] = {
    used_before_it_is_made: r"not well formed: .*used before it has been defined.*insert a node before",
    of_another_graph: r"not well formed: .*does not belong to this Graph.*erase none that has some",
    one_value: r"returns one value; programs return a tuple",
    no_source: r"placeholder without a source; set meta\['source'\]",
    unknown_source: r"unknown kind 'weights'; use one of parameter, buffer",
    constant_without_value: r"constant without a value; set meta\['value'\]",
    size_that_is_a_tensor: r"is a size, but holds a tensor; give it the kind input",
    parameter_that_is_a_number: r"is a parameter, but holds 3, not a tensor; only tensors",
    no_value: r"has no meta\['val'\]; insert it with a NodeBuilder",
    method_call: r"is a call_method; .*make it a placeholder or a call",
    foreign_call: r"calls <built-in function print>, which is not an op; define it in gnnc.ir",
    mutation: r"mutates its arguments \(aten.relu_.default\); .*use the op that returns a copy",
    result_out_of_range: r"takes result 3 of csr_default, which has 3; take one of 0..2",
    argument_left_out: r"calls spmm without num_dst; give it all of rowptr, col, value, x, reduce, num_dst",
    argument_too_many: r"gives degree arguments that it does not take; it takes rowptr",
    floats_for_quantized: r"takes torch.float32 as x, where qgemm needs quantized values; quantize it",
    quantized_for_numbers: r"takes int8/row as x, where spmm needs numbers; dequantize it, or use qspmm",
    quantized_in_aten: r"computes with int8/tensor of view_default, .*dequantize first",
    narrow_rowptr: r"takes torch.int32 as rowptr, where spmm needs int64; convert it",
    float_columns: r"takes torch.float32 as col, where spmm needs int32 or int64; convert it",
    half_scale: r"takes torch.bfloat16 as scale, where quantize needs float32; convert it",
    stale_result: r"says that it makes torch.float32, but quantize makes int8; infer its meta again",
    stale_qtype: r"says that it holds int8/tensor, but makes int4/tensor; infer its meta again",
    lost_qtype: r"says that it holds no quantized values, but makes int8/row; infer its meta again",
    another_dtype_than_the_qtype: r"takes torch.float32 as q, which says int8/row; its dtype must be",
    unknown_qtype: r"has a qtype that cannot be read: 'row' is not a quantized type; write one as",
    no_shift_of_shifted_rows: r"makes int8/row_pow2 without shifts; row_pow2 takes them, and it alone",
    shifts_of_plain_rows: r"shifts rows of int8/row, which have no shift; use row_pow2",
    unknown_reduction: r"has reduce 'median'; use one of sum, mean, max, min",
    unknown_granularity: r"has granularity 'block'; use one of tensor, row, column",
    unknown_edge_op: r"has op 'pow'; use one of dot, add",
    too_many_bits: r"has bits 99; use one of 1..8",
    rows_that_rowptr_lacks: r"makes 7 rows, but rowptr has 6 entries; num_dst is one less",
    too_few_edge_values: r"has 5 edge values for 12 edges; give each edge one",
    values_for_other_heads: r"has 3 values an edge for 2 heads of x; give each head one, or all",
    too_few_row_scales: r"has 4 entries of x_scale for 5 rows of x; give each row one",
    two_kinds_of_row_scale: r"has both x_scale and shift; .*leave one out",
    too_few_scales_of_destinations: r"has 4 entries of a_scale for 5 rows of a; give each row one",
    scales_of_one_end: r"has a scale for the rows of one end only; give both a_scale and b_scale, or neither",
    inner_widths_differ: r"multiplies rows of 8 with a weight for 4; see whether w_is_kn is right",
    scale_of_another_granularity: r"scale of 1 dimensions, but granularity 'tensor'; they must agree",
    a_scale_a_row_for_columns: r"has 5 scales for 8 columns; give each column one",
    unreadable_body: r"has a body that cannot be read: .*write it with gnnc.ir.body_text",
    body_without_its_operand: r"a body that reads j0, but 0 src operands; pass what it reads",
    values_that_nothing_reduces: r"a body that returns 2 values, but message takes 1; return what it takes",
    logits_without_values: r"a body that returns 1 values, but message takes 2; return what it takes",
    not_a_graph: r"calls fused_0, which is not a graph but a ReLU; inline its ops",
    fused_for_nothing: r"is fused without meta\['kind'\]; say which kernel",
    fused_with_too_few_arguments: r"gives 1 arguments to a fused graph with 2 inputs; give each its own",
    fused_for_another_type: r"gives torch.int8 to input in_i0 of its graph, which takes torch.float32; fuse",
    fused_makes_another_type: r"says that it makes \[torch.int8\], but its graph makes \[torch.float32\]",
    broken_inside: r"is fused, and its inner node add_tensor mutates its arguments",
}


@pytest.mark.parametrize("breaker", BROKEN, ids=lambda breaker: breaker.__name__)
def test_refuses(breaker: Breaker) -> None:
    g = Graph()
    node = breaker(g)
    if not g.graph.find_nodes(op="output"):
        g.graph.output((node,))
    with pytest.raises(VerifyError, match=BROKEN[breaker]) as error:
        verify(fx.GraphModule(g._modules, g.graph), "quantize")
    message = str(error.value)
    assert re.match(r"after 'quantize': (the graph|node \w+ \(in (conv1|the model's root)\)) ", message)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_accepts_what_holds(layer: Callable[[], fx.GraphModule]) -> None:
    verify(layer(), "fuse")
