"""The gradient of a layer norm in a body: few steps, and no less exact than that of ATen."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnc.ir.body import evaluate_body
from gnnc.ir.edge_gradients import GivenCotangent
from gnnc.ir.structure import csr_reference
from gnnc.ir.vjp import Operand, body_gradients, spell_out

GNNC = torch.ops.gnnc
EDGES, NODES = 40, 7
WEIGHTS = {"": 0, ", c0": 1, ", None, c0": 1, ", c0, c1": 2}
"""Texts of the arguments behind the sizes, and how many of them are operands."""
ROWS = {
    "random": lambda *sizes: torch.randn(*sizes),
    "constant": lambda *sizes: torch.full(sizes, 3.0),
    "zero": lambda *sizes: torch.zeros(sizes),
    "offset": lambda *sizes: torch.randn(*sizes) + 1e4,
    "large": lambda *sizes: torch.randn(*sizes) * 1e6,
    "tiny": lambda *sizes: torch.randn(*sizes) * 1e-6,
}


def body(sizes: tuple[int, ...], weights: str) -> str:
    return f"t0 = aten.layer_norm.default(e0, {list(sizes)}{weights}, eps=1e-05); return t0"


def gradients(text: str, x: Tensor, weights: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the gradients of ``edge_map`` for the rows and the weights."""
    ends = torch.arange(len(x)) % NODES
    rowptr, col = csr_reference(ends, ends, NODES, NODES)[:2]
    leaves = [x.clone().requires_grad_(), *(weight.clone().requires_grad_() for weight in weights)]
    out = GNNC.edge_map(rowptr, col, text, [], [], leaves[:1], leaves[1:])
    return list(torch.autograd.grad(out, leaves, grad))


def by_aten(sizes: tuple[int, ...], arguments: str, x: Tensor, weights: list[Tensor], grad: Tensor) -> Any:
    """Return the gradients that autograd computes."""
    leaves = [x.clone().requires_grad_(), *(weight.clone().requires_grad_() for weight in weights)]
    named: list[Tensor | None] = list(leaves[1:])
    weight, bias = ([None, *named] if "None" in arguments else [*named, None, None])[:2]
    out = torch.nn.functional.layer_norm(leaves[0], sizes, weight, bias)
    return torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("arguments", WEIGHTS)
def test_gradients_are_as_exact_as_those_of_aten(arguments: str, rows: str) -> None:
    for sizes in ((64,), (7,), (3, 5)):
        torch.manual_seed(0)
        x, grad = ROWS[rows](EDGES, *sizes), torch.randn(EDGES, *sizes)
        weights = [torch.randn(*sizes) for _ in range(WEIGHTS[arguments])]
        doubles = x.double(), [weight.double() for weight in weights], grad.double()
        expected = by_aten(sizes, arguments, *doubles)
        text = body(sizes, arguments)
        for found, want in zip(gradients(text, *doubles), expected, strict=True):
            assert (found - want).norm() <= 1e-9 * want.norm()
        aten = by_aten(sizes, arguments, x, weights, grad)
        for found, other, want in zip(gradients(text, x, weights, grad), aten, expected, strict=True):
            allowed = 2 * (other - want).norm() + 1e-6 * want.norm()
            assert (found - want).norm() <= allowed


@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_one_column_have_no_gradient(rows: str) -> None:
    x, grad, weight = ROWS[rows](EDGES, 1), torch.randn(EDGES, 1), torch.randn(1)
    found = gradients(body((1,), ", c0"), x, [weight], grad)
    assert not any(bool(gradient.any()) for gradient in found)


def test_the_gradient_takes_four_sums_over_a_row() -> None:
    operands = tuple(Operand(name, (64,), torch.float32) for name in ("e0", "e1", "c0", "c1"))
    found = body_gradients(body((64,), ", c0, c1"), GivenCotangent("e1"), operands, ("e0", "c0", "c1"))
    steps = re.findall(r"= aten\.(\w+)\.", found["e0"])
    assert steps.count("mean") == 4
    assert len(steps) <= 15
    assert re.findall(r"= aten\.(\w+)\.", found["c1"]) in (["sum", "reshape"], ["sum"])


def test_the_gradient_has_a_gradient() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 5).double().requires_grad_(), torch.randn(5).double().requires_grad_()
    ends = torch.arange(6) % 3
    rowptr, col = csr_reference(ends, ends, 3, 3)[:2]
    text = body((5,), ", c0").replace("return t0", "t1 = aten.mul.Tensor(t0, t0); return t1")
    assert torch.autograd.gradgradcheck(
        lambda x, weight: GNNC.edge_map(rowptr, col, text, [], [], [x], [weight]), (x, weight)
    )


@pytest.mark.parametrize("arguments", WEIGHTS)
def test_a_body_is_written_as_its_gradient_writes_it(arguments: str) -> None:
    weights = [torch.randn(7) for _ in range(WEIGHTS[arguments])]
    operands = [Operand("e0", (7,), torch.float32)]
    operands += [Operand(f"c{number}", (7,), torch.float32) for number in range(len(weights))]
    text = spell_out(body((7,), arguments), tuple(operands))
    assert "layer_norm" not in text
    gradient = body_gradients(body((7,), arguments), GivenCotangent("e0"), tuple(operands), ("e0",))["e0"]
    steps, again = (re.findall(r"aten\.\w+\.", each) for each in (text, gradient))
    assert steps[:5] == again[:5]
    x = torch.randn(EDGES, 7)
    found, expected = (evaluate_body(each, [], [], [x], weights) for each in (text, body((7,), arguments)))
    torch.testing.assert_close(found, expected)


def test_a_body_of_other_ops_stays() -> None:
    text = "t0 = aten.linear.default(e0, c0); t1 = aten.silu.default(t0); return [t0, t1]"
    operands = Operand("e0", (7,), torch.float32), Operand("c0", (3, 7), torch.float32)
    assert spell_out(text, operands) == text
