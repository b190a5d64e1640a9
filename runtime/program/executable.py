"""A lowered graph as straight-line Python over kernel launchers."""

import copy
import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import torch
from torch.fx import GraphModule, Node

from gnnc.ir.nodes import outputs_of
from gnnc.ir.parts import FORWARD
from gnnc.runtime.program.checks import check_scales
from gnnc.runtime.program.device import Device
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import Expr, Statement, listed, tuple_of, variable
from gnnc.runtime.program.memory import Layout, OutputPool, Region
from gnnc.runtime.program.memory_plan import assign_slots
from gnnc.runtime.registry import Choice
from gnnc.torch_private import dispatch_mode_count

_INDENT = "        "


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured time of one node.

    Attributes:
        node: name of the node in the lowered graph.
        kernel: name of the kernel that runs the node.
        seconds: time of one call, by the clock of the device.
        part: name of the graph: nodes of two graphs may have one name.
    """

    node: str
    kernel: str
    seconds: float
    part: str = FORWARD


class Executable:
    """Runs a lowered graph: ``executable(*values)`` with one value a placeholder, in order.

    Safe to call from several threads and reentrantly: each call has temporaries of its own. Outputs
    are the caller's and never written again.

    Attributes:
        source: the generated program, one launch a line.
        replays: the form of it that calls run, with many launches in a call; None: calls run ``source``.
        kernels: (node name, kernel name) of every launch, in order.
        built: the compiled kernels of the program, as ``Device.finish`` returns them.

    Args:
        graph_module: the lowered graph.
        pool: memory for outputs; a new pool by default.
        check_finite: whether scales that are not finite are errors.
        cuda_graph: whether calls are CUDA graphs; has a meaning on a CUDA device only.
        device: the device that the program runs on; the CPU by default.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        pool: OutputPool | None = None,
        *,
        check_finite: bool = True,
        cuda_graph: bool | str = "auto",
        device: Device | None = None,
    ) -> None:
        self._on = device or Device()
        emitter = self._on.emitter(graph_module, check_finite)
        results = write_statements(graph_module, emitter)
        self.built = self._on.finish(emitter, results)
        prelude = [statement.text for statement in emitter.prelude()]
        plain = [*prelude, *[statement.text for statement, _ in emitter.body]]
        self.source = program(emitter, plain, tuple_of(results).text)
        self._timed_source = program(
            emitter, [*prelude, *_marked(emitter.body)], f"{tuple_of(results).text}, marks", ranges=False
        )
        self._timed: Callable[..., tuple[tuple[Any, ...], list[tuple[str, Any]]]] | None = None
        self.pool = pool or OutputPool()
        self._arenas = self._on.arena_pool(_layout(emitter))
        self.replays = self._on.replays(emitter, results)
        running = self.source
        if self.replays is not None:
            running = program(emitter, self.replays.lines, tuple_of(results).text)
        self.kernels = tuple(
            (node.name, node.meta["choice"].kernel.name)
            for node in graph_module.graph.nodes
            if isinstance(node.meta.get("choice"), Choice)
        )
        self._names = dict(self.kernels)
        self.profiled: tuple[Any, ...] = ()
        self._globals = {
            **emitter.constants,
            **self._on.allocators(self.pool),
            "acquire": self._arenas.acquire,
            "release": self._arenas.release,
            "check_scales": check_scales,
            "clock": self._on.clock,
            "enter_range": self._on.enter_range,
            "leave_range": self._on.leave_range,
        }
        self._run: Callable[..., tuple[Any, ...]] = self.assemble(running)
        self._run_watched = self._run if self.replays is None else self.assemble(self.source)

    def whole(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that runs a whole call, of which the program is a part, on this device."""
        return run

    def share_temporaries(self, other: "Executable") -> None:
        """Use the memory of another program's temporaries, which never runs within this one or around it."""
        self._arenas.share(other._arenas)

    # Running

    @property
    def launches(self) -> str | None:
        """Say how calls make their launches, as replays or a CUDA graph; None: one by one."""
        return None if self.replays is None else str(self.replays)

    def check(self) -> None:
        """Raise what the device has found since an earlier call; the CPU raises errors at once."""

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Run the program; returns the flat outputs. A dispatch mode of torch sees each launch."""
        return self._run(*values) if dispatch_mode_count() == 0 else self._run_watched(*values)

    def profile(self, *values: Any) -> tuple[tuple[Any, ...], list[Timing]]:
        """Run the program once and time every node; ``profiled`` keeps the values as meta tensors."""
        self.profiled = tuple(v.to("meta") if isinstance(v, torch.Tensor) else v for v in values)
        outputs, marks = self._run_timed(values)
        totals: dict[str, float] = {}
        for (_, before), (name, after) in zip(marks, marks[1:], strict=False):
            totals[name] = totals.get(name, 0.0) + self._on.seconds(before, after)
        timings = [Timing(name, self._names.get(name, "view"), t) for name, t in totals.items()]
        return outputs, timings

    def _run_timed(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[tuple[str, Any]]]:
        """Run the program; return its outputs, and a reading of the clock after each node."""
        if self._timed is None:
            self._timed = _compile(self._timed_source, self._globals)
        return self._timed(*values)

    def assemble(self, source: str, **others: Any) -> Callable[..., tuple[Any, ...]]:
        """Return the function that a program's text defines.

        Args:
            source: the text, of a function ``run``.
            **others: variables of it beside those of this program.
        """
        return _compile(source, self._globals | others)

    def calling(self, stand_ins: Mapping[Callable[..., Any], Callable[..., Any]], **others: Any) -> Self:
        """Return a copy of this program, for ``profile`` alone, that calls other functions.

        Args:
            stand_ins: the function to call in the place of another.
            **others: the function to call in the place of a variable of the program.
        """
        for old, new in stand_ins.items():
            others |= {name: new for name, value in self._globals.items() if value is old}
        twin = copy.copy(self)
        twin._timed = self.assemble(self._timed_source, **others)
        return twin

    @property
    def arena_bytes(self) -> int:
        """Bytes of temporaries that stay allocated for later calls."""
        return self._arenas.idle_bytes

    def clear(self) -> None:
        """Free the memory that stays allocated for later calls."""
        self._arenas.clear()
        self.pool.clear()


def write_statements(graph_module: GraphModule, emitter: Emitter) -> list[Expr]:
    """Write the statements of every node of a lowered graph; return the outputs."""
    results: list[Expr] = []
    for step, node in enumerate(graph_module.graph.nodes):
        emitter.enter(step, node)
        if node.op == "placeholder":
            emitter.define(node, variable(emitter.fresh(_identifier(node.name))))
        elif node.op == "output":
            results = [emitter.argument(value) for value in outputs_of(graph_module.graph)]
        elif not _has_no_launch(node):
            choice: Choice = node.meta["choice"]
            assert choice.kernel is not None, f"{node} was not lowered"
            choice.kernel.implementation.emit(choice.plan, node, emitter)
    return results


def _has_no_launch(node: Node) -> bool:
    """Return whether a node is a view, a size, or a result picked from another node's launch."""
    return not isinstance(node.meta.get("choice"), Choice)


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def program(emitter: Emitter, body: Iterable[str], result: str, *, ranges: bool = True) -> str:
    """Return the text of the function from a value for each placeholder to ``result``.

    Args:
        emitter: has written the program; its temporaries are ``arena``'s.
        body: the lines between the temporaries and the checks.
        result: the expression that is returned.
        ranges: whether the program checks that static scales suit the values.
    """
    inputs = [emitter.exact(node).text for node in emitter.graph_module.graph.find_nodes(op="placeholder")]
    sizes = list(emitter.sizes.variables.items())
    lines = [f"def run({', '.join(inputs)}):"]
    lines += [f"    {name} = {size.text}" for name, size in sizes]
    lines += [f"    arena = acquire(({listed(name for name, _ in sizes)}))", "    try:"]
    if emitter.memory.regions:
        lines.append(f"{_INDENT}{', '.join(emitter.memory.names)}, = arena.tensors")
    lines += [_INDENT + text for text in body]
    if emitter.checks:
        layers = emitter.bind(tuple(layer for _, layer in emitter.checks), "layers")
        scales = tuple_of(scale for scale, _ in emitter.checks)
        lines.append(f"{_INDENT}check_scales({scales.text}, {layers.text})")
    if ranges:
        lines += [f"{_INDENT}{check.text}({largest.text})" for largest, check in emitter.ranges]
    lines += [f"{_INDENT}return {result}", "    finally:", f"{_INDENT}release(arena)", ""]
    return "\n".join(lines)


def _marked(body: list[tuple[Statement, Node | None]]) -> Iterator[str]:
    """Yield the lines of a program with a reading of the clock after each node."""
    yield "marks = [('', clock())]"
    for node, statements in groupby(body, lambda pair: pair[1]):
        name, layer = (node.name, node.meta.get("layer", "")) if node else ("", "")
        yield f"enter_range({f'{layer} {name}'.strip()!r})"
        yield "try:"
        yield from (f"    {statement.text}" for statement, _ in statements)
        yield f"    marks.append(({name!r}, clock()))"
        yield "finally:"
        yield "    leave_range()"


def _compile(source: str, variables: Mapping[str, Any]) -> Callable[..., Any]:
    name = f"<gnnc program {abs(hash(source)):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope = dict(variables)
    exec(compile(source, name, "exec"), scope)
    return scope["run"]


def _layout(emitter: Emitter) -> Layout:
    """Return the function from sizes to the regions of an arena."""
    assign_slots(emitter.memory.buffers)
    arguments = ", ".join(emitter.sizes.variables)
    rows = [
        f"Region({region.buffer.slot}, {emitter.bind(region.buffer.dtype, 'dtype').text}, "
        f"{region.shape}, {region.stride}),"
        for region in emitter.memory.regions
    ]
    source = f"def run({arguments}):\n    return ({' '.join(rows)})\n"
    return _compile(source, {**emitter.constants, "Region": Region})
