"""Lock between traces and calls that run at the same time.

A trace puts stand-ins into the model's own tables of parameters and buffers, and takes them out again. A
call that reads a table meanwhile would compute with stand-ins, so calls read under a sequence lock (seqlock):
a read counts only if no trace began or ended in between.
"""

import contextlib
import threading
from collections.abc import Iterator

LOCK = threading.RLock()
"""Held by the thread that traces; there is one at a time."""


class Clock:
    """Sequence counter of the beginnings and ends of traces.

    Attributes:
        ticks: odd while there is a trace.
    """

    __slots__ = ("_depth", "_tracer", "ticks")

    def __init__(self) -> None:
        self.ticks = 0
        self._tracer: int | None = None
        self._depth = 0

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Hold the lock while a trace runs, and advance the sequence counter."""
        with LOCK:
            self._depth += 1
            if self._depth == 1:
                self._tracer = threading.get_ident()
                self.ticks += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.ticks += 1
                    self._tracer = None

    def settle(self) -> bool:
        """Wait for the end of a trace; return whether the reader traces itself, and may read on."""
        if self.traces_here():
            return True
        with LOCK:
            return False

    def traces_here(self) -> bool:
        """Return whether the calling thread is the one that traces."""
        return self._tracer == threading.get_ident()


CLOCK = Clock()
