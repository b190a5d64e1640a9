"""Global state of torch that tracing sets for all threads, confined to the thread that traces.

``torch.export`` and ``torch.fx`` replace ``Module.__call__``, ``Module.__getattr__``, ``max``, ``min`` and
``math.pow``, and set the flags behind ``torch.compiler.is_compiling()``. A model that another thread calls in
eager meanwhile would be traced too, and its layers and optimizers would skip what they skip in a trace.
"""

import builtins
import contextlib
import math
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gnnc.capture.thread_patches import ThreadFlag, in_this_thread, replaced
from gnnc.torch_private import (
    BUFFER_HOOK_OF_EXPORT,
    BUFFER_HOOKS,
    BUILTIN_OVERRIDES,
    COMPILER_FLAGS,
    DYNAMO_CONSTANTS,
    FAKE_TENSOR_CACHE,
    FX_FLAG,
    FX_PATCHER,
    INTERPRETER_META,
    LIBRARIES_OFF,
    PRE_DISPATCH_MODES,
    STACK_TRACES_OFF,
    TRACE_STATE,
    ConvolutionLayer,
    PreDispatchModes,
)

_BUILTINS = ((builtins, "max"), (builtins, "min"), (math, "pow"))
_LAYERS_OF_LIBRARIES = (nn.RNNBase, ConvolutionLayer)
"""Layers that a trace splits into calls of oneDNN and cuDNN where these are on."""


@contextlib.contextmanager
def confined(model: nn.Module) -> Iterator[None]:
    """Confine what torch patches while ``model`` is traced to the calling thread."""
    patches: list[tuple[Any, str, Any]] = [
        # torch puts these back itself, but not in a forked child
        *((owner, name, getattr(owner, name)) for owner, name in TRACE_STATE),
        (torch.compiler, "__class__", _FlagsByThread),
        (*PRE_DISPATCH_MODES, _ModesByThread()),
        (*DYNAMO_CONSTANTS, staticmethod(_flags_as_bools(getattr(*DYNAMO_CONSTANTS)))),
        (*FX_PATCHER, _patcher_of(getattr(*FX_PATCHER))),
        (*BUILTIN_OVERRIDES, _overrides_of(getattr(*BUILTIN_OVERRIDES))),
        (*BUFFER_HOOK_OF_EXPORT, _buffer_hook_of(getattr(*BUFFER_HOOK_OF_EXPORT))),
        # a key of an op with symbolic sizes costs more than the op
        (*FAKE_TENSOR_CACHE, False),
        # an interpreter of another thread would put its nodes' metadata into the trace
        (*INTERPRETER_META, in_this_thread(getattr(*INTERPRETER_META), _no_metadata)),
    ]
    if hasattr(*STACK_TRACES_OFF):
        patches.append((*STACK_TRACES_OFF, ThreadFlag()))
    if not any(isinstance(module, _LAYERS_OF_LIBRARIES) for module in model.modules()):
        # these flags are in C++: convolutions of other threads would run on other kernels
        patches.append((*LIBRARIES_OFF, contextlib.nullcontext))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(replaced(*patch))
        yield


@contextlib.contextmanager
def _no_metadata(*_: Any, **__: Any) -> Iterator[None]:
    yield


class _FlagsByThread(types.ModuleType):
    """Class of ``torch.compiler`` that stores a flag set to True as one of the thread that sets it."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, ThreadFlag() if name in COMPILER_FLAGS and value is True else value)


class _ModesByThread(PreDispatchModes, threading.local):
    """Modes of torch.export that each thread has for itself: the sizes of others would be traced, too."""


def _flags_as_bools(create: Any) -> Any:
    """Let Dynamo trace a flag of the thread as the constant that it is there."""

    def build(tx: Any, value: Any) -> Any:
        return create(tx, bool(value) if isinstance(value, ThreadFlag) else value)

    return build


def _patcher_of(new_patcher: Any) -> Any:
    """Let the methods that ``torch.fx`` patches, and its flag, act in the thread that traces."""

    @contextlib.contextmanager
    def patcher_of_this_thread() -> Iterator[Any]:
        with new_patcher() as patcher:
            setattr(*FX_FLAG, ThreadFlag())
            patch_method = patcher.patch_method

            def patch(owner: type, name: str, new: Any, deduplicate: bool = True) -> None:
                patch_method(owner, name, in_this_thread(new, getattr(owner, name)), deduplicate)

            patcher.patch_method = patch
            yield patcher

    return in_this_thread(patcher_of_this_thread, new_patcher)


class _Table:
    """Handle of a hook in a table of its own."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(replaced(*BUFFER_HOOKS, getattr(*BUFFER_HOOKS).copy()))

    def remove(self) -> None:
        """Put the table without the hook back."""
        self._stack.close()


def _buffer_hook_of(register: Any) -> Any:
    """Let torch.export add its hook to a copy of the table, over which another thread may be iterating."""

    def register_in_copy(*args: Any) -> _Table:
        table = _Table()
        register(*args)
        return table

    return in_this_thread(register_in_copy, register)


def _overrides_of(override: Any) -> Any:
    """Let the overrides of ``max``, ``min`` and ``math.pow`` act in the thread that traces."""

    @contextlib.contextmanager
    def override_in_this_thread() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            originals = [getattr(owner, name) for owner, name in _BUILTINS]
            with override():
                overrides = [getattr(owner, name) for owner, name in _BUILTINS]
            for (owner, name), new, original in zip(_BUILTINS, overrides, originals, strict=True):
                stack.enter_context(replaced(owner, name, in_this_thread(new, original)))
            yield

    return in_this_thread(override_in_this_thread, override)
