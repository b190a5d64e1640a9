"""Node ids are checked before anything reads with them, once for each distinct graph."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gnnc.capture.guards import InputGuard
from gnnc.errors import GraphError
from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import argument, unpack
from gnnc.ir.source import Source, source_of
from gnnc.passes.edges.index_bounds import IndexBound
from gnnc.runtime.program.sizes import expression
from gnnc.runtime.structure.cache import StructureCache
from gnnc.runtime.structure.runner import StructureRunner

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


@dataclass(frozen=True, slots=True)
class _Check:
    """The bounds on one input that share a limit.

    Attributes:
        ids: position of the input's tensor.
        limit: the limit, or the position of the tensor and the dimension that say it.
        bounds: the bounds, as ``raise`` found them.
        whole: whether the bounds hold for all of the tensor.
        is_pointer: whether the tensor holds the offsets of a compressed matrix; the limit is then its number
            of entries.
    """

    ids: int
    limit: int | tuple[int, int]
    bounds: tuple[IndexBound, ...]
    whole: bool
    is_pointer: bool

    def refuse(self, ids: Tensor, limit: int) -> None:
        """Refuse ids that are out of range; all rows are looked at together first."""
        if self.is_pointer:
            return _check_pointer(ids, self.bounds[0].input, limit)
        if self.whole and _within(ids, limit):
            return
        for bound in self.bounds:
            _check_one(ids, bound, limit)


class Bounds:
    """The index bounds of a program.

    Args:
        guards: shapes and dtypes that the flat input tensors must have.
        bounds: the bounds that ``raise`` found; those whose size is no input's are checked by ``gnnc.csr``.
    """

    def __init__(self, guards: Sequence[InputGuard], bounds: Sequence[IndexBound]) -> None:
        self._guards = guards
        self._checks = _by_limit(guards, bounds)
        self._cache = StructureCache()

    def __bool__(self) -> bool:
        return bool(self._checks)

    def leave_to(self, runner: StructureRunner, structure: GraphModule) -> None:
        """Let the structure of a graph be checked where it is built: it is remembered there anyway."""
        nodes = placeholders(structure)
        inputs = {source_of(node): node for node in nodes}
        sizes = {expression(n.meta["val"]): n for n in nodes if isinstance(n.meta.get("val"), torch.SymInt)}
        slots = {node: slot for slot, node in enumerate(nodes)}

        def left(check: _Check) -> bool:
            ids = inputs.get(Source("input", self._guards[check.ids].name))
            if ids is None or isinstance(check.limit, int):
                return False
            tensor, dim = check.limit
            limit = sizes.get(self._guards[tensor].shape[dim])
            if limit is None:
                return False
            return runner.check_inputs(
                (slots[ids], slots[limit]), check.refuse, sorts=_is_sorted_alone(ids, limit, check.bounds)
            )

        self._checks = tuple(check for check in self._checks if not left(check))

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Refuse ids that are out of range; remembers the tensors that were fine.

        Raises:
            GraphError: names the argument, the position and the range.
        """
        limits = [_limit(check, tensors) for check in self._checks]
        key = [tensors[check.ids] for check in self._checks]
        self._cache.get([*key, *limits], lambda: self._check(tensors, limits))

    def clear(self) -> None:
        """Forget what was checked."""
        self._cache.clear()

    def _check(self, tensors: Sequence[Tensor], limits: Sequence[int]) -> Tensor:
        for check, limit in zip(self._checks, limits, strict=True):
            check.refuse(tensors[check.ids], limit)
        return _NOTHING


def _by_limit(guards: Sequence[InputGuard], bounds: Sequence[IndexBound]) -> tuple[_Check, ...]:
    position = {guard.name: i for i, guard in enumerate(guards)}
    found: dict[tuple[int, int | tuple[int, int], bool], list[IndexBound]] = {}
    for bound in bounds:
        if bound.input in position and bound.bound is not None:
            limit = (
                bound.bound if isinstance(bound.bound, int) else (position[bound.bound[0]], bound.bound[1])
            )
            found.setdefault((position[bound.input], limit, bound.is_pointer), []).append(bound)
    return tuple(
        _Check(ids, limit, tuple(alike), _is_whole(guards[ids], alike), is_pointer)
        for (ids, limit, is_pointer), alike in found.items()
    )


def _is_whole(guard: InputGuard, bounds: Sequence[IndexBound]) -> bool:
    rows = Counter(bound.dim for bound in bounds)
    return any(bound.row is None for bound in bounds) or any(guard.shape[dim] == n for dim, n in rows.items())


def _is_sorted_alone(ids: Node, limit: Node, bounds: Sequence[IndexBound]) -> bool:
    """Return whether ``gnnc.csr``, with this limit, is all that takes the bounded rows of ``ids``."""
    sorted_rows = set()
    for row in ids.users:
        if str(row.target) != "aten.select.int" or argument(row, "dim") != 0:
            return False
        for user in row.users:
            if str(user.target) != "gnnc.csr.default":
                return False
            src, dst, num_src, num_dst = unpack(user, "src", "dst", "num_src", "num_dst")
            if (src is row and num_src is not limit) or (dst is row and num_dst is not limit):
                return False
            sorted_rows.add(argument(row, "index"))
    return {bound.row for bound in bounds} <= sorted_rows


def _limit(check: _Check, tensors: Sequence[Tensor]) -> int:
    if isinstance(check.limit, int):
        return check.limit
    tensor, dim = check.limit
    return tensors[tensor].shape[dim]


def _within(ids: Tensor, limit: int) -> bool:
    if ids.numel() == 0:
        return True
    low, high = ids.aminmax()
    return int(low) >= 0 and int(high) < limit


def _check_pointer(pointer: Tensor, name: str, entries: int) -> None:
    steps = torch.cat([pointer, pointer.new_tensor([entries])]).diff(prepend=pointer.new_zeros(1))
    wrong = steps < 0
    wrong[0], wrong[-1] = steps[0] != 0, steps[-1] != 0
    if not bool(wrong.any()):
        return
    place = min(int(wrong.nonzero()[0]), pointer.numel() - 1)
    before = f" after {int(pointer[place - 1])}" if place else ""
    raise GraphError(
        f"{name}[{place}] = {int(pointer[place])}{before} is no offset of a matrix with {entries} entries: "
        f"offsets begin with 0, never fall and end with {entries}; "
        "torch.sparse.check_sparse_tensor_invariants.enable() finds where such a matrix is made"
    )


def _check_one(ids: Tensor, bound: IndexBound, limit: int) -> None:
    part = ids if bound.row is None else ids.select(bound.dim, bound.row)
    if _within(part, limit):
        return
    first = ((part < 0) | (part >= limit)).nonzero()[0].tolist()
    place = first if bound.row is None else [*first[: bound.dim], bound.row, *first[bound.dim :]]
    raise GraphError(
        f"{bound.input}[{', '.join(map(str, place))}] = {int(part[tuple(first)])} is not a node: ids must be "
        f"in 0..{limit - 1} ({limit} nodes); check it against the number of rows of x"
    )
