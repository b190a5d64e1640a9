"""Random programs over the primitives: after every pass, and compiled, they compute what they say.

Graphs are built directly, not traced, so that shapes and orders come up that no model of the zoo
has. ``fuse`` may not change a bit; a compiled program may differ where a rounding of floats
moves an integer by one.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_programs import (
    SIZES,
    Recipe,
    check,
    recipes,
)

from gnnc.precision import BF16, FP32, INT8

PROPERTY = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@PROPERTY
@given(recipe=recipes, sizes=st.sampled_from(SIZES))
def test_fp32(recipe: Recipe, sizes: tuple[int, int]) -> None:
    check(recipe, sizes, FP32, static=False)


@pytest.mark.slow
@PROPERTY
@given(recipe=recipes, sizes=st.sampled_from(SIZES), static=st.booleans())
def test_int8(recipe: Recipe, sizes: tuple[int, int], static: bool) -> None:
    check(recipe, sizes, INT8, static)


@pytest.mark.slow
@PROPERTY
@given(recipe=recipes, sizes=st.sampled_from(SIZES))
def test_bf16(recipe: Recipe, sizes: tuple[int, int]) -> None:
    check(recipe, sizes, BF16, static=False)
