"""Dot products of quantized rows at both ends of each edge."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnc.ir.op import Cost, ErrorInput, Op, check, define, nbytes, numel, size_expr
from gnnc.ir.sparse import expand_value
from gnnc.ir.structure import edge_rows, random_csr


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
        a: quantized ``[num_dst, F]`` or ``[num_dst, H, D]``.
        b: quantized ``[num_src, F]`` or ``[num_src, H, D]``.
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


def _rows(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


def _qsddmm_samples() -> Sequence[tuple[Any, ...]]:
    rowptr, col, _ = random_csr(6, 5, 14)
    scales = torch.rand(5) / 50, torch.rand(6) / 50
    return [
        (rowptr, col, _rows(5, 7), _rows(6, 7), "dot"),
        (rowptr, col, _rows(5, 2, 3), _rows(6, 2, 3), "dot"),
        (rowptr, col, _rows(5, 7), _rows(6, 7), "dot", *scales),
        (rowptr, col, _rows(5, 2, 3), _rows(6, 2, 3), "dot", *scales),
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
        kind="edge",
        family="sddmm",
        features=("a", "b"),
        gathered=("a", "b"),
        integer_operands=("a", "b"),
        result_dtype=torch.float32,
        counted_as="sddmm",
        label="e{n}",
        reference=qsddmm_reference,
        fake=_qsddmm_fake,
        cost=_qsddmm_cost,
        samples=_qsddmm_samples,
        error_inputs=_qsddmm_errors,
        no_gradient="integers have no gradient; the straight-through rule belongs to the joint graph",
    )
)
