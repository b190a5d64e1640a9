"""Static scales follow the weights, and calls that they do not suit compute scales of their own."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow import slow_after, slow_but
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv

import gnnc
from gnnc.compiler.static_scales import ScaledWeights
from gnnc.cost.model import Rates
from gnnc.ir.source import Source

WIDTH, NODES = 64, 100


class Net(nn.Module):
    def __init__(self, layer: Callable[..., nn.Module] = GCNConv) -> None:
        super().__init__()
        self.a: Any = layer(16, WIDTH)
        self.norm: Any = nn.BatchNorm1d(WIDTH)
        self.b: Any = layer(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x, edge_index)).relu(), edge_index)


def given(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NODES, 16, generator=generator) * scale
    return x, torch.randint(NODES, (2, 800), generator=generator)


def pair(
    *, train: bool = False, layer: Callable[..., nn.Module] = GCNConv, **options: Any
) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net(layer).train(train).requires_grad_(False)
    return model, gnnc.compile(model, "int8", example_inputs=given(), **{"backend": "cpu", **options})


@torch.no_grad()
def error(model: nn.Module, compiled: Any, scale: float = 1.0) -> float:
    actual, expected = compiled(*given(scale)), model(*given(scale))
    return float((actual - expected).norm() / expected.norm())


def without_shifts(model: Net) -> None:
    """Make the scale of the input that of every value before the last bias."""
    for shift in (model.a.bias, model.norm.bias, model.norm.running_mean):
        shift.data.zero_()


def captures(compiled: Any) -> list[str]:
    return [line.strip() for line in compiled.explain().split("\nCaptures\n")[1].splitlines()]


def weights(model: Net) -> list[nn.Parameter]:
    return [model.a.lin.weight, model.b.lin.weight]


def multiply(model: Net, factor: float) -> None:
    for weight in weights(model):
        weight.mul_(factor)


def multiply_data(model: Net, factor: float) -> None:
    for weight in weights(model):
        weight.data.mul_(factor)


def assign_data(model: Net, factor: float) -> None:
    for weight in weights(model):
        weight.data = weight.data * factor


def replace(model: Net, factor: float) -> None:
    for layer in (model.a, model.b):
        layer.lin.weight = nn.Parameter(layer.lin.weight * factor, requires_grad=False)


def load(model: Net, factor: float) -> None:
    model.load_state_dict(
        {name: value * factor if "lin" in name else value for name, value in model.state_dict().items()}
    )


def load_assigned(model: Net, factor: float) -> None:
    scaled = {name: value * factor if "lin" in name else value for name, value in model.state_dict().items()}
    model.load_state_dict(scaled, assign=True)


def scale_norm(model: Net, factor: float) -> None:
    model.norm.weight.mul_(factor)


def scale_statistics(model: Net, factor: float) -> None:
    model.norm.running_var.div_(factor**2)


def step(model: Net, factor: float, **options: Any) -> None:
    for weight in weights(model):
        weight.requires_grad_(True).grad = (1 - factor) * weight.detach()
    torch.optim.SGD(weights(model), lr=1.0, **options).step()
    model.requires_grad_(False)


CHANGES: dict[str, Callable[[Net, float], None]] = {
    "in place": multiply,
    "data in place": multiply_data,
    "data assigned": assign_data,
    "replaced": replace,
    "load_state_dict": load,
    "load_state_dict assign": load_assigned,
    "norm": scale_norm,
    "running statistics": scale_statistics,
    "step": step,
    "fused step": lambda model, factor: step(model, factor, fused=True),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("factor", slow_after(1, [30.0, 0.01]))
@pytest.mark.parametrize("how", slow_but(["in place", "data in place"], list(CHANGES)))
def test_scales_follow_the_weights(how: str, factor: float) -> None:
    model, compiled = pair()
    assert error(model, compiled) < 0.02 and len(captures(compiled)) == 1
    with torch.no_grad():
        CHANGES[how](model, factor)
    assert error(model, compiled) < 0.02
    if not (how == "data in place" and factor < 1):  # fractions of one scale hold smaller rows as well
        assert "weights have changed since static scales were taken: taken again" in captures(compiled)[1]
        assert "on the examples" in compiled.explain()
    again = captures(compiled)
    assert error(model, compiled) < 0.02 and captures(compiled) == again


@pytest.mark.slow
@pytest.mark.parametrize("layer", [SAGEConv, lambda a, b: SAGEConv(a, b, aggr="max")], ids=["mean", "max"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("factor", [30.0, 0.05])
def test_other_layers_and_backends(layer: Callable[..., nn.Module], backend: str, factor: float) -> None:
    model, compiled = pair(layer=layer, backend=backend)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(factor)
    assert error(model, compiled) < 0.03
    assert error(model, compiled, 100.0) < 0.03


def test_weights_that_no_scale_depends_on_and_equal_weights_change_nothing() -> None:
    model, compiled = pair()
    with torch.no_grad():
        model.b.bias.add_(3)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1).step()
    assert error(model, compiled) < 0.02 and len(captures(compiled)) == 1


@pytest.mark.parametrize("scale", slow_after(1, [200.0, 1e-4]))
@pytest.mark.parametrize("backend", slow_after(1, ["cpu", "reference"]))
def test_inputs_unlike_the_examples_take_their_own_scales(backend: str, scale: float) -> None:
    model, compiled = pair(backend=backend)
    without_shifts(model)
    for _ in range(2):
        assert error(model, compiled, scale) < 0.02
    assert "its static scale suits" in captures(compiled)[-1]
    assert "scales are computed in such calls" in captures(compiled)[-1]
    count = len(captures(compiled))
    assert error(model, compiled) < 0.02 and len(captures(compiled)) == count
    assert "on the examples" in compiled.explain()
    if backend == "cpu":
        compiled.profile(*given(scale))
    else:  # whose timed program checks values, too
        with pytest.raises(gnnc.PrecisionError, match="give example_inputs that are like"):
            compiled.profile(*given(scale))


def test_zeros_and_no_nodes_suit_every_scale() -> None:
    model, compiled = pair()
    without_shifts(model)
    with torch.no_grad():
        compiled(*given())
        before = captures(compiled)
        x, edge_index = given(0.0)
        assert torch.equal(compiled(x, edge_index), model(x, edge_index))
        compiled(x[:0], edge_index[:, :0])
    assert captures(compiled) == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*captured again 8 times for one cause.*compile without example_inputs")
def test_many_changes_end_in_scales_of_each_call() -> None:
    model, compiled = pair()
    for _ in range(10):
        with torch.no_grad():
            multiply(model, 2.0)
        assert error(model, compiled) < 0.02
    assert "8 times before: scales are computed at each call" in captures(compiled)[-1]
    assert len(captures(compiled)) == 10


def test_examples_that_do_not_run_any_more() -> None:
    model, compiled = pair()
    compiled._example_inputs[1].fill_(NODES)
    with torch.no_grad():
        multiply(model, 30.0)
    assert error(model, compiled) < 0.02
    assert "example_inputs do not run any more" in captures(compiled)[-1]
    assert "scales are computed at each call" in captures(compiled)[-1]


@pytest.mark.parametrize("way", slow_after(1, [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]))
def test_copies_follow_their_own_weights(way: Callable[[Any], Any]) -> None:
    model, compiled = pair()
    copied = way(compiled)
    assert error(copied.model, copied) < 0.02
    with torch.no_grad():
        multiply(copied.model, 30.0)
    assert error(copied.model, copied) < 0.02 and error(model, compiled) < 0.02
    assert len(captures(compiled)) == 1


@pytest.mark.slow
def test_statistics_that_calls_write_do_not_take_scales_again() -> None:
    model, compiled = pair(train=True)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for _ in range(3):
            twin(*given())
            compiled(*given())
    torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean, rtol=0.02, atol=0.02)
    assert len(captures(compiled)) == 1


@torch.inference_mode()
def test_inference_tensors_are_compared_by_content() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    compiled = gnnc.compile(model, "int8", example_inputs=given(), backend="cpu")
    compiled(*given())
    multiply(model, 30.0)
    assert error(model, compiled) < 0.02
    assert "weights have changed" in captures(compiled)[-1]


@torch.no_grad()
def test_the_content_of_weights_is_their_values_in_their_places() -> None:
    layer, table = nn.Linear(5, 7), torch.randn(3)
    weights = ScaledWeights(layer, [Source("parameter", "weight")], [table])
    changes: list[Callable[[], Any]] = [
        lambda: layer.weight.copy_(layer.weight.flip(0)),
        lambda: layer.weight.copy_(layer.weight.flip(1)),
        lambda: layer.weight[6, 4].add_(1e-6),
        lambda: table.copy_(table.flip(0)),
        lambda: table.mul_(2),
    ]
    for change in changes:
        before = layer.weight.clone(), table.clone()
        assert weights.are_unchanged()
        change()
        assert not weights.are_unchanged() and not weights.have_same_content()
        layer.weight.copy_(before[0]), table.copy_(before[1])
        assert weights.are_unchanged(), "written, and equal again"


@pytest.mark.slow
def test_auto(rates: Rates) -> None:
    torch.manual_seed(0)
    model = Net().eval().requires_grad_(False)
    compiled = gnnc.compile(model, "auto", example_inputs=given(), backend="cpu")
    with torch.no_grad():
        multiply(model, 30.0)
    assert error(model, compiled) < 0.02
