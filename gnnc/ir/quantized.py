"""Precision ops: scales, quantization, and sparse products of quantized values.

``quantize`` rounds to ``q = clamp(rint(x * inv), qmin, qmax)``, with the bounds of its ``QType`` and
``inv = 1 / scale`` computed once in FP32 (0 where the scale is 0). ``rint`` rounds half to even. A
scale below the least normal FP32 number counts as 0, so that ``inv`` is always finite. With a seed it
rounds stochastically: ``floor(x * inv + u)`` in the place of ``rint``, u a random fraction
(``gnnc.ir.philox``). 8-bit floats are the nearest to ``clamp(x * inv, qmin, qmax)``, half to even.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor

from gnnc.ir.op import Cost, ErrorInput, Op, check, define, nbytes, numel, refuse, size_expr
from gnnc.ir.philox import random_fractions
from gnnc.ir.qtype import QType
from gnnc.ir.sparse import REDUCTIONS, check_reduce, expand_value, reduce_messages
from gnnc.ir.structure import random_csr

SCALE_LAYOUTS = ("tensor", "row", "column")
"""Layouts of the scale that ``dequantize`` multiplies by."""

MAX_SHIFT = 7
"""The largest k of a row scale ``base / 2^k``."""

STATIC_RANGE = "static_range"
"""Key in the meta of a static scale and of its ``quantize``: least and most amax of values that it suits."""

_TINY = torch.finfo(torch.float32).tiny
_ROUNDING = "rounding has no gradient; the straight-through rule belongs to the joint graph"


def spread(scale: Tensor, granularity: str, like: Tensor) -> Tensor:
    """Return a view of ``scale`` that broadcasts against ``like``."""
    if granularity == "row":
        return scale.reshape(-1, *([1] * (like.dim() - 1)))
    return scale


def _parse(op: str, text: str) -> QType:
    try:
        qtype = QType.parse(text)
    except ValueError as error:
        refuse(op, str(error))
    is_plain = qtype.signedness != "plus_minus_one" and qtype.zero_point is None
    check(is_plain, op, lambda: f"{text} is not computed yet; use int8/row, without a zero point")
    return qtype


def _check_layout(op: str, granularity: str) -> None:
    check(
        granularity in SCALE_LAYOUTS,
        op,
        lambda: f"granularity must be one of {SCALE_LAYOUTS}, got {granularity!r}",
    )


def _check_shift(qtype: QType, shift: Tensor | None) -> None:
    is_shifted = qtype.granularity == "row_pow2"
    check(
        is_shifted == (shift is not None),
        "quantize",
        lambda: f"{qtype} takes {'the shift of each row' if is_shifted else 'no shift'}",
    )


def _amax(x: Tensor, granularity: str) -> Tensor:
    if granularity == "row":
        rows = x.reshape(x.shape[0], -1) if x.numel() else x.new_zeros(x.shape[0], 1)
        return rows.abs().amax(1)
    if granularity == "column":
        width = x.shape[-1]
        return x.reshape(-1, width).abs().amax(0) if x.numel() else x.new_zeros(width)
    return x.abs().amax() if x.numel() else x.new_zeros(())


def scale_reference(x: Tensor, qtype: str) -> Tensor:
    """Return the scale ``amax / qmax`` of the whole tensor, of each row or of each column.

    Args:
        x: floating ``[N, ...]``.
        qtype: the type that ``x`` will be quantized to.

    Returns:
        float32 ``[]`` for ``tensor`` and ``row_pow2`` (its base), ``[N]`` for ``row``, the last dimension
        for ``column``; NaN and Inf in ``x`` stay visible.

    Raises:
        InputError: ``qtype`` is not a quantized type.
    """
    parsed = _parse("scale", qtype)
    scale = _amax(x.detach(), parsed.granularity).float() / parsed.qmax
    return torch.where(scale < _TINY, torch.zeros_like(scale), scale)


def _scale_fake(x: Tensor, qtype: str) -> Tensor:
    shapes = {"row": x.shape[:1], "column": x.shape[-1:]}
    return x.new_empty(shapes.get(_parse("scale", qtype).granularity, ()), dtype=torch.float32)


def _rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _int8(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


SCALE = define(
    Op(
        name="scale",
        schema="(Tensor x, str qtype) -> Tensor",
        kind="precision",
        features=("x",),
        result_dtype=torch.float32,
        step="quantize",
        label="{x}_scale",
        reference=scale_reference,
        fake=_scale_fake,
        cost=lambda x, qtype: Cost(nbytes(x), numel(x)),
        samples=lambda: [
            *(
                (_rand(5, 7), f"int8/{granularity}")
                for granularity in ("tensor", "row", "column", "row_pow2")
            ),
            (_rand(5, 2, 3), "int4/row"),
            (_rand(5, 3).abs(), "uint4/tensor"),
            (torch.empty(0, 4), "int8/tensor"),
            (torch.zeros(3, 4), "int8/row"),
        ],
        error_inputs=lambda: [
            ErrorInput((_rand(2, 2), "int8/block"), "granularity must be one of"),
            ErrorInput((_rand(2, 2), "row"), "is not a quantized type"),
            ErrorInput((_rand(2, 2), "±1/row"), "is not computed yet"),
        ],
        no_gradient=_ROUNDING,
    )
)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, 1.0 / scale, torch.where(scale == 0, 0.0, scale))


def row_shift_reference(x: Tensor, base: Tensor, qtype: str) -> Tensor:
    """Return the shift k of each row, whose scale is ``base / 2^k``.

    Args:
        x: floating ``[N, F]``.
        base: float32 ``[]`` or ``[F]``.
        qtype: a ``row_pow2`` type.

    Returns:
        uint8 ``[N]``: the largest k in 0..7 with ``|x| * inv(base) * 2^k <= qmax`` in the whole row
        (7 for a zero row, 0 where even k = 0 saturates).

    Raises:
        InputError: ``x`` is not a matrix, or ``qtype`` no ``row_pow2`` type.
    """
    parsed = _parse_shifted(x, qtype)
    top = (x.detach().float() * _inverse(base)).abs()
    top = top.amax(1) if x.shape[1] else top.new_zeros(x.shape[0])
    powers = 2.0 ** torch.arange(1, MAX_SHIFT + 1, device=x.device, dtype=torch.float32)
    return (top[:, None] * powers <= parsed.qmax).sum(1).to(torch.uint8)


def _parse_shifted(x: Tensor, qtype: str) -> QType:
    parsed = _parse("row_shift", qtype)
    check(x.dim() == 2, "row_shift", lambda: f"x must be [N, F], got {tuple(x.shape)}")
    check(parsed.granularity == "row_pow2", "row_shift", lambda: f"{qtype} rows have no shift; use row_pow2")
    return parsed


def _row_shift_fake(x: Tensor, base: Tensor, qtype: str) -> Tensor:
    _parse_shifted(x, qtype)
    return x.new_empty(x.shape[:1], dtype=torch.uint8)


ROW_SHIFT = define(
    Op(
        name="row_shift",
        schema="(Tensor x, Tensor base, str qtype) -> Tensor",
        kind="precision",
        features=("x",),
        result_dtype=torch.uint8,
        step="quantize",
        label="{x}_shift",
        reference=row_shift_reference,
        fake=_row_shift_fake,
        cost=lambda x, base, qtype: Cost(nbytes(x), numel(x) * 2),
        samples=lambda: [
            (_rand(9, 7) * torch.logspace(-4, 0, 9)[:, None], torch.tensor(0.03), "int8/row_pow2"),
            (_rand(3, 2), torch.tensor([0.1, 0.2]), "int4/row_pow2"),
            (torch.zeros(2, 3), torch.tensor(0.0), "int8/row_pow2"),
        ],
        error_inputs=lambda: [
            ErrorInput((_rand(3), torch.tensor(0.1), "int8/row_pow2"), r"\[N, F\]"),
            ErrorInput((_rand(3, 2), torch.tensor(0.1), "int8/row"), "have no shift"),
        ],
        no_gradient=_ROUNDING,
    )
)


def quantize_reference(
    x: Tensor,
    scale: Tensor,
    qtype: str,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """Return the quantized values ``clamp(rint(x * inv), qmin, qmax)``, or stochastically rounded ones.

    Args:
        x: floating ``[N, ...]``.
        scale: float32, shaped as ``scale`` gives it for ``qtype``; a base of ``row_pow2`` may be ``[F]``.
        qtype: the type of the result.
        shift: uint8 ``[N]`` from ``row_shift``, for ``row_pow2``: rows use ``inv * 2^shift``.
        seed: int64 ``[]`` of a stochastic rounding; None: to nearest.
        stream: number that tells apart the values that one seed rounds.

    Returns:
        The dtype of ``qtype`` (int8 for signed types of at most 8 bits), the shape of ``x``.

    Raises:
        InputError: ``qtype`` is not a quantized type, or ``shift`` or ``stream`` does not go with it.
    """
    parsed = _check_quantize(qtype, shift, seed, stream)
    scaled = x.detach().float() * spread(_inverse(scale), parsed.granularity, x)
    if shift is not None:
        scaled = scaled * spread(torch.exp2(shift.float()), "row", x)
    if parsed.is_float:
        return scaled.clamp(parsed.qmin, parsed.qmax).to(parsed.dtype)
    if seed is None:
        rounded = scaled.round()
    else:
        rows = x.shape[0] if x.dim() else 1
        width = x.numel() // max(rows, 1)
        rounded = (scaled + random_fractions(rows, width, seed, stream).reshape(x.shape)).floor()
    return rounded.clamp(parsed.qmin, parsed.qmax).to(parsed.dtype)


def _check_quantize(qtype: str, shift: Tensor | None, seed: Tensor | None, stream: int) -> QType:
    parsed = _parse("quantize", qtype)
    _check_shift(parsed, shift)
    is_stream = 0 <= stream < 2**31 and (seed is not None or stream == 0)
    check(is_stream, "quantize", lambda: f"stream {stream} is not below 2^31, or has no seed")
    is_nearest = seed is None or not parsed.is_float
    check(is_nearest, "quantize", lambda: f"{qtype} values round to nearest: leave the seed out")
    return parsed


def _quantize_fake(
    x: Tensor,
    scale: Tensor,
    qtype: str,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    return x.new_empty(x.shape, dtype=_check_quantize(qtype, shift, seed, stream).dtype)


def _quantize_cost(
    x: Tensor,
    scale: Tensor,
    qtype: str,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Cost:
    written = numel(x) * sympy.Rational(QType.parse(qtype).bits, 8)
    return Cost(nbytes(x, scale, shift) + written, numel(x) * (2 if seed is None else 12))


QUANTIZE = define(
    Op(
        name="quantize",
        schema="(Tensor x, Tensor scale, str qtype, Tensor? shift=None, Tensor? seed=None, int stream=0)"
        " -> Tensor",
        kind="precision",
        features=("x",),
        step="quantize",
        label="{x}_q",
        reference=quantize_reference,
        fake=_quantize_fake,
        cost=_quantize_cost,
        qtype=lambda call: QType.parse(call["qtype"]),
        samples=lambda: [
            (_rand(5, 7), torch.tensor(0.02), "int8/tensor"),
            (_rand(5, 7), torch.rand(5) / 10, "int8/row"),
            (_rand(5, 7), torch.rand(7) / 10, "int4/column"),
            (_rand(5, 7), torch.rand(5) / 10, "uint8/row"),
            (_rand(5, 7), torch.tensor(0.1), "int8/row_pow2", torch.arange(5, dtype=torch.uint8)),
            (torch.zeros(2, 3), torch.zeros(2), "int8/row"),
            (
                _rand(5, 11),
                torch.tensor(0.1),
                "int8/row_pow2",
                torch.arange(5, dtype=torch.uint8),
                torch.tensor(-7),
                3,
            ),
            (_rand(5, 2, 3), torch.rand(5) / 10, "int8/row", None, torch.tensor(2**40 + 1), 0),
            (_rand(5, 7), torch.rand(5) / 100, "e4m3/row"),
            (_rand(5, 2, 3), torch.rand(5) / 1e4, "e5m2/row"),
        ],
        error_inputs=lambda: [
            ErrorInput((_rand(2, 2), torch.ones(()), "int8/block"), "granularity must be one of"),
            ErrorInput((_rand(2, 2), torch.ones(()), "int8/tensor", None, None, 1), "has no seed"),
            ErrorInput((_rand(2, 2), torch.ones(2), "e4m3/row", None, torch.tensor(1)), "round to nearest"),
            ErrorInput((_rand(2, 2), torch.ones(()), "int8/row_pow2"), "takes the shift of each row"),
            ErrorInput((_rand(2, 2), torch.ones(2), "int8/row", torch.ones(2)), "takes no shift"),
        ],
        no_gradient=_ROUNDING,
    )
)


def dequantize_reference(q: Tensor, scale: Tensor, granularity: str, exponent: int = 0) -> Tensor:
    """Return ``float(q) * (scale * 2^exponent)``.

    Args:
        q: quantized values, or float32 integer sums of ``qgemm`` and ``qspmm``; ``[N, ...]``.
        scale: float32, ``[]``, ``[N]`` or the last dimension of ``q``, as ``granularity`` says.
        granularity: ``tensor``, ``row`` or ``column``: the layout of ``scale``.
        exponent: exact power of two that goes with the scale.

    Returns:
        float32, the shape of ``q``.

    Raises:
        InputError: ``granularity`` is not a layout of scales.
    """
    _check_layout("dequantize", granularity)
    return q.float() * spread(scale * 2.0**exponent, granularity, q)


DEQUANTIZE = define(
    Op(
        name="dequantize",
        schema="(Tensor q, Tensor scale, str granularity, int exponent=0) -> Tensor",
        kind="precision",
        features=("q",),
        result_dtype=torch.float32,
        label="h{n}",
        reference=dequantize_reference,
        fake=lambda q, scale, granularity, exponent=0: q.new_empty(q.shape, dtype=torch.float32),
        cost=lambda q, scale, granularity, exponent=0: Cost(nbytes(q, scale) + numel(q) * 4, numel(q)),
        samples=lambda: [
            (_int8(5, 7), torch.tensor(0.02), "tensor", 0),
            (_int8(5, 7), torch.rand(5), "row", 0),
            (_rand(5, 7).round(), torch.rand(7), "column", -7),
        ],
        error_inputs=lambda: [
            ErrorInput((_int8(2, 2), torch.ones(()), "block"), "granularity must be one of")
        ],
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
    """Aggregate rows of quantized values.

    Three forms: with ``x_scale`` (row scales) the sum is of floats ``(value * x_scale[j]) * q_j``;
    with ``shift`` it is the exact integer sum of ``q_j * 2^(7 - shift_j)``; with neither the exact
    integer reduction of ``q_j`` (times ``value`` where that is an integer). Exact sums are rounded to
    FP32 once; the caller dequantizes them.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        col: int32 ``[E]`` (or an int64 permutation, for a segment reduction).
        value: float ``[E]`` or ``[E, H]`` (needs ``x_scale``), int8 ``[E]``, or None.
        x: quantized ``[num_src, F]`` or ``[num_src, H, D]``.
        x_scale: float32 ``[num_src]`` or None.
        shift: uint8 ``[num_src]`` from ``row_shift`` or None.
        reduce: ``sum``, ``mean``, ``max`` or ``min``.
        num_dst: number of rows of the result.

    Returns:
        float32 ``[num_dst, ...]``.
    """
    _check_qspmm(value, x_scale, shift, reduce)

    def scaled(edges: slice, scale: Tensor) -> Tensor:
        rows, weight = x.index_select(0, col[edges]), scale.index_select(0, col[edges])
        if value is not None:
            weight = expand_value(weight, value) * value[edges]
        return rows.float() * expand_value(weight, rows)

    def exact(edges: slice) -> Tensor:
        sources = col[edges]
        rows = x.index_select(0, sources).double()
        if shift is not None:
            rows = rows * expand_value(torch.exp2(MAX_SHIFT - shift[sources].double()), rows)
        return rows if value is None else rows * expand_value(value[edges].double(), rows)

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
    x, heads, scale = _int8(6, 7), _int8(6, 2, 3), torch.rand(6) / 50
    shift = torch.arange(6, dtype=torch.uint8)
    exact = [(rowptr, col, None, x, None, None, reduce, 5) for reduce in REDUCTIONS]
    none = random_csr(4, 7, 0)
    return [
        *exact,
        (rowptr, col, None, x, scale, None, "sum", 5),
        (rowptr, col, _rand(14), x, scale, None, "sum", 5),
        (rowptr, col, _rand(14, 2), heads, scale, None, "sum", 5),
        (rowptr, col, None, x, None, shift, "sum", 5),
        (rowptr, col, _int8(14), x, None, None, "sum", 5),
        (none[0], none[1], None, _int8(4, 1), None, None, "sum", 7),
    ]


def _qspmm_errors() -> Sequence[ErrorInput]:
    rowptr, col, _ = random_csr(6, 5, 14)
    x, scale, shift = _int8(6, 7), torch.ones(6), torch.zeros(6, dtype=torch.uint8)
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
        kind="aggregate",
        family="spmm",
        features=("value", "x"),
        gathered=("x",),
        integer_operands=("x",),
        result_dtype=torch.float32,
        counted_as="spmm",
        label="acc{n}",
        reference=qspmm_reference,
        fake=_qspmm_fake,
        cost=_qspmm_cost,
        samples=_qspmm_samples,
        error_inputs=_qspmm_errors,
        no_gradient=_ROUNDING,
    )
)
