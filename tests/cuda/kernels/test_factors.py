"""Factors ``t + c`` of weights, and rows that are scaled as they are added, in the kernels that make rows."""

import pytest
import torch
from cuda_cases import error
from torch import Tensor, nn

import gnnc


class Factors(nn.Module):
    """A product times ``1 + eps``, and three ways to add scaled rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin, self.more = nn.Linear(9, width, bias=False), nn.Linear(width, 9, bias=False)
        self.eps, self.other = nn.Parameter(torch.tensor([0.3])), nn.Parameter(torch.tensor([1.3]))
        self.beta = nn.Parameter(torch.tensor(-0.7))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.more(self.lin(x) * (1 + self.eps)) + (self.other + 1) * x
        return self.more(self.lin(rows)) + self.beta * x + 0.25 * x


@pytest.mark.cuda
@pytest.mark.parametrize("width", [1, 7, 64])
@torch.no_grad()
def test_factors_and_scaled_rows(width: int) -> None:
    torch.manual_seed(width)
    model, x = Factors(width).eval(), torch.randn(37, 9)
    compiled = gnnc.compile(Factors(width).eval().cuda(), "fp32")
    for eps in (0.3, -1.0, 40.0):
        model.eps.fill_(eps)
        compiled.model.load_state_dict(model.state_dict())
        assert error(compiled(x.cuda()), model.double()(x.double())) < 1e-6
        model.float()
    fused = [line for line in str(compiled).splitlines() if line.startswith("        ")]
    assert {"eps", "other"} == {name for name in ("eps", "other") if any(f"{name} + 1" in x for x in fused)}
