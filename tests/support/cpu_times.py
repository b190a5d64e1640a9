"""Processor time of every test, for the option ``--cpu-times``: wall time on a shared machine says little."""

import json
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest


def cpu_seconds() -> float:
    """Return the user time of this process and of the child processes that it has waited for, in seconds."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime for usage in usages)


class CpuTimes:
    """Pytest plugin that writes the seconds of every test, fixtures included, to a JSON file.

    The process that runs a test measures it; the report carries the time to the process that writes the file.

    Attributes:
        path: file to write, in the process that collects the reports; None in a worker.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.last = cpu_seconds()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Start the clock of a test."""
        self.last = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Store the seconds since the last report of the test, or since its start."""
        report = yield
        now = cpu_seconds()
        report.cpu_seconds = now - self.last
        self.last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of a phase to those of its test; a test that ended its process has none."""
        self._seconds[report.nodeid] += getattr(report, "cpu_seconds", 0.0)

    def pytest_sessionfinish(self) -> None:
        """Write the file: seconds of each test, the slowest first."""
        if self.path is not None:
            slowest_first = sorted(self._seconds.items(), key=lambda item: -item[1])
            self.path.write_text(json.dumps({name: round(s, 3) for name, s in slowest_first}, indent=0))
