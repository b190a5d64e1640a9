"""Graphs and calls for the tests of the sparse kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from gnnc.runtime.cpu import library

STORE_F32 = [60, 0, 0, 0]
WIDTHS = (1, 7, 16, 47, 64, 100, 602)


class Graph(NamedTuple):
    rowptr: Tensor
    col: Tensor
    num_src: int
    num_dst: int

    @property
    def num_edges(self) -> int:
        return self.col.numel()

    def dst(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.num_dst), self.rowptr.diff())


def from_edges(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Graph:
    order = torch.argsort(dst, stable=True)
    counts = torch.bincount(dst, minlength=num_dst)
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return Graph(rowptr, src[order].to(torch.int32), num_src, num_dst)


def random_graph(num_src: int, num_dst: int, num_edges: int) -> Graph:
    """Destinations are skewed, so there are isolated nodes, duplicates, self loops and long rows."""
    src = torch.randint(num_src, (num_edges,))
    dst = (num_dst * torch.rand(num_edges) ** 2.5).long()
    return from_edges(src, dst, num_src, num_dst)


def star(num_edges: int, num_src: int = 50) -> Graph:
    return from_edges(torch.randint(num_src, (num_edges,)), torch.full((num_edges,), 2), num_src, 5)


GRAPHS: dict[str, Callable[[], Graph]] = {
    "random": lambda: random_graph(300, 257, 4000),
    "chunks": lambda: random_graph(900, 3000, 60000),
    "no-edges": lambda: random_graph(5, 7, 0),
    "one-edge": lambda: random_graph(1, 1, 1),
    "loops": lambda: from_edges(torch.arange(40).repeat(3), torch.arange(40).repeat(3), 40, 40),
    "star": lambda: star(700),
}


def padded_int8(q: Tensor) -> Tensor:
    """Copy a matrix into rows of 64 aligned bytes, zero past the width."""
    rows, width = q.shape
    stride = (width + 63) // 64 * 64
    storage = torch.zeros(rows * stride + 64, dtype=torch.int8)
    start = -storage.data_ptr() % 64
    view = storage[start : start + rows * stride].view(rows, stride)[:, :width]
    return view.copy_(q)


def random_int8(rows: int, width: int) -> Tensor:
    return padded_int8(torch.randint(-127, 128, (rows, width), dtype=torch.int8))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_at_any_thread_count(run: Callable[[], Tensor]) -> Tensor:
    """Return the result of ``run``, after checking that 1, 2 and 4 threads give the same bits."""
    results: list[Tensor] = []
    for count in (1, 2, 4):
        with threads(count):
            results.append(run())
    assert all(torch.equal(results[0], other) for other in results[1:])
    return results[0]


def relative_error(got: Tensor, want: Tensor, size: Tensor | None = None) -> float:
    """Return the RMS error over the RMS of ``want``, or of ``size``: of sums, the sums of magnitudes."""
    assert got.shape == want.shape and torch.isfinite(got).all()
    size = want if size is None else size
    return float((got.double() - want).norm() / size.norm().clamp(min=1e-30)) if want.numel() else 0.0


def ops():  # noqa: ANN201 - torch.ops has no type
    library.load()
    return torch.ops.gnnc_cpu


def spmm(
    g: Graph,
    x: Tensor,
    value: Tensor | None = None,
    x_scale: Tensor | None = None,
    shift: Tensor | None = None,
    reduce: int = 0,
    heads: int = 1,
    col: bool = True,
) -> Tensor:
    def run() -> Tensor:
        out = torch.full((g.num_dst, x.shape[1]), float("nan"))
        edges = g.col if col else None
        ops().spmm(g.rowptr, edges, value, x, x_scale, shift, reduce, heads, STORE_F32, [], [], [out])
        return out

    return same_at_any_thread_count(run)


def segment_sum(g: Graph, messages: Tensor) -> Tensor:
    """Sum of the messages [E, ...] of each row, in the messages' type."""
    out = torch.zeros(g.num_dst, *messages.shape[1:], dtype=messages.dtype)
    return out.index_add_(0, g.dst(), messages)


def sum_error(got: Tensor, g: Graph, messages: Tensor) -> float:
    messages = messages.double()
    return relative_error(got, segment_sum(g, messages), segment_sum(g, messages.abs()))
