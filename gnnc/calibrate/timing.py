"""Timing of calls, and cached times of lowered programs on a GPU.

Between programs of a few microseconds one launch more or less decides, which no rate of bytes and
operations predicts. A GPU measures its own time whatever the host does, so that its programs can be
compared. Measured times are stored beside the rates (``gnnc.calibrate.calibration``), by
sources, program and sizes: a choice that was made from it is made again.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gnnc.calibrate import json_cache
from gnnc.calibrate.calibration import cuda_facts
from gnnc.environment import cache_folder
from gnnc.runtime.backend import Backend
from gnnc.runtime.program.device import now
from gnnc.torch_private import spin

_RUNS = 7
_LOOP_S = 4e-3
_MOST_CALLS = 20
_WAIT = 20_000_000
"""Cycles that the device waits while the host launches calls: about ten milliseconds."""

_known: dict[str, "Times"] = {}


@dataclass(frozen=True, slots=True)
class Times:
    """Measured times of a program, the least of several runs.

    Attributes:
        seconds: device seconds of one call, with calls queued.
        launches: seconds of each launch, by node.
    """

    seconds: float
    launches: Mapping[str, float]


Timer = Callable[[Any, Sequence[Any]], Times]


def timer_of(backend: Backend) -> Timer | None:
    """Return the function that times an executable on its arguments; None where predictions alone decide.

    A CPU is shared with other processes, so a measured choice would not be reproducible.
    """
    return times_of if backend.name == "cuda" else None


def times_of(executable: Any, values: Sequence[Any]) -> Times:
    """Return the times of an executable on its device, measured if they never were.

    Args:
        executable: executable on a CUDA device.
        values: its arguments; times are keyed by their layout, not by their contents.
    """
    key = _key(executable, values)
    found = _known.get(key) or _load(key)
    if found is None:
        with torch.cuda.device(executable.device):
            found = Times(_call_seconds(executable, values), _launch_seconds(executable, values))
        _store(key, found)
    _known[key] = found
    return found


def _call_seconds(executable: Any, values: Sequence[Any]) -> float:
    for _ in range(executable.SETTLES_AFTER):
        executable(*values)
        torch.cuda.synchronize()
    return min(queued_seconds(lambda: executable(*values)) for _ in range(_RUNS))


def measure_on(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return the function that measures the seconds of a call: device seconds on a GPU."""

    def on_device(call: Callable[[], object]) -> float:
        with torch.cuda.device(device):
            return queued_seconds(call)

    return on_device if device.type == "cuda" else elapsed


def elapsed(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = now()
    call()
    return now() - start


def queued_seconds(call: Callable[[], object]) -> float:
    """Return the seconds of the current GPU for a call while its queue of calls is never empty."""
    calls = max(1, min(_MOST_CALLS, int(_LOOP_S / max(_loop(call, 1), 1e-6))))
    return _loop(call, calls)


def _loop(call: Callable[[], object], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spin(_WAIT)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def _launch_seconds(executable: Any, values: Sequence[Any]) -> dict[str, float]:
    best: dict[str, float] = {}
    for _ in range(_RUNS):
        for timing in executable.profile(*values)[1]:
            best[timing.node] = min(best.get(timing.node, float("inf")), timing.seconds)
    return best


def _key(executable: Any, values: Sequence[Any]) -> str:
    sizes = [(tuple(v.shape), v.stride(), str(v.dtype)) if isinstance(v, torch.Tensor) else v for v in values]
    # The program does not say how its run tables are cut: the sources do.
    facts = (*cuda_facts(), executable.fingerprint, torch.cuda.get_device_name(executable.device), sizes)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:20]


def _path(key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "times" / f"{key}.json"


def _load(key: str) -> Times | None:
    return json_cache.load(_path(key), _parsed, "the program is timed")


def _parsed(data: Any) -> Times:
    return Times(_seconds(data["seconds"]), {str(k): _seconds(v) for k, v in data["launches"].items()})


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{seconds} is no time")
    return seconds


def _store(key: str, times: Times) -> None:
    data = {"seconds": times.seconds, "launches": dict(times.launches)}
    json_cache.store(_path(key), data, "times")
