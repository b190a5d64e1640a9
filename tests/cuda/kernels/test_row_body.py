"""Elementwise ops on rows that branch, mask or concatenate, in one kernel: against float64."""

from collections.abc import Callable

import pytest
import torch
from cuda_cases import error
from one_op import program_of, run_on_cuda
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


_ATEN = torch.ops.aten
GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _ATEN.silu_backward,
    "gelu": _ATEN.gelu_backward,
    "sigmoid": lambda grad, x: _ATEN.sigmoid_backward(grad, x),
    "tanh": lambda grad, x: _ATEN.tanh_backward(grad, x),
    "leaky relu": lambda grad, x: _ATEN.leaky_relu_backward(grad, x, 0.2, False),
    "elu": lambda grad, x: _ATEN.elu_backward(grad, 0.7, 1, 1, False, x),
    "softplus": lambda grad, x: _ATEN.softplus_backward(grad, x, 1, 20),
    "threshold": lambda grad, x: _ATEN.threshold_backward(grad, x, 0.1),
    "softmax": lambda grad, x: _ATEN._softmax_backward_data(grad, x, 1, x.dtype),
}


@pytest.mark.parametrize(("rows", "width"), [(0, 3), (1, 1), (70, 3), (70, 17), (300, 32)])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_by_itself(name: str, rows: int, width: int) -> None:
    grad, x = torch.randn(rows, width), torch.randn(rows, width)
    got = run_on_cuda(GRADIENTS[name], "row_body", grad, x)
    torch.testing.assert_close(got.double(), GRADIENTS[name](grad.double(), x.double()), rtol=1e-4, atol=1e-5)


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ge": lambda x, mask: x >= 0.1,
    "eq": lambda x, mask: x == x.abs(),
    "not": lambda x, mask: mask.logical_not(),
    "both": lambda x, mask: mask.logical_and(mask),
    "as numbers": lambda x, mask: mask.float(),
    "fill": lambda x, mask: x.masked_fill(mask, 3.0),
    "where": lambda x, mask: torch.where(mask, x, x.new_zeros(1)),
}


def test_an_operand_without_columns() -> None:
    class Empty(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            nothing = torch.where(x[:, :0] > 0, x[:, :0], y[:, :0])
            return torch.cat([x, y[:, :0], nothing, y], 1) * 2

    given = torch.randn(70, 17), torch.randn(70, 17)
    compiled = gnnc.compile(Empty().cuda(), "fp32")
    got = compiled(*(value.cuda() for value in given)).cpu()
    assert torch.equal(got, Empty()(*given))
    assert "row_body" in str(compiled)


@pytest.mark.parametrize(("rows", "width"), [(0, 3), (1, 1), (70, 17), (70, 64)])
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_read_and_stored(name: str, rows: int, width: int) -> None:
    x, mask = torch.randn(rows, width), torch.rand(rows, width) < 0.5
    program = program_of(MASKS[name], x.cuda(), mask.cuda(), backend="cuda")
    assert dict(program.kernels).popitem()[1] == "row_body"
    (got,) = program(x.cuda(), mask.cuda())
    assert torch.equal(got.cpu(), MASKS[name](x, mask))


def test_bytes_are_compared() -> None:
    x = torch.randint(3, (70, 17), dtype=torch.uint8)
    program = program_of(lambda x: x == 1, x.cuda(), backend="cuda")
    assert dict(program.kernels).popitem()[1] == "row_body"
    assert torch.equal(program(x.cuda())[0].cpu(), x == 1)


@pytest.mark.usefixtures("compiler")
def test_values_of_16_bits_are_compared_by_torch() -> None:
    """PyTorch rounds the number that a tensor is compared with: 0.1 in bf16 is not larger than 0.1."""
    program = program_of(lambda x: x > 0.1, torch.full((3, 4), 0.1).bfloat16(), backend="cuda-offline:sm_90")
    assert [name for _, name in program.kernels] == ["reference"]


class LateRows(nn.Module):
    """A mask of as many rows as x has in which the first column is positive."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.index_select(0, (x[:, 0] > 0).nonzero().squeeze(1)) > 0.5).logical_not().any(1)


def test_a_mask_of_rows_that_are_counted_late() -> None:
    x = torch.rand(400, 5) - 0.2
    x[::3] += 1
    compiled = gnnc.compile(LateRows(), "fp32", backend="cuda")
    assert torch.equal(compiled(x.cuda()).cpu(), LateRows()(x))


@pytest.mark.usefixtures("compiler")
def test_the_gradient_of_a_long_softmax_is_left_to_torch() -> None:
    given = torch.randn(9, 33), torch.randn(9, 33)
    program = program_of(GRADIENTS["softmax"], *given, backend="cuda-offline:sm_90")
    assert [name for _, name in program.kernels] == ["reference"]


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
