"""Launchers of compiled kernels, which take a few microseconds of Python a launch."""

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from gnnc.errors import BackendError
from gnnc.runtime.cuda.driver.cubin import waiting_kernels

_END, _POINTER, _SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_*
_MAX_THREADS = 0  # CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MOST_BLOCKS = 2**31 - 1  # of a grid
_PROGRAMMATIC_EDGES = 12030  # first driver version with programmatic edges between nodes of a graph


@cache
def driver() -> ctypes.CDLL:
    """Return the CUDA driver's library.

    Raises:
        BackendError: this machine has no CUDA driver.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendError(f"there is no CUDA driver on this machine ({error})") from None
    library.cuGraphLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


def check(status: int, action: str) -> None:
    """Raise unless a call of the driver succeeded.

    Args:
        status: the value that the call returned.
        action: the action for the message, such as "load the kernels".

    Raises:
        BackendError: the call failed; the message holds the driver's error text.
    """
    if status == 0:
        return
    text = ctypes.c_char_p()
    driver().cuGetErrorString(status, ctypes.byref(text))
    words = text.value.decode() if text.value else f"error {status}"
    raise BackendError(f"the CUDA driver could not {action}: {words}")


def enter_device(index: int) -> None:
    """Make the context of a device current in this thread."""
    check(driver().cuCtxSetCurrent(_context_of(index)), "enter the device")


@contextmanager
def on_device(index: int) -> Iterator[None]:
    """Make the context of a device current inside the block, and restore the previous one afterwards.

    Unlike ``torch.cuda.device`` this also serves a thread that has no context yet.
    """
    check(driver().cuCtxPushCurrent_v2(_context_of(index)), "enter the device")
    try:
        yield
    finally:
        check(driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())), "leave the device")


def _context_of(index: int) -> ctypes.c_void_p:
    """Return the primary context of a device, which torch uses."""
    library, device, context = driver(), ctypes.c_int(), ctypes.c_void_p()
    check(library.cuInit(0), "start")
    check(library.cuDeviceGet(ctypes.byref(device), index), f"find device {index}")
    check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "open the device")
    return context


@cache
def has_programmatic_edges() -> bool:
    """Return whether the driver has programmatic edges, where a kernel itself waits for the one before it."""
    version = ctypes.c_int()
    check(driver().cuDriverGetVersion(ctypes.byref(version)), "tell its version")
    return version.value >= _PROGRAMMATIC_EDGES


class LoadedCode:
    """Machine code of one compilation, loaded by the driver; valid on every device of its architecture."""

    def __init__(self, cubin: bytes, device: int) -> None:
        self._library = ctypes.c_void_p()
        self._cubin = cubin  # the driver may read it later
        self._waiting = waiting_kernels(cubin) if has_programmatic_edges() else frozenset()
        with on_device(device):
            check(
                driver().cuLibraryLoadData(ctypes.byref(self._library), cubin, None, None, 0, None, None, 0),
                "load the kernels",
            )

    def kernel(self, symbol: str, shared: int, device: int) -> ctypes.c_void_p:
        """Return a kernel's handle, allowed ``shared`` bytes of dynamic shared memory."""
        handle = ctypes.c_void_p()
        library = driver()
        found = library.cuLibraryGetKernel(ctypes.byref(handle), self._library, symbol.encode())
        check(found, f"find {symbol}")
        if shared > 0:  # 48 kB in all need no permission, but the static part is unknown here
            allowed = library.cuKernelSetAttribute(_MAX_DYNAMIC_SHARED, shared, handle, device)
            check(allowed, f"give {symbol} {shared} bytes of shared memory")
        return handle

    def waits(self, symbol: str) -> bool:
        """Return whether a kernel waits for the one before it itself (``gnnc::begin_kernel``)."""
        return symbol in self._waiting

    @staticmethod
    def threads(handle: ctypes.c_void_p, device: int) -> int:
        """Return the largest block that a kernel was compiled for: its launch bound."""
        count = ctypes.c_int()
        asked = driver().cuKernelGetAttribute(ctypes.byref(count), _MAX_THREADS, handle, device)
        check(asked, "read the launch bound of a kernel")
        return count.value

    @staticmethod
    def resident_blocks(handle: ctypes.c_void_p, block: int, shared: int, device: int) -> int:
        """Return how many blocks of a kernel run at a time on all multiprocessors."""
        function, each, multiprocessors = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        library = driver()
        with on_device(device):
            check(library.cuKernelGetFunction(ctypes.byref(function), handle), "find a kernel's function")
            check(
                library.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    ctypes.byref(each), function, block, ctypes.c_size_t(shared)
                ),
                "tell how many blocks run at a time",
            )
            asked = library.cuDeviceGetAttribute(ctypes.byref(multiprocessors), _MULTIPROCESSORS, device)
            check(asked, "count the multiprocessors")
        return max(1, each.value * multiprocessors.value)

    def __del__(self) -> None:
        if self._library:
            driver().cuLibraryUnload(self._library)


