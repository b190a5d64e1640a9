"""Memory plan of a program: which temporaries it has, and which of them share memory.

A temporary is a region of a buffer, with a shape and strides; buffers whose lives do not meet lie in
the same slot of the arena.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from gnnc.runtime.program.launches import Expr, variable
from gnnc.runtime.program.sizes import assumed, expression

END = 1 << 60
"""A step behind the last one."""


@dataclass(slots=True)
class Buffer:
    """Memory of the arena that kernels write.

    Attributes:
        shape: ``(rows, width)``.
        stride: elements from one row to the next, padding included.
        dtype: element type.
        first, last: steps between which the memory is in use.
        regions: number of the arena's tensor, by (text of the shape, text of the strides).
        slot: number of the slot of the arena, once planned.
    """

    shape: tuple[Any, ...]
    stride: Any
    dtype: torch.dtype
    first: int
    last: int
    regions: dict[tuple[str, str], int] = field(default_factory=dict)
    slot: int = -1

    @property
    def assumed_bytes(self) -> int:
        """Bytes at assumed sizes, to plan which buffers share memory."""
        rows = assumed(self.shape[0]) if self.shape else 1
        return rows * self.stride * self.dtype.itemsize

    @property
    def has_fixed_size(self) -> bool:
        """Return whether the buffer is as large on every graph."""
        return not self.shape or bool(expression(self.shape[0]).is_number)


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """A tensor of the arena, as the program's layout function makes it.

    Attributes:
        buffer: the memory that the tensor lies in.
        shape: text of its shape, a tuple.
        stride: text of its strides, a tuple.
    """

    buffer: Buffer
    shape: str
    stride: str


class MemoryPlan:
    """Buffers and regions of one program.

    Attributes:
        buffers: the buffers, in the order of their first step.
        regions: the tensors of the arena, by number; tensor ``i`` is the variable ``t{i}``.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.regions: list[PlannedRegion] = []
        self._buffers_by_name: dict[str, Buffer] = {}

    def add(self, buffer: Buffer) -> Buffer:
        """Plan memory for a buffer and return it."""
        self.buffers.append(buffer)
        return buffer

    def region(self, buffer: Buffer, shape: Iterable[Expr], stride: Iterable[int]) -> Expr:
        """Return the tensor of this shape and these strides in a buffer."""
        key = _tuple_text(size.text for size in shape), _tuple_text(map(str, stride))
        if key not in buffer.regions:
            buffer.regions[key] = len(self.regions)
            self.regions.append(PlannedRegion(buffer, *key))
        name = f"t{buffer.regions[key]}"
        self._buffers_by_name[name] = buffer
        return variable(name)

    @property
    def names(self) -> list[str]:
        """The variables of the arena's tensors."""
        return list(self._buffers_by_name)

    def slots(self) -> dict[str, int]:
        """Return the slot of each variable of the arena, once slots are assigned."""
        return {name: buffer.slot for name, buffer in self._buffers_by_name.items()}

    def keep(self, name: str) -> None:
        """Keep the memory of variable ``name`` to the end of the call, if it is a tensor of the arena."""
        if name in self._buffers_by_name:
            self._buffers_by_name[name].last = END


def _tuple_text(texts: Iterable[str]) -> str:
    items = list(texts)
    return f"({', '.join(items)},)" if items else "()"


def assign_slots(buffers: Iterable[Buffer]) -> None:
    """Share memory between buffers whose lives do not meet, in order of their first step.

    Each buffer takes the free slot that grows least for it, of those the smallest. Buffers of fixed size
    share among themselves: on a larger graph one would make a slot grow by all of another buffer. Slots are
    numbered by size, those of fixed size last, so that programs which share an arena share large slots.
    """
    buffers = list(buffers)
    slots: list[tuple[int, int, bool]] = []
    for buffer in sorted(buffers, key=lambda b: b.first):
        size, fixed = buffer.assumed_bytes, buffer.has_fixed_size
        free = [
            (max(size - held, 0), held, i)
            for i, (end, held, of_fixed) in enumerate(slots)
            if end < buffer.first and of_fixed == fixed
        ]
        if free:
            _, held, buffer.slot = min(free)
            slots[buffer.slot] = (buffer.last, max(held, size), fixed)
        else:
            buffer.slot = len(slots)
            slots.append((buffer.last, size, fixed))
    order = sorted(range(len(slots)), key=lambda i: (slots[i][2], -slots[i][1]))
    numbers = {old: new for new, old in enumerate(order)}
    for buffer in buffers:
        buffer.slot = numbers[buffer.slot]
