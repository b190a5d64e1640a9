"""Private copy of a model for a trace: new modules and tables that share their tensors.

A trace replaces parameters and buffers by stand-ins, and forward may set attributes: on the copy, while other
threads call, train, save or copy the model itself.
"""

import enum
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from gnnc.errors import CaptureError

_ATOMS = frozenset(
    (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), Tensor, nn.Parameter, torch.Size)
    + (torch.dtype, torch.device, type, types.ModuleType, types.BuiltinFunctionType)
)
"""Types of values that hold no module."""
_LIBRARIES = ("torch.", "torch_geometric.", "gnnc.")
_IN_PYTHON = 1 << 9
"""Flag of the types that a class statement makes."""


def private_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the tree of modules that shares tensors and all other values.

    Modules, their tables and the containers among their attributes are new. Bound methods, partials,
    closures, weak references and plain objects that refer to one of these, as attributes or hooks, refer to
    its copy. What is found in several places is one object in the copy, too. Globals and attributes of
    classes are shared: a model that they hold is not the copy (``registered_weights`` finds its weights).

    Raises:
        CaptureError: a module cannot be copied, since its class is also one of Python's own containers.
    """
    return _Copier()(model)


class _Copier:
    """Copier of values; equal references become references to one copy."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}
        self._originals: list[Any] = []  # kept alive, so that nothing else gets an address of theirs

    def __call__(self, value: Any) -> Any:
        """Return the copy of a value; the value itself where nothing in it is copied."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, nn.Module):
            return self._module(value)
        copier = _COPIERS.get(kind)
        if copier is not None:
            return copier(self, value)
        if isinstance(value, tuple):
            return self._tuple(value)
        base = next((base for base in _FILLED if issubclass(kind, base)), None)
        if base is not None:
            return self._extended(value, base)
        return self._object(value) if is_plain(value) and _is_copied(value) else value

    def _remember(self, value: Any, copy: Any) -> Any:
        self._originals.append(value)
        self._copies[id(value)] = copy
        return copy

    def _module(self, module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):  # its state is in C++
            return self._remember(module, module)
        return self._object(module)

    def _object(self, value: Any) -> Any:
        kind = type(value)
        try:
            copy = self._remember(value, object.__new__(kind))
        except TypeError:
            if not isinstance(value, nn.Module):
                return value
            raise CaptureError(
                f"[{kind.__name__}] is a module and also one of Python's own containers, which a trace "
                "cannot copy: let the module hold the container as an attribute"
            ) from None
        self._copy_attributes(value, copy)
        return copy

    def _items(self, values: Iterable[Any]) -> list[Any]:
        values = list(values)
        return values if _ATOMS.issuperset(map(type, values)) else [self(value) for value in values]

    def _dict(self, table: dict[Any, Any]) -> dict[Any, Any]:
        copy = table.copy()  # of the same class, in the same order
        self._remember(table, copy)
        keys, values = self._items(copy.keys()), self._items(copy.values())
        copy.clear()
        copy.update(zip(keys, values, strict=True))
        return copy

    def _list(self, values: list[Any]) -> list[Any]:
        copy = self._remember(values, [])
        copy += self._items(values)
        return copy

    def _deque(self, values: deque[Any]) -> deque[Any]:
        copy = self._remember(values, deque(maxlen=values.maxlen))
        copy += self._items(values)
        return copy

    def _set(self, values: set[Any]) -> set[Any]:
        copy = self._remember(values, set())
        copy.update(self._items(values))
        return copy

    def _extended(self, container: Any, base: Any) -> Any:
        """Return the copy of a container of a class that extends Python's, made without its methods."""
        copy = base.__new__(type(container))
        if base is deque:
            deque.__init__(copy, maxlen=container.maxlen)
        elif base is defaultdict:
            copy.default_factory = container.default_factory
        self._remember(container, copy)
        self._copy_attributes(container, copy)
        is_table = issubclass(base, dict)
        for item in list(base.items(container) if is_table else base.__iter__(container)):
            if is_table:
                base.__setitem__(copy, *map(self, item))
            else:
                _FILLED[base](copy, self(item))
        return copy

    def _copy_attributes(self, value: Any, copy: Any) -> None:
        for name in (name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)):
            object.__setattr__(copy, name, self(getattr(value, name)))
        if hasattr(value, "__dict__"):
            vars(copy).update({name: self(held) for name, held in list(vars(value).items())})

    def _tuple(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        items = self._items(values)
        if all(map(is_, items, values)):
            return values
        return self._remember(values, tuple.__new__(type(values), items))

    def _method(self, method: types.MethodType) -> types.MethodType:
        function, owner = self(method.__func__), self(method.__self__)
        if function is method.__func__ and owner is method.__self__:
            return method
        return self._remember(method, types.MethodType(function, owner))

    def _partial(self, value: partial[Any]) -> partial[Any]:
        parts = (value.func, *value.args, *value.keywords.values())
        function, *values = self._items(parts)
        if all(map(is_, (function, *values), parts)):
            return value
        args, rest = values[: len(value.args)], values[len(value.args) :]
        copy = partial(function, *args, **dict(zip(value.keywords, rest, strict=True)))
        vars(copy).update(vars(value))
        return self._remember(value, copy)

    def _reference(self, value: weakref.ref[Any]) -> weakref.ref[Any]:
        target = value()
        return self._remember(value, weakref.ref(self(target))) if isinstance(target, nn.Module) else value

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        if not _is_copied(function):
            return function
        cells = tuple(map(self, function.__closure__ or ()))
        copy = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, self(function.__defaults__), cells
        )
        self._remember(function, copy)
        copy.__kwdefaults__ = self(function.__kwdefaults__)
        for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(copy, name, getattr(function, name))
        vars(copy).update({name: self(held) for name, held in vars(function).items()})
        return copy

    def _cell(self, cell: types.CellType) -> types.CellType:
        copy = self._remember(cell, types.CellType())
        if _is_filled(cell):
            copy.cell_contents = self(cell.cell_contents)
        return copy


