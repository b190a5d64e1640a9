"""Whether a model is still what was traced: its modules, their hooks, and the constants they hold."""

import types
from collections.abc import Collection
from operator import is_
from typing import Any

import torch
from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = (bool, int, float, str, types.NoneType)
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType)


class Watch:
    """Remembers a model's modules; a look costs a comparison of identities for each attribute.

    Parameters and buffers are not looked at: they are read at each call. Nor are the modes: calls in
    another mode have programs of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [_Module(module) for module in model.modules()]

    def has_changed(self) -> bool:
        """Whether a layer was replaced, a hook was added or removed, or a constant has another value."""
        return any(module.has_changed() for module in self._modules)


class _Module:
    """One module as it was.

    Attributes:
        module: the module.
        values: its attributes.
        children: its children.
        hooks: keys of its hooks.
        meaning: what a trace reads from it.
    """

    __slots__ = ("children", "hooks", "meaning", "module", "values")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.meaning = _meaning(module)
        self._look()

    def _look(self) -> None:
        attributes = vars(self.module)
        self.values = tuple(attributes.values())
        self.children = tuple(attributes["_modules"].values())
        self.hooks = _hooks(attributes)

    def has_changed(self) -> bool:
        attributes = vars(self.module)
        if (
            _same(attributes.values(), self.values)
            and _same(attributes["_modules"].values(), self.children)
            and _hooks(attributes) == self.hooks
        ):
            return False
        if _meaning(self.module) != self.meaning:
            return True
        self._look()
        return False


def _same(now: Collection[Any], before: tuple[Any, ...]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _hooks(attributes: dict[str, Any]) -> list[Any]:
    return [key for name in _HOOKS for key in attributes[name]]


def _meaning(module: nn.Module) -> Any:
    attributes = vars(module)
    constants = {name: _constant(value) for name, value in attributes.items() if name != "training"}
    children = [(name, id(child)) for name, child in attributes["_modules"].items()]
    return constants, children, _hooks(attributes)


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
