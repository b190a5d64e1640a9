"""Set of kernel instances that are compiled together, such as those of one program."""

import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from gnnc.locks import renew_at_fork
from gnnc.runtime.cuda.driver import nvrtc
from gnnc.runtime.cuda.driver.launch import Launcher, LoadedCode
from gnnc.runtime.cuda.driver.nvrtc import CompiledCode

Result = TypeVar("Result")

BLOCK = 256
"""Default number of threads a block."""
AS_COMPILED = 0
"""Number of threads that stands for the launch bound of a kernel."""
_KERNEL = re.compile(r"__global__ void\s+(?:__launch_bounds__[^;{]*?\)\s+)?(\w+)\((?:const )?\w+Args[ <]")
_WORD = re.compile(r"\w+")
_LOADED: dict[tuple[Any, ...], Any] = {}
_COMPILING = threading.Lock()
renew_at_fork(sys.modules[__name__], "_COMPILING", threading.Lock)
_STEPS = "common/row_steps.cuh"  # declares the steps that structs call


class KernelSet:
    """Structs and instances of kernel templates of a program under construction; ``build`` compiles them.

    Each instance is compiled from a source of its own: threads share the work, and programs share the
    compiled code on disk.
    """

    def __init__(self) -> None:
        self._structs: dict[str, str] = {}
        self._asserted: dict[str, dict[str, None]] = {}
        self._launchers: dict[tuple[object, ...], Launcher] = {}

    def expect(self, kernel: str, struct: str, count: int) -> None:
        """Check at compile time that a kernel's argument struct has ``count`` eight-byte members."""
        self.require(kernel, f"sizeof({struct}) == {8 * count}", f"{struct} is given {count} values")

    def require(self, kernel: str, condition: str, message: str) -> None:
        """Add a ``static_assert`` to the source of a kernel: an assumption of the host about it."""
        self._asserted.setdefault(kernel, {})[f'static_assert({condition}, "{message}");\n'] = None

    def struct(self, kind: str, body: str) -> str:
        """Define a struct, once for each body; return its name, the same in every program."""
        name = f"{kind}_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
        self._structs[name] = body
        return name

    def launcher(
        self, kernel: str, count: int, *, block: int = BLOCK, shared: int = 0, resident: bool = False
    ) -> Launcher:
        """Return the launcher of an instance, such as ``gnnc::spmm<Config, Epilogue>``.

        Args:
            kernel: C++ name with template arguments, of a kernel of ``csrc/cuda``.
            count: number of its eight-byte arguments.
            block: threads a block, or ``AS_COMPILED``.
            shared: bytes of dynamic shared memory.
            resident: launch no more blocks than run at a time.
        """
        key = (kernel, count, block, shared, resident)
        if key not in self._launchers:
            self._launchers[key] = Launcher(kernel, count, block, shared, resident=resident)
        return self._launchers[key]

    @property
    def names(self) -> tuple[str, ...]:
        """C++ names of the kernels, each once."""
        return tuple(dict.fromkeys(launcher.name for launcher in self._launchers.values()))

    @property
    def sources(self) -> list[tuple[str, tuple[str, ...]]]:
        """CUDA C++ sources, each with the C++ names of the kernels that it is compiled for."""
        assert self._asserted.keys() <= {*self.names}, "every static_assert belongs to a kernel of the set"
        parts: dict[str, list[str]] = {}
        for name in self.names:  # including a header compiles all kernels in it that are not templates
            parts.setdefault(name if "<" in name else _header_of(name), []).append(name)
        return [(self._text(names), tuple(names)) for names in parts.values()]

    def _text(self, names: Iterable[str]) -> str:
        """Return the source of instances, with their static assertions."""
        checks = "".join(check for name in names for check in self._asserted.get(name, ()))
        needed: dict[str, str] = {}
        for text in (*names, checks):
            self._need(text, needed)
        headers = dict.fromkeys([*([_STEPS] if needed else []), *map(_header_of, names)])
        structs = [f"struct {name} {{\n{body}}};\n" for name, body in needed.items()]
        includes = [f'#include "{header}"' for header in headers]
        return "\n".join([*includes, "", "using namespace gnnc;", "", *structs, checks])

    def _need(self, text: str, needed: dict[str, str]) -> None:
        """Add the structs that a text names, each behind the structs that it uses."""
        for name in _WORD.findall(text):
            if name in self._structs and name not in needed:
                self._need(self._structs[name], needed)
                needed[name] = self._structs[name]

    def compile(self, architecture: str) -> dict[str, CompiledCode]:
        """Compile for an architecture; needs no GPU.

        Returns:
            The compiled code that each kernel is in, by C++ name.
        """
        if not self._launchers:
            return {}
        sources = self.sources

        def compiled(source: tuple[str, tuple[str, ...]]) -> CompiledCode:
            return nvrtc.compile_source(*source, architecture)

        with ThreadPoolExecutor(min(len(sources), len(os.sched_getaffinity(0)))) as pool:
            compiled_sources = zip(sources, pool.map(compiled, sources), strict=True)
            return {name: code for (_, names), code in compiled_sources for name in names}

    def build(self, device: int) -> dict[str, CompiledCode]:
        """Compile for a device and bind every launcher to its kernel; return the code by C++ name."""
        code = self.compile(architecture_of(device))
        loaded = {id(part): LoadedCode(part.cubin, device) for part in code.values()}
        for launcher in self._launchers.values():
            part = code[launcher.name]
            launcher.bind(loaded[id(part)], part.symbols[launcher.name], device)
        return code


@cache
def _headers() -> dict[str, str]:
    """Return the header that defines each kernel, by the kernel's name."""
    folder = nvrtc.headers_folder()
    return {
        name: file.relative_to(folder).as_posix()
        for file in sorted(folder.rglob("*.cuh"))
        for name in _KERNEL.findall(file.read_text())
    }


def _header_of(kernel: str) -> str:
    """Return the header that defines the kernel of a C++ name."""
    return _headers()[kernel.partition("<")[0].removeprefix("gnnc::")]


def kernels_on(device: int, make: Callable[..., Result], *given: Any) -> Result:
    """Return ``make(kernel_set, *given)`` with the kernels compiled for a device, once for all threads.

    A second set, made by a thread at the same time, would be unloaded while the device still runs it.
    """
    key = device, make, *given
    if key not in _LOADED:
        with _COMPILING:
            if key not in _LOADED:
                kernel_set = KernelSet()
                kernels = make(kernel_set, *given)
                kernel_set.build(device)
                _LOADED[key] = kernels
    return _LOADED[key]


@cache
def architecture_of(device: int) -> str:
    """Return the architecture of a device, such as ``sm_90``."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
