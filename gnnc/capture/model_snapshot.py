"""Snapshot of a model: detects later changes of its modules, hooks, constants and shared weights."""

import ctypes
import sys
import types
from collections.abc import Iterable, Mapping
from functools import cache
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from gnnc.capture.hooks import hook_tables
from gnnc.torch_private import is_autocast_enabled

_WEIGHTS = ("_parameters", "_buffers")
_PLAIN = (bool, int, float, str, types.NoneType)
_IDENTICAL = (types.FunctionType, types.BuiltinFunctionType, torch.Tensor)
NO_CONSTANTS = frozenset(("training", "_parameters", "_buffers", "_modules"))
"""Attributes of a module that are no constants: read at each call, or looked into as tables."""
_NO_AUTOCAST = (None, None)
_END = object()
_HEAD = tuple.__basicsize__
"""Bytes of a tuple before the addresses of its elements, where ``_has_addresses``."""
_TABLES = itemgetter("_modules", *_WEIGHTS)
"""The tables of a module that are looked into, beside its hooks."""


class ModelSnapshot:
    """Snapshot of a model's modules: the identities of all objects that their tables hold.

    Parameters and buffers count only by which of them are the same tensor, for which a trace has one input:
    their values are read at each call.

    Attributes:
        modes: whether each module is in train mode. Not a change: calls in another mode have programs of
            their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = tuple(model.modules())
        self._meaning = _meaning(self._modules)
        self._look()

    def _look(self) -> None:
        """Store the contents of every table of the modules: attributes, children, weights and hooks."""
        attributes = [vars(module) for module in self._modules]
        tables = [table for own in attributes for table in (*_TABLES(own), *hook_tables(own))]
        views: list[Iterable[Any]] = [own.values() for own in attributes]
        for table in filter(None, tables):
            views += [(_END,), table.values()]  # or what moves from one table to the next would not show
        self.modes = tuple([module.training for module in self._modules])
        self._seen = _Seen([table for table in tables if not table], views)

    def has_changed(self) -> bool:
        """Return whether layers, hooks, values of constants, or the sharing of weights have changed."""
        if self._seen.is_now():
            return False
        if _meaning(self._modules) != self._meaning:
            return True
        self._look()
        return False


def _has_addresses() -> bool:
    """Return whether this Python stores the addresses of a tuple's elements where CPython does."""
    if sys.implementation.name != "cpython":
        return False
    probe = (object(), object())
    found = (ctypes.c_void_p * len(probe)).from_address(id(probe) + _HEAD)
    return list(found) == list(map(id, probe))


_ADDRESSES = _has_addresses()


class _Seen:
    """Addresses of the objects that all tables held at one time.

    CPython's tuples are arrays of addresses. Comparing those in one piece costs less than a nanosecond an
    object, one by one 20; ``==`` would ask the objects, for which 1 is True.

    Args:
        empty: tables that hold nothing.
        views: the values of the others, one behind the other.
    """

    def __init__(self, empty: list[Mapping[Any, Any]], views: list[Iterable[Any]]) -> None:
        self._empty = empty
        self._read = eval(_display(len(views)), {f"v{i}": view for i, view in enumerate(views)})
        self._values = self._read()  # kept alive, so that nothing else gets an address of theirs
        self._block = ctypes.c_char * (len(self._values) * ctypes.sizeof(ctypes.c_void_p))
        self._addresses = self._block.from_address(id(self._values) + _HEAD).raw if _ADDRESSES else b""

    def is_now(self) -> bool:
        """Return whether the tables hold the same objects now."""
        if any(self._empty):
            return False
        values = self._read()
        if len(values) != len(self._values):
            return False
        if not _ADDRESSES:
            return all(map(is_, values, self._values))
        return self._block.from_address(id(values) + _HEAD).raw == self._addresses


@cache
def _display(count: int) -> types.CodeType:
    """Return a function that puts ``count`` iterables into one tuple, the fastest way in Python."""
    return compile(f"lambda: ({', '.join(f'*v{i}' for i in range(count))},)", "<gnnc watch>", "eval")


def _meaning(modules: Iterable[nn.Module]) -> Any:
    return [_meaning_of(module) for module in modules], _sharing(modules)


def _sharing(modules: Iterable[nn.Module]) -> list[tuple[int, torch.layout] | None]:
    """Return, for each parameter and buffer, the first entry that is the same tensor, and its layout."""
    tables = [vars(module)[name] for module in modules for name in _WEIGHTS]
    weights = [weight for table in tables for weight in table.values()]
    first: dict[int, int] = {}
    return [
        None if weight is None else (first.setdefault(id(weight), place), weight.layout)
        for place, weight in enumerate(weights)
    ]


def _meaning_of(module: nn.Module) -> Any:
    attributes = vars(module)
    constants = {name: _constant(value) for name, value in attributes.items() if name not in NO_CONSTANTS}
    children = [(name, id(child)) for name, child in attributes["_modules"].items()]
    hooks = [[(key, id(hook)) for key, hook in table.items()] for table in hook_tables(attributes)]
    return constants, children, hooks


def _constant(value: Any) -> Any:
    """Return the value to compare: plain values, identities of functions and tensors, else None."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_constant, value))
    if type(value) is dict:
        return tuple((key, _constant(item)) for key, item in value.items())
    if isinstance(value, _PLAIN):
        return type(value), value
    return id(value) if isinstance(value, _IDENTICAL) else None


def autocast_mode() -> tuple[Any, ...]:
    """Return the dtype that autocast uses for a call now, by device; None where autocast is off."""
    if not is_autocast_enabled():
        return _NO_AUTOCAST
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in ("cpu", "cuda")
    )
