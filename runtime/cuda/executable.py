"""A lowered graph on a CUDA device, on torch's current stream: launches one by one, or a CUDA graph."""

import hashlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from gnnc.errors import BackendError
from gnnc.runtime.cuda.device import CudaBuild, CudaDevice
from gnnc.runtime.cuda.driver.launch import enter_device
from gnnc.runtime.cuda.driver.thread_streams import PER_THREAD, on_own_stream
from gnnc.runtime.cuda.formats.tune import Tuned, tune
from gnnc.runtime.cuda.graphs.cuda_graph import (
    CallState,
    GraphCache,
    PatchedGraph,
    RecordedLaunch,
    launch_all,
)
from gnnc.runtime.cuda.graphs.recording import Recording
from gnnc.runtime.cuda.memory import CudaArena, CudaArenaPool
from gnnc.runtime.program.executable import Executable, Timing
from gnnc.runtime.program.memory import OutputPool
from gnnc.torch_private import exchange_device, raw_stream, restore_device, spin

GRAPH_BELOW_MS = 0.3
"""Device time of a call, in ms, below which launching kernels one by one takes longer than they run."""
_TRIALS = 5
"""Number of slow calls before CUDA graphs are given up: building a graph or a busy host slows some calls."""

_WAIT = 2_000_000
"""Cycles that the device spins before a timed program: about a millisecond."""
_LONGEST_WAIT = 256 * _WAIT

_THREAD = threading.local()


