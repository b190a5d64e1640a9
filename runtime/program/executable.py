"""A lowered graph as straight-line Python over kernel launchers."""

import copy
import linecache
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import torch
from torch.fx import GraphModule, Node

from gnnc.runtime.program.checks import check_scales
from gnnc.runtime.program.emitter import Buffer, Emitter
from gnnc.runtime.program.memory import ArenaPool, Layout, OutputPool, Region
from gnnc.runtime.registry import Choice

_INDENT = "        "


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured time of one node.

    Attributes:
        node: name of the node in the lowered graph.
        kernel: the kernel that runs it.
        seconds: time of one call, see ``now``.
    """

    node: str
    kernel: str
    seconds: float


def now() -> float:
    """Return seconds: wall time, or where torch has one thread its own, in which nobody else counts."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Executable:
    """Runs a lowered graph: ``executable(*values)`` with one value a placeholder, in order.

    Safe to call from several threads and reentrantly: each call has temporaries of its own. Outputs
    are the caller's and never written again.

    Attributes:
        source: the generated program.
        kernels: (node name, kernel name) of every launch, in order.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        pool: OutputPool | None = None,
        *,
        check_finite: bool = True,
        cuda_graph: bool | str = "auto",
    ) -> None:
        """As the class says; ``cuda_graph`` has a meaning on a CUDA device only."""
        emitter = self._emitter(graph_module, check_finite)
        results = _emit(graph_module, emitter)
        self._prepare(emitter, results)
        plain = [*emitter.prelude(), *[text for text, _ in emitter.body]]
        self.source = program(emitter, plain, f"({listed(results)})")
        timed = [*emitter.prelude(), *_marked(emitter.body)]
        self._timed_source = program(emitter, timed, f"({listed(results)}), marks")
        self._timed: Callable[..., tuple[tuple[Any, ...], list[tuple[str, Any]]]] | None = None
        self.pool = pool or OutputPool()
        self._arenas = self._arena_pool(_layout(emitter))
        self.kernels = tuple(
            (node.name, node.meta["choice"].kernel.name)
            for node in graph_module.graph.nodes
            if isinstance(node.meta.get("choice"), Choice)
        )
        self._names = dict(self.kernels)
        self.profiled: tuple[Any, ...] = ()
        self._globals = {
            **emitter.constants,
            **self._memory(),
            "acquire": self._arenas.acquire,
            "release": self._arenas.release,
            "check_scales": check_scales,
            "clock": self._clock,
            "enter_range": self._enter_range,
            "leave_range": self._leave_range,
        }
        self._run: Callable[..., tuple[Any, ...]] = self.assemble(self.source)

    # What another device does in its own way

    def whole(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what runs a whole call, of which the program is a part, as this device needs it."""
        return run

    def _emitter(self, graph_module: GraphModule, check_finite: bool) -> Emitter:
        return Emitter(graph_module, check_finite=check_finite)

    def _prepare(self, emitter: Any, results: list[str]) -> None:
        """What there is to do once every launch is known, and the texts of the outputs."""

    def _arena_pool(self, layout: Layout) -> ArenaPool:
        return ArenaPool(layout)

    def _memory(self) -> dict[str, Callable[..., Any]]:
        """The functions that a program allocates with: outputs, and what is sized in mid-program."""
        return {"take": self.pool.take, "empty": torch.empty}

    _clock = staticmethod(now)

    @staticmethod
    def _seconds(before: Any, after: Any) -> float:
        return after - before

    @staticmethod
    def _enter_range(msg: str) -> Any:
        """Say to the device's profiler which layer and node a profiled run comes to."""

    @staticmethod
    def _leave_range() -> Any:
        """Say that it is over."""

    # Running

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Run the program; returns the flat outputs."""
        return self._run(*values)

    def profile(self, *values: Any) -> tuple[tuple[Any, ...], list[Timing]]:
        """Run the program once and time every node; ``profiled`` keeps what the sizes were."""
        self.profiled = tuple(v.to("meta") if isinstance(v, torch.Tensor) else v for v in values)
        outputs, marks = self._run_timed(values)
        totals: dict[str, float] = {}
        for (_, before), (name, after) in zip(marks, marks[1:], strict=False):
            totals[name] = totals.get(name, 0.0) + self._seconds(before, after)
        timings = [Timing(name, self._names.get(name, "view"), t) for name, t in totals.items()]
        return outputs, timings

    def _run_timed(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[tuple[str, Any]]]:
        """Run the program; return its outputs, and a reading of the clock behind each node."""
        if self._timed is None:
            self._timed = _compile(self._timed_source, self._globals)
        return self._timed(*values)

    def assemble(self, source: str, **others: Any) -> Callable[..., tuple[Any, ...]]:
        """Return the function that a program's text defines, over the usual variables and others."""
        return _compile(source, self._globals | others)

    def calling(self, stand_ins: Mapping[Callable[..., Any], Callable[..., Any]], **others: Any) -> Self:
        """Return this program, for ``profile`` alone, with some of the functions that it calls replaced.

        Args:
            stand_ins: what is called in the place of each.
            **others: the same by the names of variables.
        """
        for old, new in stand_ins.items():
            others |= {name: new for name, value in self._globals.items() if value is old}
        twin = copy.copy(self)
        twin._timed = self.assemble(self._timed_source, **others)
        return twin

    @property
    def arena_bytes(self) -> int:
        """Bytes of temporaries that are kept for later calls."""
        return self._arenas.idle_bytes

    def clear(self) -> None:
        """Drop memory kept for later calls."""
        self._arenas.clear()
        self.pool.clear()


