"""Tables of the values of a body: the place of each element in a row of the register that holds the value."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def table_of(shape: Sequence[int]) -> Tensor:
    """Return the table of a value of a shape whose elements are in order."""
    return torch.arange(math.prod(shape)).reshape(tuple(shape))


def are_adjacent(axes: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether only dimensions of one element lie between some dimensions, in order."""
    between = set(range(axes[0], axes[-1] + 1)) - set(axes)
    return all(shape[dim] == 1 for dim in between)


def runs_of(places: Sequence[int], sources: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield runs of adjacent places whose sources are equally far apart: place, source, length, step."""
    start = 0
    while start < len(places):
        end, step = start + 1, 1
        while end < len(places) and places[end] == places[end - 1] + 1:
            apart = sources[end] - sources[end - 1]
            if end == start + 1 and apart >= 0:
                step = apart
            elif apart != step:
                break
            end += 1
        yield places[start], sources[start], end - start, step
        start = end