def packed_arguments(buffer: ctypes.Array[ctypes.c_char], nbytes: ctypes.c_size_t) -> ctypes.Array[Any]:
    """Return the launch option that passes packed arguments; it refers to both operands by address."""
    values = _POINTER, ctypes.addressof(buffer), _SIZE, ctypes.addressof(nbytes), _END
    return (ctypes.c_void_p * len(values))(*values)


class LaunchConfig(ctypes.Structure):
    """The driver's struct CUlaunchConfig."""

    _fields_ = [
        *[(f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"],
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class _LaunchBuffer(threading.local):
    """Arguments and configuration of one thread's launches of one kernel, as the driver takes them.

    The arguments and, right behind them, the number of blocks are packed together; most launches change no
    more. ctypes passes such objects on unchanged, where it would convert numbers one by one.
    """

    def __init__(self, count: int, block: int, shared: int) -> None:
        nbytes = 8 * count
        self.packed = ctypes.create_string_buffer(nbytes + ctypes.sizeof(LaunchConfig))
        self._config = LaunchConfig.from_buffer(self.packed, nbytes)
        self._config.gridy = self._config.gridz = self._config.blocky = self._config.blockz = 1
        self._config.blockx, self._config.shared = block, shared
        self._size = ctypes.c_size_t(nbytes)
        self._extra = packed_arguments(self.packed, self._size)
        self.config, self.extra = ctypes.byref(self._config), ctypes.byref(self._extra)
        self.stream = 0

    def enter(self, stream: int) -> None:
        """Direct later launches to a stream."""
        self._config.stream = self.stream = stream


class Launcher:
    """One kernel with its block size; calling it launches.

    Every argument of a kernel is eight bytes: structs of pointers and 64-bit integers, one behind
    the other as the driver expects them.

    Attributes:
        name: C++ name of the kernel.
        count: number of arguments.
        block: threads a block; 0 stands for the kernel's launch bound, which may depend on the
            architecture, until the kernel is bound.
        shared: bytes of dynamic shared memory.
        resident: whether a launch has no more blocks than run at a time, which share the work.
        waits: whether, in a graph, the kernel waits for the one before it itself; set by ``bind``.
    """

    def __init__(self, name: str, count: int, block: int, shared: int, *, resident: bool = False) -> None:
        self.name, self.count, self.block, self.shared, self.resident = name, count, block, shared, resident
        self.waits = False
        self._most = _MOST_BLOCKS
        self._pack, self._packed = struct.Struct(f"{count}qI").pack_into, struct.Struct(f"{count}q").pack
        self._buffer: Any = None
        self._code: LoadedCode | None = None
        self._handle = ctypes.c_void_p()
        self._launch: Any = None

    def bind(self, code: LoadedCode, symbol: str, device: int) -> None:
        """Look up the kernel in loaded code, and launch it from now on."""
        self._code = code  # keeps the code loaded
        handle = code.kernel(symbol, self.shared, device)
        self.waits = code.waits(symbol)
        self.take(handle, self.block or code.threads(handle, device), driver().cuLaunchKernelEx)
        if self.resident:
            self._most = code.resident_blocks(handle, self.block, self.shared, device)

    def take(self, handle: ctypes.c_void_p, block: int, launch: Callable[..., int]) -> None:
        """Use this kernel, blocks of ``block`` threads, and the function ``launch`` (cuLaunchKernelEx)."""
        self._handle, self.block, self._launch = handle, block, launch
        self._buffer = _LaunchBuffer(self.count, block, self.shared)

    def __call__(self, grid: int, stream: int, *values: int) -> None:
        """Launch ``grid`` blocks, or as many as run at a time; none where it is 0."""
        if grid == 0:
            return
        grid = min(grid, self._most)
        buffer = self._buffer
        self._pack(buffer.packed, 0, *values, grid)
        if buffer.stream != stream:
            buffer.enter(stream)
        if status := self._launch(buffer.config, self._handle, None, buffer.extra):
            check(status, f"launch {self.name} with {grid} blocks")

    @property
    def handle(self) -> int | None:
        """The driver's handle of the compiled kernel."""
        return self._handle.value

    def record(self, grid: int, recorded: list[Any], *values: int) -> None:
        """Append a launch to ``recorded`` instead of making it; a launch of no blocks is skipped later."""
        recorded.append((self, min(grid, self._most), self._packed(*values)))
