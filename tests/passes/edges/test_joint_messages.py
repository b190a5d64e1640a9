"""Aggregators of one message become one pass over the edges; others keep their own."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import PNAConv
from traced import Formula, count, eager, relative_error, run

from gnnc.capture.export import capture
from gnnc.ir import parse_body
from gnnc.passes import raise_
from gnnc.passes.base import Context, run_pass
from gnnc.passes.normalize import Normalize
from gnnc.passes.raise_ import Raise
from gnnc.target import Target

WIDTH = 6


def graph(nodes: int = 9, edges: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, WIDTH, generator=generator)
    return x, torch.randint(nodes, (2, edges), generator=generator)


def pna(**kwargs) -> PNAConv:
    torch.manual_seed(0)
    aggregators = ["mean", "max", "min", "sum", "std", "var"]
    return PNAConv(WIDTH, WIDTH, aggregators, ["identity"], torch.tensor([0, 3, 5]), **kwargs).eval()


def raised(model: nn.Module, *args: Tensor) -> tuple[torch.fx.GraphModule, Context]:
    context = Context(target=Target())
    normalized = run_pass(Normalize(), capture(model, args, {}).graph_module, context)
    return run_pass(Raise(), normalized, context), context


def messages(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in gm.graph.nodes if node.target is torch.ops.gnnc.message.default]


def formula(function) -> Formula:
    """``function(x, rows read at the sources, rows read at the destinations, dst)``."""
    return Formula(lambda x, src, dst: function(x, x[src], x[dst], dst))


def total(x: Tensor, dst: Tensor, message: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, dst, message)


def test_all_aggregators_of_pna_are_one_message_that_computes_nothing_twice():
    model = pna()
    gm, context = raised(model, *graph())
    (node,) = messages(gm)
    names = node.args[3].split(",")
    assert sorted(names) == ["max", "min", "sum", "sum"]  # mean, sum, std and var are made of two sums
    calls = [str(n.target) for n in parse_body(node.args[2]).graph.nodes if n.op == "call_function"]
    assert len(calls) == len(set(calls))
    assert not any("pass of its own" in note.text for note in context.notes)
    for sizes in [(9, 40), (5, 0), (1, 1), (1, 0)]:
        args = graph(*sizes)
        assert relative_error(run(gm, model, args, {})[0], eager(model, *args)[0]) < 1e-5


def test_joining_leaves_the_bits_alone(monkeypatch: pytest.MonkeyPatch):
    model, args = pna(towers=2), graph()
    together, _ = raised(model, *args)
    monkeypatch.setattr(raise_, "join_messages", lambda *_: None)
    apart, _ = raised(model, *args)
    assert (count(together, "message"), count(apart, "message")) == (1, 4)
    assert torch.equal(run(together, model, args, {})[0], run(apart, model, args, {})[0])


def test_numerator_and_denominator_of_one_message_are_one_pass():
    def function(x, source, target, dst):
        message = (source * target).relu()
        weight = message.exp()
        return total(x, dst, weight * message) / (total(x, dst, weight) + 1)

    model, args = formula(function), graph()
    gm, _ = raised(model, *args)
    assert count(gm, "message") == 1
    assert relative_error(run(gm, model, args, {})[0], eager(model, *args)[0]) < 1e-5


def test_a_message_that_needs_the_result_of_another_says_so():
    def function(x, source, target, dst):
        first = total(x, dst, (source * target).relu())
        return total(x, dst, (source * first[dst]).relu() + target)

    model = formula(function)
    gm, context = raised(model, *graph())
    assert len(messages(gm)) == 2
    assert ["needs the result" in note.text for note in context.notes] == [True]
    assert torch.allclose(run(gm, model, graph(), {})[0], eager(model, *graph())[0], atol=1e-5)


@pytest.mark.parametrize("widths", ["rows", "shapes"])
def test_messages_of_other_rows_or_shapes_stay_apart(widths: str):
    def function(x, source, target, dst):
        first = total(x, dst, (source * target).relu())
        if widths == "rows":
            return first + total(x, dst, ((source + 1) * (target + 2)).relu())
        return first + total(x[:, :2], dst, (source[:, :2] * target[:, :2]).relu()).sum(1, keepdim=True)

    gm, context = raised(formula(function), *graph())
    assert len(messages(gm)) == 2
    assert context.notes == []
