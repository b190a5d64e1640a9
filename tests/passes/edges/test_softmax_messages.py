"""A softmax of every column over the edges of a row, and the sum that it weighs, are one reduction."""

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from raised import nasty_graphs
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.utils import softmax
from traced import Formula, count, eager, edge_widths, run

import gnnc
from gnnc.capture.export import capture
from gnnc.passes.base import Context, run_pass
from gnnc.passes.normalize import Normalize
from gnnc.passes.raise_ import Raise
from gnnc.target import Target

WIDTH = 20


def graph(nodes: int = 9, edges: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, WIDTH, generator=generator)
    return x, torch.randint(nodes, (2, edges), generator=generator)


def formula(function: Callable[..., Tensor]) -> Formula:
    """The sum of what a function makes of the rows at both ends, the destinations and the number of nodes."""

    def total(x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        message = function(x[src], x[dst], dst, x.shape[0])
        return x.new_zeros(x.shape[0], *message.shape[1:]).index_add(0, dst, message)

    return Formula(total)


def weighed(x: Tensor, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    """A message and its softmax."""
    message = (x[src] - x[dst]).relu()
    return message, softmax(message, dst, num_nodes=x.shape[0])


def stages(model: nn.Module, *args: Tensor) -> tuple[torch.fx.GraphModule, ...]:
    context = Context(target=Target())
    normalized = run_pass(Normalize(), capture(model, args, {}).graph_module, context)
    return normalized, run_pass(Raise(), normalized, context)


def reductions(gm: torch.fx.GraphModule) -> list[str]:
    return [n.args[3] for n in gm.graph.nodes if n.target is torch.ops.gnnc.message.default]


LAYERS = {
    "gen": lambda: pyg.GENConv(WIDTH, WIDTH, aggr="softmax", learn_t=True),
    "channels": lambda: pyg.SAGEConv(WIDTH, WIDTH, aggr=pyg.SoftmaxAggregation(learn=True, channels=WIDTH)),
    "point-transformer": lambda: pyg.PointTransformerConv(WIDTH, WIDTH),
}


def arguments(name: str, x: Tensor, edge_index: Tensor) -> tuple[Tensor, ...]:
    return (x, x[:, :3].contiguous(), edge_index) if name == "point-transformer" else (x, edge_index)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", LAYERS)
def test_no_logit_and_no_weight_is_kept_on_any_graph(name: str):
    torch.manual_seed(0)
    model = LAYERS[name]().eval()
    before, after = stages(model, *arguments(name, *graph()))
    assert reductions(after) == ["softmax"]
    assert count(after, "edge_softmax") == 0
    compiled = gnnc.compile(model, "fp32", backend="cpu")
    for nodes, edge_index in nasty_graphs().values():
        args = arguments(name, torch.randn(nodes, WIDTH), edge_index)
        want = eager(model, *args)[0]
        for gm in (before, after):
            assert_close(run(gm, model, args, {})[0], want, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            assert_close(compiled(*args), want, rtol=1e-4, atol=1e-5)
    assert WIDTH not in edge_widths(compiled.graph_module).values()


@pytest.mark.first(1)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_where_it_was(bad: float):
    model = formula(lambda source, target, dst, nodes: source * softmax(source, dst, num_nodes=nodes))
    x, edge_index = graph()
    before, after = stages(model, x, edge_index)
    assert reductions(after) == ["softmax"]
    compiled = gnnc.compile(model, "fp32", backend="cpu", check_finite="off")
    x[:, 3], x[2, 5] = bad, bad
    want = run(before, model, (x, edge_index), {})[0]
    assert not want.isfinite().all()
    assert_close(run(after, model, (x, edge_index), {})[0], want, equal_nan=True)
    with torch.no_grad():
        assert_close(compiled(x, edge_index), want, equal_nan=True)


def test_beside_other_aggregators_it_is_one_pass():
    aggr = pyg.MultiAggregation(["softmax", "max", "std"], mode="sum")
    model = pyg.GENConv(WIDTH, WIDTH, aggr=aggr).eval()
    args = *graph(), torch.randn(40, WIDTH)
    before, after = stages(model, *args)
    assert [sorted(names.split(",")) for names in reductions(after)] == [["max", "softmax", "sum", "sum"]]
    assert_close(run(after, model, args, {})[0], run(before, model, args, {})[0], rtol=1e-4, atol=1e-5)


def test_two_sums_by_one_softmax_are_one_pass():
    def twice(x: Tensor, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
        message, weight = weighed(x, src, dst)
        zero = torch.zeros_like(x)
        return zero.index_add(0, dst, weight * message), zero.index_add(0, dst, message.exp() * weight)

    model = Formula(twice)
    before, after = stages(model, *graph())
    assert reductions(after) == ["softmax,softmax"]
    for got, want in zip(*(run(gm, model, graph(), {}) for gm in (after, before)), strict=True):
        assert_close(got, want)


def by_heads(source: Tensor, target: Tensor, dst: Tensor, nodes: int) -> Tensor:
    message = (source - target).relu()
    return message.view(-1, 4, 5) * softmax(
        message.view(-1, 4, 5).sum(-1, keepdim=True), dst, num_nodes=nodes
    )


def with_a_large_eps(source: Tensor, target: Tensor, dst: Tensor, nodes: int) -> Tensor:
    message = (source - target).relu()
    top = message.new_full((nodes, WIDTH), -float("inf"))
    top = top.scatter_reduce(0, dst[:, None].expand_as(message), message, "amax")
    exp = (message - top[dst]).exp()
    return exp / (exp.new_zeros(nodes, WIDTH).index_add(0, dst, exp)[dst] + 0.5) * message


def of_the_other_end(source: Tensor, target: Tensor, dst: Tensor, nodes: int) -> Tensor:
    message = (source - target).relu()
    return message * softmax(message, dst.flip(0), num_nodes=nodes)


@pytest.mark.first(1)
@pytest.mark.parametrize("function", [by_heads, with_a_large_eps, of_the_other_end])
def test_other_softmaxes_keep_their_weights(function: Callable[..., Tensor]):
    model = formula(function)
    before, after = stages(model, *graph())
    assert "softmax" not in reductions(after)
    assert count(after, "edge_softmax") == 1
    assert_close(run(after, model, graph(), {})[0], run(before, model, graph(), {})[0])


def test_weights_that_are_returned_are_made_for_that_alone():
    def returns(x: Tensor, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
        message, weight = weighed(x, src, dst)
        return torch.zeros_like(x).index_add(0, dst, weight * message), weight

    model = Formula(returns)
    before, after = stages(model, *graph())
    assert (reductions(after), count(after, "edge_softmax")) == (["softmax"], 1)
    for got, want in zip(*(run(gm, model, graph(), {}) for gm in (after, before)), strict=True):
        assert_close(got, want)


def test_no_tensor_of_edges_times_channels_is_made():
    edges = 20_000

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and not torch._C._is_alias_of(result, x):
                self.size = max(self.size, result.untyped_storage().nbytes() // 4)
            return result

    torch.manual_seed(0)
    model = pyg.GENConv(64, 64, aggr="softmax", learn_t=True, edge_dim=3).eval()
    compiled = gnnc.compile(model, "fp32", backend="cpu")
    x, edge_index, edge_attr = torch.randn(500, 64), torch.randint(500, (2, edges)), torch.randn(edges, 3)
    with torch.no_grad():
        compiled(x, edge_index, edge_attr)
        with Largest() as seen:
            compiled(x, edge_index.flip(0), edge_attr)
    assert 500 * 64 <= seen.size < edges * 64 // 4
