"""Sums of gradients of slices: concatenations where the slices fill the tensor, sums where they do not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gnnc.passes.rewrite.slice_gradients import join_slice_gradients

aten = torch.ops.aten
SHAPE = [5, 6]


def cut(grad: Tensor, start: int, end: int, dim: int = 1) -> Tensor:
    """Return the gradient of a slice of a matrix of ``SHAPE``."""
    return aten.slice_backward(grad, SHAPE, dim, start, end, 1)


def picked(grad: Tensor, index: int, dim: int = 1) -> Tensor:
    """Return the gradient of a column or row of such a matrix."""
    return aten.select_backward(grad, SHAPE, dim, index)


def joined(function: Callable[..., Tensor], *given: Tensor) -> tuple[GraphModule, list[str]]:
    """Return the graph of a function after the rewrite, and the names of its ops."""
    gm = make_fx(function, tracing_mode="fake")(*given)
    join_slice_gradients(gm)
    gm.graph.lint()
    gm.recompile()
    ops = [str(node.target).split(".")[1] for node in gm.graph.nodes if node.op == "call_function"]
    return gm, ops


X, Y, ALL, COLUMN, ROW = (torch.randn(*size) for size in ([5, 2], [5, 4], [5, 6], [5], [6]))
END = 2**63 - 1
FILLED = {
    "two slices": (lambda x, y: cut(x, 0, 2) + cut(y, 2, 6), (X, Y), ["cat"]),
    "the other order, and indices from the end": (
        lambda x, y: cut(y, -4, END) + cut(x, 0, -4),
        (X, Y),
        ["cat"],
    ),
    "a sum of three": (
        lambda x, y, c: (cut(y, 2, 6) + picked(c, 0)) + picked(c, -5),
        (X, Y, COLUMN),
        ["unsqueeze", "cat"],
    ),
    "another term": (lambda x, y, a: (cut(x, 0, 2) + a) + cut(y, 2, 6), (X, Y, ALL), ["cat", "add"]),
    "each dimension": (
        lambda x, y, r, a: cut(x, 0, 2) + cut(a[:2], 0, 2, 0) + cut(y, 2, 6) + cut(a[2:], 2, 5, 0),
        (X, Y, ROW, ALL),
        ["slice", "cat", "slice", "cat", "add"],
    ),
    "a sum with itself": (
        lambda x, y: (t := cut(x, 0, 2) + cut(y, 2, 6)) + t,
        (X, Y),
        ["cat", "add"],
    ),
    "a slice of everything": (lambda a: cut(a, 0, 6).exp(), (ALL,), ["exp"]),
    "twice": (
        lambda x, y: cut(x, 0, 2) + cut(y, 2, 6) + cut(x.exp(), 0, 2) + cut(y.exp(), 2, 6),
        (X, Y),
        ["cat", "exp", "exp", "cat", "add"],
    ),
}


@pytest.mark.parametrize("name", FILLED)
def test_slices_that_fill_a_tensor_are_concatenated(name: str) -> None:
    function, given, left = FILLED[name]
    gm, ops = joined(function, *given)
    assert sorted(ops) == sorted(left)
    torch.testing.assert_close(gm(*given), function(*given))


LEFT = {
    "columns are missing": (lambda x, y: cut(x, 0, 2) + cut(y[:, :3], 2, 5), (X, Y)),
    "slices overlap": (lambda x, y: cut(y, 0, 4) + cut(y, 2, 6), (X, Y)),
    "of different dimensions": (lambda x, a: cut(x, 0, 2) + cut(a[:3], 0, 3, 0), (X, ALL)),
    "every second column": (
        lambda x, y: aten.slice_backward(y[:, :3], SHAPE, 1, 0, 6, 2) + cut(x, 0, 2),
        (X, Y),
    ),
    "a sum with a factor": (lambda x, y: torch.add(cut(x, 0, 2), cut(y, 2, 6), alpha=2), (X, Y)),
    "a slice with itself": (lambda x, y: (s := cut(x, 0, 2)) + s + cut(y, 2, 6), (X, Y)),
    "another op reads one": (lambda x, y: (s := cut(x, 0, 2)) + cut(y, 2, 6) + s.exp(), (X, Y)),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_sums_stay(name: str) -> None:
    function, given = LEFT[name]
    gm, ops = joined(function, *given)
    assert "cat" not in ops and "slice_backward" in ops
    torch.testing.assert_close(gm(*given), function(*given))


def test_a_sum_that_is_read_twice_is_joined_by_itself() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        total = cut(x, 0, 2) + cut(y, 2, 6)
        return total.exp() + total

    gm, ops = joined(function, X, Y)
    assert sorted(ops) == ["add", "cat", "exp"]
    torch.testing.assert_close(gm(X, Y), function(X, Y))
