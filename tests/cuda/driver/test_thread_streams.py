"""Calls on CUDA's per-thread default stream run on another one: in which order, on which, and what is told.

Needs no device: streams note what is asked of them. ``test_runtime.py`` has threads and kernels.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnc.runtime.cuda.driver import thread_streams
from gnnc.runtime.cuda.driver.thread_streams import on_own_stream

DEVICE = torch.device("cuda", 1)


class Stream:
    """Notes for whom it waits."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, stream: "Stream") -> None:
        """Note it."""
        self.log.append(f"{self.name} waits for {stream.name}")


class OnDevice(Tensor):
    """A tensor that says it is on a device, and by which streams it is used."""

    is_cuda = True
    used_by: list[str]

    def record_stream(self, s: Any) -> None:
        """Note a stream."""
        self.used_by = [*getattr(self, "used_by", []), s.name]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happened, in order; the current stream is ``outer``."""
    found: list[Any] = []

    @contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        found.append(f"enter {stream.name}")
        yield
        found.append(f"leave {stream.name}")

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(found.append(str(device))))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("outer", found))
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(thread_streams, "_stream_of", lambda device, thread: Stream("own", found))
    return found


ORDER = ["cuda:1", "own waits for outer", "enter own", "call", "leave own", "outer waits for own"]


def test_each_stream_waits_for_the_other(log: list[Any]) -> None:
    assert on_own_stream(DEVICE, lambda *given: (log.append("call"), given)[1], 1, 2) == (1, 2)
    assert log == ORDER


def test_the_caller_waits_for_what_a_failed_call_has_launched(log: list[Any]) -> None:
    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        on_own_stream(DEVICE, fail)
    assert log[-1] == "outer waits for own"


def test_memory_of_results_is_told_to_be_the_callers_too(log: list[Any]) -> None:
    first, second = (torch.zeros(3).as_subclass(OnDevice) for _ in range(2))
    on_own_stream(DEVICE, lambda: ({"a": first, "b": [second]}, 3, torch.zeros(3)))
    assert first.used_by == second.used_by == ["outer"]


def test_a_call_that_is_captured_stays_on_its_stream(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_own_stream(DEVICE, lambda: log.append("call"))
    assert log == ["cuda:1", "call"]


def test_threads_have_streams_of_their_own_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    thread_streams._stream_of.cache_clear()
    here, other = threading.get_ident(), -1
    keys = [(torch.device("cuda", index), thread) for index in (0, 1) for thread in (here, other)]
    found = [thread_streams._stream_of(*key) for key in keys]
    assert [thread_streams._stream_of(*key) for key in keys] == found and len(set(map(id, found))) == 4
    thread_streams._stream_of.cache_clear()
