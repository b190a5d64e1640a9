"""Choice of the tables of one graph by measurement, beside those of the model (run_table.py).

For each table of a CSR that launches of a program use, candidates are measured alternately with the model's
table, in the program itself: by the device's time of the launches. The fastest table is cached on the CSR in
the place of the model's.

The CSR is a new one that is not shared yet (``StructureRunner.rebuild``). CUDA graphs and calls in progress
hold addresses of the tables of earlier structure tensors; later calls find the new tensors. So no table that
is in use is replaced, and no lock is needed.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnc.runtime.cuda.formats.keys import run_table_key, sum_table_key
from gnnc.runtime.cuda.formats.run_table import (
    Cut,
    build_runs,
    candidates,
    chunk_of,
    cut_for,
    model_runs,
    multiprocessors_of,
)
from gnnc.runtime.cuda.formats.tables import (
    RunTable,
    SumTable,
    give_back,
    runs_of,
    sums_of,
    window_cut_of,
)
from gnnc.runtime.cuda.formats.tensor_cache import attach, cached_tensors, detach_all_but
from gnnc.runtime.cuda.formats.window_table import (
    WindowTable,
    build_window_table,
    pays,
    sizes_of,
    window_rows,
)
from gnnc.runtime.program.executable import Executable

ROUNDS = 5
"""Number of measurements of each candidate, alternately with the model's table."""
_MARGIN, _TICK = 0.02, 0.5e-6
"""Least saving of a candidate: as a share of the model's time, and in seconds, the resolution of events."""

Table = RunTable | SumTable


def choose(seconds: Sequence[float]) -> int:
    """Return the index of the cut to use: the fastest, or the first one if the difference may be noise.

    Args:
        seconds: time with each cut, the model's first.
    """
    best = min(range(len(seconds)), key=seconds.__getitem__)
    saves = seconds[0] - seconds[best]
    return best if saves > max(_MARGIN * seconds[0], _TICK) else 0


class Tuned(NamedTuple):
    """Measurements for one table.

    Attributes:
        launches: layer and node of the launches that use the table.
        row_bytes: bytes of a row of x.
        cuts: the model's cut, and the candidates.
        seconds: time of these launches in one call, by cut.
    """

    launches: tuple[str, ...]
    row_bytes: int
    cuts: tuple[Cut, ...]
    seconds: tuple[float, ...]

    @property
    def cut(self) -> Cut:
        """Cut that is used."""
        return self.cuts[choose(self.seconds)]

    def __str__(self) -> str:
        """Return the model's cut and the fastest other one, both times, and which of them is used."""
        best = min(range(1, len(self.cuts)), key=self.seconds.__getitem__)
        model, other = (f"{self.cuts[i]}: {1e3 * self.seconds[i]:.4f} ms" for i in (0, best))
        used = "measured" if choose(self.seconds) else "model's"
        where = f"{', '.join(self.launches)}, rows of {self.row_bytes} bytes"
        others = f"fastest of {len(self.cuts) - 1} others {other}"
        return f"{where}: model {model}; {others}; the {used} cut is used"


class Wanted:
    """Request of launches for a table, by ``runs_of`` or ``sums_of``.

    Attributes:
        owner: the tensor on which the table is cached.
        cache_key: key of the table among the values cached on the owner.
        key: owner and cache key, equal for launches that share the table.
        launches: layer and node of the launches that use the table, in order.

    Args:
        rowptr: int64 ``[rows + 1]``.
        edges: E.
        row_bytes: bytes of a row of x.
        col: int32 ``[E]`` for a table of sums, which may be windowed; None for a run table.
        sources: number of rows of x, for a table of sums.
    """

    def __init__(
        self, rowptr: Tensor, edges: int, row_bytes: int, col: Tensor | None = None, sources: int = 0
    ) -> None:
        self._rowptr, self._edges, self.row_bytes, self._col = rowptr, edges, row_bytes, col
        self._sources = sources
        self.owner = rowptr if col is None else col
        self.cache_key = (
            run_table_key(row_bytes) if col is None else sum_table_key(rowptr, sources, row_bytes)
        )
        self.key = id(self.owner), self.cache_key
        self.launches: dict[str, None] = {}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of the CSR from which the table is built."""
        return (self._rowptr,) if self._col is None else (self._rowptr, self._col)

    def model(self) -> Table:
        """Return the table by the model's cut."""
        if self._col is None:
            return runs_of(self._rowptr, self._edges, self.row_bytes)
        return sums_of(self._rowptr, self._col, self._sources, self.row_bytes)

    def cuts(self) -> list[Cut]:
        """Return the cuts to measure, the model's first."""
        rows, processors = self._rowptr.shape[0] - 1, multiprocessors_of(self._rowptr)
        table = self.model()
        if self._col is not None and isinstance(table, SumTable) and table.staged_blocks:
            return candidates(window_cut_of(self._rowptr, self._col), cut_for(rows, self._edges, processors))
        model = model_runs(self._rowptr, self._edges)
        count, has_shares = model.run.shape[0], model.per_block is not None
        runs = model.cut._replace(chunk=chunk_of(count, processors, self.row_bytes, per_block=has_shares))
        if self._col is None or not pays(self._edges, self._edges, rows, processors, self.row_bytes):
            return candidates(runs)
        return candidates(runs, window_cut_of(self._rowptr, self._col))

    def build(self, cut: Cut) -> Table | None:
        """Return the table by another cut; None if it has too many words."""
        processors = multiprocessors_of(self._rowptr)
        if not cut.windowed:
            runs = build_runs(self._rowptr, self._edges, cut, processors)
            table = RunTable(runs, processors, self.row_bytes, cut.chunk)
            return table if self._col is None else SumTable(table)
        assert self._col is not None
        window = window_rows(self.row_bytes)
        sizes = sizes_of(self._rowptr, self._col, cut)
        runs = build_window_table(self._rowptr, self._col, sizes, processors, window, always=True)
        return None if runs is None else SumTable(WindowTable(runs, self._sources))


