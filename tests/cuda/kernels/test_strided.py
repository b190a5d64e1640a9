"""Slices, permutations and sums of a dimension are copies of elements, and sums in order."""

from collections.abc import Callable

import pytest
import torch
from architectures import ARCHITECTURES
from one_op import program_of, run_on_cuda
from torch import Tensor

from gnnc.runtime.cuda.driver.nvrtc import resources_of

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "slice of columns": lambda x: x[:, 3:9].view(x.shape[0], 6, 4, 5),
    "slice with a step": lambda x: x[:, 1::3],
    "slice from the end": lambda x: x[:, -4:],
    "slice of the last dimension": lambda x: x[..., 2:4],
    "select of columns": lambda x: x[:, 2],
    "select from the end": lambda x: x.select(2, -1),
    "permutation": lambda x: x.permute(0, 2, 1, 3),
    "permutation of rows": lambda x: x.permute(1, 0, 3, 2),
    "transposition": lambda x: x.transpose(1, -1),
    "sum of the last dimension": lambda x: x.sum(-1),
    "sum between": lambda x: x.sum(1, keepdim=True),
    "rows of a computed value": lambda x: (x * 2)[1:, :, 0],
}


def operand(name: str, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(len(name))
    return torch.randn(7, 10, 4, 5).to(dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", [name for name in CASES if name != "rows of a computed value"])
def test_strided(name: str, dtype: torch.dtype) -> None:
    x = operand(name, dtype)
    got, want = run_on_cuda(CASES[name], "strided", x), CASES[name](x.double())
    if name.startswith("sum"):
        assert got.dtype == dtype and torch.allclose(
            got.double(), want, rtol=0, atol=2e-6 if dtype == torch.float32 else 1e-2
        )
    else:
        assert torch.equal(got.double(), want)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [1, 3])
def test_a_sum_of_negative_zeros_is_zero(size: int) -> None:
    """A sum of negative zeros is positive zero, as in torch; ``atan2`` tells the signs apart."""
    x = torch.full((5, size), -0.0)
    got = run_on_cuda(lambda x: x.sum(1), "strided", x)
    assert not got.signbit().any() and not x.sum(1).signbit().any()
    columns = run_on_cuda(lambda x: x[:, 0], "strided", torch.full((5, 3), -0.0))
    assert columns.signbit().all()


@pytest.mark.cuda
def test_rows_of_a_computed_value_are_copied() -> None:
    x = operand("rows", torch.float32)
    program = program_of(CASES["rows of a computed value"], x.cuda(), backend="cuda")
    assert {"row_body", "strided"} == set(dict(program.kernels).values())
    assert program.built.obstacle is None and torch.equal(program(x.cuda())[0].cpu(), (x * 2)[1:, :, 0])


@pytest.mark.usefixtures("compiler")
def test_what_the_kernel_leaves_to_torch() -> None:
    """Rows of an argument are a view that moves nothing; integers and scalars are no rows of floats."""
    x = torch.randn(7, 10)
    for function, value in (
        (lambda x: x[2:], x),
        (lambda x: x[3], x),
        (lambda x: x[:, 1:3], x.long()),
        (lambda x: x.sum(), x),
        (lambda x: x[:, 5:5], x),
    ):
        program = program_of(function, value, backend="cuda-offline:sm_90")
        assert "strided" not in dict(program.kernels).values(), function


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str) -> None:
    for name in ("permutation", "sum between"):
        program = program_of(
            CASES[name], operand(name, torch.float32), backend=f"cuda-offline:{architecture}"
        )
        code = program.code[architecture]  # type: ignore[attr-defined]
        assert all(each.spilled == 0 for each in resources_of(code).values())
