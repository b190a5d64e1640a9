"""Calls as CUDA graphs: all launches of a program in one graph, with the arguments of the present call.

A program of launches alone is recorded while it runs: each launch appends its grid and its packed
arguments to a list instead of calling the driver. The launches become the nodes of a CUDA graph, once; a
later call updates the nodes whose arguments differ (a new x, a new output) and launches the graph. So
outputs are never written twice, nothing is copied, and arguments may live anywhere. An update does not
affect launches in flight, and the driver runs launches of one graph in order, so that streams and threads
may share it. A node starts before the writes of the node before it are visible, and waits for them itself
(``gnnc::begin_kernel``), where its code is found to do so.

Two calls in a row that differ only in the addresses of their inputs and outputs leave a graph in their
arena: further such calls record nothing, they write the addresses into the nodes of that graph.
"""

import ctypes
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gnnc.runtime.cuda.driver.launch import Launcher, check, driver, packed_arguments

RecordedLaunch = tuple[Launcher, int, bytes]
"""A launcher, the number of blocks, the packed arguments."""

_LIMIT = 32
"""Largest number of graphs of one program."""


class _NodeParams(ctypes.Structure):
    """The driver's struct CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", ctypes.c_void_p),
        *[(f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"],
        ("shared", ctypes.c_uint),
        ("kernel_params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class _EdgeData(ctypes.Structure):
    """The driver's struct CUgraphEdgeData."""

    _fields_ = [(name, ctypes.c_ubyte) for name in ("from_port", "to_port", "type")]
    _fields_ += [("reserved", ctypes.c_ubyte * 5)]


_PROGRAMMATIC = _EdgeData(from_port=1, type=1)
"""An edge from CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC: the kernel waits, not its launch."""


class _Node:
    """One kernel node, and the grid and arguments that it was last given."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.buffer = ctypes.create_string_buffer(8 * launcher.count)
        self.words = (ctypes.c_longlong * launcher.count).from_buffer(self.buffer)
        self.size = ctypes.c_size_t(8 * launcher.count)
        self.extra = packed_arguments(self.buffer, self.size)
        self.params = _NodeParams(
            kern=launcher.handle,
            gridx=1,
            gridy=1,
            gridz=1,
            blockx=launcher.block,
            blocky=1,
            blockz=1,
            shared=launcher.shared,
            extra=ctypes.addressof(self.extra),
        )
        self.reference = ctypes.byref(self.params)
        self.handle = ctypes.c_void_p()
        self.last: tuple[int, bytes] | None = None

    def give(self, grid: int, data: bytes) -> None:
        """Set the grid and the arguments that the next update writes."""
        self.params.gridx = grid
        ctypes.memmove(self.buffer, data, len(data))
        self.last = (grid, data)


class _Graph:
    """A chain of kernel nodes that can be launched."""

    def __init__(self, recorded: Sequence[RecordedLaunch]) -> None:
        library = driver()
        self._graph, self._executable = ctypes.c_void_p(), ctypes.c_void_p()
        check(library.cuGraphCreate(ctypes.byref(self._graph), 0), "create a graph")
        self.nodes: list[_Node] = []
        for launcher, grid, data in recorded:
            node = _Node(launcher)
            node.give(grid, data)
            status = library.cuGraphAddKernelNode_v2(
                ctypes.byref(node.handle), self._graph, None, ctypes.c_size_t(0), node.reference
            )
            check(status, f"put {launcher.name} into a graph")
            if self.nodes:
                self._follow(self.nodes[-1], node)
            self.nodes.append(node)
        made = library.cuGraphInstantiateWithFlags(
            ctypes.byref(self._executable), self._graph, ctypes.c_ulonglong(0)
        )
        check(made, "make a graph ready")
        self._set = library.cuGraphExecKernelNodeSetParams_v2
        self._launch = library.cuGraphLaunch

    def _follow(self, first: _Node, second: _Node) -> None:
        """Add the edge that makes the second node run after the first."""
        ends = self._graph, ctypes.byref(first.handle), ctypes.byref(second.handle)
        one = ctypes.c_size_t(1)
        if second.launcher.waits:
            status = driver().cuGraphAddDependencies_v2(*ends, ctypes.byref(_PROGRAMMATIC), one)
        else:
            status = driver().cuGraphAddDependencies(*ends, one)
        check(status, f"put {second.launcher.name} behind {first.launcher.name} in a graph")

    def __call__(self, recorded: Sequence[RecordedLaunch], stream: int) -> None:
        for node, (_, grid, data) in zip(self.nodes, recorded, strict=True):
            if node.last != (grid, data):
                node.give(grid, data)
                check(self.updater(node)(), "change a graph")
        self.launch(stream)

    def updater(self, node: _Node) -> Callable[[], int]:
        """Return the driver's function that updates a node to the grid and arguments it was given."""
        return partial(self._set, self._executable, node.handle, node.reference)

    def launch(self, stream: int) -> None:
        """Launch all nodes, one after the other."""
        if status := self._launch(self._executable, stream):
            check(status, "launch a graph")

    def __del__(self) -> None:
        if self._executable:
            driver().cuGraphExecDestroy(self._executable)
        if self._graph:
            driver().cuGraphDestroy(self._graph)


