"""Sparse ops over a CSR: SpMM, SDDMM, edge softmax, segment reduction, and their integer forms.

Edge tensors are in CSR order. ``num_dst`` is an argument, never ``rowptr.shape[0] - 1``, so that
``torch.export`` keeps plain dynamic dimensions; sources and destinations may be different sets.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gnnc.ir import sparse_gradients as gradients
from gnnc.ir.nodes import may_be_same_shape
from gnnc.ir.op import (
    Cost,
    ErrorInput,
    Gradient,
    Op,
    accumulate_dtype,
    check,
    define,
    nbytes,
    numel,
    size_expr,
)
from gnnc.ir.structure import edge_rows, random_csr

REDUCTIONS = ("sum", "mean", "max", "min")
EDGE_OPS = ("dot", "add", "sub", "mul", "copy_src", "copy_dst")
MOST_ELEMENTS = 2**27
"""Elements of messages that the references make at once."""


def expand_value(value: Tensor, like: Tensor) -> Tensor:
    """Give ``value`` (``[E]`` or ``[E, H]``) trailing ones until it broadcasts against ``like``."""
    return value.reshape(*value.shape, *([1] * (like.dim() - value.dim())))


def reduce_edges(messages: Tensor, rows: Tensor, num_dst: int, reduce: str) -> Tensor:
    """Reduce ``messages [E, ...]`` by ``rows [E]`` to ``[num_dst, ...]``; an empty row gives 0."""
    out = messages.new_zeros((num_dst, *messages.shape[1:]))
    if reduce in ("sum", "mean"):
        out = out.index_add(0, rows, messages)
        if reduce == "sum":
            return out
        count = torch.bincount(rows, minlength=num_dst).clamp(min=1).to(out.dtype)
        return out / expand_value(count, out)
    index = expand_value(rows, messages).expand_as(messages)
    return out.scatter_reduce(0, index, messages, f"a{reduce}", include_self=False)


def reduce_messages(
    messages: Callable[[slice], Tensor], rowptr: Tensor, x: Tensor, edges: int, num_dst: int, reduce: str
) -> Tensor:
    """Return the exact result of ``reduce_edges``, computed in blocks of edges that memory easily holds.

    Args:
        messages: returns the messages of a slice of the edges, each of the shape of a row of ``x``.
        rowptr: int64 ``[num_dst + 1]``.
        x: ``[num_src, ...]``.
        edges: E.
        num_dst: number of rows of the result.
        reduce: one of ``REDUCTIONS``.
    """
    rows, width = edge_rows(rowptr, edges), x[:1].numel()
    if edges * width <= MOST_ELEMENTS:
        return reduce_edges(messages(slice(0, edges)), rows, num_dst, reduce)
    reduced = []
    for first, past in _blocks_of_rows(rowptr, edges, MOST_ELEMENTS // width + 1):
        block = slice(int(rowptr[first]), int(rowptr[past]))
        reduced.append(reduce_edges(messages(block), rows[block] - first, past - first, reduce))
    return torch.cat(reduced)


def _blocks_of_rows(rowptr: Tensor, edges: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut a CSR into blocks of whole rows, each of about ``size`` edges and the rest of its last row."""
    ends = torch.searchsorted(rowptr, torch.arange(size, edges, size, device=rowptr.device), right=True)
    bounds = [0, *ends.unique().tolist(), rowptr.numel() - 1]
    return ((first, past) for first, past in pairwise(bounds) if first < past)


def softmax_of_edges(logits: Tensor, rows: Tensor, num_dst: int, eps: float) -> Tensor:
    """Normalize ``logits [E, ...]`` over the edges of each row: ``exp(l - max) / (sum + eps)``."""
    top = reduce_edges(logits, rows, num_dst, "max").index_select(0, rows)
    weight = (logits - top).exp()
    total = reduce_edges(weight, rows, num_dst, "sum") + eps
    return weight / total.index_select(0, rows)


