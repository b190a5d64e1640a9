"""Compiling and its disk cache: no GPU is needed."""

import re
import stat
import subprocess
import sys

import pytest
import torch

import gnnc
from gnnc.runtime.cuda import build
from gnnc.runtime.cuda.unit import Unit

pytestmark = pytest.mark.usefixtures("compiler")
SOURCE = '#include "check.cuh"\n'
NAMES = ("gnnc::check_finite",)
IN_A_NEW_PROCESS = f"""
import sys
from gnnc.runtime import cuda
cuda.load_compiler()
cuda.build.compile_source({SOURCE!r}, {NAMES!r}, "sm_90")
print("cuda.core" in sys.modules)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GNNC_CACHE", str(tmp_path))
    return tmp_path / "cuda"


@pytest.fixture
def compilations(monkeypatch):
    """Counts calls of the compiler."""
    calls = []
    original = build._compile
    monkeypatch.setattr(build, "_compile", lambda *args: calls.append(args) or original(*args))
    return calls


def test_code_is_compiled_once(folder, compilations):
    first = build.compile_source(SOURCE, NAMES, "sm_90")
    again = build.compile_source(SOURCE, NAMES, "sm_90")
    assert first == again and len(compilations) == 1
    assert first.cubin[:4] == b"\x7fELF"
    assert first.resources[NAMES[0]].spilled == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]


def test_every_kernel_first_waits_for_the_one_before_it():
    """In a graph it is launched earlier (``gnnc.runtime.cuda.replay``)."""
    texts = [path.read_text() for path in build.headers_folder().glob("*.cuh")]
    kernels = [body for text in texts for body in re.split(r"__global__ void", text)[1:]]
    first = [re.search(r"\) \{\s+(.*)", body) for body in kernels]
    assert len(kernels) > 15
    assert [match[1] for match in first if match] == ["begin_kernel();"] * len(kernels)


def test_the_compiler_is_not_imported_for_code_on_disk(folder):
    said = [
        subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.strip() for run in said] == ["True", "False"]


def test_whatever_the_code_depends_on_is_in_the_key(folder, compilations, monkeypatch):
    build.compile_source(SOURCE, NAMES, "sm_90")
    build.compile_source(SOURCE, NAMES, "sm_80")
    build.compile_source(SOURCE + "// another\n", NAMES, "sm_90")
    monkeypatch.setattr(build, "_headers_digest", lambda folder: "other headers")
    build.compile_source(SOURCE, NAMES, "sm_90")
    monkeypatch.setattr(build, "compiler_version", lambda: (13, 99))
    build.compile_source(SOURCE, NAMES, "sm_90")
    assert len(compilations) == 5


def test_a_damaged_file_is_compiled_again(folder, compilations):
    build.compile_source(SOURCE, NAMES, "sm_90")
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    build.compile_source(SOURCE, NAMES, "sm_90")
    file.write_bytes(b"")
    build.compile_source(SOURCE, NAMES, "sm_90")
    build.compile_source(SOURCE, NAMES, "sm_90")
    assert len(compilations) == 3


def test_a_folder_that_others_can_write_to_is_not_trusted(folder, compilations):
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    build.compile_source(SOURCE, NAMES, "sm_90")
    build.compile_source(SOURCE, NAMES, "sm_90")
    assert len(compilations) == 2 and not list(folder.iterdir())


def test_the_cache_can_be_off(monkeypatch, compilations):
    monkeypatch.setenv("GNNC_CACHE", "off")
    assert build.cache_folder() is None
    build.compile_source(SOURCE, NAMES, "sm_90")
    build.compile_source(SOURCE, NAMES, "sm_90")
    assert len(compilations) == 2


def test_a_source_that_does_not_compile_shows_what_the_compiler_said(folder):
    with pytest.raises(gnnc.BackendError, match="bug of gnnc(.|\n)*nonsense"):
        build.compile_source("nonsense", ("f",), "sm_90")


def test_a_unit_defines_equal_structs_once():
    unit = Unit()
    assert unit.struct("Epilogue", "  int a;\n") == unit.struct("Epilogue", "  int a;\n")
    assert unit.launch("k", 3) is unit.launch("k", 3)
    assert unit.launch("k", 3) is not unit.launch("k", 4)
    assert unit.names == ("k",) and unit.source.count("struct Epilogue0") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_one_sentence_says_so():
    with pytest.raises(gnnc.BackendError, match=r"(CUDA build of torch|no CUDA device).*use backend='cpu'"):
        gnnc.compile(torch.nn.Linear(2, 2), backend="cuda")
    assert gnnc.compile(torch.nn.Linear(2, 2)).options.backend.name == "cpu"
