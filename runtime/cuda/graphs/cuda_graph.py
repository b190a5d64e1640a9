"""Calls as CUDA graphs: every launch of a program in one, with the arguments of this very call.

A program that holds nothing but launches of ours is recorded as it runs: each launch gives its grid
and its packed arguments instead of going to the driver. They become the nodes of a CUDA graph, once;
a later call changes the nodes whose arguments differ (a fresh x, a fresh output) and launches the
graph. So outputs are never written twice, nothing is copied, and arguments may live anywhere. A
change does not touch launches that are under way, and the driver runs launches of one graph in order,
so that streams and threads may share it. A node is launched before the memory of the one before it has
settled, and waits for that itself (``gnnc::begin_kernel``), where its code is found to do so.

Two calls that differ in nothing but their inputs leave a graph of their own, in the memory that they
ran in: further such calls do not record, they put the addresses that differ into it.
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

Recorded = tuple[Launcher, int, bytes]
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


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = [(name, ctypes.c_ubyte) for name in ("from_port", "to_port", "type")]
    _fields_ += [("reserved", ctypes.c_ubyte * 5)]


_PROGRAMMATIC = _EdgeData(from_port=1, type=1)
"""From CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC: the kernel behind the edge waits, and not its launch."""


class _Node:
    """One kernel node, and what it was last given."""

    def __init__(self, launch: Launcher) -> None:
        self.launch = launch
        self.buffer = ctypes.create_string_buffer(8 * launch.count)
        self.words = (ctypes.c_longlong * launch.count).from_buffer(self.buffer)
        self.size = ctypes.c_size_t(8 * launch.count)
        self.extra = packed_arguments(self.buffer, self.size)
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

    def __init__(self, recorded: Sequence[Recorded]) -> None:
        library = driver()
        self._graph, self._executable = ctypes.c_void_p(), ctypes.c_void_p()
        check(library.cuGraphCreate(ctypes.byref(self._graph), 0), "create a graph")
        self.nodes: list[_Node] = []
        for launch, grid, data in recorded:
            node = _Node(launch)
            node.give(grid, data)
            status = library.cuGraphAddKernelNode_v2(
                ctypes.byref(node.handle), self._graph, None, ctypes.c_size_t(0), node.reference
            )
            check(status, f"put {launch.name} into a graph")
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
        """Have a node run after another."""
        ends = self._graph, ctypes.byref(first.handle), ctypes.byref(second.handle)
        one = ctypes.c_size_t(1)
        if second.launch.waits:
            status = driver().cuGraphAddDependencies_v2(*ends, ctypes.byref(_PROGRAMMATIC), one)
        else:
            status = driver().cuGraphAddDependencies(*ends, one)
        check(status, f"put {second.launch.name} behind {first.launch.name} in a graph")

    def __call__(self, recorded: Sequence[Recorded], stream: int) -> None:
        for node, (_, grid, data) in zip(self.nodes, recorded, strict=True):
            if node.last != (grid, data):
                node.give(grid, data)
                check(self.changer(node)(), "change a graph")
        self.launch(stream)

    def changer(self, node: _Node) -> Callable[[], int]:
        """Return the driver's function that lets the next launch take what a node was given."""
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


class Replay:
    """The graphs of one program, by the sequence of kernels that a call launches."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._lock = threading.Lock()

    def __call__(self, recorded: list[Recorded], stream: int) -> None:
        """Launch what a call recorded."""
        recorded = [each for each in recorded if each[1]]
        if not recorded:
            return
        key = tuple([launch for launch, _, _ in recorded])
        with self._lock:
            graph = self._graphs.get(key)
            if graph is None:
                if len(self._graphs) >= _LIMIT:
                    self._graphs.clear()
                graph = self._graphs[key] = _Graph(recorded)
            graph(recorded, stream)


class Fixed:
    """What a call takes that is no input of it.

    Args:
        key: addresses of weights and constants, plain values.
        structure: tensors of the graph's structure.
    """

    def __init__(self, key: tuple[Any, ...], structure: tuple[Tensor, ...]) -> None:
        self.key = key
        # Weak: a structure that nobody else needs is not kept for the sake of speed.
        self.structure = tuple(map(weakref.ref, structure))

    def is_like(self, other: "Fixed") -> bool:
        """Whether both say the same of tensors that are alive."""
        pairs = zip(self.structure, other.structure, strict=True)
        return self.key == other.key and all(a() is b() is not None for a, b in pairs)

    def holds(self, aliases: Sequence[Any]) -> bool:
        """Whether tensors are memory of the fixed ones, rather than copies that die with the call."""
        known = {*self.key, *[tensor.data_ptr() for ref in self.structure if (tensor := ref()) is not None]}
        tensors = [each for each in aliases if isinstance(each, Tensor) and each.numel()]
        return all(tensor.data_ptr() in known for tensor in tensors)


class Held:
    """The graph of calls that differ in the addresses of their inputs and outputs alone.

    Belongs to the temporaries that its launches use: one call at a time, on one stream.

    Attributes:
        key: what calls have in common, see ``Fixed``; they compare it themselves.
        structure: likewise.

    Args:
        recorded: what one of the calls recorded.
        patches: launch, and position among its arguments, of every address that differs.
        fixed: what the calls have in common.
        scratch: memory that launches use.
    """

    def __init__(
        self,
        recorded: Sequence[Recorded],
        patches: Sequence[tuple[int, int]],
        fixed: Fixed,
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
            (node.words, of_launch[number], self._graph.changer(node))
            for number, node in nodes
            if number in of_launch
        ]

    def __call__(self, addresses: tuple[int, ...], stream: int) -> None:
        """Launch with these addresses, in the order of the patches."""
        for words, patches, change in self._patches:
            differs = False
            for word, i in patches:
                if words[word] != addresses[i]:
                    words[word] = addresses[i]
                    differs = True
            if differs and (status := change()):
                check(status, "change a graph")
        self._graph.launch(stream)

    def one_by_one(self, addresses: tuple[int, ...], stream: int) -> None:
        """Make the launches without the graph, which takes nothing any more."""
        for words, patches, _ in self._patches:
            for word, i in patches:
                words[word] = addresses[i]
        for node in self._graph.nodes:
            node.launch(node.params.gridx, stream, *node.words)


def launch_all(recorded: list[Recorded], stream: int) -> None:
    """Make recorded launches one by one."""
    for launch, grid, data in recorded:
        launch(grid, stream, *struct.unpack(f"{launch.count}q", data))
