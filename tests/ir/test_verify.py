"""The verifier refuses graphs that break an invariant."""

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from gnnc.errors import VerifyError
from gnnc.ir import Source
from gnnc.ir.verify import verify

MODE = FakeTensorMode()


def placeholder(graph: fx.Graph, name: str, value: torch.Tensor) -> fx.Node:
    node = graph.placeholder(name)
    node.meta = {"val": MODE.from_tensor(value), "source": Source("input", name), "layer": ""}
    return node


def no_value(graph: fx.Graph) -> fx.Node:
    x = placeholder(graph, "x", torch.ones(2, 2))
    return graph.call_function(torch.ops.aten.relu.default, (x,))


def no_source(graph: fx.Graph) -> fx.Node:
    x = placeholder(graph, "x", torch.ones(2, 2))
    del x.meta["source"]
    return x


def mutation(graph: fx.Graph) -> fx.Node:
    x = placeholder(graph, "x", torch.ones(2, 2))
    node = graph.call_function(torch.ops.aten.relu_.default, (x,))
    node.meta["val"] = x.meta["val"]
    return node


def float_codes(graph: fx.Graph) -> fx.Node:
    x = placeholder(graph, "x", torch.ones(2, 2))
    node = graph.call_function(torch.ops.gnnc.qgemm.default, (x, x))
    node.meta["val"] = x.meta["val"]
    return node


def foreign_call(graph: fx.Graph) -> fx.Node:
    x = placeholder(graph, "x", torch.ones(2, 2))
    node = graph.call_function(print, (x,))
    node.meta["val"] = x.meta["val"]
    return node


def method_call(graph: fx.Graph) -> fx.Node:
    x = placeholder(graph, "x", torch.ones(2, 2))
    node = graph.call_method("relu", (x,))
    node.meta["val"] = x.meta["val"]
    return node


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (no_value, "has no meta"),
        (no_source, "without a source"),
        (mutation, "mutates its arguments"),
        (float_codes, "needs int8"),
        (foreign_call, "not an op"),
        (method_call, "call_method"),
    ],
)
def test_refuses(build: Callable[[fx.Graph], fx.Node], message: str) -> None:
    graph = fx.Graph()
    graph.output((build(graph),))
    with pytest.raises(VerifyError, match=message) as error:
        verify(fx.GraphModule({}, graph), "quantize")
    assert "after 'quantize'" in str(error.value)
