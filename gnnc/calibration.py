"""How fast this machine is: small graph networks run once, their kernels are timed, rates are fitted.

The rates are kept in the user's cache folder (``GNNC_CACHE``, else ``$XDG_CACHE_HOME/gnnc``, else
``~/.cache/gnnc``) under a key of the backend, its library, the processor and the number of threads:
another library or machine is measured again.
"""

import hashlib
import json
import os
import platform
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog

from gnnc import cost, describe
from gnnc.cost import Rates, Term
from gnnc.environment import cache_folder
from gnnc.errors import BackendError, UnsupportedError
from gnnc.ir.graph import placeholders
from gnnc.passes.base import BackendInfo, Context, run_passes
from gnnc.passes.cache import Cache
from gnnc.passes.fuse import Fuse
from gnnc.passes.lower import Lower
from gnnc.passes.options import FULL, Option, options_of
from gnnc.passes.quantize import Quantize
from gnnc.probes import PROBES, Probe, values_of
from gnnc.runtime.backend import Backend
from gnnc.runtime.executable import Executable

VERSION = 1
SECONDS = 9.0
"""Budget of a calibration; it ends when every probe ran and the time is up, or at the latest then."""

GRAPHS = ((16_000, 400_000), (3_000, 12_000), (100_000, 800_000))
"""Sizes (nodes, edges) that the probes run on, the most telling first."""

BACKENDS = ("cpu", "reference")
"""Backends whose speed can be measured."""

_LEAST_RUNS = 3
_known: dict[str, Rates] = {}


def rates_for(backend: Backend) -> Rates:
    """Return the rates of a backend on this machine, measured now if they never were.

    Raises:
        UnsupportedError: the backend's speed is not measured in this version.
        BackendError: the backend cannot run what is measured.
    """
    if backend.name not in BACKENDS:
        raise UnsupportedError(
            f"the speed of backend {backend.name!r} is not measured in this version, which precision='auto' "
            f"needs: use backend {' or '.join(map(repr, BACKENDS))}, or name a precision"
        )
    found = stored_rates(backend)
    if found is None:
        found = _known[_key(backend)] = calibrate(backend)
        _store(_key(backend), found)
    return found


def stored_rates(backend: Backend) -> Rates | None:
    """Return the rates of a backend if they were measured before, or None."""
    if backend.name not in BACKENDS:
        return None
    key = _key(backend)
    if key not in _known and (found := _load(key)) is not None:
        _known[key] = found
    return _known.get(key)


