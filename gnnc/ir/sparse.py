"""Sparse ops over a CSR: SpMM, SDDMM, edge softmax, segment reduction, and their integer forms.

Edge tensors are in CSR order. ``num_dst`` is an argument, never ``rowptr.shape[0] - 1``, so that
``torch.export`` keeps plain dynamic dimensions; sources and destinations may be different sets.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

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


def _spmm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rowptr, col, value, x, reduce, num_dst = inputs
    ctx.save_for_backward(rowptr, col, value, x, output)
    ctx.reduce, ctx.num_dst = reduce, num_dst


def _extremum_weight(ctx: Any, rowptr: Tensor, col: Tensor, value: Any, x: Tensor, out: Tensor) -> Tensor:
    """Share of each message element in its row's extremum: ties share equally, as torch does."""
    rows = edge_rows(rowptr, col.numel())
    messages = x.index_select(0, col)
    if value is not None:
        messages = messages * expand_value(value, messages)
    hit = (messages == out.index_select(0, rows)).to(x.dtype)
    count = reduce_edges(hit, rows, ctx.num_dst, "sum").clamp(min=1)
    return hit / count.index_select(0, rows)


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rowptr, col, value, x, out = ctx.saved_tensors
    rows = edge_rows(rowptr, col.numel())
    if ctx.reduce == "mean":
        grad = grad / expand_value(rowptr.diff().clamp(min=1).to(grad.dtype), grad)
    if ctx.reduce in ("max", "min"):
        share = _extremum_weight(ctx, rowptr, col, value, x, out)
        message_grad = grad.index_select(0, rows) * share
        dx = message_grad if value is None else message_grad * expand_value(value, message_grad)
        dx = reduce_edges(dx, col.long(), x.shape[0], "sum")
        dvalue = None if value is None else message_grad * x.index_select(0, col)
        return None, None, _fold_value_grad(dvalue, value), dx, None, None
    rowptr_t, col_t, perm_t = torch.ops.gnnc.csr_transpose(rowptr, col, x.shape[0])
    value_t = None if value is None else value.index_select(0, perm_t)
    dx = torch.ops.gnnc.spmm(rowptr_t, col_t, value_t, grad, "sum", x.shape[0]).to(x.dtype)
    dvalue = None
    if value is not None and ctx.needs_input_grad[2]:
        dvalue = torch.ops.gnnc.sddmm(rowptr, col, grad, x.to(grad.dtype), "mul")
    return None, None, _fold_value_grad(dvalue, value), dx, None, None


def _fold_value_grad(grad: Tensor | None, value: Tensor | None) -> Tensor | None:
    if grad is None or value is None:
        return None
    extra = tuple(range(value.dim(), grad.dim()))
    return (grad.sum(extra) if extra else grad).to(value.dtype)


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
        gradient=Gradient(_spmm_backward, _spmm_setup),
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


def _sddmm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rowptr, col, a, b, op = inputs
    ctx.save_for_backward(rowptr, col, a, b)
    ctx.edge_op = op


def _unbroadcast(grad: Tensor, like: Tensor) -> Tensor:
    return grad.sum_to_size(like.shape).to(like.dtype)


def _sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rowptr, col, a, b = ctx.saved_tensors
    rows, op = edge_rows(rowptr, col.numel()), ctx.edge_op
    grad = grad.unsqueeze(-1) if op == "dot" else grad
    da = db = None
    if a is not None and ctx.needs_input_grad[2] and op != "copy_src":
        edge = grad * b.index_select(0, col) if op in ("dot", "mul") else grad
        full = torch.ops.gnnc.segment_reduce(rowptr, None, edge.contiguous(), "sum", a.shape[0])
        da = _unbroadcast(full, a)
    if b is not None and ctx.needs_input_grad[3] and op != "copy_dst":
        edge = grad * a.index_select(0, rows) if op in ("dot", "mul") else grad
        rowptr_t, _, perm_t = torch.ops.gnnc.csr_transpose(rowptr, col, b.shape[0])
        full = torch.ops.gnnc.segment_reduce(rowptr_t, perm_t, edge.contiguous(), "sum", b.shape[0])
        db = _unbroadcast(-full if op == "sub" else full, b)
    return None, None, da, db, None


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
        gradient=Gradient(_sddmm_backward, _sddmm_setup),
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


def _edge_softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _edge_softmax_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rowptr, alpha = ctx.saved_tensors
    weighted = alpha * grad
    rows = edge_rows(rowptr, alpha.shape[0])
    total = torch.ops.gnnc.segment_reduce(rowptr, None, weighted, "sum", rowptr.shape[0] - 1)
    return None, weighted - alpha * total.index_select(0, rows), None


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
        gradient=Gradient(_edge_softmax_backward, _edge_softmax_setup),
        samples=_edge_softmax_samples,
        error_inputs=lambda: [
            ErrorInput((random_csr(6, 5, 14)[0], torch.ones(14, 1, 1)), r"\[E\] or \[E, H\]")
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


def _segment_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rowptr, perm, x, reduce, num_dst = inputs
    ctx.save_for_backward(rowptr, perm, x, output)
    ctx.reduce, ctx.num_dst = reduce, num_dst


def _segment_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rowptr, perm, x, out = ctx.saved_tensors
    order = torch.arange(x.shape[0], device=x.device) if perm is None else perm
    rows = edge_rows(rowptr, order.shape[0])
    if ctx.reduce == "mean":
        grad = grad / expand_value(rowptr.diff().clamp(min=1).to(grad.dtype), grad)
    dtaken = grad.index_select(0, rows)
    if ctx.reduce in ("max", "min"):
        dtaken = dtaken * _extremum_weight(ctx, rowptr, order, None, x, out)
    return None, None, torch.zeros_like(x).index_add(0, order, dtaken.to(x.dtype)), None, None


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
        gradient=Gradient(_segment_backward, _segment_setup),
        quantized="qspmm",
        samples=_segment_samples,
        error_inputs=lambda: _bad_reduce(_segment_samples()[0], 3),
    )
)
