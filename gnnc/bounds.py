"""Node ids are checked before anything reads with them, once for each distinct graph."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnc.errors import GraphError
from gnnc.passes.bounds import IndexBound
from gnnc.runtime.structure_cache import StructureCache

_NOTHING = torch.empty(0)
_NODES = re.compile(r"x(?:_dict)?\['([^']*)'\]")
_EDGES = re.compile(r"edge_index(?:_dict)?\[\('([^']*)', '[^']*', '([^']*)'\)\]")


def bounds_by_type(names: Sequence[str], found: Sequence[IndexBound]) -> list[IndexBound]:
    """The bounds that follow from node and edge types, where the program itself shows none.

    A layer that numbers all types through (``HGTConv``) adds an offset to the ids: one out of the range of
    its own type would be a node of another. Ids of ``edge_index_dict[(a, relation, b)]`` are rows of
    ``x_dict[a]`` and ``x_dict[b]``; so for ``edge_index`` and ``x`` of ``to_hetero``.
    """
    known = {(bound.input, bound.row) for bound in found if bound.bound is not None}
    rows = {match[1]: name for name in names if (match := _NODES.fullmatch(name))}
    return [
        IndexBound(name, row, (rows[kind], 0))
        for name in names
        if (match := _EDGES.fullmatch(name))
        for row, kind in enumerate(match.groups())
        if kind in rows and (name, row) not in known
    ]


class Bounds:
    """The index bounds of a program.

    Args:
        names: names of the flat input tensors.
        bounds: what ``raise`` found; those whose size is no input's are checked by ``gnnc.csr``.
    """

    def __init__(self, names: Sequence[str], bounds: Sequence[IndexBound]) -> None:
        position = {name: i for i, name in enumerate(names)}
        self._bounds = tuple(
            (position[b.input], b) for b in bounds if b.input in position and b.bound is not None
        )
        self._inputs = tuple(sorted({i for i, _ in self._bounds}))
        self._sizes = tuple(
            sorted(
                {(position[b.bound[0]], b.bound[1]) for _, b in self._bounds if isinstance(b.bound, tuple)}
            )
        )
        self._position = position
        self._cache = StructureCache()

    def __bool__(self) -> bool:
        return bool(self._bounds)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Refuse ids that are out of range; remembers the tensors that were fine.

        Raises:
            GraphError: names the argument, the position and the range.
        """
        key = [tensors[i] for i in self._inputs]
        key += [tensors[i].shape[dim] for i, dim in self._sizes]  # type: ignore[misc]
        self._cache.get(key, lambda: self._check(tensors))

    def clear(self) -> None:
        """Forget what was checked."""
        self._cache.clear()

    def _check(self, tensors: Sequence[Tensor]) -> Tensor:
        for position, bound in self._bounds:
            _check_one(tensors[position], bound, self._limit(bound, tensors))
        return _NOTHING

    def _limit(self, bound: IndexBound, tensors: Sequence[Tensor]) -> int:
        if isinstance(bound.bound, tuple):
            name, dim = bound.bound
            return tensors[self._position[name]].shape[dim]
        assert bound.bound is not None
        return bound.bound


def _check_one(ids: Tensor, bound: IndexBound, limit: int) -> None:
    part = ids if bound.row is None else ids[bound.row]
    if part.numel() == 0:
        return
    low, high = (int(value) for value in part.aminmax())
    if low >= 0 and high < limit:
        return
    first = ((part < 0) | (part >= limit)).nonzero()[0].tolist()
    place = first if bound.row is None else [bound.row, *first]
    raise GraphError(
        f"{bound.input}[{', '.join(map(str, place))}] = {int(part[tuple(first)])} is not a node: ids must be "
        f"in 0..{limit - 1} ({limit} nodes); check it against the number of rows of x"
    )
