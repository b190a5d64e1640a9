"""Gradient rules of the general edge ops: ``message``, ``edge_map`` and ``edge_sum``.

The gradient of a body is a body for each operand (see ``gnnc.ir.vjp``). What it gives at an edge is summed
by destination for ``dst`` operands, by source for ``src`` operands (by a ``message`` on the transpose, in
which the two ends change places), over all edges for ``const`` operands, and kept for ``edge`` operands.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from gnnc.ir.body import KINDS, body_inputs
from gnnc.ir.vjp import body_gradients, derived_body, exchange_ends, operand_of, rename_operands
from gnnc.torch_private import FakeTensor

Tensors = list[Tensor]
Gradients = list[list[Tensor | None]]

EXTREMA = frozenset(("max", "min"))
"""Reductions whose gradient compares the values that are reduced with the result."""
_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class GivenCotangent:
    """Cotangent of a body's only value that is an operand itself.

    Attributes:
        name: the operand.
    """

    name: str

    def __call__(self, values: Sequence[Tensor], operands: Mapping[str, Tensor]) -> Tensors:
        """Return the operand."""
        return [operands[self.name]]


@dataclass(frozen=True, slots=True)
class ReducedCotangent:
    """Cotangents of the values that a ``message`` reduces.

    Attributes:
        names: the reductions.
        first: number of the first ``i`` operand that ``row_operands`` has added.
        first_hit: number of the first ``e`` operand that says which edges have an extremum; None: their
            values are compared with it.
    """

    names: tuple[str, ...]
    first: int
    first_hit: int | None = None

    def __call__(self, values: Sequence[Tensor], operands: Mapping[str, Tensor]) -> Tensors:
        """Return the gradient of every value at every edge."""
        rows = (operands[f"i{number}"] for number in count(self.first))
        hits = (
            None if self.first_hit is None else (operands[f"e{number}"] for number in count(self.first_hit))
        )
        rest = iter(values)
        found: Tensors = []
        for name in self.names:
            if name == "softmax":
                found += _softmax_cotangents(next(rest), next(rest), *islice(rows, 4))
            elif name in EXTREMA:
                value, (top, share) = next(rest), islice(rows, 2)
                others = value.to(top.dtype) != top if hits is None else next(hits).logical_not()
                found.append(share.masked_fill(others, 0.0))
            else:
                next(rest)
                found.append(next(rows))
        return found


def _softmax_cotangents(
    logits: Tensor, value: Tensor, grad: Tensor, out: Tensor, top: Tensor, total: Tensor
) -> Iterator[Tensor]:
    alpha = (logits.to(top.dtype) - top).exp() / total
    weighted = alpha * grad
    yield weighted * (value.to(top.dtype) - out)
    yield weighted


@dataclass(frozen=True)
class Edges:
    """A CSR, and the operands of a body on its edges.

    Attributes:
        rowptr: int64 ``[num_dst + 1]``.
        col: int32 ``[E]``.
        groups: the operands by kind: ``dst``, ``src``, ``edge``, ``const``.
    """

    rowptr: Tensor
    col: Tensor
    groups: tuple[Tensors, ...]

    def with_operands(self, kind: str, tensors: Tensors) -> "Edges":
        """Return the edges with more operands of a kind: ``i``, ``j``, ``e`` or ``c``."""
        groups = list(self.groups)
        groups[KINDS.index(kind)] = [*groups[KINDS.index(kind)], *tensors]
        return replace(self, groups=tuple(groups))

    def number(self, kind: str) -> int:
        """Return the number of operands of a kind."""
        return len(self.groups[KINDS.index(kind)])

    def operand(self, name: str) -> Tensor:
        """Return the operand that bodies call ``name``."""
        return self.groups[KINDS.index(name[0])][int(name[1:])]

    @cached_property
    def transpose(self) -> tuple[Tensor, Tensor, Tensor]:
        """The CSR by source, and the position in this one of each of its edges."""
        return torch.ops.gnnc.csr_transpose(self.rowptr, self.col, self.groups[1][0].shape[0])

    def message(self, body: str, reduce: str, num_dst: Any) -> Tensor:
        """Return the reduction by destination of a body."""
        body, groups = self._used(body)
        return torch.ops.gnnc.message(self.rowptr, self.col, body, reduce, *groups, num_dst)

    def source_sum(self, body: str, num_src: Any) -> Tensor:
        """Return the sum by source of a body: a ``message`` on the transpose, both ends exchanged."""
        body, (dst, src, edge, const) = self._used(body)
        if body == "return i0":
            return torch.ops.gnnc.spmm(self.transpose[0], self.transpose[1], None, dst[0], "sum", num_src)
        body = exchange_ends(body)
        rowptr_t, col_t, perm_t = self.transpose
        edge = [tensor.index_select(0, perm_t) for tensor in edge]
        return torch.ops.gnnc.message(rowptr_t, col_t, body, "sum", src, dst, edge, const, num_src)

    def edge_values(self, body: str) -> Tensor:
        """Return the value of a body at every edge."""
        body, groups = self._used(body)
        if body == "return i0":
            return torch.ops.gnnc.sddmm(self.rowptr, self.col, groups[0][0], None, "copy_dst")
        return torch.ops.gnnc.edge_map(self.rowptr, self.col, body, *groups)

    def edge_sum(self, body: str) -> Tensor:
        """Return the sum over all edges of a body."""
        body, groups = self._used(body)
        return torch.ops.gnnc.edge_sum(self.rowptr, self.col, body, *groups)

    def _used(self, body: str) -> tuple[str, list[Tensors]]:
        """Return the body and the operands that it reads, numbered anew."""
        groups: list[Tensors] = [[], [], [], []]
        names = {}
        for name in body_inputs(body):
            group = groups[KINDS.index(name[0])]
            names[name] = f"{name[0]}{len(group)}"
            group.append(self.operand(name))
        return rename_operands(body, names), groups

    def gradients(self, body: str, cotangent: Any, groups: tuple[Tensors, ...], wanted: Any) -> Gradients:
        """Return the gradient of every operand in ``groups`` that is wanted, None for all others.

        Args:
            body: the body.
            cotangent: the gradients of its values, from the operands of these edges.
            groups: the operands of the op, the first ones of these edges.
            wanted: whether each needs a gradient, in the shape of ``groups``.
        """
        names = [
            f"{kind}{number}"
            for kind, group, flags in zip(KINDS, groups, wanted, strict=True)
            for number, (tensor, flag) in enumerate(zip(group, flags, strict=True))
            if flag and tensor.is_floating_point()
        ]
        operands = tuple(
            operand_of(f"{kind}{number}", tensor)
            for kind, group in zip(KINDS, self.groups, strict=True)
            for number, tensor in enumerate(group)
        )
        again = torch.is_grad_enabled()  # in a backward pass: with create_graph=True
        bodies = body_gradients(body, cotangent, operands, tuple(names), create_graph=again) if names else {}
        return [
            [self._gradient(bodies.get(f"{kind}{number}"), f"{kind}{number}") for number in range(len(group))]
            for kind, group in zip(KINDS, groups, strict=True)
        ]

    def _gradient(self, body: str | None, name: str) -> Tensor | None:
        if body is None:
            return None
        operand = self.operand(name)
        found = {
            "i": lambda: self.message(body, "sum", operand.shape[0]),
            "j": lambda: self.source_sum(body, operand.shape[0]),
            "e": lambda: self.edge_values(body),
            "c": lambda: self.edge_sum(body),
        }[name[0]]()
        return found.to(operand.dtype)


def edges_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the CSR, the operands and the result of an op that takes a body."""
    lists = [item for item in inputs if isinstance(item, list | tuple)]
    ctx.save_for_backward(inputs[0], inputs[1], output, *(t for group in lists for t in group))
    ctx.lengths = [len(group) for group in lists]
    ctx.rest = [item for item in inputs[2:] if not isinstance(item, list | tuple)]


