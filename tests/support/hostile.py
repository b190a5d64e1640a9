"""Hostile arguments of ops: good calls of every op, and each of their tensors, numbers and lists spoilt.

A spoilt call must raise an error or return; it must never crash the process or read memory that is not the
tensor's. `tests/fuzz.py` runs random ones under sanitizers.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from edge_bodies import arguments, arguments_of
from kernel_graphs import STORE_F32, Graph, random_graph, random_int8
from torch import Tensor

from gnnc.errors import GnncError
from gnnc.ir.op import REGISTRY
from gnnc.runtime.cpu import library
from gnnc.runtime.cpu.parts import Part
from gnnc.runtime.row_program.opcodes import Op
from gnnc.tensor_state import storage_fault

ROWS, WIDTH, EDGES = 8, 7, 20
REFUSALS = (RuntimeError, GnncError, IndexError)
"""Errors that say what is wrong; a TypeError of torch's argument parser comes before any op."""

_FAR = 2**40
_INTEGERS = (-1, 0, 3, 2**31 - 1, 2**31, 2**32 + 1, 2**62, 2**63 - 1, -(2**31), -(2**63))

Spoil = Callable[[Tensor], Tensor]


def cpu_samples(width: int = WIDTH) -> dict[str, list[tuple[Any, ...]]]:
    """Return good calls of each op of ``torch.ops.gnnc_cpu``, in new memory; x has ``width`` columns."""
    g = random_graph(ROWS, ROWS, EDGES)
    x, q, scale = torch.randn(ROWS, width), random_int8(ROWS, width), torch.rand(ROWS)
    ends = (torch.randn(ROWS, 1), torch.randn(ROWS, 1))

    def program(rows: int = ROWS, columns: int = width) -> tuple[Any, ...]:
        return list(STORE_F32), [], [], [torch.zeros(rows, columns)]

    edges = (torch.arange(EDGES) % ROWS, torch.arange(EDGES) % 3, ROWS, ROWS)
    sorted_edges = (
        torch.zeros(ROWS + 1).long(),
        torch.zeros(EDGES, dtype=torch.int32),
        torch.zeros(EDGES).long(),
    )
    with_loops = (
        torch.zeros(ROWS + 1).long(),
        torch.zeros(EDGES + ROWS, dtype=torch.int32),
        torch.zeros(EDGES + ROWS).long(),
    )
    numbers, per_edge = (1.0, 0.2, 1e-16, 1), torch.zeros(EDGES, 1)
    factors, bits = torch.zeros(ROWS, 4), torch.zeros(ROWS, -(-width // 8), dtype=torch.uint8)
    return {
        "isa": [()],
        "has_amx": [()],
        "csr": [(*edges, *sorted_edges)],
        "csr_with_loops": [(*edges[:3], *with_loops)],
        "csr_ordered": [(*edges, torch.tensor([0, *[3] * 7, EDGES]), None, *sorted_edges[1:])],
        "degree": [(g.rowptr, torch.zeros(ROWS))],
        "first_not_finite": [([scale, torch.zeros(0)],)],
        "first_unstored": [([scale, torch.zeros(0), x.t()],)],
        "gemm": [
            (x, None, [torch.randn(4, width)], [0], 0, *program(columns=4)),
            (q, scale, [torch.randn(4, width)], [0], 1, *program(columns=4)),
        ],
        "map": [(x, None, *program()), (q, scale, *program()), (x, None, *_long_program(width))],
        "spmm": [
            (g.rowptr, g.col, torch.randn(EDGES), x, None, None, 0, 1, *program()),
            (g.rowptr, g.col, None, q, scale, None, 2, 1, *program()),
            (g.rowptr, g.col, None, q, None, torch.arange(ROWS, dtype=torch.uint8) % 8, 0, 1, *program()),
        ],
        "sddmm": [(g.rowptr, g.col, x, x.clone(), None, None, 0, 1, per_edge)],
        "edge_softmax": [(g.rowptr, torch.randn(EDGES, 1), 1e-16, per_edge)],
        "edge_softmax_backward": [
            (g.rowptr, torch.rand(EDGES, 1), torch.randn(EDGES, 1), torch.zeros(EDGES, 1))
        ],
        "attention_backward_rows": [
            (g.rowptr, g.col, *ends, x, x.clone(), None, None, 0.2, 1e-16, 1)
            + (torch.zeros(ROWS, 1), torch.zeros(ROWS, 4)),
            (g.rowptr, g.col, *ends, q, q.clone(), scale, scale.clone(), 0.2, 1e-16, 1)
            + (torch.zeros(ROWS, 1), torch.zeros(ROWS, 4)),
        ],
        "attention_backward_columns": [
            (
                g.rowptr,
                g.col,
                ends[1],
                torch.rand(ROWS, 4),
                x,
                x.clone(),
                None,
                None,
                *torch.randn(2, width),
                ends[0],
                0.2,
                1,
            )
            + (torch.zeros(ROWS, 1), torch.zeros(width), torch.zeros(width), *program()),
            (g.rowptr, g.col, ends[1], torch.rand(ROWS, 4), x, x.clone(), *[None] * 5, 0.2, 1)
            + (torch.zeros(ROWS, 1), None, None, *program()),
            (g.rowptr, g.col, ends[1], torch.rand(ROWS, 4), q, q.clone(), scale, scale.clone(), *[None] * 3)
            + (0.2, 1)
            + (torch.zeros(ROWS, 1), None, None, *program()),
        ],
        "gemm_tn": [
            (x, torch.randn(ROWS, 4), torch.zeros(width, 4)),
            (q, torch.randn(ROWS, 4), torch.zeros(width, 4), scale, None),
        ],
        "launcher": [("gnnc_cpu::degree",), ("gnnc_cpu::csr",)],
        "replay": [_replay(x, bits.clone())],
        "row_scale": [(torch.rand(()), torch.arange(ROWS, dtype=torch.uint8), torch.zeros(ROWS))],
        "batch_norm": [
            (x, *torch.rand(4, width), 0.1, 1e-5, torch.zeros(ROWS, width), *torch.zeros(4, width)),
            (
                x,
                None,
                None,
                None,
                None,
                0.1,
                1e-5,
                torch.zeros(ROWS, width),
                *torch.zeros(2, width),
                None,
                None,
            ),
        ],
        "batch_norm_backward": [
            (x, torch.randn(ROWS, width), None, *torch.rand(2, width), torch.zeros(ROWS, width))
            + tuple(torch.zeros(2, width))
        ],
        "relu_mask": [(x, bits)],
        "relu_backward": [(x, bits.clone(), torch.zeros(ROWS, width))],
        "softmax_sum": [
            (g.rowptr, torch.randn(EDGES, 3), torch.randn(EDGES, 3), None, torch.zeros(ROWS, 3)),
            (torch.tensor([0, 2]), *torch.randn(2, 2, 3), torch.zeros(3, 3), torch.zeros(1, 3)),
        ],
        "edge_body": [
            (*_edge_body(g, _EDGE_MLP, "sum,softmax", x), [torch.zeros(ROWS, 8)]),
            (*_edge_body(g, _EDGE_CHOSEN, "mean", x), [torch.zeros(ROWS, width)]),
            (*_edge_body(g, _EDGE_OUTER, None, x), [torch.zeros(4, width)]),
            (*_edge_body(g, _EDGE_MATRICES, "sum", x), [torch.zeros(ROWS, 2)]),
            (*_edge_body(g, _EDGE_COLUMN, "max", x), [torch.zeros(ROWS, 1)]),
            _several_results(g, x),
        ],
        "attention": [
            (g.rowptr, g.col, x, None, 0, *ends, None, *numbers, per_edge, None, *program()),
            (g.rowptr, g.col, q, scale, 0, *ends, None, *numbers, None, factors, *program()),
        ],
    }


_EDGE_MLP = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.linear.default(t0, c0, c1); t2 = aten.relu.default(t1); "
    "t3 = aten.cat.default([t2, e0], 1); t4 = aten.slice.Tensor(t3, 1, 1, 5); "
    "t5 = aten.sum.dim_IntList(t4, [1], True); t6 = aten.mul.Tensor(t4, t5); return [t6, t4, t6]"
)
_EDGE_CHOSEN = "t0 = aten.index_select.default(c0, 0, e1); t1 = aten.add.Tensor(t0, j0); return t1"
_EDGE_OUTER = "t0 = aten.t.default(e0); t1 = aten.mm.default(t0, j0); return t1"

_EDGE_MATRICES = (
    "t0 = aten.view.default(e0, [-1, 2, 2]); t1 = aten.bmm.default(t0, t0); "
    "t2 = aten.sum.dim_IntList(t1, [1]); return t2"
)

_EDGE_COLUMN = (
    "t0 = aten.linear.default(i0, c2, c3); t1 = aten.linear.default(j0, c2, None); "
    "t2 = aten.add.Tensor(t0, t1); return t2"
)


def _replay(x: Tensor, bits: Tensor) -> tuple[Any, ...]:
    """Return a replay of every kind of step: zeros, a dense form, and launches that read it."""
    library.load()
    mask, gemm = map(torch.ops.gnnc_cpu.launcher, ("gnnc_cpu::relu_mask", "gnnc_cpu::gemm"))
    gaps, weight, flags, out, dense = range(5)
    steps = [-2, flags, -1, gaps, mask, dense, flags]
    steps += [gemm, dense, -1, 1, weight, 1, 0, 0, len(STORE_F32), *STORE_F32, 0, 0, 1, out]
    values = [x.t().clone().t(), torch.randn(4, x.shape[1]), bits, torch.zeros(x.shape[0], 4)]
    return torch.tensor(steps), values


def _edge_body(g: Graph, body: str, reduce: str | None, x: Tensor) -> tuple[Any, ...]:
    edge = [torch.randn(EDGES, 4), torch.arange(EDGES) % 4]
    consts = [torch.randn(4, x.shape[1]), torch.randn(4), torch.randn(1, x.shape[1]), torch.randn(1)]
    groups = [x], [x.clone()], edge, consts
    return arguments(g, body, reduce, groups)


def _several_results(g: Graph, x: Tensor) -> tuple[Any, ...]:
    parts = [Part("sources"), Part("edges"), Part("all")]
    body = "t0 = aten.mul.Tensor(j0, j0); t1 = aten.sum.dim_IntList(j0, [0]); return [t0, j0, t1]"
    outs = [torch.zeros(rows, x.shape[1]) for rows in (ROWS, EDGES, 1)]
    return (*arguments_of(g, body, parts, ([], [x], [], [])), outs)


def _long_program(width: int) -> tuple[Any, ...]:
    """Return arguments of a row program whose instructions have operands and outputs of every form."""
    operands = [
        torch.randn(ROWS),
        torch.randn(width),
        torch.randn(ROWS, width),
        torch.rand(1),
        torch.rand(width),
    ]
    operands += [torch.randn(width), torch.rand(width), torch.randn(width), torch.randn(width)]
    operands += [random_int8(ROWS, width), torch.rand(ROWS)]
    outs = [torch.zeros(ROWS, width), random_int8(ROWS, width), torch.zeros(ROWS), random_int8(ROWS, width)]
    outs += [torch.zeros(1).long(), random_int8(ROWS, width)]
    outs += [torch.zeros(ROWS, dtype=torch.uint8), torch.zeros(1)]
    outs += [torch.zeros(ROWS, 1), torch.zeros(ROWS, width, dtype=torch.bfloat16)]
    code = [
        (Op.MUL_ROW, 0, 0, 0), (Op.ADD_COL, 1, 0, 0), (Op.ADD_FULL, 2, 0, 0), (Op.MUL_TENSOR, 3, 0, 0),
        (Op.MUL_SHIFTED, 3, 0, 0), (Op.ADD_SCALED, 2, 0, 3),
        (Op.ADD_QROW, 9, 10, 0), (Op.BATCH_NORM, 5, 0, 0), (Op.LAYER_NORM, 7, 0, 0), (Op.CLAMP_MIN, 0, 1, 0),
        (Op.STORE_F32, 0, 0, 0), (Op.STORE_BF16, 9, 0, 0), (Op.QUANT_ROW, 1, 2, 0),
        (Op.QUANT_STATIC, 3, 4, 4), (Op.QUANT_POW2, 5, 6, 3), (Op.AMAX, 7, 0, 0), (Op.ROW_DOT, 1, 8, 1),
        (Op.WINDOW, 0, 5, 0),
    ]  # fmt: skip
    return [int(word) for step in code for word in step], operands, [1e-5, 0.5], outs


# Spoilt tensors


def _resized(t: Tensor, nbytes: int) -> Tensor:
    """Return a copy whose storage then has ``nbytes`` bytes."""
    new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t)
    new.untyped_storage().resize_(max(nbytes, 0))
    return new


