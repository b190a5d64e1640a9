"""Walk over the objects that a model's code can read: attributes, their contents, functions and variables."""

from abc import ABC
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cached_property, lru_cache, partial
from itertools import zip_longest
from queue import Queue
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType, NoneType
from typing import Any, Generic, Protocol
from weakref import ProxyTypes, ReferenceType, WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch import nn

from gnnc.capture.hooks import MESSAGE_HOOKS, global_hooks, hook_tables
from gnnc.capture.live_views import Views, content
from gnnc.capture.reachable_code import (
    ANY_NAME,
    globals_of,
    is_library,
    is_user_function,
    is_user_module,
    names_of,
)
from gnnc.environment import OF_PROCESS, READERS
from gnnc.torch_private import GLOBAL_FORWARD_HOOKS

NO_CONSTANTS = frozenset(("training", "_parameters", "_buffers", "_modules"))
"""Attributes of a module that are no constants: read at each call, or looked into as tables."""
_TABLES = ("_modules", "_parameters", "_buffers")
_APART = frozenset((*vars(nn.Module()), *MESSAGE_HOOKS))
"""Attributes of every module, which are tables, modes, or without meaning to forward."""
_PLAIN = frozenset((bool, int, str, bytes, NoneType, range))
_INEXACT = frozenset((float, complex))
_TABLES_OF_KEYS = (dict, MappingProxyType)
_SEQUENCES = (list, tuple, deque, set, frozenset)
_BUFFERS = (np.ndarray, bytearray, array, memoryview)
_DICT_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_IN_PYTHON = (ChainMap, UserDict, UserList, WeakKeyDictionary, WeakSet, WeakValueDictionary, Queue)
_IN_PYTHON += (type(OF_PROCESS),)
"""Containers of the standard library that are written in Python: their attributes hold what they hold."""
_HOLDERS = frozenset(("data", "maps", "queue", "_data"))
"""Names of these attributes."""
_SCALARS = (int, float, complex, str, bytes)
_WRAPPED = (type(lru_cache(len)), cached_property)
"""Decorators of the standard library that hold the user's function."""
_NO_ATTRIBUTES = frozenset(
    (dict, MappingProxyType, OrderedDict, defaultdict, Counter, *_SEQUENCES, *_BUFFERS, *_DICT_VIEWS)
    + (FunctionType, MethodType, BuiltinFunctionType, partial, *_WRAPPED)
)
_WRAPPERS = (staticmethod, classmethod, property)
_BASES = (object, nn.Module)
"""Classes whose attributes are never looked into; a trace itself replaces some of ``nn.Module``."""
_UNREAD = frozenset(
    ("__init__", "__new__", "__repr__", "__str__", "__doc__", "__module__", "__dict__", "__weakref__")
    + ("__hash__", "__annotations__", "__abstractmethods__", "_abc_impl", "__qualname__", "extra_repr")
)
"""Attributes of a class that forward does not read."""
_MOST_ENTRIES = 4000
"""Objects that are compared by what they hold; others are compared by identity."""
_LARGEST = 1000
"""Entries of a container that is looked into."""
_LARGEST_BUFFER = 1 << 14
"""Bytes of an array that are compared at each call."""

Token = tuple[Any, ...]
"""Comparable form of a value: its type and value, the number of an object that is looked into, or its id."""


