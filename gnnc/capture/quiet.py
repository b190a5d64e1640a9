"""Silence of the thread that traces: no warnings, logs and output of attempts that fail."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from gnnc.capture.thread_patches import ThreadFlag, replaced
from gnnc.torch_private import LOGGERS


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the output of torch.export about an attempt that fails: the error says it better."""
    silence = _Silence()
    ignored: Any = ("ignore", silence, Warning, None, 0)
    known = [name for name in list(logging.root.manager.loggerDict) if name.startswith(LOGGERS)]
    handlers = [handler for name in ("", "torch", *known) for handler in logging.getLogger(name).handlers]
    if logging.lastResort is not None:
        handlers.append(logging.lastResort)
    with replaced(silence, "active", True), replaced(sys, "stderr", _Stream(sys.stderr, silence)):
        warnings.filters.insert(0, ignored)  # pyright: ignore[reportAttributeAccessIssue]
        for handler in handlers:
            handler.addFilter(silence.passes)
        try:
            yield
        finally:
            for handler in handlers:
                handler.removeFilter(silence.passes)
            with contextlib.suppress(ValueError):  # another thread may have set other filters meanwhile
                warnings.filters.remove(ignored)  # pyright: ignore[reportAttributeAccessIssue]


class _Silence:
    """Condition under which output is dropped: the block is not left, and this is its thread.

    Attributes:
        active: whether the block is not left.
    """

    def __init__(self) -> None:
        self.active = False
        self._here = ThreadFlag()

    def __bool__(self) -> bool:
        return self.active and bool(self._here)

    def match(self, _: str) -> bool:
        """Return whether a warning is ignored, as the pattern of a warning filter does."""
        return bool(self)

    def passes(self, record: logging.LogRecord) -> bool:
        """Return whether a log record is written."""
        return not (self and record.name.startswith(LOGGERS))


class _Stream:
    """Stream that drops the output of one thread."""

    def __init__(self, stream: Any, silence: _Silence) -> None:
        self._stream = stream
        self._silence = silence

    def write(self, text: str) -> int:
        """Write text, or drop it; return its length."""
        return len(text) if self._silence else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
