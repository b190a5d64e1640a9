"""Whether a model is still what was traced: its modules, their hooks, and the constants they hold."""

import types
from collections.abc import Iterator, Mapping
from itertools import chain, islice, repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = (bool, int, float, str, types.NoneType)
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType)
_COMMON = tuple(vars(nn.Module()))
"""Attributes that every module begins with: its mode and its tables."""
_TABLES = itemgetter("_modules", *_HOOKS)
"""Those tables that may be replaced in a way that matters: hooks are often dropped by a new, empty one."""


class Watch:
    """Remembers a model's modules; a look costs a comparison of identities for each attribute.

    Parameters and buffers are not looked at: they are read at each call. Nor are the modes: calls in
    another mode have programs of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = tuple(model.modules())
        self._meanings = [_meaning(module) for module in self._modules]
        self._look()

    def _look(self) -> None:
        """Remember what every table of the modules holds: attributes, children and hooks."""
        self._attributes = [vars(module) for module in self._modules]
        self._tables: list[Mapping[Any, Any]] = [
            *self._attributes,
            *chain.from_iterable(map(_TABLES, self._attributes)),
        ]
        self._sizes = [len(table) for table in self._tables]
        views = [(table.values(), _common(table)) for table in self._tables if table]
        self._views, self._skipped = [view for view, _ in views], [skipped for _, skipped in views]
        self._values = list(self._read())

    def _read(self) -> Iterator[Any]:
        # By functions in C alone: this is done at every call.
        entries = map(islice, self._views, self._skipped, repeat(None))
        return chain.from_iterable(chain(entries, map(_TABLES, self._attributes)))

    def has_changed(self) -> bool:
        """Whether a layer was replaced, a hook was added or removed, or a constant has another value."""
        if list(map(len, self._tables)) == self._sizes and all(map(is_, self._read(), self._values)):
            return False
        if [_meaning(module) for module in self._modules] != self._meanings:
            return True
        self._look()
        return False


def _common(table: Mapping[Any, Any]) -> int:
    """How many entries need no look."""
    return len(_COMMON) if tuple(islice(table, len(_COMMON))) == _COMMON else 0


def _meaning(module: nn.Module) -> Any:
    attributes = vars(module)
    constants = {name: _constant(value) for name, value in attributes.items() if name != "training"}
    children = [(name, id(child)) for name, child in attributes["_modules"].items()]
    hooks = [key for name in _HOOKS for key in attributes[name]]
    return constants, children, hooks


def _constant(value: Any) -> Any:
    """Plain values as they are, functions by identity; everything else is not compared."""
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, _PLAIN):
        return type(value), value
    return id(value) if isinstance(value, _CALLABLE) else None


def autocast_mode() -> tuple[Any, ...]:
    """What autocast would do to a call now: the dtype by device, None where it is off."""
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in ("cpu", "cuda")
    )
