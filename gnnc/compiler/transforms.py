"""Refusal of calls within a transform or a trace of torch.

A compiled program is opaque to torch: ``torch.func`` would lose its derivative, and a trace would keep the
results of one call as constants.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from gnnc.errors import UnsupportedError
from gnnc.torch_private import (
    TRACING_MODES,
    dispatch_mode_count,
    dispatch_modes,
    forward_ad_level,
    functorch_interpreter,
    jit_tracing_state,
    pytree,
)

_KINDS = {"Vmap": "vmap", "Grad": "grad", "Jvp": "jvp", "Functionalize": "functionalize"}


def may_be_transformed() -> bool:
    """Return whether a call runs within a transform, a trace, forward-mode AD or a dispatch mode."""
    return (
        functorch_interpreter() is not None
        or jit_tracing_state() is not None
        or dispatch_mode_count() > 0
        or forward_ad_level() >= 0
    )


def refuse_transforms(model: nn.Module, args: Any, constants: Iterable[Tensor]) -> None:
    """Refuse a call within a transform or a trace; modes that only watch ops are let through.

    Args:
        model: the model.
        args: all arguments of the call, in dicts, lists and tuples.
        constants: tensors that the model holds apart from parameters and buffers.

    Raises:
        UnsupportedError: names the transform, or the tensor that has a tangent.
    """
    owner = type(model).__name__
    interpreter = functorch_interpreter()
    if interpreter is not None:
        _refuse_function(owner, interpreter.key().name)
    if jit_tracing_state() is not None:
        refuse_trace(owner, "torch.jit.trace")
    for mode in dispatch_modes():
        if isinstance(mode, TRACING_MODES):
            refuse_trace(owner, f"torch.export, make_fx or another trace ({type(mode).__name__})")
    if forward_ad_level() >= 0:
        _refuse_tangents(model, args, constants)


def _refuse_function(owner: str, kind: str) -> NoReturn:
    raise UnsupportedError(
        f"[{owner}] a compiled model cannot run within torch.func ({_KINDS.get(kind, kind)}), which does not "
        "see into its kernels: call it on whole tensors outside of the transform (several graphs are one "
        "graph of several components), or transform the original model (compiled.model)"
    )


def refuse_trace(owner: str, trace: str) -> NoReturn:
    """Raise UnsupportedError about a tracer that cannot see into a compiled model."""
    raise UnsupportedError(
        f"[{owner}] a compiled model cannot be traced by {trace}: the trace would keep one call's graph and "
        "weights as constants. Trace the original model (compiled.model), and compile that"
    )


def _refuse_tangents(model: nn.Module, args: Any, constants: Iterable[Tensor]) -> None:
    inputs = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    for tensor in (*inputs, *model.parameters(), *model.buffers(), *constants):
        if tensor.layout is torch.strided and forward_ad.unpack_dual(tensor).tangent is not None:
            raise UnsupportedError(
                f"[{type(model).__name__}] a tensor of shape {tuple(tensor.shape)} has a tangent of "
                "forward-mode AD, which a compiled model would lose: pass the primal "
                "(forward_ad.unpack_dual(x).primal), or differentiate the original model (compiled.model)"
            )
