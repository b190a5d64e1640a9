"""Row-local ops behind a product, with any of their parameters, have the values of eager."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from one_op import fused_program_of
from torch import Tensor

Function = Callable[[Tensor], Tensor]

STEPS: dict[str, Function] = {
    "softplus": F.softplus,
    "softplus, beta": lambda h: F.softplus(h, beta=2),
    "softplus, threshold": lambda h: F.softplus(h, threshold=1),
    "elu": lambda h: F.elu(h, 0.7),
    "selu": torch.selu,
    "celu": lambda h: F.celu(h, 0.6),
    "gelu": F.gelu,
    "gelu by tanh": lambda h: F.gelu(h, approximate="tanh"),
    "leaky relu": lambda h: F.leaky_relu(h, -0.3),
    "hardtanh": lambda h: F.hardtanh(h, -0.3, 0.4),
    "clamp": lambda h: h.clamp(-0.2, 0.3),
    "clamp from above": lambda h: h.clamp(max=0.3),
    "threshold": lambda h: F.threshold(h, 0.1, -7.0),
    "softmax": lambda h: h.softmax(1),
    "softmax of columns": lambda h: h.softmax(0),
    "log softmax of columns": lambda h: h.log_softmax(0),
    "layer norm": lambda h: F.layer_norm(h, (24,), eps=0.1),
    "cube": lambda h: h**3,
    "inverse root": lambda h: (h.abs() + 1) ** -0.5,
    "root": lambda h: h.abs() ** 0.5,
    "times itself": lambda h: h * h,
    "plus a part of itself": lambda h: h + 0.3 * h,
    "less twice itself": lambda h: torch.sub(h, h.relu(), alpha=2),
    "from a number": lambda h: torch.rsub(h, 2.0, alpha=3),
    "two over": lambda h: 2 / (h.abs() + 1),
    "one over": lambda h: 1 / (h.abs() + 1),
}
EXACT: dict[str, Function] = {
    "third": lambda h: h / 3,
    "tenth": lambda h: h / 10,
    "quarter": lambda h: h / 4,
    "less than the smallest": lambda h: h / 2.0**100 / 2.0**49,
    "minus": lambda h: h - 0.1,
    "from": lambda h: 0.1 - h,
}
"""Ops that IEEE arithmetic rounds once, so that each bit is that of eager."""


def results(step: Function) -> tuple[Tensor, Tensor]:
    """Return what a program computes of a product and a step, and what eager does of the same product."""
    torch.manual_seed(0)
    x, w = torch.randn(37, 16), torch.randn(24, 16)

    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.ops.gnnc.gemm(x, w)
        return h, step(h)

    h, got = fused_program_of(both, x, w, backend="cpu")(x, w)
    return got, step(h)


@pytest.mark.parametrize("name", STEPS)
def test_values_are_those_of_eager(name: str) -> None:
    torch.testing.assert_close(*results(STEPS[name]), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", EXACT)
def test_bits_are_those_of_eager(name: str) -> None:
    assert torch.equal(*results(EXACT[name]))
