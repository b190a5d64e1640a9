"""A lowered graph on a CUDA device: the common program, with memory and launches of torch's stream."""

import hashlib
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._dynamo import guards
from torch.fx import GraphModule

from gnnc.errors import BackendError
from gnnc.ir.graph import placeholders
from gnnc.ir.source import is_structure
from gnnc.runtime.cuda.driver.launch import enter_device
from gnnc.runtime.cuda.driver.nvrtc import Machine, Resources, resources_of
from gnnc.runtime.cuda.driver.thread_streams import PER_THREAD, on_own_stream
from gnnc.runtime.cuda.emitter import CudaEmitter, round_up
from gnnc.runtime.cuda.formats.tables import write_give_back
from gnnc.runtime.cuda.formats.tune import Tuned, tune
from gnnc.runtime.cuda.graphs.cuda_graph import Fixed, Held, Recorded, Replay, launch_all
from gnnc.runtime.cuda.graphs.recording import Recording, recording
from gnnc.runtime.program.executable import Executable, Timing
from gnnc.runtime.program.memory import Arena, ArenaPool, Layout, OutputPool

GRAPH_BELOW_MS = 0.3
"""Device time of a call below which launching kernels one by one would take longer than they do."""
_TRIALS = 5
"""Calls that are timed before they are said to take longer: one that makes a graph does, or a busy host."""

_WAIT = 2_000_000
"""Cycles that the device waits before a timed program: about a millisecond."""
_LONGEST_WAIT = 256 * _WAIT

_THREAD = threading.local()