def _emit(graph_module: GraphModule, emitter: Emitter) -> list[str]:
    results: list[str] = []
    for step, node in enumerate(graph_module.graph.nodes):
        emitter.enter(step, node)
        if node.op == "placeholder":
            emitter.define(node, emitter.fresh(_identifier(node.name)))
        elif node.op == "output":
            results = [emitter.argument(value) for value in node.args[0]]
        elif not _implicit(node):
            choice: Choice = node.meta["choice"]
            assert choice.kernel is not None, f"{node} was not lowered"
            choice.kernel.implementation.emit(choice.plan, node, emitter)
    return results


def _implicit(node: Node) -> bool:
    """Nodes that make no launch of their own: views, sizes, and results picked from a launch."""
    return not isinstance(node.meta.get("choice"), Choice)


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def program(emitter: Emitter, body: Iterable[str], result: str) -> str:
    """Return the text of the function from a value for each placeholder to ``result``.

    Args:
        emitter: has written the program; its temporaries are ``arena``'s.
        body: the statements.
        result: what they leave.
    """
    inputs = [emitter.exact(node) for node in emitter.graph_module.graph.find_nodes(op="placeholder")]
    sizes = list(emitter.sizes.variables.items())
    lines = [f"def run({', '.join(inputs)}):"]
    lines += [f"    {name} = {text}" for name, text in sizes]
    lines += [f"    arena = acquire(({listed(name for name, _ in sizes)}))", "    try:"]
    if emitter.region_texts:
        regions = ", ".join(f"t{i}" for i in range(len(emitter.region_texts)))
        lines.append(f"{_INDENT}{regions}, = arena.tensors")
    lines += [_INDENT + text for text in body]
    if emitter.checks:
        layers = emitter.bind(tuple(layer for _, layer in emitter.checks), "layers")
        lines.append(f"{_INDENT}check_scales(({listed(name for name, _ in emitter.checks)}), {layers})")
    lines += [f"{_INDENT}return {result}", "    finally:", f"{_INDENT}release(arena)", ""]
    return "\n".join(lines)


def listed(texts: Iterable[str]) -> str:
    """Return the text of a tuple's elements."""
    return "".join(f"{text}, " for text in texts)


def _marked(body: list[tuple[str, Node | None]]) -> Iterator[str]:
    yield "marks = [('', clock())]"
    for node, lines in groupby(body, lambda line: line[1]):
        name, layer = (node.name, node.meta.get("layer", "")) if node else ("", "")
        yield f"enter_range({f'{layer} {name}'.strip()!r})"
        yield "try:"
        yield from (f"    {text}" for text, _ in lines)
        yield f"    marks.append(({name!r}, clock()))"
        yield "finally:"
        yield "    leave_range()"


def _compile(source: str, variables: dict[str, Any]) -> Callable[..., Any]:
    name = f"<gnnc program {abs(hash(source)):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope = dict(variables)
    exec(compile(source, name, "exec"), scope)
    return scope["run"]


def _layout(emitter: Emitter) -> Callable[..., tuple[Region, ...]]:
    """Return the function from sizes to the regions of an arena."""
    _assign_slots(emitter.buffers)
    arguments = ", ".join(emitter.sizes.variables)
    rows = [
        f"Region({buffer.slot}, {emitter.bind(buffer.dtype, 'dtype')}, {shape}, {stride}),"
        for buffer, shape, stride in emitter.region_texts
    ]
    source = f"def run({arguments}):\n    return ({' '.join(rows)})\n"
    return _compile(source, {**emitter.constants, "Region": Region})


def _assign_slots(buffers: list[Buffer]) -> None:
    """Share memory between buffers whose lives do not meet, in order of birth.

    Each takes the memory that grows least for it, of those the smallest. What is as large on every graph
    shares with its like: on a larger graph it would grow by all of another buffer.
    """
    slots: list[tuple[int, int, bool]] = []
    for buffer in sorted(buffers, key=lambda b: b.first):
        size, fixed = buffer.typical_bytes, buffer.has_fixed_size
        free = [
            (max(size - held, 0), held, i)
            for i, (end, held, of_fixed) in enumerate(slots)
            if end < buffer.first and of_fixed == fixed
        ]
        if free:
            _, held, buffer.slot = min(free)
            slots[buffer.slot] = (buffer.last, max(held, size), fixed)
        else:
            buffer.slot = len(slots)
            slots.append((buffer.last, size, fixed))
