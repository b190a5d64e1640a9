"""A product over all edges and sums of its sides become one pass over the edges; gradients stay the same."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import edge_layers
import pytest
import torch
from raised import nasty_graphs
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch_geometric.nn import EdgeConv, GINEConv
from traced import relative_error

import gnnc
from gnnc.ir.parts import Parts
from gnnc.passes.base import Context
from gnnc.passes.join_sums import JoinSums
from gnnc.precision import FP32
from gnnc.runtime import backend as backends
from gnnc.runtime.backend import get_backend
from gnnc.target import Target

NODES, EDGES, WIDTH, FEATURES = 40, 300, edge_layers.WIDTH, edge_layers.FEATURES
GRAPHS = nasty_graphs()
GNNC = torch.ops.gnnc
PRODUCT = "t0 = aten.t.default({a}); t1 = aten.mm.default(t0, {b}); return t1"
SUM = "t0 = aten.sum.dim_IntList({a}, [0], True); t1 = aten.reshape.default(t0, [-1]); return t1"


@pytest.fixture(autouse=True)
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the reference backend as one that stores steps of gradients, and adds up sides of products."""
    monkeypatch.setattr(backends, "_REGISTRY", dict(backends._REGISTRY))
    plain = get_backend("reference")
    target = replace(plain.target, name="joining", stored_steps=True, joint_sums=True)
    backends.register_backend("joining", lambda device: replace(plain, target=target))
    yield


LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "GINE": (lambda: GINEConv(edge_layers.mlp(WIDTH), edge_dim=FEATURES), 1),
    "EdgeConv": (lambda: EdgeConv(edge_layers.mlp(2 * WIDTH)), 1),
    "mesh network": (edge_layers.MeshGraphNet, 3),
}
"""Layers, and how many products of their gradients add up a side."""


def gradients(call: Callable[..., Tensor], model: nn.Module, edge_index: Tensor, nodes: int) -> list[Tensor]:
    torch.manual_seed(3)
    x = torch.randn(nodes, WIDTH, requires_grad=True)
    attr = [] if isinstance(model, EdgeConv) else [torch.randn(edge_index.shape[1], FEATURES)]
    return list(torch.autograd.grad(call(x, edge_index, *attr).square().sum(), [x, *model.parameters()]))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_eager(name: str) -> None:
    torch.manual_seed(0)
    make, count = LAYERS[name]
    model, edge_index = make(), torch.randint(NODES, (2, EDGES))
    compiled = gnnc.compile(model, precision="fp32", backend="joining")
    found = gradients(compiled, model, edge_index, NODES)
    for got, want in zip(found, gradients(model, model, edge_index, NODES), strict=True):
        assert relative_error(got, want) < 2e-5
    text = compiled.explain()
    assert text.count("bodies are computed in one pass over the edges") >= 1, text
    assert str(compiled).count("fused.bodies()") == count


@pytest.mark.parametrize("graph", GRAPHS)
def test_nasty_graphs(graph: str) -> None:
    torch.manual_seed(0)
    model = LAYERS["GINE"][0]()
    nodes, edge_index = GRAPHS[graph]
    compiled = gnnc.compile(model, precision="fp32", backend="joining")
    found = gradients(compiled, model, edge_index, nodes)
    for got, want in zip(found, gradients(model, model, edge_index, nodes), strict=True):
        assert got.shape == want.shape and relative_error(got, want) < 2e-5


def joined(
    function: Callable[..., tuple[Tensor, ...]], *values: Tensor, joins: bool = True
) -> fx.GraphModule:
    """Return the graph of a function after the pass, which computes what the function does."""
    parts = Parts(forward=make_fx(function, tracing_mode="fake")(*values))
    context = Context(FP32, target=Target(joint_sums=joins))
    if JoinSums().applies(parts, context):
        parts = JoinSums().run_parts(parts, context)
    for got, want in zip(parts.forward(*values), function(*values), strict=True):
        assert torch.equal(got, want)
    return parts.forward


def sizes_of(gm: fx.GraphModule) -> list[int]:
    """Return how many sums each group has."""
    modules = [gm.get_submodule(str(call.target)) for call in gm.graph.find_nodes(op="call_module")]
    return [sum(node.op == "call_function" for node in module.graph.nodes) for module in modules]


def operands() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    rowptr = torch.tensor([0, 4, 4, 9])
    col = torch.randint(3, (9,), dtype=torch.int32)
    return rowptr, col, torch.randn(9, 4), torch.randn(9, 6)


def sum_of(rowptr: Tensor, col: Tensor, *edges: Tensor) -> Tensor:
    body = PRODUCT.format(a="e0", b="e1") if len(edges) == 2 else SUM.format(a="e0")
    return GNNC.edge_sum(rowptr, col, body, [], [], list(edges), [])


def test_sums_of_either_side_and_of_both_join() -> None:
    r, c, a, b = operands()
    assert sizes_of(joined(lambda r, c, a, b: (sum_of(r, c, a, b), sum_of(r, c, a)), r, c, a, b)) == [2]
    assert sizes_of(joined(lambda r, c, a, b: (sum_of(r, c, b), sum_of(r, c, a, b)), r, c, a, b)) == [2]
    three = joined(lambda r, c, a, b: (sum_of(r, c, b), sum_of(r, c, a, b), sum_of(r, c, a)), r, c, a, b)
    assert sizes_of(three) == [3]


def test_each_product_takes_one_sum_of_a_side() -> None:
    r, c, a, b = operands()

    def function(r: Tensor, c: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return sum_of(r, c, a, b), sum_of(r, c, a, a), sum_of(r, c, a), sum_of(r, c, a), sum_of(r, c, a)

    assert sizes_of(joined(function, r, c, a, b)) == [2, 2]


def test_other_rows_other_edges_and_what_needs_the_product_stay_apart() -> None:
    r, c, a, b = operands()

    assert sizes_of(joined(lambda r, c, a, b: (sum_of(r, c, a), sum_of(r, c, b)), r, c, a, b)) == []
    assert sizes_of(joined(lambda r, c, a, b: (sum_of(r, c, a, a), sum_of(r, c, b)), r, c, a, b)) == []
    others = joined(lambda r, c, a, b: (sum_of(r, c, a, b), sum_of(r, c.flip(0), a)), r, c, a, b)
    assert sizes_of(others) == []


def test_a_sum_that_the_product_needs_stays_apart() -> None:
    r, c, a, b = operands()

    def function(r: Tensor, c: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        columns = sum_of(r, c, a)
        return columns, sum_of(r, c, a, b * columns.sum())

    assert sizes_of(joined(function, r, c, a, b)) == []


def test_backends_without_the_kernel_are_left_alone() -> None:
    r, c, a, b = operands()

    def function(r: Tensor, c: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return sum_of(r, c, a, b), sum_of(r, c, a)

    assert sizes_of(joined(function, r, c, a, b, joins=False)) == []
