"""first_not_finite: which of some tensors holds NaN or an infinity."""

import pytest
import torch
from kernel_graphs import ops

BAD = [float("nan"), float("inf"), float("-inf")]


def first(*tensors: torch.Tensor) -> int:
    return ops().first_not_finite(tensors)


@pytest.mark.parametrize("count", [0, 1, 7, 100, 65_536, 300_000])
def test_finite_values_pass(count: int) -> None:
    largest = torch.full((count,), torch.finfo(torch.float32).max)
    assert first(largest, -largest, torch.zeros(count), torch.full((count,), 1e-42)) == -1


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("count", [1, 7, 100, 65_537, 300_000])
def test_the_first_is_named(bad: float, count: int) -> None:
    for place in {0, count // 2, count - 1}:
        one = torch.randn(count)
        one[place] = bad
        assert first(torch.ones(3), one, torch.tensor(bad)) == 1
        assert first(one) == 0


def test_of_no_dimension() -> None:
    assert first(torch.tensor(1.0), torch.tensor(float("nan"))) == 1


def test_other_types_are_refused() -> None:
    with pytest.raises(RuntimeError, match="must be Float"):
        first(torch.ones(3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="contiguous"):
        first(torch.ones(3, 2)[:, 0])
