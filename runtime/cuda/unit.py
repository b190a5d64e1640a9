"""A translation unit: every kernel of one program, compiled together."""

from functools import cache
from typing import Any

from gnnc.runtime.cuda import build
from gnnc.runtime.cuda.build import Machine
from gnnc.runtime.cuda.launch import Code, Launch

BLOCK = 256
"""Threads of a block, where a kernel family says nothing else."""
AS_COMPILED = 0
"""Instead of a number of threads: the kernel's launch bound."""


class Unit:
    """Collects structs and instances of kernel templates; ``build`` compiles them all at once."""

    def __init__(self) -> None:
        self._headers: dict[str, None] = {"row_steps.cuh": None}
        self._structs: dict[str, str] = {}
        self._asserted: dict[str, None] = {}
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def include(self, header: str) -> None:
        """Include a header of ``csrc/cuda``."""
        self._headers[header] = None

    def expect(self, struct: str, count: int) -> None:
        """Have the compiler check that a kernel's argument struct has so many eight-byte members."""
        self.require(f"sizeof({struct}) == {8 * count}", f"{struct} is given {count} values")

    def require(self, condition: str, message: str) -> None:
        """Have the compiler check what the host assumes."""
        self._asserted[f'static_assert({condition}, "{message}");'] = None

    def struct(self, kind: str, body: str) -> str:
        """Define a struct, once for each body; return its name."""
        if body not in self._structs:
            self._structs[body] = f"{kind}{len(self._structs)}"
        return self._structs[body]

    def launch(self, kernel: str, count: int, *, block: int = BLOCK, shared: int = 0) -> Launch:
        """Return the launcher of an instance, such as ``gnnc::spmm<Config0, Epilogue1>``.

        Args:
            kernel: C++ name with template arguments.
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
    def source(self) -> str:
        """The CUDA C++ text."""
        lines = [f'#include "{header}"' for header in self._headers]
        lines += ["", "using namespace gnnc;", ""]
        lines += [f"struct {name} {{\n{body}}};\n" for body, name in self._structs.items()]
        return "\n".join([*lines, *self._asserted, ""])

    def compile(self, architecture: str) -> Machine:
        """Compile for an architecture; needs no GPU."""
        return build.compile_source(self.source, self.names, architecture)

    def build(self, device: int) -> Machine:
        """Compile for a device and give every launcher its kernel."""
        if not self._launches:
            return Machine(b"", {}, {})
        machine = self.compile(architecture_of(device))
        code = Code(machine.cubin, device)
        for launch in self._launches.values():
            launch.bind(code, machine.symbols[launch.name], device)
        return machine


@cache
def architecture_of(device: int) -> str:
    """Return the architecture of a device: ``sm_90``."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
