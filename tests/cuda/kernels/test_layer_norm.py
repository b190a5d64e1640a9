"""Layer norm of rows with what its gradient reads, and its gradient: against float64."""

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import assert_no_spills
from one_op import fused_program_of, program_of, run_fused_on_cuda
from torch import Tensor

from gnnc.runtime.cuda.driver.nvrtc import resources_of

ATEN = torch.ops.aten
SHAPES = [(0, 4), (1, 1), (3, 7), (70, 64), (300, 100), (5, 1024)]
BOTH = [(True, True), (True, False), (False, False)]


def vectors(width: int, given: tuple[bool, bool]) -> list[Tensor]:
    """Return the weight and the bias, as far as they are given."""
    both = torch.rand(width) + 0.5, torch.randn(width)
    return [value for value, is_given in zip(both, given, strict=True) if is_given]


def norm(x: Tensor, *affine: Tensor) -> tuple[Tensor, ...]:
    weight, bias = (*affine, None, None)[:2]
    return ATEN.native_layer_norm(x, [x.shape[1]], weight, bias, 1e-5)


def gradient(grad: Tensor, x: Tensor, mean: Tensor, factor: Tensor, *affine: Tensor) -> tuple[Tensor, ...]:
    weight, bias = (*affine, None, None)[:2]
    mask = [True, weight is not None, bias is not None]
    found = ATEN.native_layer_norm_backward(grad, x, [x.shape[1]], mean, factor, weight, bias, mask)
    return tuple(value for value, is_wanted in zip(found, mask, strict=True) if is_wanted)


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("given", BOTH)
def test_rows_and_their_moments(rows: int, width: int, given: tuple[bool, bool]) -> None:
    x, affine = 3 + torch.randn(rows, width), vectors(width, given)
    got = run_fused_on_cuda(norm, ["layer_norm"], x, *affine)
    want = norm(x.double(), *(value.double() for value in affine))
    for name, one, other in zip(("rows", "mean", "factor"), got, want, strict=True):
        assert one.shape == other.shape, name
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("given", BOTH)
def test_gradient(rows: int, width: int, given: tuple[bool, bool]) -> None:
    grad, x, affine = torch.randn(rows, width), 3 + torch.randn(rows, width), vectors(width, given)
    _, mean, factor = norm(x.double())
    values = grad, x, mean.float(), factor.float(), *affine
    got = run_fused_on_cuda(gradient, ["layer_norm_backward"], *values)
    want = gradient(grad.double(), x.double(), mean, factor, *(value.double() for value in affine))
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and one.dtype == torch.float32
        size = other.abs() + (factor.max() if rows else 1)
        assert bool(((one - other).abs() <= 1e-4 * size).all())


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("shape", [(9, 1025), (9, 4, 8)])
def test_other_rows_are_left_to_torch(shape: tuple[int, ...]) -> None:
    def call(x: Tensor) -> Tensor:
        return ATEN.native_layer_norm(x, [shape[-1]], None, None, 1e-5)[0]

    program = program_of(call, torch.randn(shape), backend="cuda-offline:sm_90")
    assert "layer_norm" not in dict(program.kernels).values()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", [7, 64, 1024])
def test_no_kernel_spills(width: int, architecture: str) -> None:
    x, column, row = torch.randn(9, width), torch.rand(width), torch.rand(9, 1)
    calls = (
        (norm, x, column, column),
        (gradient, x, x, row, row, column, column),
    )
    for function, *values in calls:
        program = fused_program_of(function, *values, backend=f"cuda-offline:{architecture}")
        assert program.recording is not None
        assert_no_spills(resources_of(program.code[architecture]))
