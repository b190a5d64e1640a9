"""A NaN or an infinity shows where the reference shows it, and nowhere else, in every kernel that reduces."""

import math

import pytest
import torch
from kernel_graphs import STORE_F32, Graph, ops, random_graph, random_int8, threads
from row_programs import Program, gemm, map_rows, padded, store
from torch import Tensor

from gnnc.ir.message import MESSAGE_REDUCTIONS
from gnnc.ir.sparse import REDUCTIONS
from gnnc.runtime.cpu.message import Part, Plan, run_blocks
from gnnc.runtime.row_program.opcodes import Op

gnnc = torch.ops.gnnc
aten = torch.ops.aten

BAD = (math.nan, math.inf, -math.inf)
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
QUIET, SIGNALING, LOWEST = 0x7FFFFFFF, 0x7F800001, -1
"""Bit patterns of NaNs: rounding to 16 bits could carry over, and cutting off make an infinity."""


def graph() -> Graph:
    """Some rows read the bad source, some do not, some have no edges, one is long."""
    return random_graph(60, 50, 700)


def hidden(reduce: str | None, bad: float) -> bool:
    """An infinity that loses against every other value of its row."""
    return (reduce, bad) in (("max", -math.inf), ("min", math.inf))


def agree(got: Tensor, want: Tensor) -> None:
    """NaN where NaN is wanted, infinite where that is, and close elsewhere."""
    assert want.isfinite().any()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-3, atol=2e-3, equal_nan=True)


def rows(dtype: torch.dtype, width: int, bad: float) -> tuple[Tensor, Tensor | None, Tensor]:
    """x with one bad row, its scale, and the same as float64. Of int8 rows it is the scale that is bad."""
    if dtype == torch.int8:
        q, scale = random_int8(60, width), torch.rand(60) + 0.1
        scale[7] = bad
        return q, scale, q.double() * scale.double()[:, None]
    x = torch.randn(60, width).to(dtype)
    x[7] = bad
    return x, None, x.double()


@pytest.mark.parametrize("width", [1, 47, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bad", BAD)
def test_spmm(width: int, dtype: torch.dtype, reduce: str, weighted: bool, bad: float) -> None:
    g, (x, scale, wide) = graph(), rows(dtype, width, bad)
    value = torch.rand(g.num_edges) + 0.1 if weighted else None
    if value is not None:
        value[::3] = 0.0  # a weight of nothing does not hide it
    want = gnnc.spmm(g.rowptr, g.col, None if value is None else value.double(), wide, reduce, g.num_dst)
    assert dtype == torch.int8 or hidden(reduce, bad) or not want.isfinite().all()
    out = torch.full((g.num_dst, width), 5.0)
    number = REDUCTIONS.index(reduce)
    ops().spmm(g.rowptr, g.col, value, x, scale, None, number, 1, STORE_F32, [], [], [out])
    agree(out, want)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["x", "a_src", "a_dst", "edge"])
@pytest.mark.parametrize("bad", BAD)
def test_attention(heads: int, dtype: torch.dtype, where: str, bad: float) -> None:
    g, (x, scale, wide) = graph(), rows(dtype, heads * 16, bad if where == "x" else 0.5)
    a_src, a_dst = torch.randn(60, heads), torch.randn(50, heads)
    edge = torch.randn(g.num_edges, heads) if where == "edge" else None
    spoilt = {"a_src": a_src, "a_dst": a_dst, "edge": edge}.get(where)
    if spoilt is not None:
        spoilt[3, 0] = bad
    logits = gnnc.sddmm(g.rowptr, g.col, a_dst.double(), a_src.double(), "add")
    logits = logits if edge is None else logits + edge.double()
    alpha = gnnc.edge_softmax(g.rowptr, torch.nn.functional.leaky_relu(logits, 0.2))
    want = gnnc.spmm(g.rowptr, g.col, alpha, wide.view(60, heads, 16), "sum", 50).flatten(1)
    bounded = edge is None and heads != 3
    factors = torch.zeros(60, 4 if heads == 1 else 2 * heads)
    for count, room in ((1, None), (2, None), (1, factors), (2, factors)):
        if room is not None and not bounded:
            continue
        out = torch.full((50, heads * 16), 5.0)
        with threads(count):
            operands = (x, scale, 0, a_src, a_dst, edge, 1.0, 0.2, 1e-16, heads, None, room)
            ops().attention(g.rowptr, g.col, *operands, STORE_F32, [], [], [out])
        agree(out, want)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 16, 20])