_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_FILLED: dict[type, Callable[..., Any]] = {
    defaultdict: defaultdict.__setitem__,
    OrderedDict: OrderedDict.__setitem__,
    dict: dict.__setitem__,
    list: list.append,
    deque: deque.append,
    set: set.add,
}
"""Containers of Python, of which classes of the user's are copied, and how an item gets into them."""
_COPIERS: dict[type, Callable[[_Copier, Any], Any]] = {
    dict: _Copier._dict,
    OrderedDict: _Copier._dict,
    defaultdict: _Copier._dict,
    list: _Copier._list,
    set: _Copier._set,
    deque: _Copier._deque,
    types.MethodType: _Copier._method,
    types.FunctionType: _Copier._function,
    types.CellType: _Copier._cell,
    partial: _Copier._partial,
    weakref.ref: _Copier._reference,
}


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def is_plain(value: Any) -> bool:
    """Return whether all of an object's state is in its ``__dict__``, and its class is none of a library."""
    kinds = type(value).__mro__[:-1]
    return hasattr(value, "__dict__") and not isinstance(value, enum.Enum) and all(map(_is_of_user, kinds))


def _is_of_user(kind: type) -> bool:
    in_python = kind.__flags__ & _IN_PYTHON and not _slots(kind)
    return bool(in_python) and not f"{kind.__module__}.".startswith(_LIBRARIES)


def _is_copied(value: Any) -> bool:
    """Return whether a module or a container is reached from a function or a plain object."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, (nn.Module, *_CONTAINERS)):
            return True
        if type(value) in _ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        todo += _references(value)
    return False


def _references(value: Any) -> Iterable[Any]:
    if isinstance(value, tuple):
        return value
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, weakref.ref):
        return (value(),)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        defaults = *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
        return *cells, *defaults, *vars(value).values()
    return list(getattr(value, "__dict__", {}).values()) if is_plain(value) else ()
