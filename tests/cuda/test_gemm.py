"""Products with a weight: every width of rows, every form of x."""

import copy

import pytest
import torch
from cuda_cases import error
from torch import Tensor, nn

import gnnc

OUT = (1, 7, 47, 64, 256)
ROWS = (0, 1, 17, 1000)


class Products(nn.Module):
    """One x times weights of several widths, each with an epilogue of its own."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.plain = nn.ModuleList(nn.Linear(inner, out, bias=False) for out in OUT)
        self.active = nn.ModuleList(nn.Linear(inner, out) for out in OUT)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return every product."""
        return *[layer(x) for layer in self.plain], *[layer(x).relu() for layer in self.active]


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("inner", [1, 7, 47, 64, 602, 1433, 2050])
def test_products_equal_the_reference(inner: int, precision: str) -> None:
    torch.manual_seed(inner)
    model = Products(inner).eval()
    # on the CPU: torch's own CUDA kernels divide by a constant as they multiply by its reciprocal
    reference = gnnc.compile(model, precision, backend="reference")
    compiled = gnnc.compile(copy.deepcopy(model).cuda(), precision, backend="cuda")
    for rows in ROWS:
        x = torch.randn(rows, inner) * torch.logspace(-1, 3, rows)[:, None]
        for got, want in zip(compiled(x.cuda()), reference(x), strict=True):
            assert got.shape == want.shape
            assert error(got, want) < (0.0 if precision == "int8" else 1e-5) + 1e-30


@pytest.mark.cuda
@torch.no_grad()
def test_no_element_is_left_out() -> None:
    """Ones make every sum an integer that any precision holds."""
    for precision in ("fp16", "bf16", "int8"):
        model = Products(64).eval().cuda()
        for parameter in model.parameters():
            parameter.fill_(1.0)
        compiled = gnnc.compile(model, precision, backend="cuda")
        x = torch.zeros(333, 64, device="cuda")
        x[torch.arange(333), torch.arange(333) % 64] = 1.0
        for i, got in enumerate(compiled(x)):
            assert torch.equal(got, torch.full_like(got, 1.0 if i < len(OUT) else 2.0)), (precision, i)
