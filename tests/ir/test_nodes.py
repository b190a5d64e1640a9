import pytest
import torch
from torch import fx

from gnnc.ir.nodes import is_pointwise, is_view

aten = torch.ops.aten


def node(target) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(target, (graph.placeholder("x"),))


@pytest.mark.parametrize(
    "op", [aten.leaky_relu.default, aten.hardswish.default, aten.relu.default, aten.elu.default]
)
def test_activations_are_pointwise_on_every_torch(op) -> None:
    assert is_pointwise(node(op))


@pytest.mark.parametrize("target", [aten.sum.default, aten.mm.default, torch.relu])
def test_other_targets_are_not(target) -> None:
    assert not is_pointwise(node(target))


@pytest.mark.parametrize("op", [aten.view.default, aten.squeeze.dim, aten.flatten.using_ints])
def test_ops_that_give_another_shape_are_views(op) -> None:
    assert is_view(node(op))


@pytest.mark.parametrize("op", [aten.view.dtype, aten.expand.default, aten.relu.default])
def test_ops_that_give_other_elements_are_not(op) -> None:
    assert not is_view(node(op))
