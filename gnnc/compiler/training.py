"""Calls that want gradients: which they want, and the refusal of what has none in a compiled program."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from gnnc.capture.export import Captured
from gnnc.capture.hooks import BACKWARD_HOOKS
from gnnc.capture.pyg_data import to_dicts
from gnnc.capture.thread_patches import in_this_thread, replaced
from gnnc.errors import CaptureError, UnsupportedError
from gnnc.ir.graph import placeholders
from gnnc.ir.source import WANTS_GRADIENT, WRITTEN, Source, source_of
from gnnc.torch_private import GLOBAL_BACKWARD_HOOKS, pytree

_PRE_HOOKS, _HOOKS = BACKWARD_HOOKS
_OF_TORCH = ("torch.", "gnnc.")
"""Beginnings of the modules whose autograd functions have the gradient of what they compute."""

Wanted = tuple[tuple[bool, ...], tuple[bool, ...]]
"""Flags of a model's parameters and buffers, and of a call's tensors: true where a gradient is wanted."""


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a call, and in the containers among these."""
    is_plain = not kwargs and all(arg is None or isinstance(arg, Tensor) for arg in args)
    leaves = args if is_plain else pytree.tree_leaves(to_dicts((args, kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def wanted_weights(modules: Iterable[nn.Module]) -> tuple[bool, ...]:
    """Return for each parameter and buffer of modules, in order, whether it requires a gradient."""
    return tuple(
        [
            weight.requires_grad
            for module in modules
            for table in ("_parameters", "_buffers")
            for weight in vars(module)[table].values()
            if weight is not None
        ]
    )


def wanted_gradients(modules: Iterable[nn.Module], tensors: Sequence[Tensor]) -> Wanted | None:
    """Return which gradients a call wants; None where it wants none."""
    if not torch.is_grad_enabled():
        return None
    weights = wanted_weights(modules)
    inputs = tuple([tensor.requires_grad for tensor in tensors])
    return (weights, inputs) if any(weights) or any(inputs) else None


def want_gradients(model: nn.Module, captured: Captured) -> None:
    """Mark the placeholders of a captured graph whose gradients its call wants, in place.

    Args:
        model: the model.
        captured: the capture of the call, with its tensors.

    Raises:
        UnsupportedError: a buffer that forward writes requires a gradient.
    """
    pairs = zip(captured.call.names, captured.call.tensors, strict=True)
    inputs = {name for name, tensor in pairs if tensor.requires_grad}
    for node in placeholders(captured.graph_module):
        source = source_of(node)
        assert source is not None
        is_written = source.kind == "buffer" and source.name in captured.mutations
        if (source.kind == "input" and source.name in inputs) or _weight_wants(model, source):
            if is_written:
                refuse_held_tensor(type(model).__name__, f"the buffer {source.name}, which forward writes,")
            node.meta[WANTS_GRADIENT] = True
        if is_written:
            node.meta[WRITTEN] = True


def _weight_wants(model: nn.Module, source: Source) -> bool:
    """Return whether a value is a parameter or a buffer that requires a gradient."""
    if source.kind == "parameter":
        return bool(attrgetter(source.name)(model).requires_grad)  # of functional_call it may be plain
    return source.kind == "buffer" and model.get_buffer(source.name).requires_grad


def refuse_held_tensor(owner: str, name: str) -> NoReturn:
    """Refuse a tensor of the model whose gradient a compiled program does not compute.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"[{owner}] {name} requires a gradient, and a compiled model computes those of parameters, "
        "buffers and arguments: make it an nn.Parameter, or use requires_grad_(False) on it"
    )


def refuse_backward_hooks(owner: str, modules: Iterable[nn.Module]) -> None:
    """Refuse backward hooks on modules: a compiled backward pass has no modules that could run them.

    Raises:
        UnsupportedError: names the class of the module.
    """
    for module in modules:
        attributes = vars(module)
        if attributes.get(_PRE_HOOKS) or attributes.get(_HOOKS):
            raise UnsupportedError(
                f"[{owner}] a {type(module).__name__} has a backward hook (register_full_backward_hook or "
                "register_full_backward_pre_hook), which a compiled backward pass would not run: remove it "
                "(handle.remove()), or put a hook on a parameter (parameter.register_hook)"
            )
    if any(GLOBAL_BACKWARD_HOOKS):
        raise UnsupportedError(
            f"[{owner}] a backward hook on all modules is registered, which a compiled backward pass would "
            "not run: remove it (handle.remove())"
        )


@contextlib.contextmanager
def refusing_own_gradients(owner: str) -> Iterator[None]:
    """Refuse what would change gradients behind the back of a trace, within the block that traces.

    A ``torch.autograd.Function`` with a backward of its own is traced as what its forward computes, and a
    hook on a tensor inside of forward is not traced at all. A reentrant checkpoint, which runs its function
    without gradients, is traced as that function: a program chooses by itself what to compute again.

    Raises:
        UnsupportedError: names the function or the hook.
    """
    found: list[UnsupportedError] = []

    def refuse(what: str) -> NoReturn:
        found.append(
            UnsupportedError(
                f"[{owner}] forward {what}, which the trace of a compiled model does not see: train the "
                "original model, or compile the submodules around it"
            )
        )
        raise found[0]

    apply = vars(torch.autograd.Function)["apply"].__func__
    hook = Tensor.register_hook

    def traced_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            function, _, *inputs = args
            return function(*inputs)
        if cls.__module__.startswith(_OF_TORCH):
            return apply(cls, *args, **kwargs)
        return refuse(f"calls the autograd function {cls.__name__}, whose backward is its own")

    def traced_hook(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return refuse("registers a hook on a tensor (register_hook)")

    with (
        replaced(torch.autograd.Function, "apply", classmethod(in_this_thread(traced_apply, apply))),
        replaced(Tensor, "register_hook", in_this_thread(traced_hook, hook)),
    ):
        try:
            yield
        except (CaptureError, UnsupportedError):
            if not found:
                raise
    if found:  # also where another way to trace has taken the forward for all there is
        raise found[0]
