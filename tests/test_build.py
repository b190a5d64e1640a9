"""The build stops where a link was lost, and the library runs on the instruction set that was asked for."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slow import slow_but

from gnnc.errors import BackendError
from gnnc.runtime.cpu import library

ROOT = Path(__file__).parent.parent
PRINT_ISA = """
from gnnc.errors import BackendError
from gnnc.runtime.cpu import library
try:
    print(library.load())
except BackendError as error:
    print("BackendError:", error)
"""


def isa(forced: str | None) -> str:
    """What a new process says with GNNC_ISA set: the choice is made once a process."""
    env = {key: value for key, value in os.environ.items() if key != "GNNC_ISA"}
    if forced is not None:
        env["GNNC_ISA"] = forced
    run = subprocess.run([sys.executable, "-c", PRINT_ISA], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


AVX2 = {"avx2", "fma", "bmi2"}
NEEDED = {
    "avx512": AVX2 | {f"avx512{part}" for part in ("f", "bw", "dq", "vl", "_vnni", "vbmi")},
    "avx2": AVX2,
    "generic": set(),
}


def runs(name: str) -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    has = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return NEEDED[name] <= has and (name == "generic" or platform.machine() == "x86_64")


def test_best_isa_is_chosen() -> None:
    assert isa(None) == next(name for name in NEEDED if runs(name))


@pytest.mark.parametrize("name", slow_but(["generic"], list(NEEDED)))
def test_an_isa_can_be_forced_where_it_runs(name: str) -> None:
    said = isa(name)
    assert said == name if runs(name) else said.startswith("BackendError:") and "lacks" in said


@pytest.mark.slow
def test_unknown_isa_is_our_error() -> None:
    said = isa("sse9")
    assert said.startswith("BackendError:")
    assert "GNNC_ISA is 'sse9'; set it to generic, avx2 or avx512" in said


def test_missing_library_is_our_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "libgnnc_cpu.so")
    with pytest.raises(BackendError, match="the CPU kernels are not built: .* is missing; run `pip install"):
        library.load.__wrapped__()


@pytest.mark.parametrize("lost", ["passes", "runtime"])
def test_cmake_stops_where_a_link_was_lost(lost: str, tmp_path: Path) -> None:
    cmake = shutil.which(
        "cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if cmake is None:
        pytest.skip("cmake is not installed here")
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    package = tmp_path / "gnnc"
    package.mkdir()
    for name in ("passes", "runtime"):
        (package / name).mkdir()
    (package / lost).rmdir()
    (package / lost).write_text(f"../{lost}")  # what unpacking a zip archive leaves
    run = subprocess.run([cmake, "-S", tmp_path, "-B", tmp_path / "build"], capture_output=True, text=True)
    assert run.returncode != 0
    message = " ".join(run.stderr.split())
    assert f"gnnc/{lost} must be a link to ../{lost}" in message
    assert "use a git clone" in message