class GraphCache:
    """CUDA graphs of one program, by the sequence of kernels that a call launches."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._lock = threading.Lock()

    def __call__(self, recorded: list[RecordedLaunch], stream: int) -> None:
        """Launch the kernels that a call recorded, as one graph."""
        recorded = [launch for launch in recorded if launch[1]]
        if not recorded:
            return
        key = tuple([launcher for launcher, _, _ in recorded])
        with self._lock:
            graph = self._graphs.get(key)
            if graph is None:
                if len(self._graphs) >= _LIMIT:
                    self._graphs.clear()
                graph = self._graphs[key] = _Graph(recorded)
            graph(recorded, stream)


class CallState:
    """Values that a call uses beside its inputs: weights, constants, and the structure of the graph.

    Args:
        key: addresses of weights and constants, plain values.
        structure: tensors of the graph's structure, held by weak references.
    """

    def __init__(self, key: tuple[Any, ...], structure: tuple[Tensor, ...]) -> None:
        self.key = key
        # Weak: the cache must not keep a structure alive that nobody else uses.
        self.structure = tuple(map(weakref.ref, structure))

    def is_like(self, other: "CallState") -> bool:
        """Return whether both states are equal, and their tensors alive."""
        pairs = zip(self.structure, other.structure, strict=True)
        return self.key == other.key and all(a() is b() is not None for a, b in pairs)

    def holds(self, aliases: Sequence[Any]) -> bool:
        """Return whether tensors lie in memory of the state, rather than in copies that die with the call.

        A view of a weight lies in the memory that begins where the weight does.
        """
        known = {*self.key, *[tensor.data_ptr() for ref in self.structure if (tensor := ref()) is not None]}
        tensors = [alias for alias in aliases if isinstance(alias, Tensor) and alias.numel()]
        return all(
            tensor.data_ptr() in known or tensor.untyped_storage().data_ptr() in known for tensor in tensors
        )


class PatchedGraph:
    """CUDA graph of calls that differ only in the addresses of their inputs and outputs.

    The graph belongs to the arena that its launches use: one call at a time, on one stream.

    Attributes:
        key: key of the calls' state, see ``CallState``; a program compares it before it uses the graph.
        structure: tensors of the calls' state, see ``CallState``.

    Args:
        recorded: the launches of one of the calls.
        patches: launch, and position among its arguments, of every address that differs.
        fixed: the state of the calls.
        scratch: memory that the launches use.
    """

    def __init__(
        self,
        recorded: Sequence[RecordedLaunch],
        patches: Sequence[tuple[int, int]],
        fixed: CallState,
        scratch: Sequence[Tensor],
    ) -> None:
        self.key, self.structure, self._scratch = fixed.key, fixed.structure, scratch
        present = [number for number, (_, grid, _) in enumerate(recorded) if grid]
        self._graph = _Graph([recorded[number] for number in present])
        of_launch: dict[int, list[tuple[int, int]]] = {}
        for i, (number, word) in enumerate(patches):
            of_launch.setdefault(number, []).append((word, i))
        nodes = zip(present, self._graph.nodes, strict=True)
        self._patches = [
            (node.words, of_launch[number], self._graph.updater(node))
            for number, node in nodes
            if number in of_launch
        ]

    def __call__(self, addresses: tuple[int, ...], stream: int) -> None:
        """Launch the graph with these addresses, in the order of the patches."""
        for words, patches, update in self._patches:
            differs = False
            for word, i in patches:
                if words[word] != addresses[i]:
                    words[word] = addresses[i]
                    differs = True
            if differs and (status := update()):
                check(status, "change a graph")
        self._graph.launch(stream)

    def launch_separately(self, addresses: tuple[int, ...], stream: int) -> None:
        """Launch the kernels one by one with these addresses, after an update of the graph failed."""
        for words, patches, _ in self._patches:
            for word, i in patches:
                words[word] = addresses[i]
        for node in self._graph.nodes:
            node.launcher(node.params.gridx, stream, *node.words)


def launch_all(recorded: list[RecordedLaunch], stream: int) -> None:
    """Launch recorded kernels one by one."""
    for launcher, grid, data in recorded:
        launcher(grid, stream, *struct.unpack(f"{launcher.count}q", data))
