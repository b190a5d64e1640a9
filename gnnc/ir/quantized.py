"""Precision ops: scales, quantization, bit planes, and sparse products of integers.

Symmetric signed codes: ``q = clamp(rint(x * inv), -qmax, qmax)`` with ``qmax = 2^(bits-1) - 1`` and
``inv = 1 / scale`` computed once in FP32 (0 where the scale is 0). ``rint`` rounds half to even. A
scale below the least normal FP32 number counts as 0, so that ``inv`` is always finite.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnc.ir.op import Cost, ErrorInput, Op, check, define, nbytes, numel, size_expr
from gnnc.ir.sparse import REDUCTIONS, check_reduce, expand_value, reduce_messages
from gnnc.ir.structure import edge_rows, random_csr

GRANULARITIES = ("tensor", "row", "column")
MAX_SHIFT = 7
_TINY = torch.finfo(torch.float32).tiny
_ROUNDING = "rounding has no gradient; the straight-through rule belongs to the joint graph"


def qmax_of(bits: int) -> int:
    """Return the largest code of a signed symmetric type."""
    return 2 ** (bits - 1) - 1


def spread(scale: Tensor, granularity: str, like: Tensor) -> Tensor:
    """Reshape a scale so that it broadcasts against ``like``."""
    if granularity == "row":
        return scale.reshape(-1, *([1] * (like.dim() - 1)))
    return scale


def _check_granularity(op: str, granularity: str) -> None:
    check(
        granularity in GRANULARITIES,
        op,
        lambda: f"granularity must be one of {GRANULARITIES}, got {granularity!r}",
    )


def _amax(x: Tensor, granularity: str) -> Tensor:
    if granularity == "row":
        rows = x.reshape(x.shape[0], -1) if x.numel() else x.new_zeros(x.shape[0], 1)
        return rows.abs().amax(1)
    if granularity == "column":
        width = x.shape[-1]
        return x.reshape(-1, width).abs().amax(0) if x.numel() else x.new_zeros(width)
    return x.abs().amax() if x.numel() else x.new_zeros(())


def scale_reference(x: Tensor, granularity: str, bits: int = 8) -> Tensor:
    """Return ``amax / qmax`` of the whole tensor, of each row or of each column.

    Args:
        x: floating ``[N, ...]``.
        granularity: ``tensor`` gives ``[]``, ``row`` gives ``[N]``, ``column`` the last dimension.
        bits: bits of the codes.

    Returns:
        float32 scales; NaN and Inf in ``x`` stay visible in them.
    """
    _check_granularity("scale", granularity)
    scale = _amax(x.detach(), granularity).float() / qmax_of(bits)
    return torch.where(scale < _TINY, torch.zeros_like(scale), scale)


def _scale_fake(x: Tensor, granularity: str, bits: int = 8) -> Tensor:
    _check_granularity("scale", granularity)
    shape = {"tensor": (), "row": x.shape[:1], "column": x.shape[-1:]}[granularity]
    return x.new_empty(shape, dtype=torch.float32)


def _rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _codes(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


SCALE = define(
    Op(
        name="scale",
        schema="(Tensor x, str granularity, int bits=8) -> Tensor",
        reference=scale_reference,
        fake=_scale_fake,
        cost=lambda x, granularity, bits=8: Cost(nbytes(x), numel(x)),
        samples=lambda: [
            *((_rand(5, 7), granularity, 8) for granularity in GRANULARITIES),
            (_rand(5, 2, 3), "row", 4),
            (torch.empty(0, 4), "tensor", 8),
            (torch.zeros(3, 4), "row", 8),
        ],
        error_inputs=lambda: [ErrorInput((_rand(2, 2), "block"), "granularity must be one of")],
        no_gradient=_ROUNDING,
    )
)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, 1.0 / scale, torch.where(scale == 0, 0.0, scale))


def row_shift_reference(x: Tensor, base: Tensor, bits: int = 8) -> Tensor:
    """Return how far each row's scale lies below ``base``: its scale is ``base / 2^k``.

    Args:
        x: floating ``[N, F]``.
        base: float32 ``[]`` or ``[F]``.
        bits: bits of the codes.

    Returns:
        uint8 ``[N]``: the largest k in 0..7 with ``|x| * inv(base) * 2^k <= qmax`` in the whole row
        (7 for a zero row, 0 where even k = 0 saturates).
    """
    check(x.dim() == 2, "row_shift", lambda: f"x must be [N, F], got {tuple(x.shape)}")
    top = (x.detach().float() * _inverse(base)).abs()
    top = top.amax(1) if x.shape[1] else top.new_zeros(x.shape[0])
    powers = 2.0 ** torch.arange(1, MAX_SHIFT + 1, device=x.device, dtype=torch.float32)
    return (top[:, None] * powers <= qmax_of(bits)).sum(1).to(torch.uint8)


ROW_SHIFT = define(
    Op(
        name="row_shift",
        schema="(Tensor x, Tensor base, int bits=8) -> Tensor",
        reference=row_shift_reference,
        fake=lambda x, base, bits=8: x.new_empty(x.shape[:1], dtype=torch.uint8),
        cost=lambda x, base, bits=8: Cost(nbytes(x), numel(x) * 2),
        samples=lambda: [
            (_rand(9, 7) * torch.logspace(-4, 0, 9)[:, None], torch.tensor(0.03), 8),
            (_rand(3, 2), torch.tensor([0.1, 0.2]), 8),
            (torch.zeros(2, 3), torch.tensor(0.0), 8),
        ],
        error_inputs=lambda: [ErrorInput((_rand(3), torch.tensor(0.1)), r"\[N, F\]")],
        no_gradient=_ROUNDING,
    )
)


def quantize_reference(
    x: Tensor, scale: Tensor, granularity: str, shift: Tensor | None = None, bits: int = 8
) -> Tensor:
    """Return the codes ``clamp(rint(x * inv), -qmax, qmax)``.

    Args:
        x: floating ``[N, ...]``.
        scale: float32, shaped as ``scale`` gives it for ``granularity``.
        granularity: ``tensor``, ``row`` or ``column``.
        shift: uint8 ``[N]`` from ``row_shift``: rows use ``inv * 2^shift``.
        bits: bits of the codes, at most 8.

    Returns:
        int8, the shape of ``x``.
    """
    _check_granularity("quantize", granularity)
    scaled = x.detach().float() * spread(_inverse(scale), granularity, x)
    if shift is not None:
        scaled = scaled * spread(torch.exp2(shift.float()), "row", x)
    return scaled.round().clamp(-qmax_of(bits), qmax_of(bits)).to(torch.int8)


QUANTIZE = define(
    Op(
        name="quantize",
        schema="(Tensor x, Tensor scale, str granularity, Tensor? shift=None, int bits=8) -> Tensor",
        reference=quantize_reference,
        fake=lambda x, scale, granularity, shift=None, bits=8: x.new_empty(x.shape, dtype=torch.int8),
        cost=lambda x, scale, granularity, shift=None, bits=8: Cost(
            nbytes(x, scale, shift) + numel(x), numel(x) * 2
        ),
        samples=lambda: [
            (_rand(5, 7), torch.tensor(0.02), "tensor", None, 8),
            (_rand(5, 7), torch.rand(5) / 10, "row", None, 8),
            (_rand(5, 7), torch.rand(7) / 10, "column", None, 4),
            (_rand(5, 7), torch.tensor(0.1), "tensor", torch.arange(5, dtype=torch.uint8), 8),
            (torch.zeros(2, 3), torch.zeros(2), "row", None, 8),
        ],
        error_inputs=lambda: [
            ErrorInput((_rand(2, 2), torch.ones(()), "block"), "granularity must be one of")
        ],
        no_gradient=_ROUNDING,
    )
)


def dequantize_reference(q: Tensor, scale: Tensor, granularity: str, exponent: int = 0) -> Tensor:
    """Return ``float(q) * (scale * 2^exponent)``.

    Args:
        q: int8 codes, or float32 integer sums of ``qgemm`` and ``qspmm``; ``[N, ...]``.
        scale: float32, shaped as ``scale`` gives it for ``granularity``.
        granularity: ``tensor``, ``row`` or ``column``.
        exponent: exact power of two that goes with the scale.

    Returns:
        float32, the shape of ``q``.
    """
    _check_granularity("dequantize", granularity)
    return q.float() * spread(scale * 2.0**exponent, granularity, q)


DEQUANTIZE = define(
    Op(
        name="dequantize",
        schema="(Tensor q, Tensor scale, str granularity, int exponent=0) -> Tensor",
        reference=dequantize_reference,
        fake=lambda q, scale, granularity, exponent=0: q.new_empty(q.shape, dtype=torch.float32),
        cost=lambda q, scale, granularity, exponent=0: Cost(nbytes(q, scale) + numel(q) * 4, numel(q)),
        samples=lambda: [
            (_codes(5, 7), torch.tensor(0.02), "tensor", 0),
            (_codes(5, 7), torch.rand(5), "row", 0),
            (_rand(5, 7).round(), torch.rand(7), "column", -7),
        ],
        error_inputs=lambda: [
            ErrorInput((_codes(2, 2), torch.ones(()), "block"), "granularity must be one of")
        ],
        no_gradient=_ROUNDING,
    )
)


def pack_reference(q: Tensor, bits: int) -> Tensor:
    """Split unsigned codes into bit planes (QGTC section 4.2, 3D-stacked bit compression).

    Args:
        q: integer ``[N, F]``; the low ``bits`` bits of each code are kept.
        bits: number of planes, 1..8.

    Returns:
        uint8 ``[bits, N, ceil(F / 8)]``; bit ``c % 8`` of byte ``c // 8`` belongs to column ``c``.
    """
    check(q.dim() == 2 and 1 <= bits <= 8, "pack", lambda: f"want [N, F] and 1..8 bits, got {bits}")
    padded = torch.nn.functional.pad(q.to(torch.int32), (0, -q.shape[1] % 8))
    groups = padded.reshape(q.shape[0], padded.shape[1] // 8, 8)
    weights = (1 << torch.arange(8, device=q.device)).to(torch.int32)
    planes = [(((groups >> b) & 1) * weights).sum(-1) for b in range(bits)]
    return torch.stack(planes).to(torch.uint8)


PACK = define(
    Op(
        name="pack",
        schema="(Tensor q, int bits) -> Tensor",
        reference=pack_reference,
        fake=lambda q, bits: q.new_empty((bits, q.shape[0], (q.shape[1] + 7) // 8), dtype=torch.uint8),
        cost=lambda q, bits: Cost(nbytes(q) + numel(q) * bits / 8, numel(q) * bits),
        samples=lambda: [(_codes(5, 7).abs(), 3), (_codes(2, 16), 8), (_codes(0, 3), 1)],
        error_inputs=lambda: [ErrorInput((_codes(5, 7), 9), "1..8 bits")],
        no_gradient=_ROUNDING,
    )
)


def unpack_reference(planes: Tensor, bits: int, width: int) -> Tensor:
    """Join bit planes back into unsigned codes.

    Args:
        planes: uint8 ``[bits, N, ceil(width / 8)]`` from ``pack``.
        bits: number of planes.
        width: number of columns.

    Returns:
        uint8 ``[N, width]``.
    """
    check(
        planes.dim() == 3 and planes.shape[0] == bits,
        "unpack",
        lambda: f"want {bits} planes [bits, N, W], got {tuple(planes.shape)}",
    )
    positions = torch.arange(8, device=planes.device, dtype=torch.uint8)
    ones = (planes[..., None] >> positions) & 1
    flat = ones.reshape(bits, planes.shape[1], planes.shape[2] * 8)[..., :width].to(torch.int32)
    weights = (1 << torch.arange(bits, device=planes.device)).to(torch.int32)
    return (flat * weights[:, None, None]).sum(0).to(torch.uint8)


UNPACK = define(
    Op(
        name="unpack",
        schema="(Tensor planes, int bits, SymInt width) -> Tensor",
        reference=unpack_reference,
        fake=lambda planes, bits, width: planes.new_empty((planes.shape[1], width), dtype=torch.uint8),
        cost=lambda planes, bits, width: Cost(
            nbytes(planes) + size_expr(planes.shape[1]) * size_expr(width), numel(planes) * 8
        ),
        samples=lambda: [
            (pack_reference(_codes(5, 7).abs(), 3), 3, 7),
            (pack_reference(_codes(0, 3), 1), 1, 3),
        ],
        error_inputs=lambda: [ErrorInput((_codes(2, 3, 1).view(torch.uint8), 3, 7), "want 3 planes")],
        no_gradient=_ROUNDING,
    )
)


def qspmm_reference(
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    x: Tensor,
    x_scale: Tensor | None,
    shift: Tensor | None,
    reduce: str,
    num_dst: int,
) -> Tensor:
    """Aggregate int8 rows.

    Three forms: with ``x_scale`` (row scales) the sum is of floats ``(value * x_scale[j]) * q_j``;
    with ``shift`` it is the exact integer sum of ``q_j * 2^(7 - shift_j)``; with neither the exact
    integer reduction of ``q_j`` (times ``value`` where that is int8). Exact sums are rounded to
    FP32 once; the caller dequantizes them.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        col: int32 ``[E]`` (or an int64 permutation, for a segment reduction).
        value: float ``[E]`` or ``[E, H]`` (needs ``x_scale``), int8 ``[E]``, or None.
        x: int8 ``[num_src, F]`` or ``[num_src, H, D]``.
        x_scale: float32 ``[num_src]`` or None.
        shift: uint8 ``[num_src]`` from ``row_shift`` or None.
        reduce: ``sum``, ``mean``, ``max`` or ``min``.
        num_dst: number of rows of the result.

    Returns:
        float32 ``[num_dst, ...]``.
    """
    _check_qspmm(value, x_scale, shift, reduce)

    def scaled(those: slice, scale: Tensor) -> Tensor:
        codes, weight = x.index_select(0, col[those]), scale.index_select(0, col[those])
        if value is not None:
            weight = expand_value(weight, value) * value[those]
        return codes.float() * expand_value(weight, codes)

    def exact(those: slice) -> Tensor:
        sources = col[those]
        codes = x.index_select(0, sources).double()
        if shift is not None:
            codes = codes * expand_value(torch.exp2(MAX_SHIFT - shift[sources].double()), codes)
        return codes if value is None else codes * expand_value(value[those].double(), codes)

    messages = exact if x_scale is None else partial(scaled, scale=x_scale)
    return reduce_messages(messages, rowptr, x, col.numel(), num_dst, reduce).float()


def _check_qspmm(value: Tensor | None, x_scale: Tensor | None, shift: Tensor | None, reduce: str) -> None:
    check_reduce("qspmm", reduce)
    check(x_scale is None or shift is None, "qspmm", lambda: "x_scale and shift exclude each other")
    check(
        value is None or x_scale is not None or not value.dtype.is_floating_point,
        "qspmm",
        lambda: "float edge values need x_scale: an integer sum takes integer values only",
    )


def _qspmm_fake(
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    x: Tensor,
    x_scale: Tensor | None,
    shift: Tensor | None,
    reduce: str,
    num_dst: Any,
) -> Tensor:
    _check_qspmm(value, x_scale, shift, reduce)
    return x.new_empty((num_dst, *x.shape[1:]), dtype=torch.float32)


def _qspmm_cost(
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    x: Tensor,
    x_scale: Tensor | None,
    shift: Tensor | None,
    reduce: str,
    num_dst: Any,
) -> Cost:
    edges, width = numel(col), size_expr(1)
    for size in x.shape[1:]:
        width *= size_expr(size)
    per_edge = (4 if x_scale is not None else 0) + (1 if shift is not None else 0)
    return Cost(
        bytes=nbytes(rowptr, col, value) + edges * (width + per_edge) + size_expr(num_dst) * width * 4,
        flops=edges * width * (1 if value is None and x_scale is None else 2),
    )


def _qspmm_samples() -> Sequence[tuple[Any, ...]]:
    rowptr, col, _ = random_csr(6, 5, 14)
    x, heads, scale = _codes(6, 7), _codes(6, 2, 3), torch.rand(6) / 50
    shift = torch.arange(6, dtype=torch.uint8)
    exact = [(rowptr, col, None, x, None, None, reduce, 5) for reduce in REDUCTIONS]
    none = random_csr(4, 7, 0)
    return [
        *exact,
        (rowptr, col, None, x, scale, None, "sum", 5),
        (rowptr, col, _rand(14), x, scale, None, "sum", 5),
        (rowptr, col, _rand(14, 2), heads, scale, None, "sum", 5),
        (rowptr, col, None, x, None, shift, "sum", 5),
        (rowptr, col, _codes(14), x, None, None, "sum", 5),
        (none[0], none[1], None, _codes(4, 1), None, None, "sum", 7),
    ]


def _qspmm_errors() -> Sequence[ErrorInput]:
    rowptr, col, _ = random_csr(6, 5, 14)
    x, scale, shift = _codes(6, 7), torch.ones(6), torch.zeros(6, dtype=torch.uint8)
    return [
        ErrorInput((rowptr, col, None, x, scale, shift, "sum", 5), "exclude each other"),
        ErrorInput((rowptr, col, _rand(14), x, None, None, "sum", 5), "need x_scale"),
        ErrorInput((rowptr, col, None, x, None, None, "median", 5), "reduce must be one of"),
    ]


QSPMM = define(
    Op(
        name="qspmm",
        schema="(Tensor rowptr, Tensor col, Tensor? value, Tensor x, Tensor? x_scale, Tensor? shift,"
        " str reduce, SymInt num_dst) -> Tensor",
        reference=qspmm_reference,
        fake=_qspmm_fake,
        cost=_qspmm_cost,
        samples=_qspmm_samples,
        error_inputs=_qspmm_errors,
        no_gradient=_ROUNDING,
    )
)


def qsddmm_reference(
    rowptr: Tensor,
    col: Tensor,
    a: Tensor,
    b: Tensor,
    op: str,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
) -> Tensor:
    """Return the integer dot product of the rows at both ends of every edge, times both rows' scales.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        col: int32 ``[E]``.
        a: int8 ``[num_dst, F]`` or ``[num_dst, H, D]``.
        b: int8 ``[num_src, F]`` or ``[num_src, H, D]``.
        op: ``dot``.
        a_scale: float32 ``[num_dst]``, or None.
        b_scale: float32 ``[num_src]``, or None, as ``a_scale`` is.

    Returns:
        float32 ``[E]`` or ``[E, H]``: the exact integer rounded once, times ``a_scale[i]``, times
        ``b_scale[j]``.
    """
    _check_qsddmm(op, a_scale, b_scale)
    rows = edge_rows(rowptr, col.numel())
    dots = (a.double().index_select(0, rows) * b.double().index_select(0, col)).sum(-1).float()
    for scale, ends in ((a_scale, rows), (b_scale, col)):
        if scale is not None:
            dots = dots * expand_value(scale.index_select(0, ends), dots)
    return dots


def _check_qsddmm(op: str, a_scale: Tensor | None, b_scale: Tensor | None) -> None:
    check(op == "dot", "qsddmm", lambda: f"op must be 'dot', got {op!r}")
    check((a_scale is None) == (b_scale is None), "qsddmm", lambda: "a_scale and b_scale go together")


def _qsddmm_fake(
    rowptr: Tensor,
    col: Tensor,
    a: Tensor,
    b: Tensor,
    op: str,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
) -> Tensor:
    _check_qsddmm(op, a_scale, b_scale)
    return a.new_empty((col.shape[0], *a.shape[1:-1]), dtype=torch.float32)


def _qsddmm_cost(
    rowptr: Tensor,
    col: Tensor,
    a: Tensor,
    b: Tensor,
    op: str,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
) -> Cost:
    edges, width = numel(col), size_expr(1)
    for size in a.shape[1:]:
        width *= size_expr(size)
    scales = 0 if a_scale is None else 8
    return Cost(nbytes(rowptr, col) + edges * (width * 2 + scales + 4), edges * width * 2)


def _qsddmm_samples() -> Sequence[tuple[Any, ...]]:
    rowptr, col, _ = random_csr(6, 5, 14)
    scales = torch.rand(5) / 50, torch.rand(6) / 50
    return [
        (rowptr, col, _codes(5, 7), _codes(6, 7), "dot"),
        (rowptr, col, _codes(5, 2, 3), _codes(6, 2, 3), "dot"),
        (rowptr, col, _codes(5, 7), _codes(6, 7), "dot", *scales),
        (rowptr, col, _codes(5, 2, 3), _codes(6, 2, 3), "dot", *scales),
    ]


def _qsddmm_errors() -> Sequence[ErrorInput]:
    first = _qsddmm_samples()[0]
    return [
        ErrorInput((*first[:4], "add"), "must be 'dot'"),
        ErrorInput((*first, torch.ones(5)), "go together"),
    ]


QSDDMM = define(
    Op(
        name="qsddmm",
        schema="(Tensor rowptr, Tensor col, Tensor a, Tensor b, str op, Tensor? a_scale=None,"
        " Tensor? b_scale=None) -> Tensor",
        reference=qsddmm_reference,
        fake=_qsddmm_fake,
        cost=_qsddmm_cost,
        samples=_qsddmm_samples,
        error_inputs=_qsddmm_errors,
        no_gradient=_ROUNDING,
    )
)