class CudaExecutable(Executable):
    """Runs a lowered graph on the device of its tensors.

    Attributes:
        device: the device.
        resources: registers and memory of each kernel, by C++ name.
        recording: the recording form of the program; None where it is not launches alone.
        SETTLES_AFTER: number of calls, each waited for, after which it is decided whether calls are graphs.

    Args:
        graph_module: the lowered graph.
        pool: memory for outputs; unused, they come from torch's allocator.
        check_finite: whether scales that are not finite are errors.
        cuda_graph: whether calls are CUDA graphs; "auto" decides by the time of the first calls.
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
        super().__init__(graph_module, pool, check_finite=check_finite, device=CudaDevice(self.device))
        built: CudaBuild = self.built
        self.recording, self.resources, self._nan_flag = built.recording, built.resources, built.nan_flag
        self._settled = False
        self._wait = _WAIT
        recording = self.recording if cuda_graph is not False else None
        self._replayed = None if recording is None else self._as_graph(recording)
        self._graph_wins: bool | None = True if cuda_graph is True else None
        self._is_refused = False
        self._trials = 0
        self._trial: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Run the program; returns the flat outputs."""
        self._nan_flag.check()
        before = exchange_device(self._index)
        if not hasattr(_THREAD, "entered"):
            enter_device(self._index)  # a new thread has no context of the driver yet
            _THREAD.entered = True
        try:
            if raw_stream(self._index) == PER_THREAD:
                return on_own_stream(self.device, self._call, values)
            return self._call(values)
        finally:
            if before != self._index:
                restore_device(before)

    def check(self) -> None:
        """Raise what the device has found in an earlier call since."""
        self._nan_flag.check()

    @property
    def fingerprint(self) -> str:
        """Hash of the source and the machine code: equal for programs that do the same."""
        return hashlib.sha256(f"{self.built.code_hash} {self.source}".encode()).hexdigest()

    @property
    def replays_graph(self) -> bool:
        """Return whether calls launch a CUDA graph; under "auto" this is decided after a few calls."""
        return self._replayed is not None and self._graph_wins is True

    @property
    def launches(self) -> str:
        """Say whether calls are replayed as a CUDA graph, and why not."""
        if self.replays_graph:
            return "each call is replayed as one CUDA graph"
        if self.recording is None:
            return f"kernels are launched one by one: {self.built.obstacle}"
        if self._replayed is None:
            return "kernels are launched one by one: cuda_graph=False"
        if self._graph_wins is None:
            return "kernels are launched one by one as yet: the first calls are timed"
        if self._is_refused:
            return "kernels are launched one by one: the driver refused a graph"
        return f"kernels are launched one by one: they run for more than {GRAPH_BELOW_MS} ms a call"

    @property
    def was_captured(self) -> bool:
        """Return whether the caller's CUDA graph has captured calls since ``clear``: it holds addresses."""
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
            # The first call waits, so that it raises the errors of its own values.
            torch.cuda.current_stream(self.device).synchronize()
            self._nan_flag.check()
            self._settled = True
        return outputs

    def _try(self, replayed: Callable[..., tuple[Any, ...]], values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Time a call without waiting for it, and decide by an earlier one whether calls are graphs.

        The timed calls are graphs: between separate launches the device waits for the host, and seems slow.
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
        """Decide by a timed call, if it has ended."""
        if not end.query():
            return
        self._trial = None
        self._trials += 1
        if begin.elapsed_time(end) < GRAPH_BELOW_MS:
            self._graph_wins = True
        elif self._trials >= _TRIALS:
            self._graph_wins = False

    def _as_graph(self, recording: Recording) -> Callable[..., tuple[Any, ...]]:
        """Return the program that records its launches, and replays them as a CUDA graph at its end."""
        graphs = GraphCache()

        def replay(
            recorded: list[RecordedLaunch], arena: CudaArena, fixed: CallState | None, *memory: Any
        ) -> None:
            try:
                graphs(recorded, arena.stream)
                arena.hold(recorded, recording.patches, fixed, *memory)
            except BackendError as error:
                self._refuse_graphs(error)
                launch_all(recorded, arena.stream)

        def again(arena: CudaArena, held: PatchedGraph, addresses: tuple[int, ...]) -> None:
            arena.last = (
                None  # else two graphs of nodes and edges in turns would build a CUDA graph each time
            )
            try:
                held(addresses, arena.stream)
            except BackendError as error:
                self._refuse_graphs(error)
                held.launch_separately(addresses, arena.stream)

        arenas = self._arenas
        assert isinstance(arenas, CudaArenaPool)
        return self.assemble(
            recording.source, acquire=arenas.acquire_idle, replay=replay, again=again, Fixed=CallState
        )

    def _refuse_graphs(self, error: BackendError) -> None:
        self._graph_wins, self._is_refused = False, True
        warnings.warn(f"gnnc launches kernels one by one from here on: {error}", stacklevel=3)

    def profile(self, *values: Any) -> tuple[tuple[Any, ...], list[Timing]]:
        """Run the program once and time every node on the device."""
        with torch.cuda.device(self.device):
            if raw_stream(self._index) == PER_THREAD:
                return on_own_stream(self.device, super().profile, *values)
            return super().profile(*values)

    def tune(self, *values: Any) -> list[Tuned]:
        """Measure how to cut the edges of a graph into work, and use the fastest cut (``formats/tune.py``).

        Args:
            *values: the values of a call; nobody else uses their structure yet.
        """
        structure = [
            values[position]
            for position in self.built.structure
            if isinstance(values[position], torch.Tensor)
        ]
        with torch.cuda.device(self.device):
            return tune(self, values, structure)

    def _run_timed(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[tuple[str, Any]]]:
        """Run the timed program while the device spins until all is launched, to time only the device."""
        while True:
            spin(self._wait)
            outputs, marks = super()._run_timed(values)
            still_waits = not marks[0][1].query()
            # A program that reads sizes back waits for the device, and never launches everything in time.
            if still_waits or self._wait >= _LONGEST_WAIT:
                return outputs, marks
            self._wait *= 4

    def whole(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that runs a whole call on one stream, of which all of the call takes memory."""

        def call(tensors: Any) -> Any:
            if raw_stream(self._index) == PER_THREAD:
                return on_own_stream(self.device, run, tensors)
            return run(tensors)

        return call


def device_of(graph_module: GraphModule) -> torch.device:
    """Return the device of a graph's tensors.

    Raises:
        BackendError: the tensors are not on one CUDA device.
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
