"""Rows picked by ids, to the bit."""

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import assert_no_spills
from one_op import program_of, run_on_cuda
from torch import Tensor

from gnnc.runtime.cuda.driver.nvrtc import resources_of

SIZES = ((), (1,), (3,), (4,), (4, 1), (2, 5), (16,), (70,))


def picked(x: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of x that ids name."""
    return x.index_select(0, ids)


@pytest.mark.cuda
@pytest.mark.parametrize("ids", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_are_those_that_ids_name(sizes: tuple[int, ...], dtype: torch.dtype, ids: torch.dtype) -> None:
    x, index = torch.randn(300, *sizes).to(dtype), torch.randint(300, (1000,)).to(ids)
    x[7] = float("nan")
    got = run_on_cuda(picked, "gather_rows", x, index)
    assert got.dtype == dtype and torch.equal(got.nan_to_num(9), picked(x, index).nan_to_num(9))


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [(), (3,), (16,)], ids=str)
def test_rows_of_masks(sizes: tuple[int, ...]) -> None:
    x, index = torch.rand(300, *sizes) < 0.5, torch.randint(300, (1000,))
    assert torch.equal(run_on_cuda(picked, "gather_rows", x, index), picked(x, index))


@pytest.mark.cuda
def test_no_id_picks_no_row() -> None:
    for rows in (0, 5):
        got = run_on_cuda(picked, "gather_rows", torch.randn(rows, 4), torch.empty(0, dtype=torch.int64))
        assert got.shape == (0, 4)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str) -> None:
    for sizes in SIZES:
        given = torch.randn(9, *sizes), torch.randint(9, (20,))
        program = program_of(picked, *given, backend=f"cuda-offline:{architecture}")
        assert dict(program.kernels).popitem()[1] == "gather_rows"
        assert_no_spills(resources_of(program.code[architecture]))


@pytest.mark.usefixtures("compiler")
def test_columns_are_picked_by_pytorch() -> None:
    program = program_of(
        lambda x, ids: x.index_select(1, ids),
        torch.randn(9, 4),
        torch.randint(4, (3,)),
        backend="cuda-offline:sm_90",
    )
    assert dict(program.kernels).popitem()[1] == "reference"