@pytest.mark.parametrize("bad", [*BAD, "whole row of -inf"])
def test_edge_softmax(heads: int, bad: float | str) -> None:
    g = graph()
    logits, at = torch.randn(g.num_edges, heads), int(g.rowptr.diff().argmax())
    if isinstance(bad, str):
        logits[int(g.rowptr[at]) : int(g.rowptr[at + 1]), 0] = -math.inf
    else:
        logits[int(g.rowptr[at]), 0] = bad
    out = torch.full_like(logits, 5.0)
    ops().edge_softmax(g.rowptr, logits, 1e-16, out)
    want = gnnc.edge_softmax(g.rowptr, logits.double())
    assert want.isfinite().all() == (bad == -math.inf)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("mode", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [1, 47, 64, 100])
@pytest.mark.parametrize("bad", BAD)
def test_gemm(mode: int, dtype: torch.dtype, depth: int, bad: float) -> None:
    """A bad row of x spoils its row, a bad row of the weight its column, and neither another one."""
    x, w = torch.randn(30, depth).to(dtype), torch.randn(20, depth)
    x[7, depth // 2], w[3, depth - 1] = bad, bad
    out = torch.full((30, 20), 5.0)
    gemm(x, None, w, False, mode, store(out))
    spoilt = torch.zeros(30, 20, dtype=torch.bool)
    spoilt[7], spoilt[:, 3] = True, True
    assert torch.equal(out.isfinite(), ~spoilt)


@pytest.mark.parametrize("pattern", [QUIET, SIGNALING, LOWEST])
@pytest.mark.parametrize("mode", [0, 1, 3])
def test_gemm_takes_any_nan(pattern: int, mode: int) -> None:
    x, w = torch.randn(30, 47), torch.randn(20, 47)
    for operand, row in ((x, 7), (w, 3)):
        operand.view(torch.int32)[row, 5] = pattern
    out = torch.full((30, 20), 5.0)
    gemm(x, None, w, False, mode, store(out))
    assert not out[7].isfinite().any() and not out[:, 3].isfinite().any()


@pytest.mark.parametrize("width", [1, 7, 16, 47, 602])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", BAD)
def test_scales_show_it_at_every_column(width: int, dtype: torch.dtype, bad: float) -> None:
    columns = [0, *range(1, width, max(width // 40, 1)), width - 1]
    x = torch.randn(len(columns) + 1, width).to(dtype)
    for row, column in enumerate(columns):
        x[row, column] = bad
    program, scale, amax = Program(), torch.zeros(len(x)), torch.zeros(1)
    program.add(Op.QUANT_ROW, program.out(padded(len(x), width)), program.out(scale))
    program.add(Op.AMAX, program.out(amax))
    map_rows(x, None, program)
    assert scale.isfinite().tolist() == [False] * len(columns) + [True]
    assert not amax.isfinite().any()


@pytest.mark.parametrize("reduce", [*MESSAGE_REDUCTIONS, None])
@pytest.mark.parametrize("edges", [7, 10_000])
@pytest.mark.parametrize("bad", BAD)
def test_message(reduce: str | None, edges: int, bad: float) -> None:
    value = "[i0, t0]" if reduce == "softmax" else "t0"
    g, body = graph(), f"t0 = aten.add.Tensor(i0, j0); return {value}"
    i, j = torch.randn(50, 5), torch.randn(60, 5)
    j[7] = bad
    out = torch.full((g.num_edges if reduce is None else 50, 5), 5.0)
    part = Part("edges") if reduce is None else Part("rows", (reduce,))
    run_blocks(Plan(body, (part,), edges), g.rowptr, g.col, [i], [j], [], [], [out])
    operands = ([i.double()], [j.double()], [], [])
    if reduce is None:
        agree(out, gnnc.edge_map(g.rowptr, g.col, body, *operands))
    else:
        agree(out, gnnc.message(g.rowptr, g.col, body, reduce, *operands, 50))
