"""The mark of tests that ``make test`` leaves to ``make test-all``."""

from collections.abc import Sequence
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
