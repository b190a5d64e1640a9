"""Batch norm with given statistics: two numbers a column, which the kernel that makes the rows reads."""

import pytest
import torch
from cuda_cases import error
from torch import nn

import gnnc


def compiled_and_want(width: int, affine: bool) -> tuple[gnnc.CompiledModel, torch.Tensor, torch.Tensor]:
    """A norm after a product, its input, and its output in float64."""
    torch.manual_seed(width)
    norm = nn.BatchNorm1d(width, affine=affine)
    norm.running_mean.normal_()
    norm.running_var.uniform_(1e-9, 2.0)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    model = nn.Sequential(nn.Linear(9, width), norm).eval()
    x = torch.randn(37, 9)
    with torch.no_grad():
        want = model.double()(x.double())
    return gnnc.compile(model.float().cuda(), "fp32"), x.cuda(), want


@pytest.mark.cuda
@pytest.mark.parametrize("width", [1, 7, 47, 602])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(width: int, affine: bool) -> None:
    compiled, x, want = compiled_and_want(width, affine)
    with torch.no_grad():
        assert error(compiled(x), want) < 1e-6
        compiled.model[1].running_mean.add_(1.0)
        assert error(compiled(x), want) > 0.01
