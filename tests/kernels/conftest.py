"""Kernels run on several threads, however many the machine has: what threads do together may be wrong."""

from collections.abc import Iterator

import pytest
from kernel_graphs import threads


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    with threads(2):
        yield