def _saved(ctx: Any) -> tuple[Edges, Tensor]:
    rowptr, col, output, *flat = ctx.saved_tensors
    tensors = iter(flat)
    return Edges(rowptr, col, tuple(list(islice(tensors, many)) for many in ctx.lengths)), output


def edge_map_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of the operands of ``edge_map``."""
    edges, _ = _saved(ctx)
    cotangent = GivenCotangent(f"e{edges.number('e')}")
    extended = edges.with_operands("e", [grad])
    found = extended.gradients(ctx.rest[0], cotangent, edges.groups, ctx.needs_input_grad[3:7])
    return None, None, None, *found


def edge_sum_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of the operands of ``edge_sum``."""
    edges, _ = _saved(ctx)
    cotangent = GivenCotangent(f"c{edges.number('c')}")
    extended = edges.with_operands("c", [grad])
    found = extended.gradients(ctx.rest[0], cotangent, edges.groups, ctx.needs_input_grad[3:7])
    return None, None, None, *found


def message_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of the operands of ``message``."""
    edges, out = _saved(ctx)
    body, reduce, _ = ctx.rest
    found = message_gradients(edges, body, reduce, out, grad, ctx.needs_input_grad[4:8])
    return None, None, None, None, *found, None


def message_gradients(
    edges: Edges, body: str, reduce: str, out: Tensor, grad: Tensor, wanted: Any
) -> Gradients:
    """Return the gradients of the operands of a ``message``.

    Args:
        edges: the CSR and the operands.
        body: the body.
        reduce: names of the reductions, joined by commas.
        out: the result of the op.
        grad: the gradient of the result.
        wanted: whether each operand needs a gradient, by kind.
    """
    names = tuple(reduce.split(","))
    extended = edges.with_operands("i", list(row_operands(edges, body, names, out, grad)))
    first_hit = None
    if not isinstance(grad, FakeTensor):  # ATen computes, whose last bits depend on the place of an edge
        first_hit = edges.number("e")
        extended = extended.with_operands("e", list(_edges_of_extrema(edges, body, names, out)))
    cotangent = ReducedCotangent(names, edges.number("i"), first_hit)
    return extended.gradients(body, cotangent, edges.groups, wanted)


def row_operands(
    edges: Edges, body: str, names: tuple[str, ...], out: Tensor, grad: Tensor
) -> Iterator[Tensor]:
    """Yield what the gradient of a ``message`` reads of each row, in the order of the reductions.

    Such are the gradient for a sum, the gradient over the degree for a mean, the result and each hit's share
    for an extremum, and the gradient, the result, the largest logit and the sum of weights for a softmax.
    """
    results, slopes = _each(names, out), _each(names, grad)
    for (name, position, result), (_, _, slope) in zip(results, slopes, strict=True):
        if name == "softmax":
            yield from (slope, result, *_softmax_rows(edges, body, position, out.shape[0]))
        elif name in EXTREMA:
            yield from (result, slope / _hits(edges, body, position, result))
        else:
            yield divide_by_degree(slope, edges.rowptr) if name == "mean" else slope


def _each(names: tuple[str, ...], rows: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """Yield each reduction, the place of the first value that it takes, and its part of the rows of all."""
    position = 0
    for number, name in enumerate(names):
        yield name, position, rows if len(names) == 1 else rows.select(1, number)
        position += 2 if name == "softmax" else 1


def divide_by_degree(grad: Tensor, rowptr: Tensor) -> Tensor:
    """Return the rows of ``grad [num_dst, ...]``, each divided by its number of edges."""
    degree = torch.ops.gnnc.degree(rowptr).clamp(min=1).to(grad.dtype)
    return grad / degree.reshape(-1, *([1] * (grad.dim() - 1)))


def _hits(edges: Edges, body: str, position: int, top: Tensor) -> Tensor:
    """Return how many values of each row equal its extremum ``top``, at least 1.

    As in the gradient of ``scatter_reduce``, which starts from zeros, an extremum of 0 has one hit more.
    """
    extended = edges.with_operands("i", [top])

    def hit(graph: Graph, values: list[Node]) -> Node:
        is_top = _is_extremum(graph, values[position], edges, top.dtype)
        return graph.call_function(_ATEN._to_copy.default, (is_top,), {"dtype": top.dtype})

    hits = extended.message(derived_body(body, hit), "sum", top.shape[0])
    return (hits + (top == 0).to(hits.dtype)).clamp(min=1)


def _edges_of_extrema(edges: Edges, body: str, names: tuple[str, ...], out: Tensor) -> Iterator[Tensor]:
    """Yield for each extremum which edges have it, ``[E, ...]``: their values are computed as it was."""
    for name, position, top in _each(names, out.detach()):
        if name in EXTREMA:
            extended = edges.with_operands("i", [top])

            def hit(graph: Graph, values: list[Node], position: int = position) -> Node:
                return _is_extremum(graph, values[position], edges, out.dtype)

            with torch.no_grad():
                yield extended.edge_values(derived_body(body, hit))


def _is_extremum(graph: Graph, value: Node, edges: Edges, dtype: torch.dtype) -> Node:
    """Return the comparison of a value with the row operand that was added to ``edges``."""
    wide = graph.call_function(_ATEN._to_copy.default, (value,), {"dtype": dtype})
    return graph.call_function(_ATEN.eq.Tensor, (wide, _row(graph, edges)))


def _softmax_rows(edges: Edges, body: str, position: int, num_dst: Any) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row, and the sum of the weights relative to it, above 0."""
    top = edges.message(derived_body(body, lambda graph, values: values[position]), "max", num_dst)
    extended = edges.with_operands("i", [top])

    def weight(graph: Graph, values: list[Node]) -> Node:
        logit = graph.call_function(_ATEN._to_copy.default, (values[position],), {"dtype": top.dtype})
        return graph.call_function(
            _ATEN.exp.default, (graph.call_function(_ATEN.sub.Tensor, (logit, _row(graph, edges))),)
        )

    total = extended.message(derived_body(body, weight), "sum", num_dst)
    return top, total.masked_fill(total == 0, 1.0)


def _row(graph: Graph, edges: Edges) -> Node:
    """Return the placeholder of the row operand that was added to ``edges``."""
    with graph.inserting_before(next(iter(graph.nodes), None)):
        return graph.placeholder(f"i{edges.number('i')}")
