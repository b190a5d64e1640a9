"""Random models against eager: `python tests/fuzz_models.py --seed 0 --count 2000 --jobs 16`.

A model and its graphs are made from a number alone, so `--seed N --count 1` runs one again. Calls that eager
does not run are not counted. Every call that is not equal to eager's is printed, then a table by precision;
the exit status is 1 where a call was not equal, or a process died.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate

sys.path.append(str(Path(__file__).resolve().parent / "support"))

from check_random_model import BOUNDS, Verdict, verdicts

VERDICTS = ("equal", "wrong", "refused", "raw")


class Outcome(NamedTuple):
    """The verdicts on the model of one seed, and the CPU time that they took."""

    seed: int
    verdicts: list[Verdict]
    seconds: float


class Crash(Exception):
    """The death of a process, which no exception of Python tells of."""


def check(seed: int, precisions: list[str]) -> Outcome:
    """Return the outcome of one seed."""
    torch.set_num_threads(1)
    start = time.process_time()
    try:
        found = list(verdicts(seed, precisions))
    except Exception as error:
        found = [Verdict(p, "any graph", "raw", f"{type(error).__name__}: {error}") for p in precisions]
    return Outcome(seed, found, time.process_time() - start)


def outcomes(seeds: range, precisions: list[str], jobs: int, deadline: float) -> Iterator[Outcome]:
    """Yield the outcome of each seed, as processes finish them; none is started after the deadline.

    Raises:
        Crash: a process died; raised once every outcome that there is has been yielded.
    """
    lost: list[int] = []
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        pending = {pool.submit(check, seed, precisions): seed for seed in seeds}
        for future in as_completed(pending):
            if future.cancelled():
                continue
            if isinstance(future.exception(), BrokenProcessPool):  # of each seed that had not finished
                lost.append(pending[future])
                continue
            yield future.result()
            if time.monotonic() > deadline:
                for other in pending:
                    other.cancel()
    if lost:
        started = sorted(lost)[
            : 2 * jobs + 1
        ]  # a pool starts them in order, and queues one more than it runs
        raise Crash(f"a process died in one of the seeds {started}; {len(lost)} seeds have no outcome")


def table(found: list[Verdict], precisions: list[str]) -> str:
    """Return the number of calls with each verdict, by precision."""
    counts = Counter((verdict.precision, verdict.verdict) for verdict in found)
    rows = [[p, BOUNDS[p], *(counts[p, name] for name in VERDICTS)] for p in precisions]
    return tabulate(rows, ["precision", "bound", *VERDICTS], tablefmt="github")


def main() -> int:
    """Check the models of a range of seeds; return 1 where a call was not equal, or a process died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="number of the first model")
    parser.add_argument("--count", type=int, default=100, help="how many models")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--precisions", nargs="+", default=list(BOUNDS), choices=list(BOUNDS))
    parser.add_argument("--every", type=int, default=0, help="print where the run is after so many models")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no model after so long")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    deadline = time.monotonic() + options.seconds
    seeds = range(options.seed, options.seed + options.count)
    done: list[Outcome] = []
    crash = None
    try:
        for outcome in outcomes(seeds, options.precisions, options.jobs, deadline):
            done.append(outcome)
            for precision, kind, verdict, detail in outcome.verdicts:
                if verdict != "equal":
                    text = " ".join(detail.split())[:600]
                    print(f"{verdict}: seed {outcome.seed}, {precision}, {kind}: {text}", flush=True)
            if options.every and len(done) % options.every == 0:
                print(f"{len(done)} models, {sum(o.seconds for o in done):.0f} s of CPU", flush=True)
    except Crash as error:
        crash = error
    found = [verdict for outcome in done for verdict in outcome.verdicts]
    ran = sum(bool(outcome.verdicts) for outcome in done)
    seconds = sum(outcome.seconds for outcome in done)
    print(f"seeds {seeds.start} to {seeds.stop - 1}: {len(done)} models, {ran} run by eager")
    print(f"{seconds:.0f} s of CPU")
    print(table(found, options.precisions))
    if crash:
        print(f"crash: {crash}")
    return int(crash is not None or any(verdict.verdict != "equal" for verdict in found))


if __name__ == "__main__":
    sys.exit(main())
