"""Hooks of torch and PyG: the tables that an eager call runs, and the refusal of hooks on registration.

PyG skips the hooks of ``MessagePassing`` wherever ``is_compiling()`` holds, which a trace answers with yes; a
captured layer takes the branch that runs them.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from gnnc.errors import UnsupportedError
from gnnc.torch_private import GLOBAL_FORWARD_HOOKS, GLOBAL_REGISTRATION_HOOKS

MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""Tables of hooks that every module has."""
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
"""Tables of backward hooks that every module has."""
_STEPS = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
MESSAGE_HOOKS = tuple(f"_{step}_forward{kind}_hooks" for step in _STEPS for kind in ("_pre", ""))
"""Tables of hooks of PyG's ``MessagePassing``, beside those of every module."""
_RUNNERS = ("propagate", "edge_updater")
"""Methods of ``MessagePassing`` that run its hooks."""


def hook_tables(attributes: Mapping[str, Any]) -> list[dict[int, Callable[..., Any]]]:
    """Return the tables of the forward hooks of a module, by its attributes."""
    tables = [attributes[name] for name in MODULE_HOOKS]
    if MESSAGE_HOOKS[0] in attributes:
        tables += [attributes[name] for name in MESSAGE_HOOKS if name in attributes]
    return tables


def run_message_hooks(module: nn.Module) -> None:
    """Let a module that has hooks of ``MessagePassing`` run them while it is traced.

    ``propagate`` and ``edge_updater`` skip the hooks where ``is_compiling()`` is true, and call it for no
    other purpose. The module gets copies of both methods in which ``is_compiling`` returns False. The
    originals, which other layers and threads call, stay as they are.
    """
    attributes = vars(module)
    if not any(attributes.get(name) for name in MESSAGE_HOOKS):
        return
    for name in _RUNNERS:
        method = getattr(module, name)
        if isinstance(method, types.MethodType) and "is_compiling" in method.__func__.__globals__:
            attributes[name] = types.MethodType(_eager(method.__func__), module)


def _eager(function: Any) -> types.FunctionType:
    """Return a copy of a function, for which ``is_compiling()`` is False."""
    names = {**function.__globals__, "is_compiling": _never}
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _never() -> bool:
    return False


def global_hooks() -> list[tuple[dict[int, Callable[..., Any]], int, Callable[..., Any]]]:
    """Return the forward hooks on all modules, without torch's own: their tables, keys and functions."""
    return [
        (table, key, hook)
        for table in GLOBAL_FORWARD_HOOKS
        for key, hook in list(table.items())
        if not is_of_torch(hook)
    ]


def refuse_registration_hooks(owner: str) -> None:
    """Refuse hooks on the registration of modules and weights, which would run on modules of the trace.

    torch 2.11 leaves a hook of its own behind where ``torch.export`` fails; it does nothing to other modules.

    Raises:
        UnsupportedError: names the hook.
    """
    for table in GLOBAL_REGISTRATION_HOOKS:
        for hook in [hook for hook in table.values() if not is_of_torch(hook)]:
            raise UnsupportedError(
                f"[{owner}] {name_of(hook)} is a hook on the registration of all modules, parameters or "
                "buffers, which would run on what a capture registers for itself: remove it "
                "(handle.remove()) before the model is compiled or called for the first time"
            )


def is_of_torch(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is torch's own: those of its counters and profilers only look."""
    return str(getattr(hook, "__module__", None)).startswith("torch.")


def name_of(hook: Callable[..., Any]) -> str:
    """Return the name of a hook, for people."""
    return getattr(hook, "__qualname__", type(hook).__name__)
