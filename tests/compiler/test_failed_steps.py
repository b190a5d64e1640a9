"""Errors of ATen ops in a compiled call: they are errors of gnnc, which name the model."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import SortAggregation

import gnnc


class Reshaped(nn.Module):
    """Reads a row of x as a table of eight columns, which only some sizes allow."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return x[index].reshape(-1).cumsum(0).view(-1, 8).sum(0)


@torch.no_grad()
def test_a_step_that_does_not_fit_is_an_input_error() -> None:
    model = Reshaped()
    compiled = gnnc.compile(model, "fp32")
    x = torch.randn(6, 4)
    fits, fits_not = torch.tensor([0, 2, 4, 5]), torch.tensor([0, 2, 4])
    assert torch.allclose(compiled(x, fits), model(x, fits), atol=1e-6)
    with pytest.raises(RuntimeError):
        model(x, fits_not)
    with pytest.raises(gnnc.GnncError, match=r"\[Reshaped\]"):
        compiled(x, fits_not)
    assert torch.allclose(compiled(x, fits), model(x, fits), atol=1e-6)


@pytest.mark.slow
@torch.no_grad()
def test_groups_smaller_than_k_are_captured_as_what_they_are() -> None:
    model = SortAggregation(k=5).eval()
    x, index = torch.randn(6, 8), torch.tensor([0, 0, 1, 1, 1, 1])
    torch.testing.assert_close(gnnc.compile(model, "fp32")(x, index), model(x, index))
