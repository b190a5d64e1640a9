"""Calibration of the cost model: small graph networks run once, kernels are timed, rates are fitted.

All backends share the networks, the work of a launch and the fit. A `Device` holds the differences:
the place of tensors, the sizes of graphs, and the way in which a program is prepared and timed.

The rates are stored in the user's cache folder (``GNNC_CACHE``, else ``$XDG_CACHE_HOME/gnnc``, else
``~/.cache/gnnc``) under a key of the backend, its kernels, and the processor with its number of threads
or the name of the GPU that the model is on: other kernels or another machine are measured again.
"""

import hashlib
import importlib
import platform
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule

from gnnc.calibrate import json_cache
from gnnc.calibrate.probes import CPU, PROBES, Probe, values_of
from gnnc.cost import model
from gnnc.cost.model import Rates, Term
from gnnc.environment import cache_folder
from gnnc.errors import BackendError, UnsupportedError
from gnnc.ir import describe
from gnnc.ir.graph import placeholders
from gnnc.locks import renew_at_fork
from gnnc.passes.base import Context, run_passes
from gnnc.passes.cache import Cache
from gnnc.passes.fuse import Fuse
from gnnc.passes.lower import Lower
from gnnc.passes.quantization.number_formats import FULL, Option, options_of
from gnnc.passes.quantize import Quantize
from gnnc.passes.select_format import SelectFormat
from gnnc.runtime.backend import Backend
from gnnc.runtime.program.executable import Executable
from gnnc.target import Target

VERSION = 4
SECONDS = 8.0
"""Budget of a calibration; it ends when every probe ran and the time is up, or at the latest then."""

CPU_GRAPHS = ((16_000, 400_000), (300, 1_500), (3_000, 12_000), (100_000, 800_000))
"""Sizes (nodes, edges) that the probes run on, the most telling first."""

CUDA_GRAPHS = ((170_000, 2_400_000), (20_000, 100_000), (1_000_000, 12_000_000))
"""The same for a GPU, which needs more work to be busy."""

MOST_WAITING = 0.1
"""Largest share of waiting threads on a machine that is busy with nothing else."""

_MOST_MEASUREMENTS = 3
"""A machine that is busy every time is measured so often at most; the best rates stay."""

_LEAST_RUNS = 3
_STEP = 2.0
"""Factor by which a byte may cost at the next of ``cost.KNOTS``."""

_known: dict[str, Rates] = {}
_measured_here: set[str] = set()
"""Keys of the rates that this process measured."""

_MEASURING = threading.Lock()
"""Held by who measures: who needs the same rates waits for them, and others would take turns with it."""
renew_at_fork(sys.modules[__name__], "_MEASURING", threading.Lock)


def rates_for(backend: Backend, *, again: bool = False) -> Rates:
    """Return the rates of a backend on this machine, measured now if they never were.

    Rates of another process that were measured while the machine was busy are measured again. Threads that
    need the same rates at once measure them once.

    Args:
        backend: the kernels, and the GPU that they are for.
        again: measure now in any case, as after a measurement on a busy machine.

    Raises:
        UnsupportedError: the backend only compiles.
        BackendError: the backend cannot run the probes.
    """
    if not backend.is_runnable:
        raise UnsupportedError(
            f"backend {backend.name!r} only compiles, so that its speed is unknown, which precision='auto' "
            "needs: use a backend that runs on this machine, or name a precision"
        )
    key, found = _key(backend), None if again else stored_rates(backend)
    if found is not None and _are_final(key, found):
        return found
    with _MEASURING:
        found = None if again else stored_rates(backend)  # another thread may have measured meanwhile
        if found is None or not _are_final(key, found):
            found = _known[key] = _better(found, calibrate(backend))
            _measured_here.add(key)
            _store(key, found)
    return found


def _are_final(key: str, rates: Rates) -> bool:
    """Return whether rates need no further measurement in this process."""
    is_settled = rates.waited <= MOST_WAITING or rates.measurements >= _MOST_MEASUREMENTS
    return is_settled or key in _measured_here


def _better(old: Rates | None, new: Rates) -> Rates:
    """Return the rates of the measurement that waited less."""
    if old is None:
        return new
    best = min(new, old, key=lambda rates: rates.waited)
    return replace(best, measurements=old.measurements + 1)


