"""Signs of values: what is said to be never positive is so, for any expression."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from gnnc.ir.signs import is_never_positive

aten = torch.ops.aten
UNARY: tuple[Callable[[Graph, Node], Node], ...] = tuple(
    lambda graph, x, target=target, rest=rest: graph.call_function(target, (x, *rest))
    for target, *rest in (
        (aten.neg.default,),
        (aten.neg.default,),
        (aten.abs.default,),
        (aten.relu.default,),
        (aten.sigmoid.default,),
        (aten.exp.default,),
        (aten.tanh.default,),
        (aten.sin.default,),
        (aten.log_softmax.int, -1),
        (aten.pow.Tensor_Scalar, 2),
        (aten.pow.Tensor_Scalar, 3),
        (aten.pow.Tensor_Scalar, -2),
        (aten.clamp.default, None, 0),
        (aten.clamp.default, None, 0.5),
        (aten.clamp.default, 0),
        (aten.clamp.default, -0.5),
        (aten.clamp_max.default, -1),
        (aten.clamp_min.default, 1),
        (aten.sum.dim_IntList, [1], True),
        (aten.mean.dim, [1], True),
        (aten.amin.default, [1], True),
        (aten.amax.default, [1], True),
        (aten.permute.default, [1, 0]),
        (aten.mul.Tensor, -1.5),
        (aten.mul.Tensor, 2),
        (aten.div.Tensor, -4),
        (aten.add.Tensor, 0.5),
        (aten.add.Tensor, -0.5),
        (aten.sub.Tensor, 0.5),
        (aten.sub.Tensor, -0.5),
        (aten.rsub.Scalar, 0.5),
        (aten.rsub.Scalar, -0.5),
    )
)
BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Tensor)
ALPHAS = (None, None, -1, 2)


def expression(seed: int) -> GraphModule:
    """Draw an expression of two matrices; no maximum is subtracted from anything but what it is of."""
    draw, graph = random.Random(seed), Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    for _ in range(draw.randint(1, 7)):
        x, y = draw.choice(values), draw.choice(values)
        if draw.random() < 0.6:
            values.append(draw.choice(UNARY)(graph, values[-1] if draw.random() < 0.7 else x))
            continue
        target, alpha = draw.choice(BINARY), draw.choice(ALPHAS)
        takes = "alpha" in str(target._schema) and alpha is not None
        values.append(graph.call_function(target, (values[-1], y), {"alpha": alpha} if takes else {}))
    graph.output(values[-1])
    return GraphModule(torch.nn.Module(), graph)


def subtracts_a_maximum(module: GraphModule) -> bool:
    """Return whether a maximum may be subtracted from another value than the one it is of."""
    names = {str(node.target) for node in module.graph.nodes}
    return "aten.amax.default" in names and any("sub" in name for name in names)


def values_of(module: GraphModule) -> list[Tensor]:
    matrices = [
        torch.randn(4, 4),
        100 * torch.randn(4, 4),
        torch.zeros(4, 4),
        -torch.rand(4, 4),
        torch.eye(4),
    ]
    return [module(x, y) for x in matrices for y in matrices]


@pytest.mark.parametrize("block", range(4))
def test_what_is_said_to_be_never_positive_is_so(block: int) -> None:
    torch.manual_seed(block)
    said, denied = 0, 0
    for seed in range(1000 * block, 1000 * (block + 1)):
        module = expression(seed)
        if subtracts_a_maximum(module):
            continue
        (output,) = module.graph.output_node().args
        if not is_never_positive(output):
            denied += 1
            continue
        said += 1
        positive = [value.max().item() for value in values_of(module) if (value > 0).any()]
        assert not positive, f"seed {seed}: {module.code}"
    assert said > 50 and denied > 50


@pytest.mark.parametrize(
    ("build", "answer"),
    [
        (lambda x: x - x.amax(1, keepdim=True), True),
        (lambda x: x - x.logsumexp(1, keepdim=True), True),
        (lambda x: x - x.amin(1, keepdim=True), False),
        (lambda x: x.amax(1, keepdim=True) - x, False),
    ],
)
def test_logits_minus_their_maximum(build: Callable[[Tensor], Any], answer: bool) -> None:
    module = torch.fx.experimental.proxy_tensor.make_fx(build)(torch.randn(4, 4))
    assert is_never_positive(module.graph.output_node().args[0]) == answer