class CudaArena(Arena):
    """Temporaries of one running call, in memory of torch's allocator.

    Attributes:
        stream: handle of the stream whose kernels use them.
        captured: whether they are part of a CUDA graph of the caller's.
        last: what the last call took beside its inputs, if it was recorded.
        held: the graph of calls like it, once there were two.
    """

    def __init__(self, device: torch.device, stream: int, *, captured: bool) -> None:
        super().__init__()
        self.stream, self.captured = stream, captured
        self.last: Fixed | None = None
        self.held: Held | None = None
        self._device = device
        self._counters: torch.Tensor | None = None

    def counters(self, count: int) -> torch.Tensor:
        """Return ``count`` integers, 0 before and after every kernel (csrc/cuda/sparse/split_rows.cuh)."""
        if self._counters is None or self._counters.numel() < count:
            self._counters = torch.zeros(round_up(count, 64), dtype=torch.int32, device=self._device)
        return self._counters

    def resize(self, sizes: tuple[int, ...], layout: Layout) -> None:
        """Lay the temporaries out for these sizes; buffers only grow."""
        self.last = self.held = None
        super().resize(sizes, layout)

    def hold(
        self,
        recorded: Sequence[Recorded],
        patches: Sequence[tuple[int, int]],
        fixed: Fixed | None,
        aliases: Sequence[Any] = (),
        scratch: Sequence[torch.Tensor] = (),
    ) -> None:
        """Leave a graph for calls like the one that was just recorded, if it is the second.

        Args:
            recorded: its launches.
            patches: launch, and position among its arguments, of every address that calls differ in.
            fixed: what it took beside its inputs; None where calls differ in more than addresses.
            aliases: what it derived from that, which must be memory of the same tensors.
            scratch: memory that the launches use.
        """
        if fixed is None or self.last is None or not fixed.is_like(self.last):
            self.last = fixed
        elif fixed.holds(aliases):
            self.held = Held(recorded, patches, fixed, scratch)

    def _grow(self, slot: int, nbytes: int) -> None:
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.nbytes < nbytes:
            self._buffers.pop(slot, None)
            self._buffers[slot] = torch.empty(
                -(-max(nbytes, 1) // 256) * 256, dtype=torch.uint8, device=self._device
            )


class CudaArenaPool(ArenaPool):
    """Arenas by stream: kernels of one stream run in order, so that they may share memory.

    A handle says which stream it is: calls on the one handle that does not run elsewhere, see ``streams``.
    While a CUDA graph is being captured, the arena is part of that graph and nobody else's.

    Attributes:
        was_captured: whether there was such a graph since ``clear``.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout)
        self._device, self._index = device, device.index
        self._by_stream: dict[int, list[CudaArena]] = {}
        self.was_captured = False

    def acquire(self, sizes: tuple[int, ...]) -> Arena:
        """Return an arena laid out for these sizes, for the caller alone until released."""
        if not torch.cuda.is_current_stream_capturing():
            return self.acquire_idle(sizes)
        self.was_captured = True
        arena = CudaArena(self._device, torch._C._cuda_getCurrentRawStream(self._index), captured=True)
        arena.resize(sizes, self._layout)
        return arena

    def acquire_idle(self, sizes: tuple[int, ...]) -> CudaArena:
        """As ``acquire``, where it is known that no CUDA graph is being captured."""
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        try:
            arena = self._by_stream[stream].pop()
        except (KeyError, IndexError):
            arena = CudaArena(self._device, stream, captured=False)
        if arena.sizes != sizes:
            arena.resize(sizes, self._layout)
        return arena

    def release(self, arena: Arena) -> None:
        """Give an arena back."""
        assert isinstance(arena, CudaArena)
        if not arena.captured:
            self._by_stream.setdefault(arena.stream, []).append(arena)

    def clear(self) -> None:
        """Drop the idle arenas."""
        self._by_stream.clear()
        self.was_captured = False

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for later calls now."""
        return sum(arena.nbytes for arenas in list(self._by_stream.values()) for arena in arenas)


class CudaExecutable(Executable):
    """Runs a lowered graph on the device of its tensors.

    Attributes:
        resources: what each kernel takes, by C++ name.
        recording: the program as calls that replay run it; None where it is not launches alone.
        SETTLES_AFTER: calls, each waited for, until later ones all go the same way: as a graph, or not.
    """

    SETTLES_AFTER = 1 + 2 * _TRIALS

    def __init__(
        self,
        graph_module: GraphModule,
        pool: OutputPool | None = None,
        *,
        check_finite: bool = True,
        cuda_graph: bool | str = "auto",
    ) -> None:
        self.device = device_of(graph_module)
        self._index = self.device.index
        self.resources: dict[str, Resources] = {}
        self._settled = False
        self._wait = _WAIT
        super().__init__(graph_module, pool, check_finite=check_finite)
        text = self.recording if cuda_graph is not False else None
        self._replayed = None if text is None else self._as_graph(text)
        self._graph_wins: bool | None = True if cuda_graph is True else None
        self._trials = 0
        self._trial: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Run the program; returns the flat outputs."""
        self._watch.check()
        before = torch._C._cuda_exchangeDevice(self._index)
        if not hasattr(_THREAD, "entered"):
            enter_device(self._index)  # a new thread has no context of the driver yet
            _THREAD.entered = True
        try:
            if torch._C._cuda_getCurrentRawStream(self._index) == PER_THREAD:
                return on_own_stream(self.device, self._call, values)
            return self._call(values)
        finally:
            if before != self._index:
                torch._C._cuda_maybeExchangeDevice(before)

    @property
    def fingerprint(self) -> str:
        """Equal for programs that run the same machine code in the same way."""
        return hashlib.sha256(f"{self._cubin} {self.source}".encode()).hexdigest()

    @property
    def replays(self) -> bool:
        """Whether calls launch a CUDA graph: known after a few calls, where that was left open."""
        return self._replayed is not None and self._graph_wins is True

    @property
    def was_captured(self) -> bool:
        """Whether a CUDA graph of the caller's has captured calls since ``clear``: it holds addresses."""
        assert isinstance(self._arenas, CudaArenaPool)
        return self._arenas.was_captured

    def _call(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        replayed = self._replayed
        if replayed is None or self._graph_wins is False or not self._settled:
            return self._plain_call(values)
        if torch.cuda.is_current_stream_capturing():
            return self._run(*values)
        return replayed(*values) if self._graph_wins else self._try(replayed, values)

    def _plain_call(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        outputs = self._run(*values)
        if not self._settled and not torch.cuda.is_current_stream_capturing():
            # The first call waits, so that what is wrong with its values is said by this very call.
            torch.cuda.current_stream(self.device).synchronize()
            self._watch.check()
            self._settled = True
        return outputs

    def _try(self, replayed: Callable[..., tuple[Any, ...]], values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Time calls without waiting for them, and decide by the least.

        As a graph: between launches one by one the device would wait for the host, and seem slow.
        """
        trial = self._trial
        if trial is not None:
            self._judge(*trial)
            return replayed(*values)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        outputs = replayed(*values)
        end.record()
        self._trial = (begin, end)
        return outputs

    def _judge(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Decide from a timed call, if it is over."""
        if not end.query():
            return
        self._trial = None
        self._trials += 1
        if begin.elapsed_time(end) < GRAPH_BELOW_MS:
            self._graph_wins = True
        elif self._trials >= _TRIALS:
            self._graph_wins = False

    def _as_graph(self, text: Recording) -> Callable[..., tuple[Any, ...]]:
        """The program with its launches recorded, and made at its end."""
        graphs = Replay()

        def replay(recorded: list[Recorded], arena: CudaArena, fixed: Fixed | None, *memory: Any) -> None:
            try:
                graphs(recorded, arena.stream)
                arena.hold(recorded, text.patches, fixed, *memory)
            except BackendError as error:
                self._refuse_graphs(error)
                launch_all(recorded, arena.stream)

        def again(arena: CudaArena, held: Held, addresses: tuple[int, ...]) -> None:
            arena.last = None  # so that two structures in turns do not make a graph each time
            try:
                held(addresses, arena.stream)
            except BackendError as error:
                self._refuse_graphs(error)
                held.one_by_one(addresses, arena.stream)

        arenas = self._arenas
        assert isinstance(arenas, CudaArenaPool)
        return self.assemble(
            text.source, acquire=arenas.acquire_idle, replay=replay, again=again, Fixed=Fixed
        )

    def _refuse_graphs(self, error: BackendError) -> None:
        self._graph_wins = False
        warnings.warn(f"gnnc launches kernels one by one from here on: {error}", stacklevel=3)

    def profile(self, *values: Any) -> tuple[tuple[Any, ...], list[Timing]]:
        """Run the program once and time every node on the device."""
        with torch.cuda.device(self.device):
            if torch._C._cuda_getCurrentRawStream(self._index) == PER_THREAD:
                return on_own_stream(self.device, super().profile, *values)
            return super().profile(*values)

    def tune(self, *values: Any) -> list[Tuned]:
        """Cut the graph of these values as is measured to be fastest, see ``tuning``.

        Args:
            *values: as of a call; the structure among them is one that nobody else has yet.
        """
        structure = [values[place] for place in self._structure if isinstance(values[place], torch.Tensor)]
        with torch.cuda.device(self.device):
            return tune(self, values, structure)

    def _run_timed(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[tuple[str, Any]]]:
        """Let the device wait until the host has launched everything, so that no time is the host's."""
        while True:
            torch.cuda._sleep(self._wait)
            outputs, marks = super()._run_timed(values)
            still_waits = not marks[0][1].query()
            # One that itself waits for the device, as ops of torch do that read a size, never outruns it.
            if still_waits or self._wait >= _LONGEST_WAIT:
                return outputs, marks
            self._wait *= 4

    # What another device does in its own way

    def whole(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """As the base class says: what comes before and after the program takes memory of a stream, too."""

        def call(tensors: Any) -> Any:
            if torch._C._cuda_getCurrentRawStream(self._index) == PER_THREAD:
                return on_own_stream(self.device, run, tensors)
            return run(tensors)

        return call

    def _emitter(self, graph_module: GraphModule, check_finite: bool) -> CudaEmitter:
        emitter = CudaEmitter(graph_module, check_finite=check_finite, offline=False)
        self._watch = emitter.watch
        return emitter

    def _prepare(self, emitter: Any, results: list[str]) -> None:
        write_give_back(emitter)
        inputs = placeholders(emitter.graph_module)
        self._structure = [place for place, node in enumerate(inputs) if is_structure(node)]
        machines = emitter.unit.build(self.device.index)
        self.resources = resources_of(machines)
        code = b"".join(hashlib.sha256(machine.cubin).digest() for machine in machines.values())
        self._cubin = hashlib.sha256(code).hexdigest()
        self.recording = recording(emitter, results)

    def _arena_pool(self, layout: Layout) -> ArenaPool:
        return CudaArenaPool(layout, self.device)

    def _memory(self) -> dict[str, Callable[..., Any]]:
        # On the current device, which is the program's. What programs of torch.compile allocate with: without
        # the dispatcher it takes a third of the time of `torch.empty`.
        new = guards._empty_strided_cuda  # pyright: ignore[reportAttributeAccessIssue]

        def take(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
            return new(shape, (shape[1], 1), dtype)

        empty = partial(torch.empty, device=self.device)
        return {"take": take, "empty": empty, "counters": CudaArena.counters}

    @staticmethod
    def _clock() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _seconds(before: Any, after: Any) -> float:
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    _enter_range = staticmethod(torch.cuda.nvtx.range_push)
    _leave_range = staticmethod(torch.cuda.nvtx.range_pop)


class OfflineExecutable(Executable):
    """A program compiled for architectures that this machine need not have; it cannot run.

    Attributes:
        machines: the compiled code by architecture, and by the C++ name of a kernel in it.
        recording: the program as calls that replay run it; None where it is not launches alone.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        pool: OutputPool | None = None,
        *,
        check_finite: bool = True,
        cuda_graph: bool | str = "auto",
        architectures: tuple[str, ...],
    ) -> None:
        self._architectures = architectures
        self.machines: dict[str, dict[str, Machine]] = {}
        super().__init__(graph_module, pool, check_finite=check_finite)

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Refuse to run.

        Raises:
            BackendError: always.
        """
        raise BackendError(
            "backend 'cuda-offline' compiles for a device that is not here: compile with backend='cuda' on a "
            "machine that has one to run the model"
        )

    def profile(self, *values: Any) -> tuple[tuple[Any, ...], list[Timing]]:
        """Refuse to run."""
        return self(*values), []

    def _emitter(self, graph_module: GraphModule, check_finite: bool) -> CudaEmitter:
        return CudaEmitter(graph_module, check_finite=check_finite, offline=True)

    def _prepare(self, emitter: Any, results: list[str]) -> None:
        self.unit = emitter.unit
        self.recording = recording(emitter, results)
        if emitter.unit.names:
            self.machines = {name: emitter.unit.compile(name) for name in self._architectures}


def device_of(graph_module: GraphModule) -> torch.device:
    """Return the device of a graph's tensors.

    Raises:
        BackendError: they are not on a CUDA device.
    """
    values = [node.meta.get("val") for node in graph_module.graph.find_nodes(op="placeholder")]
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    cuda = sorted((device for device in devices if device.type == "cuda"), key=str)
    if len(cuda) != 1:
        raise BackendError(
            f"backend 'cuda' needs the model and its inputs on one CUDA device, not on "
            f"{', '.join(sorted(map(str, devices))) or 'none'}: move both with .cuda()"
        )
    index = torch.cuda.current_device() if cuda[0].index is None else cuda[0].index
    return torch.device("cuda", index)