def check_reduce(op: str, reduce: str) -> None:
    """Refuse a reduction that no op of the family has."""
    check(reduce in REDUCTIONS, op, lambda: f"reduce must be one of {REDUCTIONS}, got {reduce!r}")


def spmm_reference(
    rowptr: Tensor, col: Tensor, value: Tensor | None, x: Tensor, reduce: str, num_dst: int
) -> Tensor:
    """Aggregate rows of ``x`` over incoming edges: ``y_i = reduce_e value_e * x[col_e]``.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        col: int32 ``[E]``.
        value: floating ``[E]``, per head ``[E, H]``, or None for 1.
        x: floating ``[num_src]``, ``[num_src, F]`` or ``[num_src, H, D]``.
        reduce: ``sum``, ``mean``, ``max`` or ``min``.
        num_dst: number of rows of the result.

    Returns:
        ``[num_dst, ...]``, at least FP32; a row without edges is 0.
    """
    check_reduce("spmm", reduce)
    wide = x.to(accumulate_dtype(x.dtype))

    def messages(block: slice) -> Tensor:
        rows = wide.index_select(0, col[block])
        return rows if value is None else rows * expand_value(value[block].to(rows.dtype), rows)

    return reduce_messages(messages, rowptr, x, col.numel(), num_dst, reduce)


def _spmm_fake(
    rowptr: Tensor, col: Tensor, value: Tensor | None, x: Tensor, reduce: str, num_dst: Any
) -> Tensor:
    check_reduce("spmm", reduce)
    return x.new_empty((num_dst, *x.shape[1:]), dtype=accumulate_dtype(x.dtype))


def _row_elements(x: Tensor) -> Any:
    result = size_expr(1)
    for size in x.shape[1:]:
        result *= size_expr(size)
    return result


def _spmm_cost(
    rowptr: Tensor, col: Tensor, value: Tensor | None, x: Tensor, reduce: str, num_dst: Any
) -> Cost:
    edges, width = numel(col), _row_elements(x)
    gathered = edges * width * x.element_size()
    out = size_expr(num_dst) * width * 4
    return Cost(
        bytes=nbytes(rowptr, col, value) + gathered + out,
        flops=edges * width * (1 if value is None else 2),
    )


def _float_samples() -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    rowptr, col, _ = random_csr(6, 5, 14)
    empty = random_csr(4, 7, 0)
    value, heads = torch.randn(14, generator=generator), torch.randn(14, 2, generator=generator)
    x, x3 = torch.randn(6, 7, generator=generator), torch.randn(6, 2, 3, generator=generator)
    return [
        (rowptr, col, None, x, 5),
        (rowptr, col, value, x, 5),
        (rowptr, col, heads, x3, 5),
        (rowptr, col, value, x[:, 0].contiguous(), 5),
        (empty[0], empty[1], None, torch.randn(4, 1, generator=generator), 7),
    ]


def _spmm_samples() -> Sequence[tuple[Any, ...]]:
    return [
        (rowptr, col, value, x, reduce, num_dst)
        for rowptr, col, value, x, num_dst in _float_samples()
        for reduce in REDUCTIONS
    ]


def _bad_reduce(sample: tuple[Any, ...], position: int) -> list[ErrorInput]:
    args = list(sample)
    args[position] = "median"
    return [ErrorInput(tuple(args), "reduce must be one of")]


SPMM = define(
    Op(
        name="spmm",
        schema="(Tensor rowptr, Tensor col, Tensor? value, Tensor x, str reduce, SymInt num_dst) -> Tensor",
        kind="aggregate",
        features=("value", "x"),
        gathered=("x",),
        low_operands=("x",),
        counted_as="spmm",
        label="h{n}",
        reference=spmm_reference,
        fake=_spmm_fake,
        cost=_spmm_cost,
        gradient=Gradient(gradients.spmm_backward, gradients.spmm_setup),
        quantized="qspmm",
        samples=_spmm_samples,
        error_inputs=lambda: _bad_reduce(_spmm_samples()[0], 4),
    )
)


