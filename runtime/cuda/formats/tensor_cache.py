"""Cache of values derived from a tensor; stored on the tensor, freed with it."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnc.errors import BackendError
from gnnc.runtime.cuda.formats.keys import FormatKey
from gnnc.torch_private import raw_stream

BUILDING = threading.RLock()
"""Lock of builds from tensors, and of frees of tensors that nothing is built from any more."""
_ATTRIBUTE = "gnnc_formats"
"""Attribute of a tensor: the dictionary of the values that are cached on it, by key."""


class Ready(NamedTuple):
    """The event on a stream after which a value is in memory."""

    device: torch.device
    stream: int
    event: torch.cuda.Event

    @classmethod
    def now(cls, device: torch.device) -> "Ready":
        """Return the event after all work that the current stream of a device has so far."""
        stream, event = torch.cuda.current_stream(device), torch.cuda.Event()
        event.record(stream)
        return cls(device, stream.cuda_stream, event)

    def wait(self, memory: Iterable[Tensor]) -> None:
        """Let the current stream wait, if another one launched the work; tell torch's allocator of the use.

        Args:
            memory: tensors that the stream will read.
        """
        if raw_stream(self.device.index) == self.stream:
            return
        if torch.cuda.is_current_stream_capturing():
            return  # a capture follows a call, and a synchronization of the caller's
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.event)
        for tensor in memory:
            tensor.record_stream(current)


class _CacheEntry(NamedTuple):
    """A cached value.

    Attributes:
        value: a tensor, None, or an object with ``tensors``.
        ready: events after which the value, and all that it is made of, is in memory; empty: it is in memory
            when the tensor is.
    """

    value: Any
    ready: tuple[Ready, ...] = ()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the value."""
        if isinstance(self.value, Tensor):
            yield self.value
        elif self.value is not None:
            yield from self.value.tensors


_NOTHING = _CacheEntry(None)


class _BuildEvents(threading.local):
    """The events of the build that a thread is in, and of all that it reads; None outside a build."""

    ready: list[Ready] | None = None


_events = _BuildEvents()


def cached(tensor: Tensor, key: FormatKey, build: Callable[[], Any]) -> Any:
    """Return the value cached on a tensor under a key, built if there is none; the current stream waits.

    Args:
        tensor: owner of the value; not a tensor of the caller.
        key: key of the value among those of the tensor.
        build: returns a tensor, None, or an object whose attribute ``tensors`` lists its tensors. It launches
            its kernels inside ``launching``.
    """
    entries = vars(tensor).setdefault(_ATTRIBUTE, {})
    entry = entries.get(key)
    if entry is None:
        with BUILDING:  # the first thread builds for all: a CUDA graph may hold addresses of the value
            entry = entries.get(key)
            if entry is None:
                entry = entries.setdefault(key, _build(build))
    if entry.ready:
        _add_events(entry.ready)
        for ready in entry.ready:
            ready.wait(entry.tensors())
    return entry.value


def _build(build: Callable[[], Any]) -> _CacheEntry:
    outer, _events.ready = _events.ready, []
    try:
        value = build()
        return _CacheEntry(value, tuple(_events.ready))
    finally:
        _events.ready = outer


def _add_events(ready: Iterable[Ready]) -> None:
    if _events.ready is not None:
        _events.ready += ready


@contextmanager
def launching(device: torch.device) -> Iterator[None]:
    """Mark launches of a build, whose results other streams may use next, without waiting for them.

    Raises:
        BackendError: see ``refuse_in_capture``.
    """
    refuse_in_capture()
    yield
    _add_events([Ready.now(device)])


def refuse_in_capture() -> None:
    """Refuse to build a value while a CUDA graph is captured: its launches would be recorded, not run.

    Raises:
        BackendError: the current stream is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise BackendError(
            "a graph or edge weights that no call has seen, while a CUDA graph is being captured: "
            "call the model with these very tensors once before the capture"
        )


def attach(tensor: Tensor, key: FormatKey, value: Any) -> None:
    """Store ``value`` on a tensor that is not shared yet, in the place of any value with the same key."""
    vars(tensor).setdefault(_ATTRIBUTE, {})[key] = _CacheEntry(value)


def attached(tensor: Tensor, key: FormatKey) -> Any:
    """Return the value that is stored on a tensor under a key, or None."""
    return _entries(tensor).get(key, _NOTHING).value


def detach(tensor: Tensor, key: FormatKey) -> Any:
    """Remove the value that is stored on a tensor under a key; return it, or None."""
    return _entries(tensor).pop(key, _NOTHING).value


def detach_all_but(tensor: Tensor, needed: Collection[int]) -> None:
    """Remove the objects without needed tensors from a tensor that is not shared yet; cached tensors stay.

    Args:
        tensor: owner of the values.
        needed: ``id`` of every needed tensor.
    """
    entries = _entries(tensor)
    for key, entry in list(entries.items()):
        if not isinstance(entry.value, Tensor | None):
            if not any(id(part) in needed for part in entry.value.tensors):
                del entries[key]


def cached_values(tensor: Tensor) -> Iterator[Any]:
    """Yield the values that are cached on a tensor."""
    return (entry.value for entry in list(_entries(tensor).values()))


def cached_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors of the values that are cached on a tensor, and of those cached on them."""
    for entry in list(_entries(tensor).values()):
        for part in entry.tensors():
            yield part
            yield from cached_tensors(part)


def _entries(tensor: Tensor) -> dict[FormatKey, _CacheEntry]:
    return vars(tensor).get(_ATTRIBUTE, {})
