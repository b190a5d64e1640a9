"""The parts of an executable that depend on the device that it runs on."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from gnnc.runtime.cpu.replay import Replays, replays
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import Expr
from gnnc.runtime.program.memory import ArenaPool, Layout, OutputPool


def now() -> float:
    """Return seconds: wall time, or the thread's processor time where torch has one thread."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Device:
    """Emitter, memory and clock of programs on one device; this class is the CPU's."""

    def emitter(self, graph_module: GraphModule, check_finite: bool) -> Emitter:
        """Return the emitter that writes a program for this device."""
        return Emitter(graph_module, check_finite=check_finite)

    def finish(self, emitter: Any, results: list[Expr]) -> Any:
        """Complete a program once all nodes are written; build and return what it launches, if anything.

        Args:
            emitter: the emitter that ``emitter`` returned.
            results: the outputs of the program.
        """

    def replays(self, emitter: Any, results: list[Expr]) -> Replays | None:
        """Return the form of a program that makes many launches in one call; None: it makes them one by one.

        Args:
            emitter: has written the program, and the slots of its temporaries are assigned.
            results: the outputs of the program.
        """
        return replays(emitter, results)

    def arena_pool(self, layout: Layout) -> ArenaPool:
        """Return the pool of the temporaries of a program."""
        return ArenaPool(layout)

    def allocators(self, pool: OutputPool) -> dict[str, Callable[..., Any]]:
        """Return the functions that a program allocates with, by name: outputs and late temporaries."""
        return {"take": pool.take, "empty": torch.empty}

    def clock(self) -> Any:
        """Return a reading of the device's clock."""
        return now()

    def seconds(self, before: Any, after: Any) -> float:
        """Return the seconds between two readings of the clock."""
        return after - before

    def enter_range(self, msg: str) -> Any:
        """Begin a range of the device's profiler, named after a layer and a node."""

    def leave_range(self) -> Any:
        """End the range that was entered last."""