class Trials:
    """Runs of a program with chosen tables.

    Attributes:
        wanted: the tables that launches of the program request, by key.
        chosen: tables that replace the model's, by key.

    Args:
        executable: the program.
        values: its arguments.
    """

    def __init__(self, executable: Executable, values: Sequence[Any]) -> None:
        self.wanted: dict[Any, Wanted] = {}
        self.chosen: dict[Any, Table] = {}
        self._tried: dict[Any, Table] = {}
        self._values, self._launch = values, ""
        self._collecting = True
        stand_ins = {runs_of: self._runs_of, sums_of: self._sums_of, give_back: _leave}
        self._program = executable.calling(stand_ins, enter_range=self._enter, leave_range=_leave)
        self._program.profile(*values)  # builds the model's tables: its times are not used
        self._collecting = False

    def table(self, wanted: Wanted) -> Table:
        """Return the table that launches use."""
        return self._tried.get(wanted.key) or self.chosen.get(wanted.key) or wanted.model()

    def seconds(self, wanted: Wanted, table: Table) -> float:
        """Return the time of the launches that request a table, with ``table`` in its place."""
        self._tried = {wanted.key: table}
        _, timings = self._program.profile(*self._values)
        self._tried = {}
        nodes = {launch.rpartition(" ")[2] for launch in wanted.launches}
        return sum(timing.seconds for timing in timings if timing.node in nodes)

    def _enter(self, launch: str) -> None:
        self._launch = launch

    def _runs_of(self, rowptr: Tensor, edges: int, row_bytes: int) -> Table:
        return self._requested(Wanted(rowptr, edges, row_bytes))

    def _sums_of(self, rowptr: Tensor, col: Tensor, sources: int, row_bytes: int) -> Table:
        return self._requested(Wanted(rowptr, col.shape[0], row_bytes, col, sources))

    def _requested(self, wanted: Wanted) -> Table:
        if self._collecting:  # a program may build a CSR of its own in each run: not collected later
            self.wanted.setdefault(wanted.key, wanted).launches[self._launch] = None
        return self.table(wanted)


def tune(executable: Executable, values: Sequence[Any], structure: Iterable[Tensor]) -> list[Tuned]:
    """Measure the candidates for each table of a graph, and cache the fastest on its structure tensors.

    Args:
        executable: the program, of a CUDA device that is the current one.
        values: its arguments.
        structure: the arguments that are the graph's structure, not shared yet.

    Returns:
        The measurements for each table of the structure.
    """
    trials = Trials(executable, values)
    owners = {id(t) for tensor in structure for t in (tensor, *cached_tensors(tensor))}
    requests = [wanted for wanted in trials.wanted.values() if owners.issuperset(map(id, wanted.tensors))]
    tuned = [_tune(trials, wanted) for wanted in requests]
    _attach_tables(trials, requests)
    return tuned


def _tune(trials: Trials, wanted: Wanted) -> Tuned:
    """Measure the candidates for one table; further trials use the chosen one."""
    cuts = wanted.cuts()
    pairs = [_race(trials, wanted, cut) for cut in cuts[1:]]
    seconds = (min(model for model, _ in pairs), *[other for _, other in pairs])
    chosen = choose(seconds)
    table = wanted.build(cuts[chosen]) if chosen else None
    if table is not None:
        trials.chosen[wanted.key] = table
    return Tuned(tuple(wanted.launches), wanted.row_bytes, tuple(cuts), seconds)


def _race(trials: Trials, wanted: Wanted, cut: Cut) -> tuple[float, float]:
    """Return the least times with the model's table and with that of a cut, which is freed again."""
    model, other = wanted.model(), wanted.build(cut)
    if other is None:
        return float("inf"), float("inf")
    turns = [(trials.seconds(wanted, model), trials.seconds(wanted, other)) for _ in range(ROUNDS)]
    return min(model for model, _ in turns), min(other for _, other in turns)


def _attach_tables(trials: Trials, requests: Sequence[Wanted]) -> None:
    """Cache the tables, and free the cached values that none of them uses."""
    tables = [trials.table(wanted) for wanted in requests]
    for wanted, table in zip(requests, tables, strict=True):
        attach(wanted.owner, wanted.cache_key, table)
    needed = {id(tensor) for table in tables for tensor in table.tensors}
    for tensor in (tensor for wanted in requests for tensor in wanted.tensors):
        detach_all_but(tensor, needed)
    torch.cuda.current_stream().synchronize()  # other streams may use the tables next


def _leave(*_: Any) -> None:
    """Do nothing: columns are still read, and a range is recorded when it is entered."""
