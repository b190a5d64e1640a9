"""Comparison of a compiled model's outputs with eager's."""

from typing import Any

import torch
from torch.utils import _pytree as pytree
from zoo import Arguments

SIZES = [(60, 400), (37, 150), (1, 0), (1, 1), (7, 0)]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    norm = expected.double().norm()
    return ((got.double() - expected.double()).norm() / norm.clamp(min=1e-6)).item()


def eager(model: torch.nn.Module, arguments: Arguments) -> Any:
    """The model's own result, or None where the model itself does not run on a graph so small."""
    args, kwargs = arguments
    try:
        return model(*args, **kwargs)
    except ValueError:  # batch statistics of a single row
        assert args[0].shape[0] == 1
        return None


def assert_close(got: Any, expected: Any, limit: float, sizes: tuple[int, int]) -> None:
    got, got_spec = pytree.tree_flatten(got)
    expected, spec = pytree.tree_flatten(expected)
    assert got_spec == spec
    for actual, wanted in zip(got, expected, strict=True):
        assert actual.shape == wanted.shape
        assert actual.dtype == wanted.dtype
        if wanted.numel():
            assert relative_error(actual, wanted) <= limit, sizes


def capture_count(compiled: Any) -> int:
    """Return how many captures ``explain()`` lists."""
    return len(compiled.explain().rpartition("Captures")[2].strip().splitlines())
