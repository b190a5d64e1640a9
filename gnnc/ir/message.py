"""General edge ops: run a small body at every edge, and keep (``edge_map``) or reduce (``message``) it.

The body (see ``gnnc.ir.body``) sees rows of its operands: ``dst`` operands by destination, ``src``
operands by source, ``edge`` operands by edge, ``const`` operands whole. A ``message`` may reduce
several values of one body, or one value in several ways, in one pass over the edges. Its reduction
``softmax`` takes two values: logits, and the values that their softmax over the edges of a row weighs,
column by column.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import sympy
import torch
from torch import Tensor

from gnnc.ir.body import evaluate_body, parse_body
from gnnc.ir.edge_gradients import edge_map_backward, edge_sum_backward, edges_setup, message_backward
from gnnc.ir.nodes import same_shape
from gnnc.ir.op import Cost, ErrorInput, Gradient, Op, accumulate_dtype, check, define, nbytes, numel
from gnnc.ir.sparse import REDUCTIONS, reduce_edges, softmax_of_edges
from gnnc.ir.structure import edge_rows, random_csr

MESSAGE_REDUCTIONS = (*REDUCTIONS, "softmax")

Tensors = list[Tensor]


def edge_map_reference(
    rowptr: Tensor, col: Tensor, body: str, dst: Tensors, src: Tensors, edge: Tensors, const: Tensors
) -> Tensor:
    """Return the body's value at every edge.

    Args:
        rowptr: int64 ``[num_dst + 1]``.
        col: int32 ``[E]``.
        body: text of the body.
        dst: operands ``[num_dst, ...]``, seen as ``i0, i1, ...``.
        src: operands ``[num_src, ...]``, seen as ``j0, ...``.
        edge: operands ``[E, ...]`` in CSR order, seen as ``e0, ...``.
        const: operands without an edge dimension, seen as ``c0, ...``.

    Returns:
        ``[E, ...]`` in CSR order.
    """
    rows = edge_rows(rowptr, col.numel())
    return _edge_values(rows, col, body, dst, src, edge, const).contiguous()


def _edge_values(
    rows: Tensor, col: Tensor, body: str, dst: Tensors, src: Tensors, edge: Tensors, const: Tensors
) -> Any:
    gathered_dst = [t.index_select(0, rows) for t in dst]
    gathered_src = [t.index_select(0, col) for t in src]
    return evaluate_body(body, gathered_dst, gathered_src, list(edge), list(const))


def _edge_map_fake(
    rowptr: Tensor, col: Tensor, body: str, dst: Tensors, src: Tensors, edge: Tensors, const: Tensors
) -> Tensor:
    out = _fake_values(col, body, dst, src, edge, const)
    return out.new_empty((col.shape[0], *out.shape[1:]))


def _fake_values(col: Tensor, body: str, dst: Tensors, src: Tensors, edge: Tensors, const: Tensors) -> Any:
    edges = col.shape[0]
    return evaluate_body(
        body,
        [t.new_empty((edges, *t.shape[1:])) for t in dst],
        [t.new_empty((edges, *t.shape[1:])) for t in src],
        list(edge),
        list(const),
    )


def _gathered_cost(col: Tensor, body: str, dst: Tensors, src: Tensors, edge: Tensors) -> Cost:
    edges, gathered = numel(col), sympy.Integer(0)
    width = sympy.Integer(1)
    for tensor in (*dst, *src):
        row = sympy.Integer(tensor.element_size())
        for size in tensor.shape[1:]:
            row *= int(size)
        gathered += edges * row
        width = sympy.Max(width, row / tensor.element_size())
    steps = sum(1 for n in parse_body(body).graph.nodes if n.op == "call_function")
    return Cost(bytes=gathered + nbytes(col, *edge), flops=edges * width * steps)


def _edge_map_cost(
    rowptr: Tensor, col: Tensor, body: str, dst: Tensors, src: Tensors, edge: Tensors, const: Tensors
) -> Cost:
    cost = _gathered_cost(col, body, dst, src, edge)
    return Cost(cost.bytes + numel(col) * 4, cost.flops)


_GATV2 = (
    "t0 = aten.add.Tensor(i0, j0); t1 = aten.leaky_relu.default(t0, 0.2); "
    "t2 = aten.mul.Tensor(t1, c0); t3 = aten.sum.dim_IntList(t2, [-1]); return t3"
)
_STD = "t0 = aten.sub.Tensor(j0, e0); t1 = aten.mul.Tensor(t0, t0); return [t0, t0, t1]"
_SOFTMAX = "t0 = aten.add.Tensor(j0, e0); t1 = aten.mul.Tensor(t0, c0); return [t1, t0]"
_BOTH = "t0 = aten.add.Tensor(j0, e0); t1 = aten.mul.Tensor(t0, c0); return [t0, t1, t0, t1]"
_GINE = "t0 = aten.add.Tensor(j0, e0); t1 = aten.relu.default(t0); return t1"


def _operands() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(4)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rowptr, col, _ = random_csr(6, 5, 14)
    return rowptr, col, rand(5, 2, 3), rand(6, 2, 3), rand(14, 2, 3), rand(1, 2, 3)


def _edge_map_samples() -> Sequence[tuple[Any, ...]]:
    rowptr, col, i, j, e, c = _operands()
    none = random_csr(6, 5, 0)
    return [
        (rowptr, col, _GATV2, [i], [j], [], [c]),
        (rowptr, col, _GINE, [], [j], [e], []),
        (none[0], none[1], _GATV2, [i], [j], [], [c]),
    ]


EDGE_MAP = define(
    Op(
        name="edge_map",
        schema="(Tensor rowptr, Tensor col, str body, Tensor[] dst, Tensor[] src, Tensor[] edge,"
        " Tensor[] const) -> Tensor",
        kind="edge",
        counted_as="message",
        features=("dst", "src", "edge", "const"),
        gathered=("src", "dst"),
        label="e{n}",
        reference=edge_map_reference,
        fake=_edge_map_fake,
        cost=_edge_map_cost,
        gradient=Gradient(edge_map_backward, edges_setup),
        samples=_edge_map_samples,
        error_inputs=lambda: [],
    )
)


def message_reference(
    rowptr: Tensor,
    col: Tensor,
    body: str,
    reduce: str,
    dst: Tensors,
    src: Tensors,
    edge: Tensors,
    const: Tensors,
    num_dst: int,
) -> Tensor:
    """Reduce the body's value over the edges of each destination.

    Args: as ``edge_map``, and ``num_dst`` and ``reduce``: ``sum``, ``mean``, ``max``, ``min``,
        ``softmax``, or several of them joined by commas. The body returns a list of as many values of one
        shape as they take: ``softmax`` takes two, ``l`` and ``v``, and makes
        ``sum_e exp(l_e - max) / (sum_e exp(l_e - max)) * v_e`` of them; any other takes one.

    Returns:
        ``[num_dst, ...]``, at least FP32; of K reductions ``[num_dst, K, ...]``. A row without
        edges is 0.

    Raises:
        InputError: ``reduce`` names something else, or another number of values than the body returns.
    """
    names = reductions(reduce)
    rows = edge_rows(rowptr, col.numel())
    values = _listed(_edge_values(rows, col, body, dst, src, edge, const), names)
    values = [value.to(accumulate_dtype(value.dtype)) for value in values]
    reduced = [_reduced(name, taken, rows, num_dst) for name, taken in pair_values(names, values)]
    return reduced[0] if len(reduced) == 1 else torch.stack(reduced, 1)


def _reduced(name: str, values: Tensors, rows: Tensor, num_dst: int) -> Tensor:
    if name != "softmax":
        return reduce_edges(values[0], rows, num_dst, name)
    logits, value = values
    return reduce_edges(softmax_of_edges(logits, rows, num_dst, 0.0) * value, rows, num_dst, "sum")


def reductions(reduce: str) -> tuple[str, ...]:
    """Split the names in ``reduce``; refuse names of no reduction."""
    names = tuple(reduce.split(","))
    for name in names:
        check(
            name in MESSAGE_REDUCTIONS,
            "message",
            lambda name=name: f"reduce must be one of {MESSAGE_REDUCTIONS}, got {name!r}",
        )
    return names


def values_taken(name: str) -> int:
    """Return how many values of a body a reduction takes: ``softmax`` takes logits and weighted values."""
    return 2 if name == "softmax" else 1


def pair_values(names: Sequence[str], values: Tensors) -> Iterator[tuple[str, Tensors]]:
    """Return each reduction with the values that it takes, which are all values of the body in turn."""
    assert sum(map(values_taken, names)) == len(values), (names, len(values))
    rest = iter(values)
    return ((name, list(islice(rest, values_taken(name)))) for name in names)


def _listed(value: Any, names: tuple[str, ...]) -> list[Tensor]:
    """Return the values of a body, reduced as ``names`` say."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    many = sum(map(values_taken, names))
    check(
        len(values) == many and all(same_shape(v.shape[1:], values[0].shape[1:]) for v in values),
        "message",
        lambda: (
            f"reduce {','.join(names)!r} takes {many} values of one shape from the body, got {len(values)}"
        ),
    )
    return values


