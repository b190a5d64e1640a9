"""What is made of a tensor once, and lives as long as the tensor."""

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor

BUILDING = threading.RLock()
"""Held by who builds something of a tensor, and by who frees what nobody builds from any more."""
_PREFIX = "gnnc_"


def kept(tensor: Tensor, name: str, build: Callable[[], Any]) -> Any:
    """Return what a tensor keeps under a name, built if it has none.

    Args:
        tensor: owns it; not one of the caller's.
        name: one for each thing that can be made of it.
        build: returns a tensor, None, or an object whose ``tensors`` are those that it holds.
    """
    table, key = vars(tensor), _PREFIX + name
    if key in table:
        return table[key]
    with BUILDING:  # the first thread builds for all: a graph may hold the addresses of what it built
        return table[key] if key in table else table.setdefault(key, build())


def keep(tensor: Tensor, name: str, value: Any) -> None:
    """Have a tensor that nobody else has yet keep a value, in the place of what it kept under that name."""
    vars(tensor)[_PREFIX + name] = value


def drop_all_but(tensor: Tensor, needed: Collection[int]) -> None:
    """Have a tensor that nobody else has yet drop the objects whose tensors are not needed.

    Args:
        tensor: keeps what is dropped; tensors that it keeps stay.
        needed: ``id`` of every tensor that is.
    """
    for key, value in list(vars(tensor).items()):
        if key.startswith(_PREFIX) and not isinstance(value, Tensor | None):
            if not any(id(each) in needed for each in value.tensors):
                del vars(tensor)[key]


def tensors_kept(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor keeps."""
    for name, value in list(vars(tensor).items()):
        if name.startswith(_PREFIX) and value is not None:
            yield from (value,) if isinstance(value, Tensor) else value.tensors
