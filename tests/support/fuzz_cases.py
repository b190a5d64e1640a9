"""Random graphs and operands, and one function a primitive: what the kernel makes beside the reference.

Tensors end where their last element does (int8 rows: where their padding does), so that a sanitizer sees
every step past them. Floats are compared with the reference in float64, integers bit for bit.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from edge_bodies import edge_body
from kernel_graphs import Graph as KernelGraph
from row_programs import Program, gemm, map_rows, padded, quantized, row_scale, store
from torch import Tensor

from gnnc.errors import GraphError
from gnnc.ir.message import MESSAGE_REDUCTIONS
from gnnc.ir.sparse import EDGE_OPS, REDUCTIONS
from gnnc.runtime.cpu import library, structure
from gnnc.runtime.cpu.message import Part, Plan, run_blocks
from gnnc.runtime.row_program.opcodes import Op

gnnc = torch.ops.gnnc
aten = torch.ops.aten

WIDTHS = (1, 7, 16, 47, 64, 602)
HEADS = (1, 2, 3, 4, 8, 16)
HEAD_WIDTHS = (1, 7, 8, 16, 47)
NODES = (1, 1, 2, 7, 8, 9, 40, 300)
ADDITIVE, DOT, EDGE = range(3)
STORE = [int(Op.STORE_F32), 0, 0, 0]
FLOATS = (torch.float32, torch.bfloat16)
FLOAT_ERROR = 1e-5
FIXED_STEP = 2.0**-16
"""Weights of int8 rows are 16-bit integers, in proportion to the largest of their head."""

GATE = "t0 = aten.add.Tensor(i0, j0); t1 = aten.relu.default(t0); t2 = aten.mul.Tensor(t1, e0); return t2"
Case = Callable[["Draw"], None]


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph as edges and as CSR."""

    src: Tensor
    dst: Tensor
    num_src: int
    num_dst: int
    rowptr: Tensor
    col: Tensor
    perm: Tensor

    @property
    def num_edges(self) -> int:
        return self.src.numel()