def _message_fake(
    rowptr: Tensor,
    col: Tensor,
    body: str,
    reduce: str,
    dst: Tensors,
    src: Tensors,
    edge: Tensors,
    const: Tensors,
    num_dst: Any,
) -> Tensor:
    names = reductions(reduce)
    values = _listed(_fake_values(col, body, dst, src, edge, const), names)
    joined = (len(names),) if len(names) > 1 else ()
    dtype = accumulate_dtype(values[0].dtype)
    return values[0].new_empty((num_dst, *joined, *values[0].shape[1:]), dtype=dtype)


def _message_samples() -> Sequence[tuple[Any, ...]]:
    rowptr, col, _, j, e, c = _operands()
    none = random_csr(6, 5, 0)
    samples = [(rowptr, col, _GINE, reduce, [], [j], [e], [], 5) for reduce in REDUCTIONS]
    return [
        *samples,
        (none[0], none[1], _GINE, "max", [], [j], [e[:0]], [], 5),
        (rowptr, col, _STD, "max,mean,sum", [], [j], [e], [], 5),
        (none[0], none[1], _STD, "max,mean,sum", [], [j], [e[:0]], [], 5),
        (rowptr, col, _SOFTMAX, "softmax", [], [j], [e], [c], 5),
        (none[0], none[1], _SOFTMAX, "softmax", [], [j], [e[:0]], [c], 5),
        (rowptr, col, _BOTH, "max,softmax,mean", [], [j], [e], [c], 5),
    ]


