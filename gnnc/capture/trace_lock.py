"""Lock of traces: one thread builds a program at a time, since tracing uses global state of torch."""

import contextlib
import os
import threading
from collections.abc import Iterator

from gnnc.capture.thread_patches import undo_patches
from gnnc.locks import renew_at_fork
from gnnc.torch_private import DYNAMO_LOCK


class TraceLock:
    """Lock that a thread holds while it builds a program, and the thread that traces a model at the moment.

    Calls of compiled models never wait for it.

    Attributes:
        tracer: identifier of the thread that traces a model; None where there is none.
    """

    def __init__(self) -> None:
        self.tracer: int | None = None
        self._depth = 0
        self._lock = threading.RLock()
        renew_at_fork(self, "_lock", threading.RLock)
        renew_at_fork(*DYNAMO_LOCK, threading.RLock)
        os.register_at_fork(after_in_child=self._stop_in_child)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Keep other threads from building programs.

        A compilation by Dynamo sets the same state, and may have gnnc as its backend: its lock comes first.
        """
        with getattr(*DYNAMO_LOCK), self._lock:
            yield

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Keep other threads from building programs, and mark the calling thread as the one that traces."""
        with self.building():
            self._depth += 1
            self.tracer = threading.get_ident()
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.tracer = None

    def traces_here(self) -> bool:
        """Return whether the calling thread is the one that traces."""
        return self.tracer == threading.get_ident()

    def _stop_in_child(self) -> None:
        """End the trace of a thread that a forked child does not have."""
        if self.tracer is not None and not self.traces_here():
            undo_patches()
            self.tracer, self._depth = None, 0


TRACES = TraceLock()
