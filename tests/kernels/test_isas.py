"""The kernels once more with the slower instruction sets, and equal integers from all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gnnc.runtime.cpu import library

HERE = Path(__file__).parent
DENSE = ("test_gemm.py", "test_gradient_kernels.py", "test_map.py", "test_row_program.py")
PRODUCTS = DENSE[:2]
SPARSE = (
    "test_spmm.py",
    "test_attention.py",
    "test_attention_backward.py",
    "test_sddmm.py",
    "test_edge_softmax.py",
    "test_softmax_sum.py",
) + ("../runtime/test_edge_body.py", "../runtime/test_edge_low_products.py")

# Prints digests of quantized values, scales and sums that must not depend on the instruction set.
DIGESTS = """
import hashlib, torch
from row_programs import Program, bits, gemm, padded, random_int8, store
from gnnc.runtime.row_program.opcodes import Op
torch.manual_seed(0)
for rows, depth, width in [(1000, 128, 64), (77, 1433, 7), (50, 47, 602), (3, 8189, 100)]:
    x, w = torch.randn(rows, depth), torch.randn(width, depth)
    sums, program = torch.empty(rows, width), Program()
    q, scale, shift = padded(rows, width), torch.empty(rows), torch.empty(rows, dtype=torch.uint8)
    program.add(Op.STORE_F32, program.out(sums)).add(Op.QUANT_ROW, program.out(q), program.out(scale))
    fine, base = program.out(padded(rows, width)), program.operand(torch.ones(1))
    program.add(Op.QUANT_POW2, fine, program.out(shift), base)
    gemm(x, None, w, False, 1, program)
    print([hashlib.sha256(b).hexdigest() for b in bits(*program.outs)])
"""


def run(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(HERE.parent / "support"), *sys.path])
    environment = os.environ | {"GNNC_ISA": isa, "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module", autouse=True)
def needs_a_choice() -> None:
    if "GNNC_ISA" in os.environ:
        pytest.skip("GNNC_ISA is set: one instruction set was asked for")
    if library.load() == "generic":
        pytest.skip("this machine has but the generic instruction set, which every test uses")


ISAS = ("generic", "avx2", "avx512")


def slower() -> tuple[str, ...]:
    return ISAS[: ISAS.index(library.load())]


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS[:-1])
def test_slower(isa: str) -> None:
    if isa not in slower():
        pytest.skip(f"{isa} is what every test uses here, or this CPU lacks it")
    result = run(
        isa, "-m", "pytest", "-q", "-x", "-m", "not slow", *(str(HERE / file) for file in (*DENSE, *SPARSE))
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.slow
def test_products_without_amx() -> None:
    if not torch.ops.gnnc_cpu.has_amx():
        pytest.skip("this machine has no AMX")
    files = [str(HERE / file) for file in PRODUCTS]
    result = run("avx512", "-m", "pytest", "-q", "-x", "-m", "not slow", *files)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.slow
def test_integers_are_equal() -> None:
    results = [run(isa, "-c", DIGESTS) for isa in (*slower(), library.load())]
    assert all(result.returncode == 0 for result in results), [result.stderr for result in results]
    assert len({result.stdout for result in results}) == 1 and results[0].stdout.count("[") == 4
