"""The kernels of one program, compiled side by side."""

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from gnnc.runtime.cuda.driver import nvrtc
from gnnc.runtime.cuda.driver.launch import Code, Launch
from gnnc.runtime.cuda.driver.nvrtc import Machine

Result = TypeVar("Result")

BLOCK = 256
"""Threads of a block, where a kernel family says nothing else."""
AS_COMPILED = 0
"""Instead of a number of threads: the kernel's launch bound."""
_KERNEL = re.compile(r"__global__ void\s+(?:__launch_bounds__[^;{]*?\)\s+)?(\w+)\((?:const )?\w+Args ")
_WORD = re.compile(r"\w+")
_KERNELS: dict[tuple[Any, ...], Any] = {}
_COMPILING = threading.Lock()
_STEPS = "common/row_steps.cuh"  # of which structs are made


class Unit:
    """Collects structs and instances of kernel templates; ``build`` compiles them.

    Each instance is compiled by itself, from a text that says nothing of the others: threads share the work,
    and programs share on disk what they have in common.
    """

    def __init__(self) -> None:
        self._structs: dict[str, str] = {}
        self._asserted: dict[str, dict[str, None]] = {}
        self._launches: dict[tuple[object, ...], Launch] = {}

    def expect(self, kernel: str, struct: str, count: int) -> None:
        """Have the compiler check that a kernel's argument struct has so many eight-byte members."""
        self.require(kernel, f"sizeof({struct}) == {8 * count}", f"{struct} is given {count} values")

    def require(self, kernel: str, condition: str, message: str) -> None:
        """Have the compiler check, where it compiles a kernel, what the host assumes of it."""
        self._asserted.setdefault(kernel, {})[f'static_assert({condition}, "{message}");\n'] = None

    def struct(self, kind: str, body: str) -> str:
        """Define a struct, once for each body; return its name, the same in every program."""
        name = f"{kind}_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
        self._structs[name] = body
        return name

    def launch(self, kernel: str, count: int, *, block: int = BLOCK, shared: int = 0) -> Launch:
        """Return the launcher of an instance, such as ``gnnc::spmm<Config, Epilogue>``.

        Args:
            kernel: C++ name with template arguments, of a kernel of ``csrc/cuda``.
            count: number of its eight-byte arguments.
            block: threads a block, or ``AS_COMPILED``.
            shared: bytes of dynamic shared memory.
        """
        key = (kernel, count, block, shared)
        if key not in self._launches:
            self._launches[key] = Launch(kernel, count, block, shared)
        return self._launches[key]

    @property
    def names(self) -> tuple[str, ...]:
        """C++ names of the kernels, each once."""
        return tuple(dict.fromkeys(launch.name for launch in self._launches.values()))

    @property
    def sources(self) -> list[tuple[str, tuple[str, ...]]]:
        """CUDA C++ texts, each with the C++ names of the kernels that are wanted of it."""
        assert self._asserted.keys() <= {*self.names}, "what is checked is compiled"
        parts: dict[str, list[str]] = {}
        for name in self.names:  # a header brings all of its kernels that are no templates
            parts.setdefault(name if "<" in name else _header_of(name), []).append(name)
        return [(self._text(names), tuple(names)) for names in parts.values()]

    def _text(self, names: Iterable[str]) -> str:
        """Return the text that instances need, with what is checked of them."""
        checks = "".join(check for name in names for check in self._asserted.get(name, ()))
        needed: dict[str, str] = {}
        for text in (*names, checks):
            self._need(text, needed)
        headers = dict.fromkeys([*([_STEPS] if needed else []), *map(_header_of, names)])
        structs = [f"struct {name} {{\n{body}}};\n" for name, body in needed.items()]
        includes = [f'#include "{header}"' for header in headers]
        return "\n".join([*includes, "", "using namespace gnnc;", "", *structs, checks])

    def _need(self, text: str, needed: dict[str, str]) -> None:
        """Add the structs that a text names, each behind those that it is made of."""
        for name in _WORD.findall(text):
            if name in self._structs and name not in needed:
                self._need(self._structs[name], needed)
                needed[name] = self._structs[name]

    def compile(self, architecture: str) -> dict[str, Machine]:
        """Compile for an architecture; needs no GPU.

        Returns:
            The machine code that each kernel is in, by C++ name.
        """
        if not self._launches:
            return {}
        sources = self.sources

        def compiled(source: tuple[str, tuple[str, ...]]) -> Machine:
            return nvrtc.compile_source(*source, architecture)

        with ThreadPoolExecutor(min(len(sources), len(os.sched_getaffinity(0)))) as pool:
            machines = zip(sources, pool.map(compiled, sources), strict=True)
            return {name: machine for (_, names), machine in machines for name in names}

    def build(self, device: int) -> dict[str, Machine]:
        """Compile for a device and give every launcher its kernel; return the code, as ``compile`` does."""
        machines = self.compile(architecture_of(device))
        codes = {id(machine): Code(machine.cubin, device) for machine in machines.values()}
        for launch in self._launches.values():
            machine = machines[launch.name]
            launch.bind(codes[id(machine)], machine.symbols[launch.name], device)
        return machines


@cache
def _headers() -> dict[str, str]:
    """Return the header of each kernel."""
    folder = nvrtc.headers_folder()
    return {
        name: file.relative_to(folder).as_posix()
        for file in sorted(folder.rglob("*.cuh"))
        for name in _KERNEL.findall(file.read_text())
    }


def _header_of(kernel: str) -> str:
    """Return the header of the kernel that a C++ name is an instance of."""
    return _headers()[kernel.partition("<")[0].removeprefix("gnnc::")]


def kernels_on(device: int, make: Callable[..., Result], *given: Any) -> Result:
    """Return ``make(unit, *given)`` with the kernels of the unit compiled for a device: once for all threads.

    Those of a thread that is late would go, and be unloaded, while the device still runs them.
    """
    key = device, make, *given
    if key not in _KERNELS:
        with _COMPILING:
            if key not in _KERNELS:
                unit = Unit()
                kernels = make(unit, *given)
                unit.build(device)
                _KERNELS[key] = kernels
    return _KERNELS[key]


@cache
def architecture_of(device: int) -> str:
    """Return the architecture of a device: ``sm_90``."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
