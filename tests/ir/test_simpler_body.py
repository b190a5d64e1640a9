"""Simplified gradients of bodies: fewer steps, and the same bits."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from gnnc.ir.nodes import op_name
from gnnc.ir.simpler_body import FORWARD, simpler
from gnnc.torch_private import trace_sizes

EDGES, WIDTH = 37, 48
Function = Callable[..., Tensor]


def traced(function: Function, *tensors: Tensor) -> Graph:
    """Return the graph of a function of tensors of these sizes."""
    return trace_sizes(function, [torch.empty_like(tensor, device="meta") for tensor in tensors])


def gradient_of(function: Function) -> Function:
    """Return the function that computes the gradient of a function for its first operand."""

    def gradient(grad: Tensor, *tensors: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            result = function(*leaves)
        return torch.autograd.grad(result, leaves[0], grad)[0]

    return gradient


def calls(graph: Graph) -> Counter[str]:
    return Counter(op_name(node) for node in graph.nodes if node.op == "call_function")


def rows(number: int, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(number))


def check(function: Function, *tensors: Tensor) -> Counter[str]:
    """Check that a simplified function computes the same bits; return its calls."""
    graph = traced(function, *tensors)
    simple = simpler(graph)
    simple.lint()
    found = GraphModule({}, simple)(*tensors)
    assert torch.equal(found, GraphModule({}, graph)(*tensors))
    assert found.shape == function(*tensors).shape
    return calls(simple)


def rms(x: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()


def layer_norm_by_hand(x: Tensor) -> Tensor:
    centered = x - x.mean(1, keepdim=True)
    return centered / (centered.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()


def distance(x: Tensor) -> Tensor:
    return (-x.pow(2).sum(1, keepdim=True)).exp() * x


def deviation(x: Tensor) -> Tensor:
    return (x.square().mean(1, keepdim=True) - x.mean(1, keepdim=True).square()).relu().expand(-1, WIDTH)


@pytest.mark.parametrize("function", [rms, layer_norm_by_hand, distance, deviation])
def test_gradients_keep_their_bits_in_fewer_steps(function: Function) -> None:
    grad, x = rows(0, EDGES, WIDTH), rows(1, EDGES, WIDTH)
    gradient = gradient_of(function)
    before, after = calls(traced(gradient, grad, x)), check(gradient, grad, x)
    assert after.total() <= before.total() - 4
    assert after["expand"] == 0 < before["expand"]


def test_the_gradient_of_a_square_multiplies_what_is_narrow() -> None:
    grad, x = rows(0, EDGES, 1), rows(1, EDGES, WIDTH)
    gradient = gradient_of(lambda x: x.pow(2).sum(1, keepdim=True) * 0.25)
    assert check(gradient, grad, x) == {"mul": 2}


WIDE = rows(2, EDGES, WIDTH)
SIMPLER: dict[str, tuple[Function, tuple[Tensor, ...], dict[str, int]]] = {
    "first power": (lambda x: x.pow(1.0), (WIDE,), {}),
    "times one": (lambda x: x * 1.0, (WIDE,), {}),
    "transposed twice": (lambda x: x.t().t(), (WIDE,), {}),
    "same shape": (lambda x: x.expand(EDGES, WIDTH).reshape(EDGES, WIDTH), (WIDE,), {}),
    "merged factors": (lambda x: x * 3.0 * -0.5 / 2.0, (WIDE,), {"mul": 1}),
    "factor of a quotient": (lambda x: x / 48.0 * 2.0, (WIDE,), {"div": 1}),
    "negated twice": (lambda x: x.neg().neg(), (WIDE,), {}),
    "negated term": (lambda x: x + (-x.exp()), (WIDE,), {"exp": 1, "sub": 1}),
    "negated first term": (lambda x: -x + x.exp(), (WIDE,), {"exp": 1, "sub": 1}),
    "negative subtracted": (lambda x: x - (-x.exp()), (WIDE,), {"exp": 1, "add": 1}),
    "sum of negatives": (lambda x: (-x).sum(1, keepdim=True) * 2.0, (WIDE,), {"sum": 1, "mul": 1}),
    "mean of products": (lambda x: (x * 0.5).mean([1]) * 4.0, (WIDE,), {"mean": 1, "mul": 1}),
    "equal steps": (lambda x: x.exp() + x.exp(), (WIDE,), {"exp": 1, "add": 1}),
    "expanded operand": (lambda x, y: x * y.expand(EDGES, WIDTH), (WIDE, rows(3, EDGES, 1)), {"mul": 1}),
    "expanded operands": (
        lambda y: (y.expand(EDGES, WIDTH) / 3.0).relu(),
        (rows(3, EDGES, 1),),
        {"div": 1, "relu": 1, "expand": 1},
    ),
    "factor of the wider operand": (
        lambda x, y: ((y + 1.0) * 0.5) * (x * 2.0),
        (WIDE, rows(3, EDGES, 1)),
        {"add": 1, "mul": 1},
    ),
}


@pytest.mark.parametrize("name", SIMPLER)
def test_steps_become_fewer(name: str) -> None:
    function, tensors, expected = SIMPLER[name]
    assert check(function, *tensors) == expected


REFUSED: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "another factor of a sum": (lambda x: (x * 3.0).sum(1), (WIDE,)),
    "two rounded factors": (lambda x: x * 3.0 * 0.1, (WIDE,)),
    "sum over the edges": (lambda x: (-x).sum(0), (WIDE,)),
    "sum of all": (lambda x: (-x).sum([0, 1]), (WIDE,)),
    "scaled term": (lambda x, y: torch.add(x, -y, alpha=2), (WIDE, rows(4, EDGES, WIDTH))),
    "half precision": (lambda x: (x * 0.5).sum(1), (WIDE.half(),)),
    "expanded scalar": (lambda x, y: x * y.expand(EDGES, WIDTH), (WIDE, torch.tensor(2.0))),
    "expanded edges": (lambda y: y.expand(EDGES, WIDTH) * 3.0, (rows(5, 1, WIDTH),)),
    "times nothing": (lambda x: x * 0.0 * 2.0, (WIDE,)),
    "second power": (lambda x: x.pow(2.0), (WIDE,)),
    "transposed once": (lambda x: x.t(), (WIDE,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_stay(name: str) -> None:
    function, tensors = REFUSED[name]
    assert check(function, *tensors) == calls(traced(function, *tensors))


def test_values_of_the_body_itself_keep_their_steps() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.detach().pow(1.0) * 2.0 * 3.0 + -x).sum(1)

    graph = traced(function, WIDE)
    assert calls(simpler(graph)) == {"mul": 1, "sub": 1, "sum": 1}
    for node in graph.nodes:
        node.meta[FORWARD] = True
    assert calls(simpler(graph)) == {"mul": 2, "neg": 1, "add": 1, "sum": 1}
