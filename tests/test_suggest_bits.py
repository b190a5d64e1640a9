"""Tango's bit rule against cases computed by hand."""

import pytest
import torch
from torch import nn
from zoo import build, random_graph

import gnnc
from gnnc.cost.quantization_error import relative_quantization_error
from gnnc.suggest_bits import least_bits

INPUTS = random_graph(60, 300)


def test_values_on_the_grid_need_few_bits() -> None:
    assert least_bits(torch.tensor([-1.0, 0.0, 1.0])) == 2
    assert least_bits(torch.tensor([-3.0, -2.0, 1.0, 3.0]), limit=0.0) == 3
    assert least_bits(torch.zeros(4)) == 2
    assert least_bits(torch.empty(0, 3)) == 2


def test_a_hand_computed_case() -> None:
    """With 2 bits (0, 1, 1, 1) for (0.4, 1, 1, 1) errs 0.25, with 3 bits (1/3, ...) 0.02 (limit 0.1)."""
    x = torch.tensor([0.4, 1.0, 1.0, 1.0])
    two, three = torch.tensor([0.0, 1, 1, 1]), torch.tensor([1 / 3, 1, 1, 1])
    assert relative_quantization_error(x, two) == pytest.approx(0.25, abs=1e-3)
    assert relative_quantization_error(x, three) == pytest.approx(0.0227, abs=1e-3)
    assert (least_bits(x, 0.3), least_bits(x, 0.1)) == (2, 3)


def test_small_values_beside_a_large_one_need_many() -> None:
    x = torch.cat([torch.full((100,), 1.0), torch.tensor([1e4])])
    assert least_bits(x) == 14
    assert least_bits(torch.cat([torch.full((100,), 1.0), torch.tensor([1e9])])) == 32


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["gcn", "gat", "gin", "models.GCN", "scatter_add"])
def test_models(name: str) -> None:
    from zoo import ZOO

    (args, kwargs) = ZOO[name].arguments(60, 300)
    assert not kwargs
    assert 2 <= gnnc.suggest_bits(build(name), *args) <= 16


def test_it_looks_at_the_first_layer_as_a_whole() -> None:
    model = build("models.GCN")
    with torch.no_grad():
        out = model.convs[0](*INPUTS)
    assert gnnc.suggest_bits(model, *INPUTS) == least_bits(out)


def test_a_compiled_model_is_its_model() -> None:
    model = build("gcn")
    assert gnnc.suggest_bits(gnnc.compile(model), *INPUTS) == gnnc.suggest_bits(model, *INPUTS)


def test_a_model_that_trains_needs_as_many_bits_and_stays_as_it_is() -> None:
    model, (x, edge_index) = build("gin"), random_graph(60, 300)
    bits = gnnc.suggest_bits(model, x, edge_index)
    buffers = [buffer.clone() for buffer in model.train().buffers()]
    assert buffers and gnnc.suggest_bits(model, x.clone().requires_grad_(), edge_index) == bits
    assert all(map(torch.equal, buffers, model.buffers()))
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


def test_what_is_no_graph_network_is_refused() -> None:
    with pytest.raises(gnnc.GnncError, match="Linear aggregates nothing over edges"):
        gnnc.suggest_bits(nn.Linear(12, 3).eval(), INPUTS[0])
    with pytest.raises(gnnc.GnncError, match=r"takes a torch.nn.Module, got int"):
        gnnc.suggest_bits(3)  # type: ignore[arg-type]


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(gnnc.PrecisionError, match="not finite"):
        gnnc.suggest_bits(build("gcn"), INPUTS[0] * float("nan"), INPUTS[1])
