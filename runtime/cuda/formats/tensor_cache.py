"""What is made of a tensor once, and lives as long as the tensor."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnc.errors import BackendError
from gnnc.torch_private import raw_stream

BUILDING = threading.RLock()
"""Held by who builds something of a tensor, and by who frees what nobody builds from any more."""
_PREFIX = "gnnc_"


class Ready(NamedTuple):
    """When something is in memory: after an event on a stream of a device."""

    device: torch.device
    stream: int
    event: torch.cuda.Event

    @classmethod
    def now(cls, device: torch.device) -> "Ready":
        """Return when all that the current stream of a device was given so far is done."""
        stream, event = torch.cuda.current_stream(device), torch.cuda.Event()
        event.record(stream)
        return cls(device, stream.cuda_stream, event)

    def wait(self, memory: Iterable[Tensor]) -> None:
        """Have the current stream wait, if another one launched it, and torch's allocator know of its use.

        Args:
            memory: what the stream will read.
        """
        if raw_stream(self.device.index) == self.stream:
            return
        if torch.cuda.is_current_stream_capturing():
            return  # a capture follows a call, and a synchronisation of the caller's
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.event)
        for tensor in memory:
            tensor.record_stream(current)


class _Made(NamedTuple):
    """What a tensor keeps.

    Attributes:
        value: the thing.
        ready: when it, and all that it is made of, is in memory; none: it is when the tensor is.
    """

    value: Any
    ready: tuple[Ready, ...] = ()

    def tensors(self) -> Iterator[Tensor]:
        """Yield those that the value is, or holds."""
        if isinstance(self.value, Tensor):
            yield self.value
        elif self.value is not None:
            yield from self.value.tensors


_NOTHING = _Made(None)


class _Noted(threading.local):
    """When what a thread is building, and what that is made of, is in memory; None: it builds nothing."""

    ready: list[Ready] | None = None


_noted = _Noted()


def kept(tensor: Tensor, name: str, build: Callable[[], Any]) -> Any:
    """Return what a tensor keeps under a name, built if it has none; it is there for the current stream.

    Args:
        tensor: owns it; not one of the caller's.
        name: one for each thing that can be made of it.
        build: returns a tensor, None, or an object whose ``tensors`` are those that it holds. What it
            launches itself, it launches inside ``launching``.
    """
    table, key = vars(tensor), _PREFIX + name
    made = table.get(key)
    if made is None:
        with BUILDING:  # the first thread builds for all: a graph may hold the addresses of what it built
            made = table.get(key)
            if made is None:
                made = table.setdefault(key, _build(build))
    if made.ready:
        _note(made.ready)
        for each in made.ready:
            each.wait(made.tensors())
    return made.value


def _build(build: Callable[[], Any]) -> _Made:
    outer, _noted.ready = _noted.ready, []
    try:
        value = build()
        return _Made(value, tuple(_noted.ready))
    finally:
        _noted.ready = outer


def _note(ready: Iterable[Ready]) -> None:
    if _noted.ready is not None:
        _noted.ready += ready


@contextmanager
def launching(device: torch.device) -> Iterator[None]:
    """Launch what is built of a tensor, which other streams may use next, without waiting for it.

    Raises:
        BackendError: see ``refuse_in_capture``.
    """
    refuse_in_capture()
    yield
    _note([Ready.now(device)])


def refuse_in_capture() -> None:
    """Refuse to launch what builds something, while a CUDA graph is being captured: it would only be noted.

    Raises:
        BackendError: it is.
    """
    if torch.cuda.is_current_stream_capturing():
        raise BackendError(
            "a graph or edge weights that no call has seen, while a CUDA graph is being captured: "
            "call the model with these very tensors once before the capture"
        )


def keep(tensor: Tensor, name: str, value: Any) -> None:
    """Have a tensor that nobody else has yet keep a value, in the place of what it kept under that name."""
    vars(tensor)[_PREFIX + name] = _Made(value)


def found(tensor: Tensor, name: str) -> Any:
    """Return what a tensor keeps under a name, or None."""
    return vars(tensor).get(_PREFIX + name, _NOTHING).value


def drop(tensor: Tensor, name: str) -> Any:
    """Have a tensor drop what it keeps under a name; return that, or None."""
    return vars(tensor).pop(_PREFIX + name, _NOTHING).value


def drop_all_but(tensor: Tensor, needed: Collection[int]) -> None:
    """Have a tensor that nobody else has yet drop the objects whose tensors are not needed.

    Args:
        tensor: keeps what is dropped; tensors that it keeps stay.
        needed: ``id`` of every tensor that is.
    """
    for key, made in _all_made(tensor):
        if not isinstance(made.value, Tensor | None):
            if not any(id(each) in needed for each in made.value.tensors):
                del vars(tensor)[key]


def values_kept(tensor: Tensor) -> Iterator[Any]:
    """Yield what a tensor keeps."""
    return (made.value for _, made in _all_made(tensor))


def tensors_kept(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor keeps, and those that they keep."""
    for _, made in _all_made(tensor):
        for each in made.tensors():
            yield each
            yield from tensors_kept(each)


def _all_made(tensor: Tensor) -> list[tuple[str, _Made]]:
    return [(key, value) for key, value in list(vars(tensor).items()) if key.startswith(_PREFIX)]
