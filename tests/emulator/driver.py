"""Calls of the CUDA driver that gnnc.runtime.cuda makes, for kernels that are libraries of this machine."""

import ctypes
import gc
import itertools
import os
import tempfile
from typing import Any

import torch

_DONE_AT_ONCE = (
    "cuInit",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuGraphAddDependencies",
)
_Node = tuple[int, int, int, int, bytes]
"""A node of a CUDA graph: kernel, blocks, threads, bytes of shared memory, arguments."""


_TENSORS = {torch.Tensor, torch.nn.Parameter}
gc.freeze()  # of what there is so far nothing is handed to a kernel, and to look through it takes a while


class EmulatorError(RuntimeError):
    """A kernel did what no kernel may."""


class _Library:
    """Code that is loaded."""

    def __init__(self, code: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=".so", delete=False) as file:
            file.write(code)
        self._loaded = ctypes.PyDLL(file.name)  # one launch at a time
        os.unlink(file.name)

    def kernel(self, symbol: str) -> tuple[Any, int]:
        """Return what launches a kernel, and its launch bound."""
        function = self._loaded[f"launch_{symbol}"]
        function.restype = ctypes.c_char_p
        sizes = [ctypes.c_int, ctypes.c_int, ctypes.c_size_t]
        function.argtypes = [ctypes.c_char_p, *sizes, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int]
        return function, ctypes.c_int.in_dll(self._loaded, f"threads_{symbol}").value


class Driver:
    """The functions of the CUDA driver that ``gnnc.runtime.cuda`` calls, by the same names."""

    def __init__(self) -> None:
        self._graphs: list[list[_Node]] = []
        self._seeds = itertools.count(1)
        self._libraries: list[_Library] = []
        self._kernels: list[tuple[Any, int]] = []
        for name in _DONE_AT_ONCE:
            setattr(self, name, lambda *given: 0)

    def begin(self, seed: int) -> None:
        """Draw the orders of events from a seed."""
        self._seeds = itertools.count(1 + seed * 1_000_003)

    def cuLibraryLoadData(self, library: Any, code: bytes, *rest: Any) -> int:  # noqa: N802
        self._libraries.append(_Library(code))
        library._obj.value = len(self._libraries)
        return 0

    def cuLibraryGetKernel(self, kernel: Any, library: Any, symbol: bytes) -> int:  # noqa: N802
        self._kernels.append(self._libraries[library.value - 1].kernel(symbol.decode()))
        kernel._obj.value = len(self._kernels)
        return 0

    def cuKernelSetAttribute(self, attribute: int, value: int, kernel: Any, device: int) -> int:  # noqa: N802
        return 0

    def cuKernelGetAttribute(self, value: Any, attribute: int, kernel: Any, device: int) -> int:  # noqa: N802
        value._obj.value = self._kernels[kernel.value - 1][1]
        return 0

    def cuKernelGetFunction(self, function: Any, kernel: Any) -> int:  # noqa: N802
        function._obj.value = kernel.value
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(  # noqa: N802
        self, count: Any, function: Any, block: int, shared: Any
    ) -> int:
        count._obj.value = 1
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: N802
        value._obj.value = 3  # multiprocessors, few enough that blocks take several turns
        return 0

    def cuMemcpyDtoHAsync_v2(self, host: Any, device: Any, nbytes: Any, stream: Any) -> int:  # noqa: N802
        ctypes.memmove(host, device, nbytes.value)
        return 0

    def cuLaunchKernelEx(self, config: Any, kernel: Any, _: None, extra: Any) -> int:  # noqa: N802
        given = config._obj
        return self._run(kernel.value, given.gridx, given.blockx, given.shared, _arguments(extra._obj))

    def _run(self, kernel: int, grid: int, block: int, shared: int, arguments: bytes) -> int:
        function, _ = self._kernels[kernel - 1]
        tensors = memory_of_tensors()
        error = function(arguments, grid, block, shared, next(self._seeds), tensors, len(tensors) // 2)
        if error is not None:
            raise EmulatorError(error.decode())
        return 0

    # Graphs of launches: a list of what each node was last given

    def cuGraphCreate(self, graph: Any, flags: int) -> int:  # noqa: N802
        self._graphs.append([])
        graph._obj.value = len(self._graphs)
        return 0

    def cuGraphAddKernelNode_v2(self, node: Any, graph: Any, _: Any, count: Any, given: Any) -> int:  # noqa: N802
        nodes = self._graphs[graph.value - 1]
        nodes.append(_launch_of(given._obj))
        node._obj.value = len(nodes)
        return 0

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: Any, flags: Any) -> int:  # noqa: N802
        executable._obj.value = graph.value
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, executable: Any, node: Any, given: Any) -> int:  # noqa: N802
        self._graphs[executable.value - 1][node.value - 1] = _launch_of(given._obj)
        return 0

    def cuGraphLaunch(self, executable: Any, stream: int) -> int:  # noqa: N802
        for node in self._graphs[executable.value - 1]:
            self._run(*node)
        return 0


def memory_of_tensors() -> Any:
    """Return where the memory of each tensor begins and where it ends, by the first of them."""
    ranges = set()
    for value in gc.get_objects():
        if type(value) in _TENSORS and _has_memory(value):
            storage = value.untyped_storage()
            if storage.nbytes():
                ranges.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    flat = [number for pair in sorted(ranges) for number in pair]
    return (ctypes.c_uint64 * len(flat))(*flat)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of the host; tensors that vmap wraps have none."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not is_wrapped and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _arguments(extra: Any) -> bytes:
    """Return what CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE say."""
    _, buffer, _, size, _ = extra
    return ctypes.string_at(buffer, ctypes.c_size_t.from_address(size).value)


def _launch_of(given: Any) -> _Node:
    """Return what a CUDA_KERNEL_NODE_PARAMS says."""
    extra = (ctypes.c_void_p * 5).from_address(given.extra)
    return given.kern, given.gridx, given.blockx, given.shared, _arguments(extra)