def sddmm_reference(rowptr: Tensor, col: Tensor, a: Tensor | None, b: Tensor | None, op: str) -> Tensor:
    """Combine the destination's and the source's rows at every edge.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        col: int32 ``[E]``.
        a: destination side ``[num_dst, ...]``; None for ``copy_src``.
        b: source side ``[num_src, ...]``; None for ``copy_dst``.
        op: ``dot`` (sums the last dimension), ``add``, ``sub`` (a - b), ``mul``, ``copy_src`` or
            ``copy_dst``.

    Returns:
        ``[E, ...]``; ``dot`` of ``[N, H, D]`` gives ``[E, H]``, of ``[N, F]`` gives ``[E]``.
    """
    _check_edge_op("sddmm", a, b, op)
    if op == "copy_src":
        return _required(b).index_select(0, col)
    rows = edge_rows(rowptr, col.numel())
    if op == "copy_dst":
        return _required(a).index_select(0, rows)
    left, right = _required(a), _required(b)
    dtype = accumulate_dtype(left.dtype)
    left, right = left.to(dtype).index_select(0, rows), right.to(dtype).index_select(0, col)
    if op == "dot":
        return (left * right).sum(-1)
    return {"add": torch.add, "sub": torch.sub, "mul": torch.mul}[op](left, right)