class ObjectGraph:
    """Graph of the objects that the code of some modules can read.

    Objects are numbered in the order in which the walk comes to them, so that two graphs of equal objects
    have equal entries. An attribute of the user's classes is looked into once the code that forward reaches
    has its name.

    Attributes:
        views: views of everything that can change in the objects.
        entries: (number of the object, label of the place, token of what is there).

    Args:
        modules: the modules of a model, by path.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.views = Views()
        self.entries: list[tuple[int, Any, Token]] = []
        self._alive: list[Any] = []  # so that nothing else gets an id of theirs
        self._numbers: dict[int, int] = {}
        self._places: list[tuple[int, Any]] = []  # object and label where each object was found first
        self._pending: deque[tuple[int, Any]] = deque()
        self._names = {"forward", "__call__"}
        self._classes: set[type] = set()
        self._left = _MOST_ENTRIES
        self._waiting: dict[str, list[tuple[int, Any]]] = {}
        self._paths = [f"self.{path}".removesuffix(".") for path in modules]
        for module in modules.values():
            self._number(module, 0, "")
        for number, module in enumerate(modules.values()):
            self._open_module(number, module)
        if modules:
            self._open_global_hooks()
        self._walk()

    @staticmethod
    def of(value: Any) -> "ObjectGraph":
        """Return the graph of an object that forward may read in any way."""
        graph = ObjectGraph({})
        graph._names |= ANY_NAME
        graph._enter(0, "", value)
        graph._walk()
        return graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectGraph) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(tuple(self.entries))

    def difference(self, other: "ObjectGraph") -> tuple[str, bool] | None:
        """Return the first place in which two graphs differ, and whether a module holds it, or None."""
        for mine, others in zip_longest(self.entries, other.entries):
            if mine != others:
                known = {entry[:2] for entry in self.entries}
                added = mine is None or (others is not None and others[:2] not in known)
                graph, (number, label, _) = (other, others) if added else (self, mine)
                return graph._path(number, label), number < len(self._paths)
        return None

    def _path(self, number: int, label: Any) -> str:
        """Return the path of a place, as a reader writes it."""
        if isinstance(label, tuple) and label[0] == "global":
            return str(label[1])
        if number < len(self._paths):
            owner = self._paths[number]
        else:
            owner = self._path(*self._places[number])
        if isinstance(label, str):
            return f"{owner}.{label}" if label.isidentifier() else f"{owner} {label}"
        if isinstance(label, int):
            return f"{owner}[{label}]"
        kind, name = label
        return (
            f"{owner}[{name!r}]"
            if kind == "key"
            else f"{owner}.{name}"
            if kind != "hook"
            else f"{owner} (hook)"
        )

    def _walk(self) -> None:
        while self._pending:
            number, value = self._pending.popleft()
            self._open(number, value)
        for name, places in self._waiting.items():
            for number, value in places:
                self.entries.append((number, name, self._identity(value)))

    def _number(self, value: Any, owner: int, label: Any) -> int:
        """Return the number of an object, which was found in another."""
        number = self._numbers.setdefault(id(value), len(self._numbers))
        if number == len(self._places):
            self._alive.append(value)
            self._places.append((owner, label))
        return number

    def _identity(self, value: Any) -> Token:
        self._alive.append(value)
        return id, id(value)

    def _token(self, value: Any, owner: int, label: Any) -> Token:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in _INEXACT:
            return kind, repr(value)  # 0.0 and -0.0 are equal, NaN and NaN are not
        if issubclass(kind, ReferenceType):
            return kind, self._token(value(), owner, label)
        if issubclass(kind, ProxyTypes):
            return kind, self._token(_referent(value), owner, label)
        number = self._numbers.get(id(value))
        if number is None:
            size = _size(value, kind)
            if size is None or size > min(_LARGEST, self._left):
                return self._identity(value)
            self._left -= size
            number = self._number(value, owner, label)
            self._pending.append((number, value))
        return "object", number

    def _enter(self, number: int, label: Any, value: Any) -> None:
        self.entries.append((number, label, self._token(value, number, label)))

    def _enter_named(self, number: int, name: str, value: Any, owner: type) -> None:
        """Enter an attribute, once the code that is reached has its name where the class is the user's."""
        if (
            type(value) in _PLAIN | _INEXACT
            or name in self._names
            or _is_special(name)
            or self._names & ANY_NAME
            or not _is_of_user(owner)
        ):
            self._enter(number, name, value)
        else:
            self._waiting.setdefault(name, []).append((number, value))

    def _reach(self, names: Iterable[str]) -> None:
        """Learn the names that code reads, and enter the attributes that waited for them."""
        new = set(names) - self._names
        self._names |= new
        for name in list(self._waiting) if new & ANY_NAME else new & self._waiting.keys():
            for number, value in self._waiting.pop(name):
                self._enter(number, name, value)

    # Kinds of objects

    def _open_module(self, number: int, module: nn.Module) -> None:
        attributes = vars(module)
        self.views.objects.append(module)
        self.views.contents.append(attributes.values())
        for name in _TABLES:
            table = attributes[name]
            self.views.add(table, table.values())
            self.entries.append((number, name, self._identity(table)))  # programs read from it
        for name, child in attributes["_modules"].items():
            self.entries.append((number, ("layer", name), self._identity(child)))
        for table in hook_tables(attributes):
            self.views.add(table, table.values())
            for key, hook in table.items():
                self._enter(number, ("hook", key), hook)
        for name, value in attributes.items():
            if name not in _APART:
                self._enter_named(number, name, value, type(module))
        self._open_class(number, type(module))

    def _open_global_hooks(self) -> None:
        for table in GLOBAL_FORWARD_HOOKS:
            self.views.add(table, table.values())
        for _, key, hook in global_hooks():
            self._enter(0, ("global", f"hook {key} on all modules"), hook)

    def _open(self, number: int, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, _TABLES_OF_KEYS):
            self.views.add(value, value.keys(), value.values())
            for key, item in value.items():
                self._enter(number, "key", key)
                self._enter(number, ("key", key), item)
        elif issubclass(kind, _SEQUENCES):
            if not issubclass(kind, (tuple, frozenset)):
                self.views.add(value, value)
            self._open_sequence(number, value, kind)
        elif issubclass(kind, _BUFFERS):
            self.views.buffers.append(value)
            self.entries.append((number, "(bytes)", (kind, content(value), str(getattr(value, "dtype", "")))))
            self._enter(number, "(shape)", getattr(value, "shape", None))
            if isinstance(value, np.ndarray) and value.dtype.hasobject:
                self._open_sequence(number, value.ravel().tolist(), list)
        elif issubclass(kind, _DICT_VIEWS):
            self._enter_fields(number, value, ("mapping",))
        elif kind is FunctionType:
            self._open_function(number, value)
        elif issubclass(kind, partial):
            self.views.add_fields(value, ("func", "args", "keywords"))
            self._enter_fields(number, value, ("func", "args", "keywords"))
        elif kind in (MethodType, BuiltinFunctionType):
            self._enter_fields(number, value, ("__name__", "__self__", "__func__"))
        elif issubclass(kind, _WRAPPERS):
            self._enter_fields(number, value, ("__func__", "fget", "fset"))
        elif issubclass(kind, _WRAPPED):
            self._enter_fields(number, value, ("__wrapped__", "func"))
        elif issubclass(kind, _IN_PYTHON):
            self._reach(_HOLDERS)  # by code of the standard library
        elif issubclass(kind, type):
            self._open_class(number, value)
        self._open_attributes(number, value, kind)

    def _open_sequence(self, number: int, value: Iterable[Any], kind: type) -> None:
        if issubclass(kind, (set, frozenset)):
            tokens = frozenset([self._token(item, number, 0) for item in value])
            self.entries.append((number, "(items)", (tokens,)))
            return
        for place, item in enumerate(value):
            self._enter(number, place, item)

    def _open_attributes(self, number: int, value: Any, kind: type) -> None:
        """Open the attributes of an object, and its class."""
        if issubclass(kind, _SCALARS):
            base = next(base for base in kind.__mro__ if base in _SCALARS)
            self.entries.append((number, "(value)", (base, base.__repr__(value))))
        elif _is_partly_hidden(kind):
            self.entries.append((number, "(object)", self._identity(value)))
        if kind in _NO_ATTRIBUTES or kind is type:
            return
        if issubclass(kind, type):
            self._open_class(number, kind)
            return
        slots = _slots(kind)
        if slots:
            self.views.add_fields(value, slots)
            for name in slots:
                self._enter_named(number, name, getattr(value, name, None), kind)
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self.views.objects.append(value)
            self.views.add(attributes, attributes.keys(), attributes.values())
            for name, item in attributes.items():
                self._enter_named(number, name, item, kind)
        self._open_class(number, kind)

    def _enter_fields(self, number: int, value: Any, names: Iterable[str]) -> None:
        for name in names:
            self._enter(number, name, getattr(value, name, None))

    def _open_function(self, number: int, function: FunctionType) -> None:
        self.views.functions.append(function)
        code, variables = function.__code__, function.__globals__
        self.entries.append((number, "(code)", (code,)))
        self._enter(number, "(defaults)", function.__defaults__)
        self._enter(number, "(keyword defaults)", function.__kwdefaults__)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if not _is_empty(cell):
                self.views.cells.append(cell)
                self._enter(number, name, cell.cell_contents)
        if hasattr(function, "__wrapped__"):  # by a decorator, perhaps a library's
            self._enter_fields(number, function, ("__wrapped__",))
        attributes = vars(function)
        self.views.add(attributes, attributes.keys(), attributes.values())
        for name, value in attributes.items():
            if name != "__wrapped__":
                self._enter_named(number, name, value, object)
        if is_user_function(function):
            names = names_of(code)
            self._reach(names)
            self._open_names(number, globals_of(code), names, variables)
            if not names.isdisjoint(READERS):
                self._enter(number, ("global", "environ"), OF_PROCESS)

    def _open_names(
        self, number: int, read: Iterable[str], names: frozenset[str], table: Mapping[str, Any]
    ) -> None:
        """Open variables of a module, and those of the user's modules among them that code names."""
        read = sorted(name for name in read if name in table)
        if read:
            self.views.add_items(table, read)
        for name in read:
            value = table[name]
            self._enter(number, ("global", name), value)
            if isinstance(value, ModuleType) and id(value) not in self._numbers and is_user_module(value):
                self._open_names(self._number(value, number, ("global", name)), names, names, vars(value))

    def _open_class(self, number: int, kind: type) -> None:
        self.entries.append((number, "(class)", self._identity(kind)))
        for base in kind.__mro__:
            if base in self._classes or base in _BASES or base.__module__ == "builtins":
                continue
            self._classes.add(base)
            if base is kind:
                self.views.classes.append(kind)  # its version changes with those of its bases
            library = is_library(base.__module__)
            for name, value in vars(base).items():
                if name in _UNREAD:
                    continue
                if library:
                    self.entries.append((number, (base.__qualname__, name), self._identity(value)))
                else:
                    self._enter_named(self._number(base, number, "(class)"), name, value, kind)


