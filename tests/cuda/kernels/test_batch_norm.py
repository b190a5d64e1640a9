"""Batch norm in training, and its gradient: against float64."""

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import assert_no_spills
from one_op import fused_program_of, program_of, run_fused_on_cuda
from torch import Tensor

from gnnc.runtime.cuda.driver.nvrtc import resources_of

ATEN = torch.ops.aten
SHAPES = [(2, 1), (3, 7), (70, 64), (500, 100), (9, 1024)]


def norm(x: Tensor, mean: Tensor, var: Tensor, *affine: Tensor) -> tuple[Tensor, ...]:
    """Normalize with weight and bias, or without."""
    weight, bias = affine or (None, None)
    return ATEN._native_batch_norm_legit_functional(x, weight, bias, mean, var, True, 0.1, 1e-5)


def gradient(grad: Tensor, x: Tensor, mean: Tensor, factor: Tensor, *weight: Tensor) -> tuple[Tensor, ...]:
    (of,) = weight or (None,)
    mask = [True, bool(weight), bool(weight)]
    found = ATEN.native_batch_norm_backward(grad, x, of, None, None, mean, factor, True, 1e-5, mask)
    return found if weight else found[:1]


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("count", [2, 4])
def test_rows_and_moments(rows: int, width: int, count: int) -> None:
    x = 3 + torch.randn(rows, width) * torch.logspace(-1, 1, width)
    vectors = [torch.rand(width) + 0.5 for _ in range(count)]
    got = run_fused_on_cuda(norm, ["batch_norm"], x, *vectors)
    want = norm(x.double(), *(value.double() for value in vectors))
    for name, one, other in zip(
        ("rows", "mean", "factor", "running mean", "running var"), got, want, strict=True
    ):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.cuda
def test_no_rows_leave_the_running_moments() -> None:
    moments = torch.randn(4), torch.rand(4)
    rows, *_, mean, var = run_fused_on_cuda(norm, ["batch_norm"], torch.randn(0, 4), *moments)
    assert rows.shape == (0, 4) and torch.equal(mean, moments[0]) and torch.equal(var, moments[1])


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_gradient(rows: int, width: int, is_weighted: bool) -> None:
    grad, x = torch.randn(rows, width), 3 + torch.randn(rows, width)
    weight = [torch.rand(width) + 0.5] if is_weighted else []
    mean, factor = x.double().mean(0), 1 / (x.double().var(0, correction=0) + 1e-5).sqrt()
    got = run_fused_on_cuda(gradient, ["batch_norm_backward"], grad, x, mean.float(), factor.float(), *weight)
    want = gradient(grad.double(), x.double(), mean, factor, *(value.double() for value in weight))
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert bool(((one - other).abs() <= 1e-4 * (other.abs() + factor.max())).all())


@pytest.mark.usefixtures("compiler")
def test_other_norms_are_left_to_torch() -> None:
    given = torch.rand(8), torch.rand(8)

    def images(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return ATEN._native_batch_norm_legit_functional(x, None, None, mean, var, True, 0.1, 1e-5)[0]

    def evaluated(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return ATEN._native_batch_norm_legit_functional(x, None, None, mean, var, False, 0.1, 1e-5)[0]

    for function, x in ((images, torch.randn(5, 8, 3)), (evaluated, torch.randn(5, 8))):
        program = program_of(function, x, *given, backend="cuda-offline:sm_90")
        assert [name for _, name in program.kernels] == ["reference"]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", [7, 64, 1024])
def test_no_kernel_spills(width: int, architecture: str) -> None:
    x, column = torch.randn(9, width), torch.rand(width)
    calls = (
        (norm, x, column, column, column, column),
        (gradient, x, x, column, column, column),
    )
    for function, *values in calls:
        program = fused_program_of(function, *values, backend=f"cuda-offline:{architecture}")
        assert program.recording is not None
        assert_no_spills(resources_of(program.code[architecture]))
