"""Compiles the kernel templates with NVRTC for the tests, with or without a GPU."""

import importlib.util
import io
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).resolve().parent.parent / "csrc" / "cuda"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel."""

    registers: int
    spilled: int
    stack: int


def nvrtc() -> Any:
    """Return cuda.core, or skip the test where it or NVRTC is missing."""
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    bindings = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        bindings.nvrtcVersion()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    return core


@cache
def include_folders() -> tuple[str, ...]:
    """Return csrc/cuda and the folder of cuda_fp16.h: of the pip wheel, or of a toolkit."""
    found = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (found.submodule_search_locations or [])] if found else []
    candidates = [root / "cu13" / "include" for root in roots]
    candidates += [root / "cuda_runtime" / "include" for root in roots]
    candidates += [Path("/usr/local/cuda/include")]
    headers = next((str(c) for c in candidates if (c / "cuda_fp16.h").exists()), None)
    if headers is None:
        pytest.skip("cuda_fp16.h is not installed (wheel nvidia-cuda-runtime)")
    return (str(SOURCES), headers)


def compile_kernels(
    source: str, names: tuple[str, ...], architecture: str
) -> tuple[Any, dict[str, Resources]]:
    """Compile ``source`` and return the code and the resources of each kernel, by its mangled name."""
    core = nvrtc()
    options = core.ProgramOptions(
        arch=architecture,
        std="c++17",
        include_path=include_folders(),
        ptxas_options="-v",
        device_as_default_execution_space=False,
    )
    log = io.StringIO()
    code = core.Program(source, "c++", options).compile("cubin", name_expressions=names, logs=log)
    return code, resources(log.getvalue())


def resources(log: str) -> dict[str, Resources]:
    """Read ptxas' report."""
    pattern = re.compile(
        r"properties for (?P<name>\w+)\s+(?:ptxas[ .]+)?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) "
        r"bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return {
        m["name"]: Resources(int(m["registers"]), int(m["stores"]) + int(m["loads"]), int(m["stack"]))
        for m in pattern.finditer(log)
    }
