"""Sensitivity: the error of the output when one op alone is rounded, from shared prefixes."""

import math

import pytest
import torch
from gnn_graphs import MODELS, Layers, arguments

from gnnc.passes.quantization.number_formats import FULL, Option
from gnnc.passes.search.sensitivity import Bench, relative_l2

INT8 = Option.parse("int8")
ops = torch.ops.gnnc


def test_relative_l2_of_a_hand_computed_case() -> None:
    # |(0, 4) - (3, 4)| / |(3, 4)| = 3 / 5
    assert relative_l2(torch.tensor([0.0, 4.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.6)


def test_relative_l2_at_zero_and_beyond() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    assert relative_l2(zero, zero) == 0
    assert relative_l2(zero[:0], zero[:0]) == 0
    assert relative_l2(one, zero) == math.inf
    assert relative_l2(one * math.nan, one) == math.inf


def _gemms(gm):
    return [n for n in gm.graph.nodes if n.target is ops.gemm.default]


def test_the_error_of_a_hand_computed_case() -> None:
    """x @ w with x = (127, 0.4) and w = (0, 1): in 8 bits x becomes (127, 0), and the output 0."""
    b = Layers(2)
    gm = b.finish(b.linear(b.x, 1))
    values = list(arguments(gm))
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    values[names.index("in_x")] = torch.tensor([[127.0, 0.4]])
    values[names.index("in_lin_weight")] = torch.tensor([[0.0, 1.0]])
    (node,) = _gemms(gm)
    assert Bench(gm, values).errors({node: INT8}) == (1.0,)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_rounded_is_no_error(name) -> None:
    gm = MODELS[name]()
    bench = Bench(gm, arguments(gm))
    assert bench.errors({}) == (0.0,)
    assert bench.errors({node: FULL for node in _gemms(gm)}) == (0.0,)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_from_the_shared_prefix_equals_a_whole_run(name) -> None:
    gm = MODELS[name]()
    values = arguments(gm)
    first, *_, last = _gemms(gm)
    bench = Bench(gm, values)
    alone = [bench.errors({node: INT8})[0] for node in (first, last)]
    assert [Bench(gm, values).errors({node: INT8})[0] for node in (first, last)] == alone
    both = bench.errors({first: INT8, last: INT8})[0]
    assert max(alone) * 0.8 < both < sum(alone) * 1.2


def test_only_what_depends_on_the_op_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = MODELS["gcn"]()
    bench = Bench(gm, arguments(gm))
    seen = []
    evaluate = Bench._evaluate
    monkeypatch.setattr(
        Bench, "_evaluate", lambda self, node, *rest: seen.append(node) or evaluate(self, node, *rest)
    )
    last = _gemms(gm)[-1]
    bench.errors({last: INT8})
    order = list(gm.graph.nodes)
    assert seen[0] is last and all(order.index(node) >= order.index(last) for node in seen)


def test_each_output_has_its_own_error() -> None:
    b = Layers(16)
    gm = b.finish(b.linear(b.x, 8, name="a"), b.linear(b.x, 8, name="b"))
    first, _ = _gemms(gm)
    errors = Bench(gm, arguments(gm)).errors({first: INT8})
    assert errors[0] > 0 and errors[1] == 0


def test_growth_saturates_scales_without_room_alone() -> None:
    b = Layers(16)
    gm = b.finish(b.spmm(b.x))
    (node,) = [n for n in gm.graph.nodes if n.target is ops.spmm.default]
    bench = Bench(gm, arguments(gm))
    for name, grows in (("int8 tensor", True), ("int8 row_pow2", False), ("int8 row", False)):
        option = Option.parse(name)
        now, later = bench.errors({node: option})[0], bench.errors({node: option}, 2.0)[0]
        assert (later > 1.5 * now) == grows, name
