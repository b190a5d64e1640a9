"""The inner loops of the gemm keep their sums in registers: spilling them costs a factor of two."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnnc.runtime.cpu import library

SYMBOL = re.compile(r"^[0-9a-f]+ <(.*gemm_(?:code|float)_tile.*)>:$")
STACK = re.compile(r"%zmm\d+.*\(%r[sb]p|\(%r[sb]p.*%zmm\d+")
FOUND = 8  # tiles of 1 to 4 vectors, of codes and of floats


def built_objects() -> list[Path]:
    """The object files of this library; the library itself where they are gone."""
    root = library.PATH.resolve().parents[1]
    return [*root.glob("build/**/gnnc_avx512.dir/**/gemm.isa.cpp.o"), library.PATH][:1]


def spills(listing: Iterator[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    name = None
    for line in listing:
        if line.endswith(">:\n"):
            found = SYMBOL.match(line.rstrip())
            name = found[1] if found and "avx512" in line else None
            if name:
                counts[name] = 0
        elif name and STACK.search(line):
            counts[name] += 1
    return counts


def test_tiles_do_not_spill() -> None:
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump is missing (package binutils)")
    [built] = built_objects()
    if not os.path.exists(built):
        pytest.skip("the kernels are not built")
    with subprocess.Popen([objdump, "-dC", str(built)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        counts = spills(process.stdout)
    if not counts:
        pytest.skip(f"{built.name} has no symbols of AVX-512 tiles: stripped, or built for another CPU")
    assert len(counts) == FOUND
    assert not any(counts.values()), counts
