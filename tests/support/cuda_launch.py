"""Compiles and launches kernel templates on their own, for the kernels' tests and benchmark."""

import torch

from gnnc.runtime.cuda.driver import nvrtc
from gnnc.runtime.cuda.driver.launch import Launcher, LoadedCode
from gnnc.runtime.cuda.driver.nvrtc import Resources


def compile_kernels(source: str, names: tuple[str, ...], architecture: str) -> dict[str, Resources]:
    """Return the resources of each kernel of ``source``, by its C++ name."""
    return nvrtc.compile_source(source, names, architecture).resources


class Module:
    """Kernels of one translation unit, on the current device."""

    def __init__(self, source: str, names: tuple[str, ...]) -> None:
        torch.zeros(1, device="cuda")  # makes the context
        major, minor = torch.cuda.get_device_capability()
        self._machine = nvrtc.compile_source(source, names, f"sm_{major}{minor}")
        self._device = torch.cuda.current_device()
        self._code = LoadedCode(self._machine.cubin, self._device)
        self._launches: dict[tuple[str, int, int, int], Launcher] = {}

    def launcher(self, name: str, block: int, count: int, shared: int = 0) -> Launcher:
        """Return what launches a kernel of ``count`` 8-byte arguments, with dynamic shared memory."""
        key = name, block, count, shared
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = Launcher(name, count, block, shared)
            launch.bind(self._code, self._machine.symbols[name], self._device)
        return launch

    def launch(self, name: str, grid: int, block: int, *values: int, shared: int = 0) -> None:
        """Launch ``grid`` blocks on torch's stream with 8-byte arguments; nothing where grid is 0."""
        launch = self.launcher(name, block, len(values), shared)
        launch(grid, torch.cuda.current_stream().cuda_stream, *values)


def address(tensor: torch.Tensor | None) -> int:
    """Return a tensor's address, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
