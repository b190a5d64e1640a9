"""The architectures that tests compile CUDA kernels for; all but sm_90 are slow."""

from collections.abc import Sequence
from typing import Any

import pytest
from slow import slow_but

ARCHITECTURES = slow_but(["sm_90"], ["sm_80", "sm_90", "sm_100"])
"""Parameters of a test: `make test` compiles for sm_90, `make test-all` for each."""


def all_for_one(sizes: Sequence[Any]) -> list[Any]:
    """Return parameters (architecture, size): all sizes for sm_90, the last for the others.

    Register files are of one size. What differs is the code for an element, which the widest size, the last,
    shows where registers are fewest.
    """
    others = [pytest.param(other, sizes[-1], marks=pytest.mark.slow) for other in ("sm_80", "sm_100")]
    return [*(("sm_90", size) for size in sizes), *others]