def _misaligned(t: Tensor) -> Tensor:
    raw = bytearray(t.numel() * t.itemsize + 1)
    flat = torch.frombuffer(raw, dtype=t.dtype, offset=1, count=t.numel()) if t.numel() else t.flatten()
    return flat.copy_(t.flatten()).view(t.shape)


def _strided(t: Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return t.new_zeros(4096).as_strided(size, stride)


def _with(t: Tensor, number: float, place: int = 0) -> Tensor:
    """Return a copy with one element set, as far as the dtype can hold the number."""
    t = t.clone()
    if t.numel():
        integer = not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
        limits = torch.iinfo(t.dtype) if integer else None
        t.view(-1)[place] = number if limits is None else min(max(number, limits.min), limits.max)  # type: ignore[type-var]
    return t


def _wide(t: Tensor) -> Tensor:
    """Return a view with gaps between all elements."""
    return torch.stack([t, t], -1)[..., 0]


SPOILS: dict[str, Spoil] = {
    "freed": lambda t: _resized(t, 0),
    "one byte is left": lambda t: _resized(t, 1),
    "half of the storage": lambda t: _resized(t, t.nbytes // 2),
    "storage without the last element": lambda t: _resized(t, t.untyped_storage().nbytes() - t.itemsize),
    "storage without the last byte": lambda t: _resized(t, t.untyped_storage().nbytes() - 1),
    "misaligned": _misaligned,
    "rows of stride 0": lambda t: t[:1].expand_as(t) if t.dim() and t.numel() else t,
    "all of stride 0": lambda t: t.new_ones(()).expand_as(t),
    "endless": lambda t: t.new_zeros(()).expand(_FAR, *t.shape[1:]),
    "endless columns": lambda t: t.new_zeros(()).expand(*t.shape[:1], _FAR),
    "no rows, endless columns": lambda t: t.new_zeros((0, _FAR)),
    "endless rows, no columns": lambda t: t.new_zeros((_FAR, 0)),
    "overlapping rows": lambda t: _strided(t, tuple(t.shape), (1,) * t.dim()),
    "far rows": lambda t: _strided(t, (2, 3), (4093, 1)),
    "far columns": lambda t: _strided(t, (3, 2), (1, 4093)),
    "at the end of its storage": lambda t: _strided(t, (2, 1), (4095, 7)),
    "far rows, then shortened": lambda t: _shortened_after(_strided(t, (2, 3), (4093, 1))),
    "transposed": lambda t: t.t().contiguous().t() if t.dim() == 2 else t.flip(0),
    "with gaps": _wide,
    "without padding": lambda t: t.clone(memory_format=torch.contiguous_format),
    "one row without padding": lambda t: t[:1].clone(memory_format=torch.contiguous_format),
    "no elements": lambda t: t.new_empty(0),
    "no rows": lambda t: t[:0] if t.dim() else t,
    "a row less": lambda t: t[:-1] if t.dim() else t,
    "a row more": lambda t: torch.cat([t, t[:1]]) if t.dim() else t,
    "a column less": lambda t: t[..., :-1] if t.dim() else t,
    "a number": lambda t: t.new_ones(()),
    "a dimension more": lambda t: t[None],
    "flat": lambda t: t.flatten(),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "negated in its flag": lambda t: torch.complex(t, t).conj().imag,
    "needs gradients": lambda t: t.clone().requires_grad_() if t.is_floating_point() else t,
    "NaN": lambda t: _with(t, float("nan")) if t.is_floating_point() else t,
    "infinite": lambda t: _with(t, float("inf"), -1) if t.is_floating_point() else t,
    "negative": lambda t: _with(t, -1),
    "last negative": lambda t: _with(t, -1, -1),
    "far": lambda t: _with(t, _FAR),
    "last far": lambda t: _with(t, _FAR, -1),
    "just too far": lambda t: _with(t, ROWS, -1),
    "one in the middle far": lambda t: _with(t, 2**31 - 1, t.numel() // 2),
    "one in the middle negative": lambda t: _with(t, -(2**31), t.numel() // 2),
    "falling": lambda t: t.flip(0),
    "falls once": lambda t: _with(t, 0, t.numel() - 2) if t.numel() > 2 else t,
    "smallest": lambda t: _with(t, -(2**63)),
}  # fmt: skip
for _dtype in (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16,
    torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn,
):  # fmt: skip
    SPOILS[str(_dtype)] = lambda t, dtype=_dtype: t.to(dtype)


def _shortened_after(t: Tensor) -> Tensor:
    t.untyped_storage().resize_(64)
    return t


@dataclass(frozen=True)
class HostileCall:
    """A call of an op with one argument spoilt.

    Attributes:
        label: the op, the place of the argument and what is wrong with it.
        op: the op.
        args: its arguments, in memory that nothing else uses.
    """

    label: str
    op: Callable[..., Any]
    args: tuple[Any, ...]

    def run(self) -> str:
        """Return what came of the call: the name of the error, or "returned"."""
        try:
            with torch.no_grad():
                self.op(*self.args)
        except REFUSALS as error:
            return type(error).__name__
        return "returned"


@cache
def ops_and_samples() -> list[tuple[str, Callable[..., Any], Callable[[], tuple[Any, ...]]]]:
    """Return (label, op, function that makes the arguments of a good call) of all public ops."""
    library.load()
    found = []
    for name, samples in cpu_samples().items():
        for number in range(len(samples)):
            op = getattr(torch.ops.gnnc_cpu, name).default
            found.append((f"gnnc_cpu.{name}", op, lambda n=name, k=number: cpu_samples()[n][k]))
    for name, op in REGISTRY.items():
        for number in range(min(len(op.samples()), 3)):
            found.append((f"gnnc.{name}", op.target, lambda op=op, k=number: _copied(op.samples()[k])))
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(map(_copied, value)) if isinstance(value, list | tuple) else value


def places(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yield the path and the value of each tensor and integer among arguments."""
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from places(item, (*path, i))
    elif isinstance(value, Tensor | int) and not isinstance(value, bool):
        yield path, value


def replaced(value: Any, path: tuple[int, ...], new: Any) -> Any:
    """Return arguments with the value at a path replaced."""
    if not path:
        return new
    items = [replaced(v, path[1:], new) if i == path[0] else v for i, v in enumerate(value)]
    return type(value)(items)


def ways_to_spoil(
    args: tuple[Any, ...], path: tuple[int, ...], value: Any, *, small: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (what is wrong, function that makes the spoilt argument) for one place of arguments.

    Args:
        args: the arguments of a good call.
        path: the place.
        value: the tensor or integer there.
        small: whether integers of billions are left out, for which a reference would take the memory.
    """
    if not isinstance(value, Tensor):
        for number in _INTEGERS:
            if not (small and 2**30 < number < 2**60):
                yield f"{path} = {number}", lambda number=number: number
        return
    if (
        value.layout is torch.strided and storage_fault(value) is not None
    ):  # torch's own ops, too, would read past its end
        return
    for label, spoil in SPOILS.items():
        yield f"{path} {label}", lambda spoil=spoil: spoil(value)
    for other, tensor in places(args):
        if other != path and isinstance(tensor, Tensor):
            yield f"{path} is the tensor of {other}", lambda tensor=tensor: tensor


def made(make: Callable[[], Any]) -> Any:
    """Return a spoilt argument, or None where this one cannot be spoilt in this way."""
    try:
        return make()
    except (RuntimeError, ValueError, IndexError):
        return None


def hostile_calls(only: str = "") -> Iterator[HostileCall]:
    """Yield every op's good calls with one place spoilt; those whose label begins with ``only``."""
    for label, op, sample in ops_and_samples():
        if not label.startswith(only):
            continue
        args = sample()
        for path, value in places(args):
            for what, make in ways_to_spoil(args, path, value, small=label.startswith("gnnc.")):
                if (new := made(make)) is not None:
                    yield HostileCall(f"{label} {what}", op, replaced(args, path, new))


def random_call(rng: random.Random) -> HostileCall:
    """Return a call with two places spoilt at random."""
    label, op, sample = rng.choice(ops_and_samples())
    args, whats = sample(), []
    for _ in range(2):
        options = list(places(args))
        if not options:
            break
        path, value = rng.choice(options)
        ways = list(ways_to_spoil(args, path, value, small=label.startswith("gnnc.")))
        if not ways:
            continue
        what, make = rng.choice(ways)
        if (new := made(make)) is not None:
            args = replaced(args, path, new)
            whats.append(what)
    return HostileCall(f"{label} {', '.join(whats)}", op, args)