class Draw:
    """Choices and operands of a case, drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def one(self, choices: Any) -> Any:
        return self.rng.choice(choices)

    def maybe(self, chance: float = 0.5) -> bool:
        return self.rng.random() < chance

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def floats(self, *shape: int) -> Tensor:
        scale = self.one((1.0, 1.0, 1e-3, 50.0))
        return torch.randn(*shape, generator=self.generator) * scale

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator) + 0.01

    def quantized(self, rows: int, width: int) -> Tensor:
        q = padded(rows, width, self.one((0, 99, -128)))  # what lies past the width must not count
        return q.copy_(self.ints(-127, 128, rows, width))

    def rows(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        if dtype == torch.int8:
            return self.quantized(rows, width)
        x = self.floats(rows, width).to(dtype)
        if not self.maybe(0.2):
            return x
        wide = torch.full((rows, width + self.one((1, 16))), torch.nan, dtype=dtype)
        return wide[:, :width].copy_(x)

    def graph(self, nodes: int | None = None) -> Graph:
        """Few or many edges of one kind; sometimes two sets of nodes; sometimes none at all."""
        num_dst = self.one(NODES) if nodes is None else nodes
        num_src = num_dst if nodes is not None or self.maybe() else self.one(NODES)
        if nodes is None and self.maybe(0.05):
            num_dst, num_src = self.one(((0, 0), (0, 3), (3, 0)))
        edges = self.one((0, 1, 2, 15, 16, 17, 65, 600, 2000)) if num_src and num_dst else 0
        if edges == 2000 and self.maybe(0.3):
            edges = self.one((20_000, 40_000))
        src, dst = self.edges(edges, num_src, num_dst)
        rowptr, col, perm = gnnc.csr(src, dst, num_src, num_dst)
        return Graph(src, dst, num_src, num_dst, rowptr, col, perm)

    def edges(self, count: int, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
        src, dst = self.ints(0, num_src, count), self.ints(0, num_dst, count)
        match self.one(("any", "any", "hub", "loops", "duplicates", "isolated", "source")):
            case "hub":
                dst = torch.where(self.ints(0, 10, count) > 0, self.rng.randrange(max(num_dst, 1)), dst)
            case "loops":
                src = dst % max(num_src, 1)
            case "duplicates":
                src, dst = src // 2 * 0 + src[:1], dst // 4 * 4
            case "isolated":
                src, dst = src // 3, dst // 5
            case "source":
                src = torch.full_like(src, num_src - 1)
        return src, dst


# Comparisons


def close(got: Tensor, want: Tensor, size: Tensor, error: float = FLOAT_ERROR) -> None:
    """Each element to ``error`` of ``size``, the sum of the magnitudes that it is made of."""
    assert got.shape == want.shape, f"{tuple(got.shape)} for {tuple(want.shape)}"
    wrong = (got.double() - want.double()).abs() > error * size.double() + 1e-30
    wrong |= ~got.isfinite()
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"at {at}: {got[at]} for {want[at]}, size {size[at]}; {int(wrong.sum())} of {wrong.numel()}"
        )


def same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, f"{got.dtype} {tuple(got.shape)}"
    if not torch.equal(got, want):
        at = tuple((got != want).nonzero()[0].tolist())
        raise AssertionError(f"at {at}: {got[at]} for {want[at]}")


def kernels() -> Any:
    library.load()
    return torch.ops.gnnc_cpu


def unwritten(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


# Structure


def bad_index(d: Draw, bound: int, dtype: torch.dtype) -> int:
    """Draw an id near a boundary: of the nodes, of 32 bits, of 64 bits."""
    values = [-1, bound - 1, bound, bound + 1, 2**31 - 1, -(2**31)]
    if dtype == torch.int64:
        values += [2**31, 2**32, 2**32 + bound - 1, -(2**31) - 1, 2**63 - 1, -(2**63)]
    return d.one(values)


def csr(d: Draw) -> None:
    g, dtype = d.graph(), d.one((torch.int32, torch.int64))
    src, dst = g.src.to(dtype), g.dst.to(dtype)
    if g.num_edges and d.maybe():
        into, bound = d.one(((src, g.num_src), (dst, g.num_dst)))
        into[d.rng.randrange(g.num_edges)] = bad_index(d, bound, dtype)
    if g.num_edges and d.maybe(0.3):
        pairs = torch.stack([src, dst], 1)
        src, dst = pairs[:, 0], pairs[:, 1]
    inside = all(
        0 <= int(t.min()) and int(t.max()) < bound
        for t, bound in ((src, g.num_src), (dst, g.num_dst))
        if t.numel()
    )
    if inside:
        want = gnnc.csr(src, dst, g.num_src, g.num_dst)
        for a, b in zip(structure.csr(src, dst, g.num_src, g.num_dst), want, strict=True):
            same(a, b)
        same(structure.degree(want[0]), gnnc.degree(want[0]))
        return
    for sort in (gnnc.csr, structure.csr):
        try:
            sort(src, dst, g.num_src, g.num_dst)
        except GraphError:
            continue
        raise AssertionError(f"{sort} took an index out of range")


# Aggregations


def _spmm(
    g: Graph, x: Tensor, reduce: str, heads: int, value: Any = None, scale: Any = None, shift: Any = None
) -> Tensor:
    out = unwritten(g.num_dst, x.shape[1])
    number = REDUCTIONS.index(reduce)
    kernels().spmm(g.rowptr, g.col, value, x, scale, shift, number, heads, STORE, [], [], [out])
    return out


def spmm(d: Draw) -> None:
    g, reduce, dtype = d.graph(), d.one(REDUCTIONS), d.one(FLOATS)
    heads, head_width = (1, d.one(WIDTHS)) if d.maybe() else (d.one(HEADS), d.one(HEAD_WIDTHS))
    x = d.rows(g.num_src, heads * head_width, dtype)
    value = None
    if heads > 1 or d.maybe():
        value = d.floats(g.num_edges, heads) if heads > 1 else d.floats(g.num_edges)
    got = _spmm(g, x, reduce, heads, value)
    wide = x.double().reshape(g.num_src, heads, head_width)
    weight = None if value is None else value.double().reshape(g.num_edges, heads)
    want = gnnc.spmm(g.rowptr, g.col, weight, wide, reduce, g.num_dst).flatten(1)
    largest = "sum" if reduce == "sum" else "mean" if reduce == "mean" else "max"
    size = gnnc.spmm(g.rowptr, g.col, _abs(weight), wide.abs(), largest, g.num_dst).flatten(1)
    close(got, want, size)


def _abs(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.abs()


def qspmm_exact(d: Draw) -> None:
    g, width, reduce = d.graph(), d.one(WIDTHS), d.one(REDUCTIONS)
    q, value, shift = d.quantized(g.num_src, width), None, None
    if d.maybe(0.3) and reduce in ("sum", "mean"):
        value = d.ints(-127, 128, g.num_edges).to(torch.int8)
    elif d.maybe():
        shift = d.ints(0, 8, g.num_src).to(torch.uint8)
    got = _spmm(g, q, reduce, 1, value, None, shift)
    if reduce != "mean":
        same(got, gnnc.qspmm(g.rowptr, g.col, value, q, None, shift, reduce, g.num_dst))
        return
    total = gnnc.qspmm(g.rowptr, g.col, value, q, None, shift, "sum", g.num_dst)
    same(got, total / g.rowptr.diff().clamp(min=1).float()[:, None])


def qspmm_scaled(d: Draw) -> None:
    g, reduce = d.graph(), d.one(REDUCTIONS)
    heads, head_width = (1, d.one(WIDTHS)) if d.maybe() else (d.one(HEADS), d.one(HEAD_WIDTHS))
    q, scale = d.quantized(g.num_src, heads * head_width), d.positive(g.num_src)
    value = None
    if heads > 1 or d.maybe():
        value = d.positive(g.num_edges, heads) if d.maybe() else d.floats(g.num_edges, heads)
    got = _spmm(g, q, reduce, heads, value, scale)
    weight = scale.double()[g.col.long()][:, None]
    weight = weight if value is None else weight * value.double()
    wide = q.double().reshape(g.num_src, heads, head_width)
    want = gnnc.spmm(g.rowptr, g.col, weight, wide, reduce, g.num_dst).flatten(1)
    close(got, want, _fixed_size(g, weight, wide, reduce))


def _fixed_size(g: Graph, weight: Tensor, wide: Tensor, reduce: str) -> Tensor:
    """Sums of magnitudes, and what a step of the largest weight may add to each."""
    step = FIXED_STEP / FLOAT_ERROR
    largest = weight.abs().amax(0) if len(weight) else weight.new_zeros(weight.shape[1])
    kind = reduce if reduce in ("sum", "mean") else "max"
    size = gnnc.spmm(g.rowptr, g.col, weight.abs() + step * largest, wide.abs(), kind, g.num_dst)
    return size.flatten(1)


def segment_reduce(d: Draw) -> None:
    g, reduce, width, dtype = d.graph(), d.one(REDUCTIONS), d.one(WIDTHS), d.one((*FLOATS, torch.int8))
    x, perm = d.rows(g.num_edges, width, dtype), g.perm if d.maybe() else None
    out = unwritten(g.num_dst, width)
    order = None if perm is None else perm.int()
    number = REDUCTIONS.index(reduce)
    kernels().spmm(g.rowptr, order, None, x, None, None, number, 1, STORE, [], [], [out])
    want = gnnc.segment_reduce(g.rowptr, perm, x.double(), reduce, g.num_dst)
    kind = reduce if reduce in ("sum", "mean") else "max"
    close(out, want, gnnc.segment_reduce(g.rowptr, perm, x.double().abs(), kind, g.num_dst))


def message(d: Draw) -> None:
    g, reduce, width = d.graph(), d.one((*MESSAGE_REDUCTIONS, None)), d.one(WIDTHS)
    i, j, e = (d.floats(rows, width) for rows in (g.num_dst, g.num_src, g.num_edges))
    out = unwritten(g.num_edges if reduce is None else g.num_dst, width)
    edges = d.one((1, 7, 512, 100_000)) if g.num_edges < 3000 else 5000
    body = GATE.replace("return t2", "return [t0, e0]") if reduce == "softmax" else GATE
    plan = Plan(body, (Part("edges") if reduce is None else Part("rows", (reduce,)),), edges)
    run_blocks(plan, g.rowptr, g.col, [i], [j], [e], [], [out])
    operands = ([i.double()], [j.double()], [e.double()], [])
    if reduce == "softmax":
        rounding = 2.0**-23 * (i.abs().max() + j.abs().max()) if g.num_edges else 0
        want = gnnc.message(g.rowptr, g.col, body, reduce, *operands, g.num_dst)
        size = gnnc.segment_reduce(g.rowptr, None, e.double().abs(), "max", g.num_dst)
        close(out, want, size, FLOAT_ERROR + 2 * float(rounding))
        return
    if reduce is None:
        want = gnnc.edge_map(g.rowptr, g.col, GATE, *operands)
        top = i.abs().max() + j.abs().max() if out.numel() else 0
        close(out, want, top * e.abs().double())
        return
    want = gnnc.message(g.rowptr, g.col, GATE, reduce, *operands, g.num_dst)
    kind = reduce if reduce in ("sum", "mean") else "max"
    bigger = ([i.double().abs()], [j.double().abs()], [e.double().abs()], [])
    close(out, want, gnnc.message(g.rowptr, g.col, GATE, kind, *bigger, g.num_dst))


BODY = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.linear.default(t0, c0, {bias}); "
    "t2 = aten.cat.default([t1, e0, i0], 1); t3 = aten.slice.Tensor(t2, 1, {first}, 9999, {step}); "
    "t4 = aten.sum.dim_IntList(t2, [1], True); t5 = aten.mul.Tensor(t3, t4); "
    "t6 = aten.view.default(e0, [-1, {heads}, {width}]); t7 = aten.sum.dim_IntList(t6, [2]); "
    "t8 = aten.linear.default(t6, c2, None); t9 = aten.reshape.default(t8, [-1, {heads}]); "
    "t10 = aten.add.Tensor(t7, t9); t11 = aten.cat.default([t5, t10], 1); return t11"
)
"""Body with products of one column and of several, moves of columns, and sums over them."""


def body(d: Draw) -> None:
    """Check a body on tiles of edges, with rows of few columns."""
    g, reduce = d.graph(), d.one(("sum", "mean", "max", "min", ""))
    narrow, outputs, heads, width = (d.one((1, 2, 4, 7, 16, 32, 47)) for _ in range(4))
    joined = outputs + heads * width + narrow
    first, step = d.rng.randrange(joined), d.one((1, 1, 2))
    text = BODY.format(bias=d.one(("c1", None)), first=first, step=step, heads=heads, width=width)
    ends = [[d.rows(rows, narrow, torch.float32)] for rows in (g.num_dst, g.num_src)]
    edge, consts = (
        [d.rows(g.num_edges, heads * width, torch.float32)],
        [(outputs, narrow), (outputs,), (1, width)],
    )
    groups = (*ends, edge, [d.floats(*shape) for shape in consts])
    columns = len(range(first, joined, step)) + heads
    graph = KernelGraph(g.rowptr, g.col, g.num_src, g.num_dst)
    got = edge_body(graph, text, reduce, groups, (g.num_dst if reduce else g.num_edges, columns))
    sizes = ([t.abs() for t in group] for group in groups)
    close(got, _in_double(g, text, reduce, groups), _in_double(g, text, _size_of(reduce), sizes))


def _in_double(g: Graph, text: str, reduce: str, groups: Any) -> Tensor:
    given = [[t.double() for t in group] for group in groups]
    if not reduce:
        return gnnc.edge_map(g.rowptr, g.col, text, *given)
    return gnnc.message(g.rowptr, g.col, text, reduce, *given, g.num_dst)


def _size_of(reduce: str) -> str:
    """Return the reduction of magnitudes that bounds the error of a reduction."""
    return "max" if reduce == "min" else reduce


# Edges


def sddmm(d: Draw) -> None:
    g, op, dtype = d.graph(), d.one(EDGE_OPS), d.one((*FLOATS, torch.int8))
    heads = d.one(HEADS) if op == "dot" else 1
    width = heads * d.one(WIDTHS if heads == 1 else HEAD_WIDTHS)
    a, b = d.rows(g.num_dst, width, dtype), d.rows(g.num_src, width, dtype)
    out = unwritten(g.num_edges, heads if op == "dot" else width)
    kernels().sddmm(g.rowptr, g.col, a, b, None, None, EDGE_OPS.index(op), heads, out)
    if op != "dot":
        sides = (None if op == "copy_src" else a.float(), None if op == "copy_dst" else b.float())
        same(out, gnnc.sddmm(g.rowptr, g.col, *sides, op))
        return
    left, right = (t.double().reshape(len(t), heads, width // heads) for t in (a, b))
    want = gnnc.sddmm(g.rowptr, g.col, left, right, "dot")
    if dtype == torch.int8:
        same(out, want.float())
    else:
        close(out, want, gnnc.sddmm(g.rowptr, g.col, left.abs(), right.abs(), "dot"))


def edge_softmax(d: Draw) -> None:
    g, heads, eps = d.graph(), d.one((None, *HEADS, 20)), d.one((1e-16, 0.0, 1.0))
    logits = d.floats(g.num_edges, *(() if heads is None else (heads,)))
    out = torch.full_like(logits, torch.nan)
    kernels().edge_softmax(g.rowptr, logits, eps, out)
    close(out, gnnc.edge_softmax(g.rowptr, logits.double(), eps), torch.ones_like(out), 1e-5)


def attention(d: Draw) -> None:
    g, kind, heads, head_width = d.graph(), d.one((ADDITIVE, DOT, EDGE)), d.one(HEADS), d.one(HEAD_WIDTHS)
    dtype, inner = d.one((*FLOATS, torch.int8)), d.one((1, 5, 16))
    x = d.rows(g.num_src, heads * head_width, dtype)
    scale = d.positive(g.num_src) if dtype == torch.int8 else None
    wide = heads * inner if kind == DOT else heads
    ends = [None if kind == EDGE else d.floats(rows, wide) for rows in (g.num_src, g.num_dst)]
    edge = d.floats(g.num_edges, heads) if kind == EDGE or d.maybe(0.3) else None
    alpha = unwritten(g.num_edges, heads) if d.maybe(0.3) else None
    out = unwritten(g.num_dst, heads * head_width)
    numbers = (0.3, 0.2, 1e-16, heads)
    bounds = kind == ADDITIVE and edge is None and alpha is None and 16 % heads == 0 and d.maybe(0.8)
    factors = unwritten(g.num_src, 4 if heads == 1 else 2 * heads) if bounds else None
    kernels().attention(
        g.rowptr, g.col, x, scale, kind, *ends, edge, *numbers, alpha, factors, STORE, [], [], [out]
    )  # fmt: skip
    weight = gnnc.edge_softmax(g.rowptr, _logits(g, kind, heads, ends, edge), 1e-16)
    spread = max((float(t.abs().max()) for t in (*ends, edge) if t is not None and t.numel()), default=1.0)
    error = FLOAT_ERROR * max(1.0, spread * (spread if kind == DOT else 1.0) / 10)  # of a logit's exponential
    if alpha is not None:
        close(alpha, weight, torch.ones_like(weight), error)
    rows = x.double() if scale is None else x.double() * scale.double()[:, None]
    rows = rows.reshape(g.num_src, heads, head_width)
    want = gnnc.spmm(g.rowptr, g.col, weight, rows, "sum", g.num_dst).flatten(1)
    top = rows.abs().amax(0).flatten() if g.num_src else want.new_zeros(heads * head_width)
    step = 0.0 if scale is None else FIXED_STEP / error
    slack = 1.0 + step * g.rowptr.diff().clamp(max=512).double()[:, None]
    close(out, want, top * slack, 4 * error)


def _logits(g: Graph, kind: int, heads: int, ends: list[Tensor | None], edge: Tensor | None) -> Tensor:
    logits = torch.zeros(g.num_edges, heads, dtype=torch.float64)
    if ends[0] is not None and ends[1] is not None:
        src, dst = (t.double().reshape(len(t), heads, t.shape[1] // heads) for t in ends if t is not None)
        if kind == DOT:
            logits = 0.3 * gnnc.sddmm(g.rowptr, g.col, dst, src, "dot")
        else:
            logits = gnnc.sddmm(g.rowptr, g.col, dst[..., 0], src[..., 0], "add")
    logits = logits if edge is None else logits + edge.double()
    return torch.nn.functional.leaky_relu(logits, 0.2) if kind == ADDITIVE else logits


# Dense


def _shape(d: Draw) -> tuple[int, int, int]:
    return d.one((0, 1, 5, 8, 23, 100)), d.one(WIDTHS), d.one(WIDTHS)


def gemm_float(d: Draw) -> None:
    rows, depth, width = _shape(d)
    dtype, half, kn = d.one(FLOATS), d.maybe(0.3), d.maybe()
    x, w = d.rows(rows, depth, dtype), d.rows(width, depth, torch.float32)
    out = unwritten(rows, width)
    gemm(x, None, w.t().contiguous() if kn else w, kn, 3 if half else 0, store(out))
    left, right = (x.bfloat16(), w.bfloat16()) if half else (x, w)
    want = gnnc.gemm(left.double(), right.double())
    close(out, want, gnnc.gemm(left.double().abs(), right.double().abs()))


def gemm_int8(d: Draw) -> None:
    rows, depth, width = _shape(d)
    kn, given, dtype = d.maybe(), d.maybe(0.4), d.one(FLOATS)
    w = d.rows(width, depth, torch.float32)
    w_scale = gnnc.scale(w, "int8/row")
    if given:
        x, scale = d.quantized(rows, depth), d.positive(1 if d.maybe() else rows)
        q, x_scale = x, scale.expand(rows)
    else:
        x, scale = d.rows(rows, depth, dtype), None
        x_scale = gnnc.scale(x, "int8/row")
        q = gnnc.quantize(x, x_scale, "int8/row")
    out = unwritten(rows, width)
    gemm(x, scale, w.t().contiguous() if kn else w, kn, 1, store(out))
    sums = gnnc.qgemm(q, gnnc.quantize(w, w_scale, "int8/row"))
    same(out, gnnc.dequantize(gnnc.dequantize(sums, x_scale, "row"), w_scale, "column"))


def quantize(d: Draw) -> None:
    rows, width = d.one((0, 1, 5, 8, 23, 100)), d.one(WIDTHS)
    x = d.rows(rows, width, d.one(FLOATS)) * d.one((1.0, 1e-20, 1e30))
    program, q, scale = Program(), padded(rows, width), unwritten(rows)
    program.add(Op.QUANT_ROW, program.out(q), program.out(scale))
    fixed, base = padded(rows, width), d.positive(width if d.maybe() else 1)
    program.add(Op.QUANT_STATIC, program.out(fixed), program.operand(base), -1)
    fine, shift = padded(rows, width), torch.full((rows,), 99, dtype=torch.uint8)
    program.add(Op.QUANT_POW2, program.out(fine), program.out(shift), program.operand(base))
    amax = torch.zeros(width if d.maybe() else 1)
    program.add(Op.AMAX, program.out(amax))
    map_rows(x, None, program)
    same(scale, row_scale(x.float()))
    same(q, quantized(x.float(), scale[:, None]))
    by = "column" if base.numel() > 1 else "tensor"
    like = base if by == "column" else base[0]
    same(fixed, gnnc.quantize(x, like, f"int8/{by}"))
    want = gnnc.row_shift(x, like, "int8/row_pow2")
    same(shift, want)
    same(fine, gnnc.quantize(x, like, "int8/row_pow2", want))
    if rows:
        same(amax, x.float().abs().amax(0) if amax.numel() > 1 else x.float().abs().amax().reshape(1))


CASES: tuple[Case, ...] = (
    csr, csr, spmm, spmm, qspmm_exact, qspmm_scaled, segment_reduce, message, body, body, sddmm, edge_softmax,
    attention, attention, gemm_float, gemm_int8, quantize,
)  # fmt: skip
