"""What is made of a tensor once, and lives as long as the tensor."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

_PREFIX = "gnnc_"


def kept(tensor: Tensor, name: str, build: Callable[[], Any]) -> Any:
    """Return what a tensor keeps under a name, built if it has none.

    Args:
        tensor: owns it; not one of the caller's.
        name: one for each thing that can be made of it.
        build: returns a tensor, None, or an object whose ``tensors`` are those that it holds.
    """
    table, key = vars(tensor), _PREFIX + name
    # Of threads that build at once the first is heard: a graph may hold the addresses of what it built.
    return table[key] if key in table else table.setdefault(key, build())


def tensors_kept(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor keeps."""
    for name, value in list(vars(tensor).items()):
        if name.startswith(_PREFIX) and value is not None:
            yield from (value,) if isinstance(value, Tensor) else value.tensors
