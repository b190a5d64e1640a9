"""Key of the programs that may serve a call, and what two keys differ in."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from gnnc.capture.arguments import Call, Leaf
from gnnc.capture.model_snapshot import autocast_mode
from gnnc.compiler.training import Wanted, wanted_gradients


class CallKey(NamedTuple):
    """Everything but sizes and values by which calls need programs of their own.

    Attributes:
        arguments: the structure of the arguments and their constants.
        tensors: dtype, number of dimensions and device of each tensor.
        modes: whether each module of the model is in train mode.
        autocast: dtype of autocast on the CPU and on CUDA; None where it is off.
        wanted: the gradients that are wanted, or None.
    """

    arguments: Any
    tensors: tuple[tuple[torch.dtype, int, torch.device], ...]
    modes: tuple[bool, ...]
    autocast: tuple[Any, ...]
    wanted: Wanted | None


Keyed = tuple[Call, CallKey]
"""A call with its key."""


def key_of(call: Call, modules: Sequence[nn.Module]) -> CallKey:
    """Return the key of a call of a model that has these modules."""
    return CallKey(
        call.key,
        tuple((t.dtype, t.dim(), t.device) for t in call.tensors),
        tuple(module.training for module in modules),
        autocast_mode(),
        wanted_gradients(modules, call.tensors),
    )


def reason_of(taken: Sequence[Keyed], captured: Sequence[Keyed], model: nn.Module) -> str:
    """Return as a reason how a call differs from the one that is most like it; of two such, from the later.

    Args:
        taken: the call as each program takes it.
        captured: the call that each program was captured from.
        model: the model, whose modules the keys tell of.
    """
    found = [list(_differences(*pair, model)) for pair in zip(taken, captured, strict=True)]
    return " and ".join(min(reversed(found), key=len))


def _differences(call: Keyed, other: Keyed, model: nn.Module) -> Iterator[str]:
    (this, key), (known, past) = call, other
    if key.arguments != past.arguments:
        yield _of_arguments(this, known)
    elif key.tensors != past.tensors:
        yield from _of_tensors(this.names, key, past)
    if key.modes != past.modes:
        yield _of_modes(key.modes, past.modes, [name for name, _ in model.named_modules()])
    if key.autocast != past.autocast:
        yield f"autocast is {_autocast(key)}, it was {_autocast(past)}"
    if key.wanted != past.wanted:
        yield _of_gradients(key.wanted, past.wanted)


def _of_arguments(call: Call, other: Call) -> str:
    names, others = [leaf.name for leaf in call.leaves], [leaf.name for leaf in other.leaves]
    if names != others:
        missing = [name for name in others if name not in names]
        added = [name for name in names if name not in others]
        parts = [f"without {', '.join(missing)}"] * bool(missing) + [f"with {', '.join(added)}"] * bool(added)
        return f"another structure of arguments: {' and '.join(parts) or 'in another order'}"
    for leaf, known in zip(call.leaves, other.leaves, strict=True):
        if leaf.key != known.key:
            return _of_leaf(leaf, known)
    return "another structure of arguments: lists, tuples or dicts are nested otherwise"


def _of_leaf(leaf: Leaf, known: Leaf) -> str:
    if leaf.kind == known.kind == "constant":
        return f"{leaf.name} has {leaf.value!r} as a constant, it had {known.value!r}"
    return f"{leaf.name} is {_kind(leaf)}, it was {_kind(known)}"


def _kind(leaf: Leaf) -> str:
    if leaf.kind == "constant":
        return f"the constant {leaf.value!r}"
    return _KINDS[leaf.kind] + (f" ({leaf.value})" if leaf.value is not None else "")


_KINDS = {"tensor": "a tensor", "sparse": "a sparse tensor", "quantized": "quantized rows", "int": "an int"}


def _of_tensors(names: Sequence[str], key: CallKey, past: CallKey) -> Iterator[str]:
    for name, (dtype, dims, device), known in zip(names, key.tensors, past.tensors, strict=True):
        if dtype != known[0]:
            yield f"{name} is {_name(dtype)}, it was {_name(known[0])}"
        if dims != known[1]:
            yield f"{name} has {dims} dimensions, it had {known[1]}"
        if device != known[2]:
            yield f"{name} is on {device}, it was on {known[2]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_modes(modes: Sequence[bool], past: Sequence[bool], paths: Sequence[str]) -> str:
    changed = [place for place, pair in enumerate(zip(modes, past, strict=True)) if pair[0] != pair[1]]
    first = changed[0]
    is_part = first > 0 and len(changed) > 1
    others = f" ({len(changed)} of {len(modes)} modules changed)" if is_part else ""
    owner = paths[first] or "the model"
    return f"{owner} is in {_MODES[modes[first]]} mode, it was in {_MODES[past[first]]} mode{others}"


_MODES = {True: "train", False: "eval"}


def _autocast(key: CallKey) -> str:
    pairs = zip(("cpu", "cuda"), key.autocast, strict=True)
    on = [f"{_name(dtype)} on {device}" for device, dtype in pairs if dtype is not None]
    return " and ".join(on) or "off"


def _of_gradients(wanted: Wanted | None, past: Wanted | None) -> str:
    if past is None or wanted is None:
        return "gradients are wanted" if past is None else "no gradients are wanted"
    of = "weights" if wanted[0] != past[0] else "arguments"
    return f"gradients of other {of} are wanted"
