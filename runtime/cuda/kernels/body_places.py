"""Places of elements in the values of a body, as C++ expressions of indices."""

import ast
import operator
from math import prod
from typing import Any

from gnnc.ir.body import EDGES
from gnnc.runtime.cuda.kernels.epilogue import literal
from gnnc.runtime.row_program.build import Refusal

Place = tuple[str, ...]
"""Indices of an element, one a dimension; that of the edge dimension is ``"edge"``."""


def places(name: str, shape: tuple[int, ...]) -> Place:
    """Return the place that a flat index stands for in a shape."""
    found, remaining, total = [], prod(shape), prod(shape)
    for size in shape:
        is_outermost = remaining == total  # less than its size, as the flat index is less than the total
        remaining //= max(size, 1)
        outer = name if remaining == 1 else f"({name} / {remaining})"
        found.append("0" if size == 1 else outer if is_outermost else f"({outer} % {size})")
    return tuple(found)


def flat(place: Place, shape: tuple[int, ...]) -> str:
    """Return the flat index of a place."""
    terms, remaining = [], prod(shape)
    for index, size in zip(place, shape, strict=True):
        remaining //= max(size, 1)
        if size != 1 and index != "0":
            terms.append(index if remaining == 1 else f"{index} * {remaining}")
    return " + ".join(terms) or "0"


def between(place: Place, shape: tuple[int, ...], source: tuple[int, ...]) -> Place:
    """Return the place in ``source`` of an element of its reshape; the edge dimension stays in front."""
    edges = bool(shape) and shape[0] == EDGES
    if edges != (bool(source) and source[0] == EDGES):
        raise Refusal("the body folds the edge dimension into another")
    if not edges:
        return places(f"({flat(place, shape)})", source)
    if source[1:] == shape[1:]:
        return place
    return (place[0], *places(f"({flat(place[1:], shape[1:])})", source[1:]))


def broadcast(place: Place, shape: tuple[int, ...]) -> Place:
    """Return the place in an operand that is broadcast to the place of the result."""
    trailing = place[len(place) - len(shape) :]
    return tuple("0" if size == 1 else index for index, size in zip(trailing, shape, strict=True))


def number_of(value: Any) -> str:
    """Return a number as C++."""
    if isinstance(value, bool):
        return "1.0f" if value else "0.0f"
    if isinstance(value, int | float):
        return f"({literal(float(value))})"
    raise Refusal(f"the body holds {value!r}")


def is_in_vector(index: str) -> bool:
    """Return whether an index of a row is ``column``, moved by a multiple of four (``slice``, ``cat``)."""
    form = _linear_form(ast.parse(index, mode="eval").body)
    return form is not None and form[0] == 1 and form[1] % 4 == 0


def is_column(index: str) -> bool:
    """Return whether an index is ``column``."""
    return _linear_form(ast.parse(index, mode="eval").body) == (1, 0)


def _linear_form(index: ast.expr) -> tuple[int, int] | None:
    """Return the factor of ``column`` and the summand of an index; None where it is not linear in it."""
    match index:
        case ast.Name("column"):
            return 1, 0
        case ast.Constant(int(number)):
            return 0, number
        case ast.BinOp(left, ast.Add() | ast.Sub() as sign, right):
            terms = _linear_form(left), _linear_form(right)
            combine = operator.add if isinstance(sign, ast.Add) else operator.sub
            return None if None in terms else tuple(map(combine, *terms))
        case ast.BinOp(ast.Constant(int(number)), ast.Mult(), term) | ast.BinOp(
            term, ast.Mult(), ast.Constant(int(number))
        ):
            form = _linear_form(term)
            return None if form is None else (number * form[0], number * form[1])
    return None