def _required(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _check_edge_op(name: str, a: Tensor | None, b: Tensor | None, op: str) -> None:
    check(op in EDGE_OPS, name, lambda: f"op must be one of {EDGE_OPS}, got {op!r}")
    check(a is not None or op == "copy_src", name, lambda: f"op {op!r} needs the destination side a")
    check(b is not None or op == "copy_dst", name, lambda: f"op {op!r} needs the source side b")


def _sddmm_fake(rowptr: Tensor, col: Tensor, a: Tensor | None, b: Tensor | None, op: str) -> Tensor:
    _check_edge_op("sddmm", a, b, op)
    side = _required(b if a is None else a)
    if op in ("copy_src", "copy_dst"):
        return side.new_empty((col.shape[0], *side.shape[1:]))
    tail = torch.broadcast_shapes(side.shape[1:], _required(b).shape[1:])
    shape = (col.shape[0], *(tail[:-1] if op == "dot" else tail))
    return side.new_empty(shape, dtype=accumulate_dtype(side.dtype))


def _sddmm_cost(rowptr: Tensor, col: Tensor, a: Tensor | None, b: Tensor | None, op: str) -> Cost:
    side = _required(b if a is None else a)
    edges, width = numel(col), _row_elements(side)
    sides = (a is not None) + (b is not None)
    out = edges * (4 if op == "dot" else width * 4)
    return Cost(
        bytes=nbytes(rowptr, col) + edges * width * side.element_size() * sides + out,
        flops=edges * width * (2 if op == "dot" else 1),
    )


def _sddmm_samples() -> Sequence[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(1)
    rowptr, col, _ = random_csr(6, 5, 14)
    a, b = torch.randn(5, 7, generator=generator), torch.randn(6, 7, generator=generator)
    a3, b3 = torch.randn(5, 2, 3, generator=generator), torch.randn(6, 2, 3, generator=generator)
    both = [(rowptr, col, a, b, op) for op in EDGE_OPS[:4]]
    empty = random_csr(6, 5, 0)
    return [
        *both,
        (rowptr, col, a3, b3, "dot"),
        (rowptr, col, None, b, "copy_src"),
        (rowptr, col, a, None, "copy_dst"),
        (empty[0], empty[1], a, b, "dot"),
    ]


SDDMM = define(
    Op(
        name="sddmm",
        schema="(Tensor rowptr, Tensor col, Tensor? a, Tensor? b, str op) -> Tensor",
        kind="edge",
        features=("a", "b"),
        gathered=("a", "b"),
        low_operands=("a", "b"),
        counted_as="sddmm",
        label="e{n}",
        reference=sddmm_reference,
        fake=_sddmm_fake,
        cost=_sddmm_cost,
        gradient=Gradient(gradients.sddmm_backward, gradients.sddmm_setup),
        quantized="qsddmm",
        samples=_sddmm_samples,
        error_inputs=lambda: [
            ErrorInput((*_sddmm_samples()[0][:4], "pow"), "op must be one of"),
            ErrorInput((*_sddmm_samples()[0][:3], None, "dot"), "needs the source side"),
        ],
    )
)


def edge_softmax_reference(rowptr: Tensor, logits: Tensor, eps: float = 1e-16) -> Tensor:
    """Normalize the logits of each row's edges: ``exp(l - max) / (sum + eps)``, always FP32.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        logits: ``[E]`` or ``[E, H]``, in CSR order.
        eps: added to the denominator (PyG adds 1e-16).

    Returns:
        The shape of ``logits``; at least FP32.
    """
    check(logits.dim() in (1, 2), "edge_softmax", lambda: f"logits {tuple(logits.shape)}: want [E] or [E, H]")
    logits = logits.to(accumulate_dtype(logits.dtype))
    return softmax_of_edges(logits, edge_rows(rowptr, logits.shape[0]), rowptr.numel() - 1, eps)


def _edge_softmax_samples() -> Sequence[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(2)
    rowptr = random_csr(6, 5, 14)[0]
    return [
        (rowptr, torch.randn(14, generator=generator), 1e-16),
        (rowptr, torch.randn(14, 3, generator=generator) * 50, 0.0),
        (random_csr(6, 5, 0)[0], torch.empty(0, 2), 1e-16),
    ]


EDGE_SOFTMAX = define(
    Op(
        name="edge_softmax",
        schema="(Tensor rowptr, Tensor logits, float eps=1e-16) -> Tensor",
        kind="edge",
        counted_as="softmax",
        features=("logits",),
        step="exp",
        label="alpha{n}",
        reference=edge_softmax_reference,
        fake=lambda rowptr, logits, eps=1e-16: logits.new_empty(
            logits.shape, dtype=accumulate_dtype(logits.dtype)
        ),
        cost=lambda rowptr, logits, eps=1e-16: Cost(nbytes(rowptr) + numel(logits) * 8, numel(logits) * 5),
        gradient=Gradient(gradients.edge_softmax_backward, gradients.edge_softmax_setup),
        samples=_edge_softmax_samples,
        error_inputs=lambda: [
            ErrorInput((random_csr(6, 5, 14)[0], torch.ones(14, 1, 1)), r"\[E\] or \[E, H\]")
        ],
    )
)


def edge_softmax_backward_reference(rowptr: Tensor, alpha: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the logits of ``edge_softmax``: ``alpha * (grad - sum of alpha * grad by row)``.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        alpha: result of ``edge_softmax``, ``[E]`` or ``[E, H]``.
        grad: gradient of ``alpha``, of its shape.

    Returns:
        The shape of ``alpha``; at least FP32.
    """
    _check_softmax_grad(alpha, grad)
    dtype = accumulate_dtype(alpha.dtype)
    alpha, rows = alpha.to(dtype), edge_rows(rowptr, alpha.shape[0])
    total = reduce_edges(alpha * grad, rows, rowptr.numel() - 1, "sum")
    return alpha * (grad - total.index_select(0, rows))


def _check_softmax_grad(alpha: Tensor, grad: Tensor) -> None:
    check(
        alpha.dim() in (1, 2) and may_be_same_shape(alpha.shape, grad.shape),
        "edge_softmax_backward",
        lambda: f"alpha {tuple(alpha.shape)} and grad {tuple(grad.shape)}: want one shape, [E] or [E, H]",
    )


def _edge_softmax_backward_fake(rowptr: Tensor, alpha: Tensor, grad: Tensor) -> Tensor:
    _check_softmax_grad(alpha, grad)
    return alpha.new_empty(alpha.shape, dtype=accumulate_dtype(alpha.dtype))


def _edge_softmax_backward_samples() -> Sequence[tuple[Any, ...]]:
    return [
        (rowptr, edge_softmax_reference(rowptr, logits), logits.flip(0))
        for rowptr, logits, _ in _edge_softmax_samples()
    ]


EDGE_SOFTMAX_BACKWARD = define(
    Op(
        name="edge_softmax_backward",
        schema="(Tensor rowptr, Tensor alpha, Tensor grad) -> Tensor",
        kind="edge",
        family="edge_softmax",
        counted_as="softmax",
        features=("alpha", "grad"),
        label="e{n}",
        reference=edge_softmax_backward_reference,
        fake=_edge_softmax_backward_fake,
        cost=lambda rowptr, alpha, grad: Cost(nbytes(rowptr, alpha, grad) + numel(grad) * 4, numel(grad) * 4),
        gradient=Gradient(gradients.softmax_backward_backward, gradients.softmax_backward_setup),
        samples=_edge_softmax_backward_samples,
        error_inputs=lambda: [
            ErrorInput((random_csr(6, 5, 14)[0], torch.ones(14), torch.ones(14, 2)), "want one shape")
        ],
    )
)


def segment_reduce_reference(
    rowptr: Tensor, perm: Tensor | None, x: Tensor, reduce: str, num_dst: int
) -> Tensor:
    """Reduce consecutive rows of ``x`` (or of ``x[perm]``) to one row a segment.

    Args:
        rowptr: int64 ``[num_dst + 1]``, the segments' bounds.
        perm: int64 or int32 ``[M]`` order in which rows are taken, or None for rows in order.
        x: ``[M, ...]``.
        reduce: ``sum``, ``mean``, ``max`` or ``min``.
        num_dst: number of segments.

    Returns:
        ``[num_dst, ...]``, at least FP32; an empty segment gives 0.
    """
    check_reduce("segment_reduce", reduce)
    x = x.to(accumulate_dtype(x.dtype))
    taken = x if perm is None else x.index_select(0, perm)
    return reduce_edges(taken, edge_rows(rowptr, taken.shape[0]), num_dst, reduce)


def _segment_samples() -> Sequence[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(3)
    rowptr, _, perm = random_csr(6, 5, 14)
    x = torch.randn(14, 7, generator=generator)
    plain = [(rowptr, perm, x, reduce, 5) for reduce in REDUCTIONS]
    return [
        *plain,
        (rowptr, perm.int(), x, "sum", 5),
        (rowptr, None, x, "sum", 5),
        (random_csr(2, 3, 0)[0], None, x[:0], "max", 3),
    ]


SEGMENT_REDUCE = define(
    Op(
        name="segment_reduce",
        schema="(Tensor rowptr, Tensor? perm, Tensor x, str reduce, SymInt num_dst) -> Tensor",
        kind="aggregate",
        family="spmm",
        features=("x",),
        gathered=("x",),
        low_operands=("x",),
        counted_as="segment",
        label="h{n}",
        reference=segment_reduce_reference,
        fake=lambda rowptr, perm, x, reduce, num_dst: _spmm_fake(rowptr, rowptr, None, x, reduce, num_dst),
        cost=lambda rowptr, perm, x, reduce, num_dst: Cost(
            nbytes(rowptr, perm, x) + size_expr(num_dst) * _row_elements(x) * 4, numel(x)
        ),
        gradient=Gradient(gradients.segment_backward, gradients.segment_setup),
        quantized="qspmm",
        samples=_segment_samples,
        error_inputs=lambda: _bad_reduce(_segment_samples()[0], 3),
    )
)