def _message_errors() -> Sequence[ErrorInput]:
    args = _message_samples()[0]
    return [
        ErrorInput((*args[:3], "median", *args[4:]), "reduce must be one of"),
        ErrorInput((*args[:3], "sum,max", *args[4:]), "takes 2 values of one shape"),
        ErrorInput((*args[:3], "softmax", *args[4:]), "takes 2 values of one shape"),
    ]


MESSAGE = define(
    Op(
        name="message",
        schema="(Tensor rowptr, Tensor col, str body, str reduce, Tensor[] dst, Tensor[] src,"
        " Tensor[] edge, Tensor[] const, SymInt num_dst) -> Tensor",
        kind="aggregate",
        features=("dst", "src", "edge", "const"),
        gathered=("src", "dst"),
        counted_as="message",
        label="h{n}",
        reference=message_reference,
        fake=_message_fake,
        cost=lambda rowptr, col, body, reduce, dst, src, edge, const, num_dst: _gathered_cost(
            col, body, dst, src, edge
        ),
        gradient=Gradient(message_backward, edges_setup),
        samples=_message_samples,
        error_inputs=_message_errors,
    )
)


def edge_sum_reference(
    rowptr: Tensor, col: Tensor, body: str, dst: Tensors, src: Tensors, edge: Tensors, const: Tensors
) -> Tensor:
    """Return what the body sums over all edges, such as the gradient of a weight that every edge reads.

    Args: as ``edge_map``; the body's value has no dimension of edges, and is linear in the edges: its values
        for blocks of edges add up to its value for all of them, and it is 0 for none.

    Returns:
        The shape of the body's value, at least FP32.
    """
    rows = edge_rows(rowptr, col.numel())
    value = _edge_values(rows, col, body, dst, src, edge, const)
    return value.to(accumulate_dtype(value.dtype), copy=True, memory_format=torch.contiguous_format)


def _edge_sum_fake(
    rowptr: Tensor, col: Tensor, body: str, dst: Tensors, src: Tensors, edge: Tensors, const: Tensors
) -> Tensor:
    value = _fake_values(col, body, dst, src, edge, const)
    return value.new_empty(value.shape, dtype=accumulate_dtype(value.dtype))


_WEIGHTED = "t0 = aten.mul.Tensor(i0, j0); t1 = aten.sum.dim_IntList(t0, [0], True); return t1"
_WEIGHT_GRAD = (
    "t0 = aten.view.default(j0, [-1, 6]); t1 = aten.view.default(i0, [-1, 6]); "
    "t2 = aten.t.default(t0); t3 = aten.mm.default(t2, t1); return t3"
)


def _edge_sum_samples() -> Sequence[tuple[Any, ...]]:
    rowptr, col, i, j, _, _ = _operands()
    none = random_csr(6, 5, 0)
    return [
        (rowptr, col, _WEIGHTED, [i], [j], [], []),
        (rowptr, col, _WEIGHT_GRAD, [i], [j], [], []),
        (none[0], none[1], _WEIGHT_GRAD, [i], [j], [], []),
    ]


EDGE_SUM = define(
    Op(
        name="edge_sum",
        schema="(Tensor rowptr, Tensor col, str body, Tensor[] dst, Tensor[] src, Tensor[] edge,"
        " Tensor[] const) -> Tensor",
        kind="aggregate",
        counted_as="message",
        features=("dst", "src", "edge", "const"),
        gathered=("src", "dst"),
        label="h{n}",
        reference=edge_sum_reference,
        fake=_edge_sum_fake,
        cost=lambda rowptr, col, body, dst, src, edge, const: _gathered_cost(col, body, dst, src, edge),
        gradient=Gradient(edge_sum_backward, edges_setup),
        samples=_edge_sum_samples,
        error_inputs=lambda: [],
    )
)
