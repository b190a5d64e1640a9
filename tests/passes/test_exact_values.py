"""Exact values: which values feed comparisons, selections and the like, and which do not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gnn_graphs import MODELS, Layers, arguments, before_and_after, relative_error, run_all, targets
from torch.fx import GraphModule, Node

from gnnc.ir.exact_reads import EXACT
from gnnc.passes.assign import Assign
from gnnc.passes.exact_values import ExactValues
from gnnc.passes.quantize import Quantize
from gnnc.precision import BF16, INT8, Precision

gnnc = torch.ops.gnnc
aten = torch.ops.aten
PASSES = (ExactValues(), Assign(min_row_bytes=0), Quantize())


def graph(build: Callable[[Layers, Node], Any]) -> GraphModule:
    """A linear layer ``h``, an aggregation of it, and what ``build`` makes of both."""
    b = Layers(32)
    b.layer = "conv"
    h = b.linear(b.x, 24)
    return b.finish(build(b, h), b.linear(b.x, 24, name="other"))


def exact(gm: GraphModule) -> list[str]:
    """The primitives that are marked, by name."""
    return [
        name
        for node in gm.graph.nodes
        if EXACT in node.meta and (name := str(node.target)).startswith("gnnc.")
    ]


def winners(b: Layers, h: Node) -> Node:
    """A body that compares the sources with the largest of them."""
    body = "t0 = aten.eq.Tensor(j0, i0); t1 = aten._to_copy.default(t0, dtype=torch.float32); return t1"
    largest = b.spmm(h, reduce="max")
    return b.call(gnnc.message, b.rowptr, b.col, body, "sum", [largest], [h], [], [], b.nodes)


def exponential_of_difference(b: Layers, h: Node, reduce: str) -> Node:
    """A body with the exponential of the sources minus what they are reduced to."""
    body = "t0 = aten.sub.Tensor(j0, i0); t1 = aten.exp.default(t0); return t1"
    reduced = b.call(aten.clamp.default, b.spmm(h, reduce=reduce), 0.0)
    return b.call(gnnc.message, b.rowptr, b.col, body, "sum", [reduced], [h], [], [], b.nodes)


def other_body(b: Layers, h: Node) -> Node:
    """A body that only compares an edge attribute that no layer has computed."""
    body = "t0 = aten.gt.Scalar(e0, 0.5); t1 = aten.mul.Tensor(j0, t0); return t1"
    return b.call(gnnc.message, b.rowptr, b.col, body, "sum", [], [h], [b.edge_input("a", 1)], [], b.nodes)


def then(target: Any, *args: Any, **kwargs: Any) -> Callable[[Layers, Node], Node]:
    return lambda b, h: b.call(target, h, *args, **kwargs)


def part(target: Any, index: int, *args: Any) -> Callable[[Layers, Node], Node]:
    return lambda b, h: b.parts(b.call(target, h, *args))[index]


FIRES: dict[str, Callable[[Layers, Node], Any]] = {
    "body": winners,
    "gt": then(aten.gt.Scalar, 0.5),
    "eq": then(aten.eq.Scalar, 0.0),
    "sign": then(aten.sign.default),
    "argmax": then(aten.argmax.default, 1),
    "topk": part(aten.topk.default, 1, 2),
    "max indices": part(aten.max.dim, 1, 1),
    "sort indices": part(aten.sort.default, 1),
    "cos": then(aten.cos.default),
    "exp": then(aten.exp.default),
    "floor": then(aten.floor.default),
    "remainder": then(aten.remainder.Scalar, 24.0),
    "long": then(aten._to_copy.default, dtype=torch.int64),
    "bool": then(aten._to_copy.default, dtype=torch.bool),
    "isclose": lambda b, h: b.call(aten.isclose, h, b.mul(h, b.norm)),
    "angle": lambda b, h: b.call(aten.atan2, h, b.mul(h, b.norm)),
    "where": lambda b, h: b.call(aten.where.ScalarSelf, b.call(aten.gt.Scalar, h, 0.0), 1.0, h),
    "far threshold": lambda b, h: b.call(aten.masked_fill.Scalar, h, b.call(aten.le.Scalar, h, 0.5), 0.0),
    "far mask": lambda b, h: b.mul(
        h, b.call(aten._to_copy.default, b.call(aten.gt.Scalar, h, 0.5), dtype=torch.float32)
    ),
    "distance to the smallest": lambda b, h: exponential_of_difference(b, h, "min"),
    "distance to a sum": lambda b, h: exponential_of_difference(b, h, "sum"),
    "factor of a sum": lambda b, h: b.call(
        aten.exp.default,
        b.call(aten.neg, b.call(aten.add.Tensor, b.mul(h, h), b.call(aten.abs, h), alpha=-1)),
    ),
    "behind others": lambda b, h: b.call(aten.floor.default, b.linear(b.relu(b.spmm(h)), 32, name="third")),
}

HARMLESS: dict[str, Callable[[Layers, Node], Any]] = {
    "body": other_body,
    "relu": lambda b, h: b.relu(h),
    "largest": then(aten.amax.default, [1]),
    "max values": part(aten.max.dim, 0, 1),
    "top values": part(aten.topk.default, 0, 2),
    "infinite": lambda b, h: b.call(aten.masked_fill.Scalar, h, b.call(aten.eq.Scalar, h, math.inf), 0.0),
    "nan": lambda b, h: b.call(aten.masked_fill.Scalar, h, b.call(aten.ne.Tensor, h, h), 0.0),
    "bf16": then(aten._to_copy.default, dtype=torch.bfloat16),
    "shape": lambda b, h: b.call(aten.gt.Scalar, b.call(aten.ones_like.default, h), 0.5),
    "relu by hand": lambda b, h: b.call(aten.where.ScalarOther, b.call(aten.gt.Scalar, h, 0), h, 0.0),
    "relu by a mask": lambda b, h: b.mul(
        h, b.call(aten._to_copy.default, b.call(aten.gt.Scalar, h, 0), dtype=torch.float32)
    ),
    "leaky relu by hand": lambda b, h: b.call(
        aten.where.self, b.call(aten.gt.Scalar, h, 0), h, b.mul(h, 0.2)
    ),
    "standard deviation": lambda b, h: b.call(
        aten.masked_fill.Scalar, h, b.call(aten.le.Scalar, h, math.sqrt(1e-5)), 0.0
    ),
    "mask of the graph": lambda b, h: b.mul(h, b.call(aten.gt.Scalar, b.norm, 0.0)),
    "gaussian": lambda b, h: b.call(aten.exp.default, b.mul(b.mul(h, h), -0.5)),
    "softmax by hand": lambda b, h: b.call(
        aten.exp.default, b.call(aten.sub.Tensor, h, b.call(aten.amax.default, h, [1], True))
    ),
    "softmax in a body": lambda b, h: exponential_of_difference(b, h, "max"),
    "elu by hand": lambda b, h: b.call(
        aten.where.self,
        b.call(aten.gt.Scalar, h, 0),
        h,
        b.call(aten.sub.Tensor, b.call(aten.exp, b.call(aten.clamp.default, h, None, 0)), 1),
    ),
    "sigmoid by hand": lambda b, h: b.call(aten.reciprocal, b.add(b.call(aten.exp, b.call(aten.neg, h)), 1)),
    "softplus by hand": lambda b, h: b.call(aten.log1p, b.call(aten.exp, h)),
    "maximum by hand": lambda b, h: b.call(
        aten.where.self, b.call(aten.gt.Tensor, h, g := b.mul(h, b.norm)), h, g
    ),
    "exponent of a weight": lambda b, h: b.call(aten.pow.Tensor_Tensor, h, b.weight("p", 1)),
}


@pytest.mark.parametrize("name", FIRES)
def test_values_that_feed_such_an_op_are_marked(name: str) -> None:
    gm, _ = run_all(graph(FIRES[name]), PASSES[:1])
    assert "gnnc.gemm.default" in exact(gm)
    other = next(n for n in reversed(gm.graph.nodes) if str(n.target) == "gnnc.gemm.default")
    assert EXACT not in other.meta


@pytest.mark.parametrize("name", HARMLESS)
def test_other_values_are_not(name: str) -> None:
    gm, ctx = run_all(graph(HARMLESS[name]), PASSES[:1])
    assert exact(gm) == [] and not ctx.notes


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_left_alone(name: str) -> None:
    gm, _ = run_all(MODELS[name](), PASSES[:1])
    assert not any(EXACT in node.meta for node in gm.graph.nodes)


@pytest.mark.parametrize("precision", [INT8, BF16], ids=str)
@pytest.mark.parametrize("name", FIRES)
def test_marked_values_are_those_of_fp32(name: str, precision: Precision) -> None:
    original = graph(FIRES[name])
    gm, ctx = run_all(original, PASSES, precision=precision)
    (got, low), (want, full) = gm(*arguments(gm)), original(*arguments(original))
    assert torch.equal(got, want)
    assert 0 < relative_error([low], [full]) < 0.02
    kept = [note.text for note in ctx.notes if "which reads no rounded values" in note.text]
    assert kept and all(text.startswith("stays FP32: its result feeds ") for text in kept)


def test_both_ends_of_the_reason() -> None:
    _, ctx = run_all(graph(winners), PASSES)
    assert "stays FP32: its result feeds eq, a comparison, which reads no rounded values" in [
        n.text for n in ctx.notes
    ]


def test_a_sum_that_is_compared_has_no_term_in_bf16() -> None:
    def build(b: Layers, h: Node) -> list[Node]:
        total = b.add(h, b.linear(b.relu(b.spmm(b.x)), 24, name="b"))
        return b.call(aten.gt.Scalar, total, 0.5)

    gm, _ = run_all(graph(build), PASSES)
    assert not any(n.kwargs.get("dtype") is torch.bfloat16 for n in gm.graph.nodes)


def test_an_override_does_not_round_them() -> None:
    gm, _ = run_all(graph(FIRES["floor"]), PASSES, overrides={"conv": INT8})
    assert targets(gm).count("gemm.default") == 1


def test_inputs_of_bodies() -> None:
    def build(b: Layers, h: Node) -> Node:
        body = "t0 = aten.mul.Tensor(j0, c0); t1 = aten.ge.Tensor(t0, i0); "
        body += "t2 = aten.mul.Tensor(j1, t1); return t2"
        c, value = b.mul(b.weight("c", 1, 24), 2.0), b.linear(b.x, 24, name="value")
        return b.call(gnnc.message, b.rowptr, b.col, body, "sum", [h], [h, value], [], [c], b.nodes)

    gm, _ = run_all(graph(build), PASSES[:1])
    marked = [n for n in gm.graph.nodes if EXACT in n.meta]
    assert [str(n.target) for n in marked] == ["gnnc.gemm.default", "aten.mul.Tensor"]


def test_only_annotates() -> None:
    unread = "unsqueeze.default"
    before = [name for name in targets(graph(winners)) if name != unread]
    assert targets(run_all(graph(winners), PASSES[:1])[0]) == before


def test_golden(golden: Callable[[str], None]) -> None:
    golden(before_and_after(graph(winners), [], ExactValues()))
