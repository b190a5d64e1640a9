"""Stochastic rounding in CUDA kernels: the same bits as the reference's."""

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import assert_no_spills
from one_op import fused_program_of, run_fused_on_cuda
from rounding_cases import FORMS, SEEDS, rows_of

from gnnc.runtime.cuda.driver.nvrtc import resources_of

KERNELS = {"row": ["rowmap"], "tensor": ["rowmap"] * 2, "row_pow2": ["rowmap", "rowmap", "row_scale"]}


@pytest.mark.cuda
@pytest.mark.parametrize("width", [7, 47, 130, 602])
@pytest.mark.parametrize("form", FORMS)
def test_bits_are_those_of_the_reference(form: str, width: int) -> None:
    for rows, seed in zip((0, 1, 37, 37), SEEDS, strict=True):
        values = rows_of(rows, width), torch.rand(rows, 1) + 0.5, torch.tensor(seed)
        got, want = run_fused_on_cuda(FORMS[form], KERNELS[form], *values), FORMS[form](*values)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (rows, seed)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str) -> None:
    for form, function in FORMS.items():
        values = rows_of(9, 64), torch.rand(9, 1), torch.tensor(0)
        program = fused_program_of(function, *values, backend=f"cuda-offline:{architecture}")
        assert [name for _, name in program.kernels] == KERNELS[form]
        assert_no_spills(resources_of(program.code[architecture]))
