"""Patches of global names that act in the thread that traces, and that a forked child undoes."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

_ACTIVE: list[tuple[Any, str, Any]] = []
"""Patched owners and names with the values before, oldest first."""


class ThreadFlag:
    """Flag that is true in the thread that created it, and false in all others."""

    __slots__ = ("_thread",)

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread


def in_this_thread(new: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is ``new`` in the calling thread, and ``original`` in all others."""
    thread, current = threading.get_ident(), threading.get_ident

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (new if current() == thread else original)(*args, **kwargs)

    return call


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` to ``value`` within the block, which is one of the thread that traces.

    A function must be one of ``in_this_thread``, or do for values of other threads what the one before did:
    they call it, too.
    """
    held = vars(owner) if isinstance(owner, type) else {}
    before = held[name] if name in held else getattr(owner, name)  # of a class a static method as such
    patch = owner, name, before
    _ACTIVE.append(patch)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(*patch)
        _ACTIVE.pop()


def undo_patches() -> None:
    """Undo all patches, in a child that was forked while another thread traced."""
    while _ACTIVE:
        setattr(*_ACTIVE.pop())