def can_change(value: Any) -> bool:
    """Return whether an object is compared by its contents, which can change, and not by identity."""
    return _size(value, type(value)) is not None


def _size(value: Any, kind: type) -> int | None:
    """Return how many objects are to be looked at in an object; None: it is compared by identity."""
    if issubclass(kind, (*_TABLES_OF_KEYS, *_SEQUENCES)):
        return 1 + len(value)
    if issubclass(kind, _BUFFERS):
        return 1 if _bytes_of(value) <= _LARGEST_BUFFER else None
    if kind is FunctionType:
        return 1 if is_user_function(value) or hasattr(value, "__wrapped__") else None
    if kind is BuiltinFunctionType:
        return 1 if type(value.__self__) is not ModuleType and value.__self__ is not None else None
    if kind is MethodType or issubclass(kind, (partial, nn.Module, *_WRAPPERS)):
        return 1
    if issubclass(kind, (*_WRAPPED, *_IN_PYTHON, *_DICT_VIEWS)):
        return 1
    if issubclass(kind, type):
        return None if issubclass(value, Enum) or is_library(value.__module__) else 1
    if issubclass(kind, (torch.Tensor, Enum, ModuleType)) or is_library(kind.__module__):
        return None
    return 1 if hasattr(value, "__dict__") or _slots(kind) else None


