"""Changes within objects of every kind are seen without a capture, and names lead to what code reads."""

import collections
import functools
import os
import queue
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

from gnnc.capture.model_snapshot import ModelSnapshot

K = 1.0
STANDS_ALONE = [1]


class Holder:
    """A plain object."""

    def __init__(self, k: Any) -> None:
        self.k = k


class Kind(type):
    """A class of classes."""

    level = 1.0

    @property
    def found(cls) -> float:
        return cls.level


class Held(metaclass=Kind):
    """A class that an attribute or a global holds."""

    k = 1.0


class Number(float):
    """A number of a class of the user's."""


class Text(str):
    """A text of a class of the user's, with attributes."""


class Rows(list):
    """A list of a class of the user's."""


class Model(nn.Module):
    """Model that reads what it holds."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held = held
        self.read = read

    def forward(self) -> Any:
        return self.read(self.held)


def function() -> float:
    return function.k  # pyright: ignore[reportFunctionMemberAccess]


function.k = 1.0  # pyright: ignore[reportFunctionMemberAccess]


def text() -> Text:
    made = Text("a")
    made.k = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    return made


def filled(made: Any) -> Any:
    made.put(1.0)
    return made


REFERRED, ADDED = Holder(1.0), Holder(3.0)
STRUCTURED = [("k", "f4"), ("n", "i4")]

CHANGES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute of a class": (Held, lambda v: v.k, lambda v: setattr(v, "k", 3.0)),
    "property of a class of classes": (Held, lambda v: v.found, lambda _: setattr(Kind, "level", 3.0)),
    "attribute of a function": (function, lambda v: v(), lambda v: setattr(v, "k", 3.0)),
    "attribute of a text": (text(), lambda v: v.k, lambda v: setattr(v, "k", 3.0)),
    "element of a list of another class": (Rows([1.0]), lambda v: v[0], lambda v: v.__setitem__(0, 3.0)),
    "queue": (filled(queue.Queue()), lambda v: v.queue[0], lambda v: v.queue.appendleft(3.0)),
    "stack": (filled(queue.LifoQueue()), lambda v: v.queue[-1], lambda v: v.put(3.0)),
    "object in a weak set": (
        weakref.WeakSet([REFERRED]),
        lambda v: next(iter(v)).k,
        lambda _: setattr(REFERRED, "k", 2.0),
    ),
    "size of a weak set": (weakref.WeakSet([REFERRED]), len, lambda v: v.add(ADDED)),
    "object behind a proxy": (
        weakref.proxy(REFERRED),
        lambda v: v.k,
        lambda _: setattr(REFERRED, "k", REFERRED.k + 1),
    ),
    "field of a structured array": (
        np.array([(1.0, 2)], STRUCTURED),
        lambda v: float(v["k"][0]),
        lambda v: v["k"].__setitem__(0, 3.0),
    ),
    "object in a structured array": (
        np.array([(Holder(1.0), 2)], [("k", "O"), ("n", "i4")]),
        lambda v: v["k"][0].k,
        lambda v: setattr(v["k"][0], "k", 3.0),
    ),
    "values of a dict": (
        (table := {"k": 1.0}, table.values()),
        lambda v: next(iter(v[1])),
        lambda v: v[0].update(k=3.0),
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_within_an_object_is_seen(kind: str) -> None:
    held, read, change = CHANGES[kind]
    model = Model(held, read)
    snapshot, before = ModelSnapshot(model), model()
    assert not snapshot.has_changed()
    change(held)
    assert model() != before
    assert snapshot.has_changed()


@pytest.mark.parametrize(
    ("first", "second"),
    [(Number(1.0), Number(3.0)), (Text("a"), Text("b")), (functools.partial(len), functools.partial(max))],
)
def test_another_value_of_a_class_of_the_user_is_seen(first: Any, second: Any) -> None:
    model = Model(first, lambda v: v)
    snapshot = ModelSnapshot(model)
    model.held = second
    assert snapshot.has_changed()


def test_an_equal_number_of_a_class_of_the_user_is_no_change() -> None:
    model = Model(Number(1.0), lambda v: v)
    snapshot = ModelSnapshot(model)
    model.held = Number(1.0)
    assert not snapshot.has_changed()


@pytest.mark.parametrize("read", [lambda _: os.getenv("GNNC_TEST"), lambda _: os.environ.get("GNNC_TEST")])
def test_variables_of_the_environment_are_seen(read: Callable[[Any], Any], monkeypatch) -> None:
    monkeypatch.setenv("GNNC_TEST", "1")
    snapshot = ModelSnapshot(model := Model(None, read))
    assert model() == "1"
    assert not snapshot.has_changed()
    monkeypatch.setenv("GNNC_TEST", "3")
    assert snapshot.has_changed()


def test_a_global_with_the_name_of_an_attribute_is_not_read() -> None:
    """Code that reads ``v.STANDS_ALONE`` does not read the variable of the module."""
    model = Model(collections.namedtuple("Pair", "STANDS_ALONE")(2), lambda v: v.STANDS_ALONE)
    snapshot = ModelSnapshot(model)
    STANDS_ALONE.append(1)
    assert not snapshot.has_changed()


def test_a_global_that_code_within_code_reads_is_seen(monkeypatch) -> None:
    model = Model(2.0, lambda v: [k * K for k in (v,)])
    snapshot = ModelSnapshot(model)
    monkeypatch.setattr(f"{__name__}.K", 3.0)
    assert snapshot.has_changed()
