"""The mark of tests that ``make test`` leaves to ``make test-all``."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def slow_if(is_slow: bool) -> Sequence[pytest.MarkDecorator]:
    """Return the marks of a case: ``slow``, or none."""
    return [pytest.mark.slow] if is_slow else []


def slow_after(count: int, values: Sequence[Any]) -> list[Any]:
    """Return values as parameters of a test, of which all but the first ``count`` are slow."""
    return [pytest.param(value, marks=slow_if(place >= count)) for place, value in enumerate(values)]


def slow_but(fast: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Return values as parameters of a test, of which all that are not in ``fast`` are slow."""
    return [pytest.param(value, marks=slow_if(value not in fast)) for value in values]


def mark_after_first(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the cases of a test that come after the first ones, by its mark ``first(count)``."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("first")
        if mark is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        if seen[test] > mark.args[0]:
            item.add_marker(pytest.mark.slow)
