"""``Partition(save_bits=4 | 2)``: fewer bits for what gradients read alone, right in the mean."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from slow import slow_but
from torch import Tensor, nn
from torch_geometric import nn as pyg

import gnnc
from gnnc.ir.groups import dequantize_groups_reference, quantize_groups_reference
from gnnc.ir.nodes import outputs_of
from gnnc.ir.parts import SAVED
from gnnc.passes.partition import Partition
from gnnc.passes.pipeline import PIPELINE


class Net(nn.Module):
    """Two layers with a ReLU between."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, outputs))


MODELS = {
    "gcn": lambda: Net(pyg.GCNConv(96, 64), pyg.GCNConv(64, 12)),
    "sage": lambda: Net(pyg.SAGEConv(96, 100), pyg.SAGEConv(100, 12)),
    "gin": lambda: Net(pyg.GINConv(mlp(96, 64)), pyg.GINConv(mlp(64, 12))),
    "gat": lambda: Net(pyg.GATConv(96, 16, heads=4), pyg.GATConv(64, 12)),
}


def graph() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(60, 96), torch.randint(60, (2, 240))


def compiled(model: nn.Module, precision: str, bits: Any, **options: Any) -> gnnc.CompiledModel:
    passes = [replace(step, save_bits=bits) if isinstance(step, Partition) else step for step in PIPELINE]
    return gnnc.compile(model, precision, pipeline=passes, **options)


def gradient(call: nn.Module, model: nn.Module, seed: int = 0) -> Tensor:
    """Return the gradient of all parameters, for a loss with some weight on each output."""
    args = graph()
    model.zero_grad()
    torch.manual_seed(seed)
    out = call(*args)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def error(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


def saved_bytes(program: gnnc.CompiledModel) -> int:
    forward = dict(program.stages)["partition"]
    values = [outputs_of(forward.graph)[place].meta["val"] for place in forward.meta[SAVED].values()]
    return sum(v[0].numel() * v.itemsize for v in values if isinstance(v, Tensor) and v.dim() > 1)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("name", slow_but(("gcn",), list(MODELS)))
def test_gradients_are_right_in_the_mean(name: str, bits: int) -> None:
    torch.manual_seed(1)
    model = MODELS[name]().train()
    eager = copy.deepcopy(model)
    program = compiled(model, "fp32", bits)
    right = gradient(eager, eager)
    draws = torch.stack([gradient(program, model, seed) for seed in range(16)])
    mean = draws.mean(0)
    noise = ((draws - mean).norm(dim=1).mean() / right.norm()).item()
    assert 0 < noise < {4: 0.2, 2: 1.2}[bits]
    assert error(mean, right) < 0.5 * noise  # a quarter is to be expected of 16 draws
    assert f"saved in {bits} bits, stochastically rounded" in program.explain()


@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("name", slow_but(("gat",), list(MODELS)))
def test_low_precisions_save_four_bits(name: str, precision: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name]().train()
    eager = copy.deepcopy(model)
    program = compiled(model, precision, 4)
    assert error(gradient(program, model), gradient(eager, eager)) < 0.25
    assert "saved in 4 bits, stochastically rounded" in program.explain()


def errors_in_summary(model: nn.Module, precision: str, bits: Any) -> dict[str, float]:
    """Return the relative errors of a step on the example inputs that the summary tells, by name."""
    program = compiled(model, precision, bits, example_inputs=graph())
    program(*graph()).sum().backward()
    lines = program.summary().partition("on the example inputs, against FP32:\n")[2].splitlines()
    return {name.strip(): float(error.strip(" %")) / 100 for name, error in (s.split(":") for s in lines)}


@pytest.mark.parametrize("precision", ["fp32", *slow_but((), ["bf16", "int8"])])
def test_the_summary_tells_the_errors_of_gradients(precision: str) -> None:
    torch.manual_seed(1)
    model = MODELS["gcn"]().train()
    assert not errors_in_summary(model, precision, None)
    gradients = []
    for bits in (4, 2):
        output, weights = errors_in_summary(model, precision, bits).values()
        assert output < 0.02
        gradients.append(weights)
    assert 0.01 < gradients[0] < 0.15 < gradients[1] < 1.2


@pytest.mark.parametrize("name", slow_but(("two dropouts",), ["two dropouts", "dropout of attention"]))
def test_errors_are_of_the_masks_that_the_program_draws(name: str) -> None:
    torch.manual_seed(1)
    deep, attention = pyg.GCN(96, 64, 3, 12, dropout=0.5), pyg.GATConv(96, 16, dropout=0.5)
    model = deep if name == "two dropouts" else attention
    output, weights = errors_in_summary(model.train(), "fp32", 4).values()
    assert output < 1e-5 and 0 < weights < 0.3


def test_one_seed_gives_one_gradient_and_outputs_do_not_change() -> None:
    torch.manual_seed(1)
    model = MODELS["gcn"]().train()
    program, plain = compiled(model, "fp32", 4), gnnc.compile(model, "fp32")
    torch.testing.assert_close(program(*graph()), plain(*graph()), rtol=0, atol=0)
    first, again, other = (gradient(program, model, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_bytes_that_are_saved() -> None:
    torch.manual_seed(1)
    model = MODELS["gcn"]().train()
    found = {}
    for bits in (None, 4, 2):
        program = compiled(model, "int8", bits)
        program(*graph())
        found[bits] = saved_bytes(program)
    assert found == {None: 64 + 8, 4: 32 + 8 + 8, 2: 16 + 8 + 8}


@pytest.mark.parametrize("bits", [8, 3, 1, 0, "4", True])
def test_other_bits_are_refused(bits: Any) -> None:
    with pytest.raises(gnnc.PrecisionError, match=r"save_bits must be None or one of \(4, 2\)"):
        Partition(save_bits=bits)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("width", [1, 3, 64, 130])
def test_a_value_is_rounded_to_one_of_its_neighbors_and_right_in_the_mean(bits: int, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, width)
    draws = []
    for seed in range(200):
        packed, scale, offset = quantize_groups_reference(x, bits, torch.tensor(seed), 5)
        draws.append(dequantize_groups_reference(packed, scale, offset, bits, width))
    step = scale.repeat_interleave(64, 1)[:, :width]
    stacked = torch.stack(draws)
    assert ((stacked - x).abs() <= step * 1.001 + 1e-6).all()
    assert ((stacked.mean(0) - x).abs() <= 5 * step / 2 / 200**0.5 + 1e-6).all()
