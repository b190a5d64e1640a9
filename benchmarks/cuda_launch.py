"""Compiles kernel templates with NVRTC and launches them, for the kernels' tests and benchmark."""

import ctypes
import importlib.util
import io
import re
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).resolve().parent.parent / "csrc" / "cuda"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel."""

    registers: int
    spilled: int
    stack: int


@cache
def missing_compiler() -> str:
    """Return why kernels cannot be compiled here, or an empty string."""
    try:
        from cuda.bindings import nvrtc
        from cuda.core import Program  # noqa: F401

        nvrtc.nvrtcVersion()
        include_folders()
    except (ImportError, OSError, RuntimeError) as error:
        return f"NVRTC cannot be used: {error}"
    return ""


@cache
def missing_gpu() -> str:
    """Return why kernels cannot run here, or an empty string."""
    return missing_compiler() or ("" if torch.cuda.is_available() else "torch sees no GPU")


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
        raise OSError("cuda_fp16.h is not installed (wheel nvidia-cuda-runtime)")
    return (str(SOURCES), headers)


def compile_kernels(
    source: str, names: tuple[str, ...], architecture: str
) -> tuple[Any, dict[str, Resources]]:
    """Compile ``source``; return the code, and the resources of each kernel by its mangled name."""
    from cuda import core

    options = core.ProgramOptions(
        arch=architecture, std="c++17", include_path=include_folders(), ptxas_options="-v", fma=False
    )
    log = io.StringIO()
    code = core.Program(source, "c++", options).compile("cubin", name_expressions=names, logs=log)
    return code, _resources(log.getvalue())


def _resources(log: str) -> dict[str, Resources]:
    pattern = re.compile(
        r"properties for (?P<name>\w+)\s+(?:ptxas[ .]+)?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) "
        r"bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return {
        m["name"]: Resources(int(m["registers"]), int(m["stores"]) + int(m["loads"]), int(m["stack"]))
        for m in pattern.finditer(log)
    }


class Module:
    """Kernels of one translation unit, on the current device."""

    def __init__(self, source: str, names: tuple[str, ...]) -> None:
        torch.cuda.current_stream()  # makes the context
        torch.zeros(1, device="cuda")
        major, minor = torch.cuda.get_device_capability()
        code, self.resources = compile_kernels(source, names, f"sm_{major}{minor}")
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._module = ctypes.c_void_p()
        self._cubin = bytes(code.code)
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), self._cubin))
        self._functions = {}
        for name, symbol in code.symbol_mapping.items():
            function = ctypes.c_void_p()
            text = symbol if isinstance(symbol, bytes) else symbol.encode()
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), self._module, text))
            self._functions[name] = function

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"the CUDA driver returned error {status}")

    def launch(self, name: str, grid: int, block: int, *values: int) -> None:
        """Launch ``grid`` blocks on torch's stream with 8-byte arguments; nothing where grid is 0."""
        if grid == 0:
            return
        buffer = struct.pack(f"{len(values)}q", *values)
        size = ctypes.c_size_t(len(buffer))
        holder = ctypes.create_string_buffer(buffer, len(buffer))
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(holder), 2, ctypes.addressof(size), 0)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        function = self._functions[name]
        self._check(self._driver.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, None, extra))


def address(tensor: torch.Tensor | None) -> int:
    """Return a tensor's address, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
