"""Elementwise ops on rows that branch, mask or concatenate, in one kernel: against float64."""

import pytest
import torch
from cuda_cases import error
from row_bodies import BODIES, Rows, values
from torch import Tensor, nn

import gnnc

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(("rows", "width"), [(1, 2), (70, 17), (513, 64)])
@pytest.mark.parametrize("name", BODIES)
def test_values(name: str, rows: int, width: int) -> None:
    given = values(rows, width)
    compiled = gnnc.compile(Rows(name).eval().cuda(), "fp32")
    got = compiled(*(value.cuda() for value in given)).cpu()
    torch.testing.assert_close(got, Rows(name)(*given), rtol=1e-5, atol=1e-5)
    assert "row_body" in str(compiled)


class Joined(nn.Module):
    """A linear layer of values side by side, whose kernel reads them in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(30, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.lin(torch.cat([x, (x * y).masked_fill(y < 0.5, 0.0)], 1))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp16", 2e-3), ("bf16", 1e-2), ("int8", 2e-2)])
def test_rows_are_stored_for_a_product(precision: str, tolerance: float) -> None:
    x, y, _ = values(100, 15)
    model = Joined().eval()
    want = model.double()(x.double(), y.double())
    compiled = gnnc.compile(model.float().cuda(), precision)
    with torch.no_grad():
        assert error(compiled(x.cuda(), y.cuda()), want.detach()) < tolerance
    assert "row_body" in str(compiled) and "reference" not in str(compiled)


class Small(nn.Module):
    """Arithmetic of a model on its own weights, and single ops on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(7, 3) + 1), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, None] * (self.scale + self.shift)).tanh()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_single_ops(precision: str) -> None:
    x = values(50, 3)[0]
    model = Small().eval()
    compiled = gnnc.compile(model.cuda(), precision)
    with torch.no_grad():
        got = compiled(x.cuda()).cpu()
        torch.testing.assert_close(got, model.cpu()(x), rtol=1e-5, atol=1e-6)