def _path(key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / f"rates-{key}.json"


def _load(key: str) -> Rates | None:
    path = _path(key)
    if path is None:
        return None
    try:
        text = path.read_text()
    except OSError:
        return None
    try:
        data = json.loads(text)
        return Rates(data["families"], data["backend"], data["machine"], data["measured_in"])
    except (ValueError, KeyError, TypeError):
        warnings.warn(f"{path} is damaged: the machine is measured again", stacklevel=2)
        return None


def _store(key: str, rates: Rates) -> None:
    path = _path(key)
    if path is None:
        return
    data = {
        "backend": rates.backend,
        "machine": rates.machine,
        "measured_in": round(rates.measured_in, 2),
        "families": {family: dict(table) for family, table in rates.families.items()},
    }
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(path)  # whoever reads meanwhile sees the old file or the new one
    except OSError as error:
        warnings.warn(f"rates cannot be kept, every process measures anew: {error}", stacklevel=2)


def _key(backend: Backend) -> str:
    facts = (VERSION, backend.name, backend.description, _library(), _processor(), torch.get_num_threads())
    return f"{backend.name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


def _library() -> str:
    path = Path(__file__).parent / "libgnnc_cpu.so"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else torch.__version__


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Measuring


@dataclass(slots=True)
class Sample:
    """One kernel launch on one graph.

    Attributes:
        family: its kernel family.
        terms: its work, in numbers.
        seconds: the shortest time that was measured.
    """

    family: str
    terms: Sequence[Term]
    seconds: float = float("inf")


@dataclass(slots=True)
class _Trial:
    """A lowered probe on one graph."""

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


def calibrate(backend: Backend, seconds: float = SECONDS) -> Rates:
    """Measure this machine.

    Args:
        backend: the kernels to time.
        seconds: how long to go on; more runs make the shortest times surer.
    """
    start = time.perf_counter()
    with torch.no_grad():
        lowered = [(probe, list(_variants(probe, backend))) for probe in PROBES]
        trials: list[_Trial] = []
        for graph in GRAPHS:
            for probe, variants in lowered:
                in_time = time.perf_counter() - start < 0.6 * seconds
                if graph[0] <= probe.largest and (in_time or graph is GRAPHS[0]):
                    trials += _trials(probe, variants, graph)
        while trials and (time.perf_counter() - start < seconds or trials[0].runs < _LEAST_RUNS):
            _run_fewest(trials)
    samples = [s for t in trials for s in t.samples.values() if s.seconds < float("inf")]
    if not samples:
        raise BackendError(f"backend {backend.name!r} ran none of the kernels that are measured")
    machine = f"{_processor()}, {torch.get_num_threads()} threads, {backend.description}"
    return Rates(fit(samples), backend.name, machine, time.perf_counter() - start)


def _run_fewest(trials: Sequence[_Trial]) -> None:
    """Run the trial that had the least time so far: short kernels need more runs to show their best."""
    trial = min(trials, key=lambda t: (t.runs >= _LEAST_RUNS, t.spent))
    start = time.perf_counter()
    trial.run()
    trial.spent += time.perf_counter() - start


def _variants(probe: Probe, backend: Backend) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The probe lowered in every option that its ops have, and the scales that it then takes."""
    info = BackendInfo(backend.name, backend.precisions, backend, backend.joint_products)
    for option in _options(probe, info):
        graph_module, examples = probe.build()
        context = Context(precision=option.precision, backend=info, examples=examples)
        _assign(graph_module, option, context)
        stages = run_passes(graph_module, (Quantize(), Cache(), Fuse(), Lower()), context)
        assert context.examples is not None
        yield stages[-1][1], context.examples[len(examples) :]


def _options(probe: Probe, info: BackendInfo) -> list[Option]:
    graph_module, examples = probe.build()
    context = Context(backend=info, examples=examples)
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


def _assign(graph_module: Any, option: Option, context: Context) -> None:
    """Give every op the option, or its precision, or FP32: the first of these that it has."""
    for node in graph_module.graph.nodes:
        known = options_of(node, context)
        alike = [o for o in known if o.precision == option.precision]
        chosen = option if option in known else alike[-1] if alike else FULL
        node.meta["precision"], node.meta["granularity"] = chosen.precision, chosen.granularity


def _trials(probe: Probe, variants: Sequence[tuple[Any, Any]], graph: tuple[int, int]) -> Iterator[_Trial]:
    values = values_of(probe, *graph)
    for graph_module, scales in variants:
        given = (*values, *scales)
        sizes = cost.sizes_of(placeholders(graph_module), given)
        value = lambda expr, sizes=sizes: float(cost.evaluate(expr, sizes) or 0)  # noqa: E731
        samples = {
            launch.name: Sample(launch.family, [term.at(value) for term in cost.work(launch)])
            for launch in cost.launches(describe.inline(graph_module))
        }
        yield _Trial(Executable(graph_module), given, samples)


# Fitting


def fit(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Return the rates that explain the samples best, by family.

    The sum of absolute relative errors is least, with rates of at least 0: a sample that was
    disturbed pulls no more than any other.
    """
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.family].append(sample)
    families = {family: _fit_one(group) for family, group in sorted(groups.items())}
    if cost.ALONE not in families:
        families[cost.ALONE] = _fit_one(samples)
    return families


def _fit_one(samples: Sequence[Sample]) -> dict[str, float]:
    rows = []
    for sample in samples:
        row: dict[str, float] = defaultdict(float)
        for term in sample.terms:
            for name, amount in cost.parts(term):
                row[name] += amount / sample.seconds
        rows.append(row)
    names = sorted({name for row in rows for name, amount in row.items() if amount > 0})
    matrix = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    unit = matrix.max(0)
    rates = _least_absolute(matrix / unit) / unit
    return {name: float(rate) for name, rate in zip(names, rates, strict=True)}


def _least_absolute(matrix: np.ndarray) -> np.ndarray:
    """Return x >= 0 with the least sum of |matrix @ x - 1|."""
    rows, columns = matrix.shape
    slack = -np.eye(rows)
    result = linprog(
        np.concatenate([np.zeros(columns), np.ones(rows)]),
        A_ub=np.block([[matrix, slack], [-matrix, slack]]),
        b_ub=np.concatenate([np.ones(rows), -np.ones(rows)]),
    )
    return result.x[:columns]


__all__ = ["Sample", "calibrate", "fit", "rates_for", "stored_rates"]