def _referent(proxy: Any) -> Any:
    """Return the object that a weak proxy stands for, or None where it is gone."""
    try:
        return proxy.__init__.__self__
    except ReferenceError:
        return None


def _is_partly_hidden(kind: type) -> bool:
    """Return whether a class of the user's extends one of a library, whose state may be out of sight."""
    known = (*_BASES, *_TABLES_OF_KEYS, *_SEQUENCES, *_BUFFERS, *_IN_PYTHON, *_WRAPPERS, *_WRAPPED)
    if is_library(kind.__module__) or issubclass(kind, (*known[1:], type, partial, ReferenceType)):
        return False
    bases = set(kind.__mro__) - {object, Generic, Protocol, ABC}
    return any(is_library(base.__module__) for base in bases)


def _bytes_of(buffer: Any) -> int:
    if isinstance(buffer, np.ndarray | memoryview):
        return buffer.nbytes
    return len(buffer) * (buffer.itemsize if isinstance(buffer, array) else 1)


def _slots(kind: type) -> list[str]:
    """Return the names of the slots of a class, as its instances have them."""
    names = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _is_of_user(kind: type) -> bool:
    """Return whether all code that reads the attributes of a class is the user's."""
    return not any(is_library(base.__module__) for base in kind.__mro__ if base not in _BASES)


def _is_special(name: str) -> bool:
    """Return whether Python calls a method without its name in the code, as ``__getitem__``."""
    return name.startswith("__") and name.endswith("__")


def _is_empty(cell: Any) -> bool:
    """Return whether a variable of a function has no value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False
