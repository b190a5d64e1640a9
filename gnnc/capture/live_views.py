"""Live views of the contents of objects, and the comparison of what they show with an earlier time."""

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import CodeType, FunctionType
from typing import Any

_HEAD = tuple.__basicsize__
"""Bytes of a tuple before the addresses of its elements, where ``_has_addresses``."""
_VERSION_TAG = 48 * ctypes.sizeof(ctypes.c_void_p)
"""Bytes of a class before its version tag, where ``_has_version_tags``."""
_END = object()
_MAPS: dict[str, Callable[[Any], Any]] = {
    "types": type,
    "dicts": attrgetter("__dict__"),
    "codes": attrgetter("__code__"),
    "defaults": attrgetter("__defaults__"),
    "keyword_defaults": attrgetter("__kwdefaults__"),
    "cells": attrgetter("cell_contents"),
}
"""Functions that read one field of an object, by the name of the objects that they are called on."""


@dataclass(eq=False)
class Views:
    """Views of everything that can change in some objects.

    Attributes:
        empty: containers that hold nothing.
        contents: iterables over attributes, which are never without some.
        tables: iterables over what containers hold.
        objects: objects whose class and ``__dict__`` can be replaced.
        functions: functions whose code and defaults can be replaced.
        cells: variables that functions share with the function around them.
        readers: functions that return a tuple of what else can be replaced.
        buffers: objects whose bytes can be written.
        classes: classes whose attributes can be replaced, bases included.
    """

    empty: list[Sized] = field(default_factory=list)
    contents: list[Iterable[Any]] = field(default_factory=list)
    tables: list[Iterable[Any]] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    functions: list[FunctionType] = field(default_factory=list)
    cells: list[Any] = field(default_factory=list)
    readers: list[Callable[[], tuple[Any, ...]]] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=list)
    classes: list[type] = field(default_factory=list)

    def add(self, container: Sized, *contents: Iterable[Any]) -> None:
        """Add views of the contents of a container."""
        if not container:
            self.empty.append(container)
            return
        self.tables += contents

    def add_items(self, table: Any, names: Iterable[str]) -> None:
        """Add a view of some items of a dict."""
        first, *others = names
        self.readers.append(partial(itemgetter(first, *(others or [first])), table))

    def add_fields(self, value: Any, names: Sequence[str]) -> None:
        """Add a view of some attributes of an object, which may be missing."""
        self.readers.append(lambda: tuple([getattr(value, name, _END) for name in names]))


def _has_addresses() -> bool:
    """Return whether this Python stores the addresses of a tuple's elements where CPython does."""
    if sys.implementation.name != "cpython":
        return False
    probe = (object(), object())
    found = (ctypes.c_void_p * len(probe)).from_address(id(probe) + _HEAD)
    return list(found) == list(map(id, probe))


def _has_version_tags() -> bool:
    """Return whether this Python stores the version of a class, and changes it, where CPython does."""
    if sys.implementation.name != "cpython":
        return False
    base = type("Base", (), {"value": 0})
    probe = type("Probe", (base,), {})
    seen = []
    for value in (1, 2, 2, 3):
        base.value = value  # pyright: ignore[reportAttributeAccessIssue]
        versions = [_version(probe), _version(probe)]
        if versions[0] != versions[1] or not 0 < versions[0] < 2**31:
            return False
        seen.append(versions[0])
    return len(set(seen)) == len(seen)


def _tag(kind: type) -> ctypes.c_uint:
    return ctypes.c_uint.from_address(id(kind) + _VERSION_TAG)


def _version(kind: type) -> int:
    """Return the version of a class, which Python counts at the first look-up; 0 where it has none."""
    getattr(kind, "__init__", None)
    return _tag(kind).value


_ADDRESSES = _has_addresses()
_VERSIONS = _has_version_tags()


class SeenViews:
    """Objects that views showed at one time.

    CPython's tuples are arrays of addresses. Comparing those in one piece costs less than a nanosecond an
    object, one by one 20; ``==`` would ask the objects, for which 1 is True. A class has a version that
    changes with each attribute of the class and its bases.
    """

    def __init__(self, views: Views) -> None:
        self._empty, self._buffers = views.empty, views.buffers
        self._classes = views.classes  # kept alive, as their tags are read by address
        versions = [_version(kind) for kind in views.classes] if _VERSIONS else [0]
        self._tags = [_tag(kind) for kind in views.classes] if all(versions) else []
        self._versions = [tag.value for tag in self._tags]
        contents = views.contents
        if not all(versions):
            bases = dict.fromkeys(base for kind in views.classes for base in kind.__mro__)
            contents = [*contents, *(vars(base).values() for base in bases)]
        self._read = _reader(contents, views)
        self._values = self._read()  # kept alive, so that nothing else gets an address of theirs
        self._block = ctypes.c_char * (len(self._values) * ctypes.sizeof(ctypes.c_void_p))
        self._addresses = self._block.from_address(id(self._values) + _HEAD).raw if _ADDRESSES else b""
        self._bytes = list(map(content, self._buffers))

    def are_now(self) -> bool:
        """Return whether the views show the same objects now."""
        if any(self._empty) or [tag.value for tag in self._tags] != self._versions:
            return False
        if self._buffers and list(map(content, self._buffers)) != self._bytes:
            return False
        try:
            values = self._read()
        except (AttributeError, KeyError, ValueError):  # a name, or a variable's value, is gone
            return False
        if len(values) != len(self._values):
            return False
        if not _ADDRESSES:
            return all(map(is_, values, self._values))
        return self._block.from_address(id(values) + _HEAD).raw == self._addresses


def content(buffer: Any) -> bytes:
    """Return the bytes of an array."""
    return bytes(buffer) if isinstance(buffer, bytearray) else buffer.tobytes()


def _reader(contents: Sequence[Iterable[Any]], views: Views) -> Callable[[], tuple[Any, ...]]:
    """Return a function that puts all that the views show into one tuple."""
    of_maps = {
        "types": views.objects,
        "dicts": views.objects,
        "codes": views.functions,
        "defaults": views.functions,
        "keyword_defaults": views.functions,
        "cells": views.cells,
    }
    used = tuple(name for name, values in of_maps.items() if values)
    scope: dict[str, Any] = {f"v{i}": view for i, view in enumerate(contents)}
    scope |= {f"r{i}": reader for i, reader in enumerate(views.readers)}
    scope |= {name: tuple(of_maps[name]) for name in used} | {f"{name}_of": _MAPS[name] for name in used}
    scope |= {f"t{i}": table for i, table in enumerate(views.tables)}
    return eval(_display(len(contents), len(views.tables), len(views.readers), used), scope)


@cache
def _display(contents: int, tables: int, readers: int, maps: tuple[str, ...]) -> CodeType:
    """Return a function that puts many iterables into one tuple, the fastest way in Python.

    A number before each table shows what moves from one to the next.
    """
    parts = chain(
        (f"*v{i}" for i in range(contents)),
        (f"0, *t{i}" for i in range(tables)),
        (f"*r{i}()" for i in range(readers)),
        (f"*map({name}_of, {name})" for name in maps),
    )
    return compile(f"lambda: ({''.join(f'{part}, ' for part in parts)})", "<gnnc views>", "eval")