def stored_rates(backend: Backend) -> Rates | None:
    """Return the rates of a backend if they were measured before, or None."""
    if not backend.is_runnable:
        return None
    key = _key(backend)
    if key not in _known and (found := _load(key)) is not None:
        _known[key] = found
    return _known.get(key)


def _path(key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / f"rates-{key}.json"


def _load(key: str) -> Rates | None:
    return json_cache.load(_path(key), _parsed, "the machine is measured")


def _parsed(data: Any) -> Rates:
    names = ("families", "backend", "machine", "measured_in", "waited", "measurements")
    return Rates(*(data[name] for name in names))


def _store(key: str, rates: Rates) -> None:
    data = {
        "backend": rates.backend,
        "machine": rates.machine,
        "measured_in": round(rates.measured_in, 2),
        "waited": round(rates.waited, 3),
        "measurements": rates.measurements,
        "families": {family: dict(table) for family, table in rates.families.items()},
    }
    json_cache.store(_path(key), data, "rates")


def _key(backend: Backend) -> str:
    facts = (VERSION, backend.name, backend.description, *_device_of(backend).facts())
    return f"{backend.name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Devices


@dataclass(frozen=True, slots=True)
class Device:
    """Device on which the kernels of a backend are timed.

    Attributes:
        graphs: sizes (nodes, edges) that the probes run on, the most informative first.
        largest_input: bytes of the largest x of a probe.
        facts: further parts of the key of the rates, beside the backend and its description.
        alike: precision to an equally fast precision that is measured in its place.
    """

    graphs: Sequence[tuple[int, int]]
    largest_input: int
    facts: Callable[[], tuple[Any, ...]]
    alike: Mapping[str, str] = field(default_factory=dict)


def _machine(backend: Backend) -> str:
    """Return a description of the machine that the rates belong to."""
    if backend.device is not None:
        return backend.description  # which names the GPU
    return f"{_processor()}, {torch.get_num_threads()} threads, {backend.description}"


def _device_of(backend: Backend) -> Device:
    return _CPU if backend.device is None else _CUDA


def _where(backend: Backend) -> torch.device:
    """Return the device on which tensors are made."""
    return backend.device or CPU


def _cpu_facts() -> tuple[Any, ...]:
    return _library_digest(), _processor(), torch.get_num_threads()


@cache
def _library_digest() -> str:
    """Return a digest of the CPU kernels, which a process loads once."""
    path = Path(__file__).parents[1] / "libgnnc_cpu.so"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else torch.__version__


@cache
def cuda_facts() -> tuple[Any, ...]:
    """Return a digest of the sources of kernels and launches; GPU and compiler are in the description."""
    from gnnc.runtime import cuda
    from gnnc.runtime.cuda.driver import nvrtc

    lowerings = Path(cuda.__file__).parent
    sources = [*nvrtc.headers_folder().rglob("*.cuh"), *lowerings.rglob("*.py")]
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return (digest.hexdigest(),)


_CPU = Device(CPU_GRAPHS, 64 << 20, _cpu_facts)
# Both 16-bit floats take the same instructions, and NVRTC takes half a second for each program.
_CUDA = Device(CUDA_GRAPHS, 1 << 30, cuda_facts, {"fp16": "bf16"})


# Measuring


@dataclass(slots=True)
class Sample:
    """Measured launch of one kernel on one graph.

    Attributes:
        family: its kernel family.
        terms: numbers that describe its work.
        seconds: shortest measured time.
    """

    family: str
    terms: Sequence[Term]
    seconds: float = float("inf")


@dataclass(slots=True)
class _Trial:
    """Lowered probe on one graph."""

    executable: Executable
    values: tuple[Any, ...]
    samples: dict[str, Sample]
    runs: int = 0
    spent: float = 0.0

    def run(self) -> None:
        _, timings = self.executable.profile(*self.values)
        self.runs += 1
        for timing in timings:
            if timing.node in self.samples:
                sample = self.samples[timing.node]
                sample.seconds = min(sample.seconds, timing.seconds)


@dataclass(slots=True)
class _Variant:
    """Probe in one option, with the static scales that the option takes."""

    probe: Probe
    graph_module: GraphModule
    scales: tuple[Any, ...]


def calibrate(backend: Backend, seconds: float = SECONDS) -> Rates:
    """Measure the rates of this machine; the current device is restored.

    Args:
        backend: the kernels to time, on the GPU that they are for.
        seconds: duration; more runs make the shortest times more reliable.
    """
    start, before = time.perf_counter(), scheduled()
    device = _device_of(backend)
    with torch.no_grad():
        programs = _programs(backend, device)
        ready = time.perf_counter()
        trials: list[_Trial] = []
        for graph in device.graphs:
            if time.perf_counter() - ready < 0.4 * seconds or graph is device.graphs[0]:
                trials += _trials(programs, graph, device, _where(backend))
        while trials and (time.perf_counter() - start < seconds or trials[0].runs < _LEAST_RUNS):
            _run_fewest(trials)
    samples = [s for t in trials for s in t.samples.values() if 0 < s.seconds < float("inf")]
    if not samples:
        raise BackendError(f"backend {backend.name!r} ran none of the kernels that are measured")
    families = _with_alike(fit(samples), device.alike)
    took = time.perf_counter() - start
    return Rates(families, backend.name, _machine(backend), took, _waited_share(before, scheduled()))


def scheduled() -> tuple[int, int]:
    """Return the nanoseconds that the threads of this process ran, and that they waited for a processor."""
    ran = waited = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        try:
            numbers = thread.read_text().split()
        except OSError:  # the thread ended meanwhile
            continue
        ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
    return ran, waited


def _waited_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    ran, waited = (max(b - a, 0) for a, b in zip(before, after, strict=True))
    return waited / (ran + waited) if waited else 0.0


def _programs(backend: Backend, device: Device) -> list[tuple[_Variant, Executable]]:
    """Lower every probe in every option; a probe is compiled while the next ones are lowered.

    CUDA's compiler takes a second for each program and lets threads read the sources one after the other.
    """

    def compile_one(variant: _Variant) -> Executable:
        return backend.executable(variant.graph_module, check_finite=False, cuda_graph=False)

    with ThreadPoolExecutor() as pool:
        variants = (variant for probe in PROBES for variant in _variants(probe, backend, device))
        coming = [(variant, pool.submit(compile_one, variant)) for variant in variants]
        importlib.import_module("scipy.optimize")  # most of a second, which the fit would wait for
        return [(variant, program.result()) for variant, program in coming]


def _with_alike(
    families: dict[str, dict[str, float]], alike: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Assign rates to precisions that were not measured: the rates of equally fast precisions."""
    for table in families.values():
        for name, seconds in list(table.items()):
            for other, measured in alike.items():
                table.setdefault(name.replace(f".{measured}", f".{other}"), seconds)
    return families


def _run_fewest(trials: Sequence[_Trial]) -> None:
    """Run the trial with the least total time so far: short kernels need more runs to show their best."""
    trial = min(trials, key=lambda t: (t.runs >= _LEAST_RUNS, t.spent))
    start = time.perf_counter()
    trial.run()
    trial.spent += time.perf_counter() - start


def _variants(probe: Probe, backend: Backend, device: Device) -> Iterator[_Variant]:
    """Yield the probe lowered in every option that its ops have."""
    precisions = backend.target.precisions - device.alike.keys()
    facts = backend.target
    target = Target(facts.name, precisions, joins_products=facts.joins_products, lowering=backend)
    for option in _options(probe, target):
        graph_module, examples = probe.build(_where(backend))
        context = Context(precision=option.precision, target=target, examples=examples)
        _assign(graph_module, option, context)
        stages = run_passes(graph_module, (Quantize(), Cache(), Fuse(), Lower(), SelectFormat()), context)
        assert context.examples is not None
        yield _Variant(probe, stages[-1][1].forward, context.examples[len(examples) :])


def _options(probe: Probe, target: Target) -> list[Option]:
    graph_module, examples = probe.build()
    context = Context(target=target, examples=examples)
    found = dict.fromkeys(o for node in graph_module.graph.nodes for o in options_of(node, context))
    precisions = dict.fromkeys(o.precision for o in found)
    return [
        option
        for precision in precisions
        for option in _of_one_precision([o for o in found if o.precision == precision], probe)
    ]


def _of_one_precision(options: list[Option], probe: Probe) -> list[Option]:
    granular = [o for o in options if o.granularity is not None] or options
    return granular if probe.every_option else granular[-1:]


def _assign(graph_module: GraphModule, option: Option, context: Context) -> None:
    """Assign to every op the first it has of: the option, the option's precision, FP32."""
    for node in graph_module.graph.nodes:
        known = options_of(node, context)
        alike = [o for o in known if o.precision == option.precision]
        chosen = option if option in known else alike[-1] if alike else FULL
        node.meta["precision"], node.meta["granularity"] = chosen.precision, chosen.granularity


def _trials(
    programs: Sequence[tuple[_Variant, Executable]],
    graph: tuple[int, int],
    device: Device,
    where: torch.device,
) -> Iterator[_Trial]:
    known: dict[str, tuple[Any, ...]] = {}
    for variant, executable in programs:
        probe = variant.probe
        if graph[0] * probe.width * 4 > device.largest_input:
            continue
        if probe.name not in known:
            known[probe.name] = values_of(probe, *graph, where)
        given = (*known[probe.name], *variant.scales)
        sizes = model.sizes_of(placeholders(variant.graph_module), given)
        value = lambda expr, sizes=sizes: float(model.evaluate(expr, sizes) or 0)  # noqa: E731
        samples = {
            launch.name: Sample(launch.family, [term.at(value) for term in model.work(launch)])
            for launch in model.launches(describe.inline(variant.graph_module))
        }
        yield _Trial(executable, given, samples)


# Fitting


def fit(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Return the rates that explain the samples best, by family.

    The sum of absolute relative errors is least, with rates of at least 0: a disturbed sample
    has no more influence than any other. A byte costs no less, and at most twice as much, at the next
    larger of ``cost.KNOTS``.
    """
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.family].append(sample)
    families = {family: _fit_one(group) for family, group in sorted(groups.items())}
    if model.ALONE not in families:
        families[model.ALONE] = _fit_one(samples)
    return families


def _fit_one(samples: Sequence[Sample]) -> dict[str, float]:
    rows = []
    for sample in samples:
        row: dict[str, float] = defaultdict(float)
        for term in sample.terms:
            for name, amount in model.parts(term):
                row[name] += amount / sample.seconds
        rows.append(row)
    names = sorted({name for row in rows for name, amount in row.items() if amount > 0})
    matrix = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    unit = matrix.max(0)
    rates = _least_absolute(matrix / unit, _memory_steps(names) / unit) / unit
    return {name: float(rate) for name, rate in zip(names, rates, strict=True)}


def _memory_steps(names: Sequence[str]) -> np.ndarray:
    """Return the matrix A of the constraints ``A @ rates <= 0`` on the rates of memory traffic.

    The time of a byte is fitted at several sizes of memory (knots). From one knot to the next it must not
    fall, and must at most double. Few samples reach the largest sizes: without the constraints, one disturbed
    sample would set a rate that the prediction for a large graph multiplies.
    """
    knots: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for column, name in enumerate(names):
        base, _, knot = name.partition("@")
        if knot:
            knots[base].append((int(knot), column))
    rows = []
    for places in knots.values():
        for (low, first), (high, second) in pairwise(sorted(places)):
            for column, other, factor in ((first, second, 1.0), (second, first, _STEP ** (high - low))):
                row = np.zeros(len(names))
                row[column], row[other] = 1.0, -factor
                rows.append(row)
    return np.array(rows).reshape(-1, len(names))


def _least_absolute(matrix: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return x >= 0 with the least sum of |matrix @ x - 1| such that limits @ x <= 0."""
    from scipy.optimize import linprog  # scipy takes most of a second to import

    rows, columns = matrix.shape
    slack = -np.eye(rows)
    # Terms differ by ten orders of magnitude, and the solver's tolerance is absolute.
    scaled = limits / np.maximum(np.abs(limits).max(1, keepdims=True), 1e-300)
    result = linprog(
        np.concatenate([np.zeros(columns), np.ones(rows)]),
        A_ub=np.block([[matrix, slack], [-matrix, slack], [scaled, np.zeros((len(limits), rows))]]),
        b_ub=np.concatenate([np.ones(rows), -np.ones(rows), np.zeros(len(limits))]),
    )
    return result.x[:columns]


__all__ = ["Sample", "calibrate", "cuda_facts", "fit", "rates_for", "stored_rates"]
