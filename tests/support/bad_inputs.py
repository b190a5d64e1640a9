"""Calls that no model can take, made from a good one: each argument spoilt in every way that it can be."""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import gnnc
from gnnc.capture.validate import is_graph_name

_FAR = 10**9

Spoils = dict[str, Callable[[Tensor], Any]]


@dataclass(frozen=True)
class BadCall:
    """A call and what its error must name.

    Attributes:
        label: what is wrong.
        args: positional arguments.
        kwargs: keyword arguments.
        named: a word of the message: the argument. Where rows are missing, the edges may be named instead.
        traced: whether only a trace can tell that the call is wrong; that takes a second.
        may_run: whether some models take it: a third row of ids, for one that reads two of them.
    """

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: str
    traced: bool = False
    may_run: bool = False


def _set(value: Tensor, place: Any, number: int) -> Tensor:
    value = value.clone()
    value[place] = number
    return value


EDGES: Spoils = {
    "source too large": lambda e: _set(e, (0, 3), _FAR),
    "destination too large": lambda e: _set(e, (1, 0), _FAR),
    "source negative": lambda e: _set(e, (0, -1), -1),
    "destination negative": lambda e: _set(e, (1, 2), -7),
    "float": lambda e: e.float(),
    "bool": lambda e: e > 3,
    "three rows": lambda e: torch.cat([e, e[:1]]),
    "one row": lambda e: e[:1],
    "transposed": lambda e: e.t().contiguous(),
    "one-dimensional": lambda e: e[0],
    "empty and one-dimensional": lambda e: e.new_empty(0),
}
SHAPES = frozenset(name for name in EDGES if not name.endswith(("large", "negative")))
"""Spoilt edges that eager can be asked about: no id in them is out of range."""
FEATURES: Spoils = {
    "half": lambda x: x.half(),
    "double": lambda x: x.double(),
    "complex": lambda x: x.to(torch.complex64),
}
ROWS: Spoils = {"no rows, but edges": lambda x: x[:0], "too few rows": lambda x: x[:1]}
TYPES: Spoils = {
    "too large": lambda i: _set(i, 1, _FAR),
    "negative": lambda i: _set(i, 0, -2),
}
TRACED_FEATURES: Spoils = {
    "wrong width": lambda x: x[:, :-1],
    "integers": lambda x: x.long(),
    "one-dimensional": lambda x: x[:, 0],
    "None": lambda x: None,
}
TRACED_EDGES: Spoils = {"None": lambda e: None, "a string": lambda e: "edges"}
TRACED_PER_EDGE: Spoils = {
    "too short": lambda w: w[:-1],
    "too long": lambda w: torch.cat([w, w[:1]]),
}


def bad_calls(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[BadCall]:
    """Yield calls that must be refused; ``args`` and ``kwargs`` are good ones."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    takes_any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    yield BadCall("unknown keyword", args, kwargs | {"edge_wieght": 1}, "edge_wieght")
    yield BadCall("no arguments", (), {}, parameters[0].name)
    if not takes_any_number:
        yield BadCall("too many", (*args, *[None] * 20), kwargs, type(model).__name__)
    paths, spec = pytree.tree_flatten_with_path((args, kwargs))
    tensors = [value for _, value in paths if isinstance(value, Tensor)]
    edges = max((value.shape[1] for value in tensors if _is_edges(value)), default=-1)
    rows = Counter(value.shape[:1] for value in tensors)
    seen = set()
    for position, (path, value) in enumerate(paths):
        if not isinstance(value, Tensor):
            continue
        name = _argument(path, parameters)
        # Values of one dictionary take one way through the code: the first of each form stands for all.
        form = name, value.dtype, value.dim(), _is_edges(value)
        if len(path) > 2 and form in seen:
            continue
        seen.add(form)
        for spoils, traced in _spoils(
            value, name, edges, alone=rows[value.shape[:1]] == 1 and len(path) == 2
        ):
            for label, spoil in spoils.items():
                flat = [item for _, item in paths]
                flat[position] = spoil(value)
                bad_args, bad_kwargs = pytree.tree_unflatten(flat, spec)
                may_run = spoils is EDGES and label in SHAPES
                yield BadCall(f"{name}: {label}", bad_args, bad_kwargs, name, traced, may_run)


def _argument(path: Any, parameters: list[inspect.Parameter]) -> str:
    """Return the name of the argument that a path into ``(args, kwargs)`` leads to."""
    if path[0].idx == 1:
        return path[1].key
    return parameters[min(path[1].idx, len(parameters) - 1)].name


def _is_edges(value: Any) -> bool:
    whole = isinstance(value, Tensor) and not value.is_floating_point()
    return whole and value.dim() == 2 and value.shape[0] == 2


def _spoils(value: Tensor, name: str, edges: int, *, alone: bool) -> Iterator[tuple[Spoils, bool]]:
    """Yield what can be wrong with an argument, and whether only a trace can tell.

    ``alone``: it is an argument by itself, and no other has as many rows.
    """
    if _is_edges(value):
        yield EDGES, not is_graph_name(name)
        yield TRACED_EDGES, True
    elif name == "batch":  # a large id asks for as many graphs, which is no mistake
        yield {"negative": TYPES["negative"]}, False
    elif "type" in name:
        yield TYPES, False
    elif value.shape[:1] == (edges,):
        yield TRACED_PER_EDGE, True
    elif value.is_floating_point() and value.dim() == 2:
        yield FEATURES, False
        yield ROWS, not alone
        yield TRACED_FEATURES, True


@torch.no_grad()
def assert_refused(
    compiled: gnnc.CompiledModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    traced: bool = False,
    tried: bool = True,
    same: Callable[[Tensor, Tensor], bool] = torch.equal,
    taken: Collection[str] = (),
) -> int:
    """Check every bad call, and that the good one gives the same bits afterwards; return their number.

    A call is refused, or gives what eager gives for it.

    Args:
        compiled: the compiled model.
        args: positional arguments of a good call.
        kwargs: keyword arguments of it.
        traced: whether to make the calls that only a trace can tell from a good one.
        tried: whether to make those that some models take: each is traced in every way that there is.
        same: whether two results of the good call are equal.
        taken: labels of calls that are not made.
    """
    good = pytree.tree_leaves(compiled(*args, **kwargs))
    calls = [call for call in bad_calls(compiled.model, args, kwargs) if traced or not call.traced]
    calls = [call for call in calls if call.label not in taken and (tried or not call.may_run)]
    for call in calls:
        expected = _eager(compiled.model, call) if call.may_run else None
        if expected is not None:
            found = pytree.tree_leaves(compiled(*call.args, **call.kwargs))
            assert all(map(_is_close, found, expected)), call.label
            continue
        try:
            compiled(*call.args, **call.kwargs)
        except gnnc.GnncError as error:
            message = str(error)
        else:
            pytest.fail(f"{call.label}: not refused")
        named = (call.named, "edge_index", "an argument", "these arguments")
        assert any(name in message for name in named), call.label
        assert ".cpp" not in message
        after = pytree.tree_leaves(compiled(*args, **kwargs))
        assert all(map(same, after, good)), call.label
    return len(calls)


def _eager(model: torch.nn.Module, call: BadCall) -> list[Any] | None:
    """Return the results of the model itself, or None where it raises."""
    try:
        return pytree.tree_leaves(model(*call.args, **call.kwargs))
    except Exception:  # whatever torch and PyG raise about it
        return None


def _is_close(found: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor):
        return found == expected
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True)
