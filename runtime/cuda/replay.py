"""Calls as CUDA graphs: every launch of a program in one, with the arguments of this very call.

A program that holds nothing but launches of ours is recorded as it runs: each launch gives its grid
and its packed arguments instead of going to the driver. They become the nodes of a CUDA graph, once;
a later call changes the nodes whose arguments differ (a fresh x, a fresh output) and launches the
graph. So outputs are never written twice, nothing is copied, and arguments may live anywhere. A
change does not touch launches that are under way, and the driver runs launches of one graph in order,
so that streams and threads may share it.
"""

import ctypes
import struct
import threading
from typing import Any

from gnnc.runtime.cuda.launch import Launch, check, driver

Recorded = tuple[Launch, int, bytes]
"""A launch, its number of blocks, its packed arguments."""

_LIMIT = 32
"""Sequences of kernels that one program keeps graphs of."""


class _NodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", ctypes.c_void_p),
        *[(f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"],
        ("shared", ctypes.c_uint),
        ("kernel_params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class _Node:
    """One kernel node, and what it was last given."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.buffer = ctypes.create_string_buffer(8 * launch.count)
        self.size = ctypes.c_size_t(8 * launch.count)
        self.extra = (ctypes.c_void_p * 5)(
            1, ctypes.addressof(self.buffer), 2, ctypes.addressof(self.size), 0
        )
        self.params = _NodeParams(
            kern=launch.handle,
            gridx=1,
            gridy=1,
            gridz=1,
            blockx=launch.block,
            blocky=1,
            blockz=1,
            shared=launch.shared,
            extra=ctypes.addressof(self.extra),
        )
        self.reference = ctypes.byref(self.params)
        self.handle = ctypes.c_void_p()
        self.last: tuple[int, bytes] | None = None

    def give(self, grid: int, data: bytes) -> None:
        """Set the grid and the arguments that the next change takes."""
        self.params.gridx = grid
        ctypes.memmove(self.buffer, data, len(data))
        self.last = (grid, data)


class _Graph:
    """A chain of kernel nodes that can be launched."""

    def __init__(self, recorded: list[Recorded]) -> None:
        library = driver()
        self._graph, self._executable = ctypes.c_void_p(), ctypes.c_void_p()
        check(library.cuGraphCreate(ctypes.byref(self._graph), 0), "create a graph")
        self._nodes: list[_Node] = []
        for launch, grid, data in recorded:
            node = _Node(launch)
            node.give(grid, data)
            before = (ctypes.c_void_p * 1)(self._nodes[-1].handle) if self._nodes else None
            status = library.cuGraphAddKernelNode_v2(
                ctypes.byref(node.handle),
                self._graph,
                before,
                ctypes.c_size_t(len(self._nodes) > 0),
                node.reference,
            )
            check(status, f"put {launch.name} into a graph")
            self._nodes.append(node)
        made = library.cuGraphInstantiateWithFlags(
            ctypes.byref(self._executable), self._graph, ctypes.c_ulonglong(0)
        )
        check(made, "make a graph ready")
        self._set = library.cuGraphExecKernelNodeSetParams_v2
        self._launch = library.cuGraphLaunch

    def __call__(self, recorded: list[Recorded], stream: ctypes.c_void_p) -> None:
        for node, (_, grid, data) in zip(self._nodes, recorded, strict=True):
            if node.last != (grid, data):
                node.give(grid, data)
                check(self._set(self._executable, node.handle, node.reference), "change a graph")
        check(self._launch(self._executable, stream), "launch a graph")

    def __del__(self) -> None:
        if self._executable:
            driver().cuGraphExecDestroy(self._executable)
        if self._graph:
            driver().cuGraphDestroy(self._graph)


class Replay:
    """The graphs of one program, by the sequence of kernels that a call launches."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._lock = threading.Lock()

    def __call__(self, recorded: list[Recorded], stream: int) -> None:
        """Launch what a call recorded."""
        if not recorded:
            return
        key = tuple([launch for launch, _, _ in recorded])
        handle = ctypes.c_void_p(stream)
        with self._lock:
            graph = self._graphs.get(key)
            if graph is None:
                if len(self._graphs) >= _LIMIT:
                    self._graphs.clear()
                graph = self._graphs[key] = _Graph(recorded)
            graph(recorded, handle)


def launch_all(recorded: list[Recorded], stream: int) -> None:
    """Make recorded launches one by one."""
    for launch, grid, data in recorded:
        launch(grid, stream, *struct.unpack(f"{launch.count}q", data))
