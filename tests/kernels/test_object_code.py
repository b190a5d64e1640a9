"""What the compiler made of the inner loops: sums stay in registers, and rows ahead are prefetched.

Spilling the sums of a gemm costs a factor of two, a sparse kernel without prefetches 1.4 to 1.9; g++ 12
does the first where a loop indexes the sums, and drops calls of functions that only prefetch.
"""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from gnnc.runtime.cpu import library

SYMBOL = re.compile(r"^[0-9a-f]+ <(.*)>:$")
STACK = re.compile(r"%zmm\d+.*\(%r[sb]p|\(%r[sb]p.*%zmm\d+")
GEMM_TILES = re.compile(r"gemm_(?:code|dot|float)_tile")
GATHERS = re.compile(r"(?:integer_rows|sum_columns|sum_heads_of_8|extreme_bytes|extreme_floats|fixed_sum)<")
INTERLEAVED = re.compile(r"integer_rows<")
TILES = 12  # of 1 to 4 vectors, of quantized values, of pairs of bf16 values and of floats


def counts(source: str, symbols: re.Pattern[str], instruction: re.Pattern[str]) -> dict[str, int]:
    """How often an instruction occurs in each matching function of an AVX-512 object file."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump is missing (package binutils)")
    root = library.PATH.resolve().parents[1]
    built = next(iter(root.glob(f"build/**/gnnc_avx512.dir/**/{source}.o")), None)
    if built is None:
        pytest.skip(f"{source} is not built here for AVX-512")
    return _counted(objdump, built, symbols, instruction)


def _counted(
    objdump: str, built: Path, symbols: re.Pattern[str], instruction: re.Pattern[str]
) -> dict[str, int]:
    found: Counter[str] = Counter()
    name = None
    with subprocess.Popen([objdump, "-dC", str(built)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith(">:\n"):
                match = SYMBOL.match(line.rstrip())
                wanted = match and symbols.search(match[1]) and not match[1].endswith("[clone .cold]")
                name = match[1] if match and wanted else None
                if name:
                    found[name] += 0
            elif name and instruction.search(line):
                found[name] += 1
    return dict(found)


def test_tiles_of_a_gemm_do_not_spill() -> None:
    spilled = counts("gemm.isa.cpp", GEMM_TILES, STACK)
    assert len(spilled) == TILES
    assert not any(spilled.values()), spilled


def test_integer_sums_do_not_spill() -> None:
    spilled = counts("spmm.isa.cpp", INTERLEAVED, STACK)
    assert len(spilled) == 3
    assert max(spilled.values()) < 32, spilled  # constants around calls; sums in memory took 240


@pytest.mark.parametrize("source", ["spmm.isa.cpp", "attention.isa.cpp"])
def test_every_kernel_that_gathers_rows_prefetches(source: str) -> None:
    fetches = counts(source, GATHERS, re.compile("prefetcht1"))
    assert len(fetches) > 4
    assert all(fetches.values()), fetches
