"""The state of a tensor: a key that shows whether it was written or replaced, and whether it has memory."""

import weakref
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_steps = 0
"""Number of steps that optimizers of this process have taken: fused optimizers bump no version counter."""
_numbers = count()
_STEP = "_gnnc_step"
"""Attribute of a storage object: the last step of an optimizer that it is a parameter of."""
_MARK = "_gnnc_number"
"""Attribute of a storage object, which torch keeps for as long as the memory lives."""


class _Assignment(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a tensor, with the number of its storage when last seen, and one of its own."""

    __slots__ = ("key", "number", "storage")

    key: int
    number: int
    storage: int


_assignments: dict[int, _Assignment] = {}
"""The last assignment of memory to a tensor, by the tensor's id."""


def _count_step(optimizer: Any, *_: Any) -> None:
    """Count a step, and mark the memory that it may write: fused optimizers bump no version counter."""
    global _steps
    _steps += 1
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            setattr(parameter.untyped_storage(), _STEP, _steps)


register_optimizer_step_post_hook(_count_step)


def optimizer_steps() -> int:
    """Return the number of steps that the optimizers of this process have taken."""
    return _steps


def state(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that changes when a tensor changes: version counter, memory, layout and dtype.

    The version is None for an inference tensor, which counts no writes: compare its content instead. Memory
    is known by a number that no other storage gets: an address is given out again once it is free.
    """
    try:
        version = tensor._version
    except RuntimeError:
        version = None
    step = getattr(tensor.untyped_storage(), _STEP, 0) if tensor.is_floating_point() else 0
    return (
        _storage_number(tensor),
        tensor.data_ptr(),
        version,
        step,
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def state_of_object(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key of this tensor object: its state, and the number of the last ``tensor.data = other`` seen.

    An assignment of ``data`` counts no version. Memory that comes back to a tensor may have been written
    meanwhile through another tensor, so it is other memory than before.
    """
    key = state(tensor)
    owner, storage = tensor, key[0]
    base = tensor._base
    if base is not None:  # a fresh view has no history of its own
        if base.layout is not torch.strided:
            return 0, *key
        owner = base if _storage_number(base) == storage else tensor
    known = _assignments.get(id(owner))
    if known is None or known.storage != storage or known() is not owner:
        known = _assigned(owner, storage)
    return known.number, *key


def _assigned(tensor: Tensor, storage: int) -> _Assignment:
    """Record that a tensor has this storage from now on."""
    made = _Assignment(tensor, _forget)
    made.key, made.storage, made.number = id(tensor), storage, next(_numbers)
    _assignments[made.key] = made
    return made


def _forget(freed: Any) -> None:
    if _assignments.get(freed.key) is freed:
        _assignments.pop(freed.key, None)


def _storage_number(tensor: Tensor) -> int:
    """Return the number of a tensor's storage, which no other storage has or will have."""
    storage = tensor.untyped_storage()
    try:
        return getattr(storage, _MARK)
    except AttributeError:
        number = next(_numbers)
        setattr(storage, _MARK, number)
        return number


def storage_fault(tensor: Tensor) -> str | None:
    """Return why the storage of a dense tensor does not hold its elements, or None where it does.

    ``tensor.untyped_storage().resize_(n)`` frees or shortens the memory of a tensor whose shape stays:
    FSDP does so with parameters, and off-loading with activations.
    """
    if tensor.numel() == 0:
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    held = tensor.untyped_storage().nbytes()
    if held >= needed:
        return None
    how = "freed" if held == 0 else f"shortened to {held} bytes"
    return f"its storage was {how}, but its elements take {needed} bytes"
