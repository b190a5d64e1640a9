"""csr against a stable argsort."""

import pytest
import torch
from kernel_graphs import from_edges, ops, threads
from torch import Tensor

from gnnc.errors import GraphError
from gnnc.ir.self_loops import csr_with_loops_reference
from gnnc.runtime.cpu.structure import csr_with_loops


def build(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
    num_edges = src.numel()
    rowptr = torch.full((num_dst + 1,), -7)
    col = torch.full((num_edges,), -7, dtype=torch.int32)
    perm = torch.full((num_edges,), -7)
    ops().csr(src, dst, num_src, num_dst, rowptr, col, perm)
    return rowptr, col, perm


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_edges", [0, 1, 999, 300_001])
def test_stable(num_edges: int, dtype: torch.dtype, count: int) -> None:
    src = torch.randint(500, (num_edges,))
    dst = (400 * torch.rand(num_edges) ** 3).long()
    with threads(count):
        rowptr, col, perm = build(src.to(dtype), dst.to(dtype), 500, 400)
    want = from_edges(src, dst, 500, 400)
    assert torch.equal(rowptr, want.rowptr)
    assert torch.equal(col, want.col)
    assert torch.equal(perm, torch.argsort(dst, stable=True))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("nodes", "edges"), [(0, 0), (1, 0), (1, 5), (7, 40), (500, 300_001), (4000, 900)])
def test_with_loops_equals_the_reference(nodes: int, edges: int, dtype: torch.dtype, count: int) -> None:
    src, dst = torch.randint(max(nodes, 1), (2, edges)).to(dtype)
    with threads(count):
        got = csr_with_loops(src, dst, nodes)
    for part, want in zip(got, csr_with_loops_reference(src, dst, nodes), strict=True):
        assert part.dtype == want.dtype and torch.equal(part, want)


@pytest.mark.parametrize("bad", [-1, 4])
@pytest.mark.parametrize("row", [0, 1])
def test_with_loops_refuses_ids(row: int, bad: int) -> None:
    edge_index = torch.tensor([[0, 1, 3], [1, 2, 3]])
    edge_index[row, 2] = bad
    with pytest.raises(GraphError, match=rf"csr_with_loops.*{'dst' if row else 'src'}\[2\] is {bad}"):
        csr_with_loops(*edge_index, 4)
    loop = torch.tensor([bad])
    with pytest.raises(GraphError, match=rf"src\[0\] is {bad}"):
        csr_with_loops(loop, loop, 4)


def test_strided() -> None:
    pairs = torch.randint(30, (200, 2))
    rowptr, col, perm = build(pairs[:, 0], pairs[:, 1].flip(0).flip(0), 30, 30)
    want = build(pairs[:, 0].contiguous(), pairs[:, 1].contiguous(), 30, 30)
    assert all(torch.equal(a, b) for a, b in zip((rowptr, col, perm), want, strict=True))


def test_no_nodes() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert build(empty, empty, 0, 0)[0].tolist() == [0]
    assert build(empty, empty, 3, 2)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("src", 70_000, 50, r"src\[70000\] is 50, but must be in 0..49"),
        ("src", 3, -1, r"src\[3\] is -1"),
        ("dst", 99_999, 40, r"dst\[99999\] is 40, but must be in 0..39"),
        ("dst", 0, -(2**40), r"dst\[0\] is -1099511627776"),
    ],
)
def test_index_out_of_range(name: str, at: int, value: int, message: str, count: int) -> None:
    src, dst = torch.randint(50, (100_000,)), torch.randint(40, (100_000,))
    bad = src if name == "src" else dst
    bad[at] = value
    if at + 1 < bad.numel():
        bad[-1] = 1000  # a later one is not the one that is named
    rowptr = torch.full((41,), -7)
    col, perm = torch.full((100_000,), -7, dtype=torch.int32), torch.full((100_000,), -7)
    with threads(count), pytest.raises(RuntimeError, match=message):
        ops().csr(src, dst, 50, 40, rowptr, col, perm)
    assert all((t == -7).all() for t in (rowptr, col, perm))


@pytest.mark.parametrize("num_edges", [0, 700])
def test_degree(num_edges: int) -> None:
    dst = torch.randint(30, (num_edges,))
    rowptr, out = from_edges(dst, dst, 30, 40).rowptr, torch.full((40,), -7.0)
    ops().degree(rowptr, out)
    assert torch.equal(out, torch.bincount(dst, minlength=40).float())
    with pytest.raises(RuntimeError, match="degree: rowptr must have 32 elements, but has 41"):
        ops().degree(rowptr, out[:31])


def test_other_types_are_refused() -> None:
    with pytest.raises(RuntimeError, match="int64 or both int32"):
        build(torch.zeros(3), torch.zeros(3), 3, 3)
    with pytest.raises(RuntimeError, match="equal lengths"):
        build(torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 3, 3)
