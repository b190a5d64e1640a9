"""Ops for graphs in which every node gets one self loop, in place of the self loops of the edge list.

GCN and GAT ask for such graphs. To filter the edge list first, the host has to wait for the number of edges
that are left, and writing the new list takes as long as a pass of a sort. ``csr_with_loops`` filters and
sorts at once; the other ops give the values of edges that go with it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnc.errors import GraphError
from gnnc.ir.op import Cost, ErrorInput, Op, check, define, nbytes, numel, size_expr
from gnnc.ir.structure import check_index, csr_reference

_INTEGERS = "integers have no gradient"
_ONCE = "computed once for each graph, without gradients"


def csr_with_loops_reference(src: Tensor, dst: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
    """Sort the edges ``src -> dst`` by destination; every node gets one self loop, in place of those given.

    Args:
        src: source ids, integer ``[E]``.
        dst: destination ids, integer ``[E]``.
        num_nodes: number of nodes N, both sources and destinations.

    Returns:
        The CSR of the M edges that are no self loops and, behind them, the N new loops: ``rowptr`` int64
        ``[N + 1]``, ``col`` int32 ``[M + N]``, and ``perm`` int64 ``[M + N]``: the position of each edge in
        the list of all E edges, or E + i for the new loop of node i.

    Raises:
        GraphError: an id is negative or not below the number of nodes, also that of a loop.
    """
    check(
        src.dim() == 1 and src.shape == dst.shape,
        "csr_with_loops",
        lambda: f"expected src and dst of one length, got {tuple(src.shape)}, {tuple(dst.shape)}",
    )
    check_index("src", src, num_nodes, "source")
    check_index("dst", dst, num_nodes, "destination")
    is_edge, loops = src != dst, torch.arange(num_nodes, dtype=src.dtype, device=src.device)
    rowptr, col, perm = csr_reference(
        torch.cat([src[is_edge], loops]), torch.cat([dst[is_edge], loops]), num_nodes, num_nodes
    )
    positions = torch.cat([is_edge.nonzero().squeeze(1), loops.long() + src.shape[0]])
    return rowptr, col, positions[perm]


def _csr_with_loops_fake(src: Tensor, dst: Tensor, num_nodes: Any) -> tuple[Tensor, ...]:
    edges = torch.library.get_ctx().new_dynamic_size()
    return (
        src.new_empty((num_nodes + 1,), dtype=torch.int64),
        src.new_empty((edges,), dtype=torch.int32),
        src.new_empty((edges,), dtype=torch.int64),
    )


def _csr_with_loops_cost(src: Tensor, dst: Tensor, num_nodes: Any) -> Cost:
    edges = numel(src) + size_expr(num_nodes)
    return Cost(bytes=nbytes(src, dst) * 2 + edges * 12, flops=edges * 2)


def _edges() -> tuple[Tensor, Tensor]:
    return torch.tensor([0, 1, 2, 2, 0, 1]), torch.tensor([1, 1, 0, 2, 2, 0])


def _csr_with_loops_samples() -> Sequence[tuple[Any, ...]]:
    empty = torch.empty(0, dtype=torch.int64)
    src, dst = _edges()
    return [(src, dst, 4), (src.int(), dst.int(), 3), (src[1:2], dst[1:2], 2), (empty, empty, 3)]


def _csr_with_loops_errors() -> Sequence[ErrorInput]:
    src, dst = _edges()
    return [
        ErrorInput((src, dst, 2), r"src\[2\] = 2", GraphError),
        ErrorInput((torch.tensor([0, -1]), torch.tensor([0, -1]), 2), r"src\[1\] = -1", GraphError),
        ErrorInput((torch.tensor([0, 1]), torch.tensor([0, 3]), 2), r"dst\[1\] = 3", GraphError),
        ErrorInput((src, dst[1:], 4), "one length"),
    ]


CSR_WITH_LOOPS = define(
    Op(
        name="csr_with_loops",
        schema="(Tensor src, Tensor dst, SymInt num_nodes) -> (Tensor rowptr, Tensor col, Tensor perm)",
        kind="structure",
        cached_alone=True,
        reference=csr_with_loops_reference,
        fake=_csr_with_loops_fake,
        cost=_csr_with_loops_cost,
        samples=_csr_with_loops_samples,
        error_inputs=_csr_with_loops_errors,
        no_gradient=_INTEGERS,
    )
)


def positions_without_loops_reference(is_edge: Tensor, perm: Tensor, num_nodes: int) -> Tensor:
    """Return the positions of sorted edges in a list without the self loops given, int64 ``[M + N]``.

    Args:
        is_edge: bool ``[E]``, which of the edges are no self loops.
        perm: int64 ``[M + N]`` of ``csr_with_loops``: positions in the list of all E edges, and E + i.
        num_nodes: number of nodes N.

    Returns:
        Positions in the list of the M edges that are no loops, and M + i for the new loop of node i.
    """
    check(
        is_edge.dtype == torch.bool,
        "positions_without_loops",
        lambda: f"is_edge must be bool, got {is_edge.dtype}",
    )
    loops = torch.arange(perm.shape[0] - num_nodes, perm.shape[0], device=perm.device)
    return torch.cat([is_edge.cumsum(0) - 1, loops]).index_select(0, perm)


def _sample_csr() -> tuple[Tensor, Tensor, Tensor]:
    """Return the mask of the sample edges that are no loops, and the columns and positions of their CSR."""
    src, dst = _edges()
    _, col, perm = csr_with_loops_reference(src, dst, 4)
    return src != dst, col, perm


def _positions_samples() -> Sequence[tuple[Any, ...]]:
    is_edge, _, perm = _sample_csr()
    return [(is_edge, perm, 4), (is_edge[:0], torch.arange(2), 2)]


def _positions_errors() -> Sequence[ErrorInput]:
    is_edge, _, perm = _sample_csr()
    return [ErrorInput((is_edge.long(), perm, 4), "bool")]


POSITIONS_WITHOUT_LOOPS = define(
    Op(
        name="positions_without_loops",
        schema="(Tensor is_edge, Tensor perm, SymInt num_nodes) -> Tensor",
        kind="structure",
        cached_alone=True,
        reference=positions_without_loops_reference,
        fake=lambda is_edge, perm, num_nodes: perm.new_empty(perm.shape, dtype=torch.int64),
        cost=lambda is_edge, perm, num_nodes: Cost(
            nbytes(is_edge, perm) * 2 + numel(perm) * 8, numel(is_edge)
        ),
        samples=_positions_samples,
        error_inputs=_positions_errors,
        no_gradient=_INTEGERS,
    )
)


def without_loops_reference(values: Tensor, is_edge: Tensor, col: Tensor, num_nodes: int) -> Tensor:
    """Return ``values[is_edge]``, ``[M, ...]``, without a wait of the host for the number of edges M.

    Args:
        values: ``[E, ...]``, of edges.
        is_edge: bool ``[E]``, which of the edges are no self loops.
        col: ``[M + N]``, the columns of ``csr_with_loops``; only its length is read.
        num_nodes: number of nodes N.
    """
    check(
        is_edge.dim() == 1 and values.shape[:1] == is_edge.shape,
        "without_loops",
        lambda: f"values have {tuple(values.shape)} for a mask of {tuple(is_edge.shape)}; give each edge one",
    )
    positions = torch.nonzero_static(is_edge, size=col.shape[0] - num_nodes).squeeze(1)
    return values.index_select(0, positions)


def _without_loops_samples() -> Sequence[tuple[Any, ...]]:
    is_edge, col, _ = _sample_csr()
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(6, generator=generator), is_edge, col, 4),
        (torch.randn(6, 3, generator=generator), is_edge, col, 4),
    ]


def _without_loops_errors() -> Sequence[ErrorInput]:
    is_edge, col, _ = _sample_csr()
    return [ErrorInput((torch.ones(5), is_edge, col, 4), "give each edge one")]


WITHOUT_LOOPS = define(
    Op(
        name="without_loops",
        kind="structure",
        cached_alone=True,
        schema="(Tensor values, Tensor is_edge, Tensor col, SymInt num_nodes) -> Tensor",
        reference=without_loops_reference,
        fake=lambda values, is_edge, col, num_nodes: values.new_empty(
            (col.shape[0] - num_nodes, *values.shape[1:])
        ),
        cost=lambda values, is_edge, col, num_nodes: Cost(
            nbytes(values) * 2 + nbytes(is_edge), numel(is_edge)
        ),
        samples=_without_loops_samples,
        error_inputs=_without_loops_errors,
        no_gradient=_ONCE,
    )
)


def values_of_loops_reference(start: Tensor, edge_index: Tensor, values: Tensor) -> Tensor:
    """Return the value of each node's self loop, or its row of ``start`` where it has none.

    The result is ``start.index_put([src[src == dst]], values[src == dst])``, but the host waits for no list
    of the loops: values of all other edges are written to memory that is dropped.

    Args:
        start: ``[N, ...]``.
        edge_index: int64 ``[2, E]``; an id out of range does no harm, the sort reports it.
        values: ``[E, ...]``.
    """
    check(
        edge_index.dim() == 2 and edge_index.shape[0] == 2,
        "values_of_loops",
        lambda: f"edge_index must be [2, E], got {tuple(edge_index.shape)}",
    )
    nodes, (src, dst) = start.shape[0], edge_index
    if nodes == 0:
        return start.clone()
    rows = src.clamp(0, nodes - 1) + (src != dst) * nodes
    return torch.cat([start, start]).index_put_((rows,), values)[:nodes]


def _values_of_loops_samples() -> Sequence[tuple[Any, ...]]:
    edge_index, generator = torch.stack(_edges()), torch.Generator().manual_seed(5)
    return [
        (torch.ones(4), edge_index, torch.randn(6, generator=generator)),
        (torch.zeros(3, 2), edge_index, torch.randn(6, 2, generator=generator)),
        (torch.ones(0), edge_index[:, :0], torch.ones(0)),
    ]


VALUES_OF_LOOPS = define(
    Op(
        name="values_of_loops",
        kind="structure",
        cached_alone=True,
        schema="(Tensor start, Tensor edge_index, Tensor values) -> Tensor",
        reference=values_of_loops_reference,
        fake=lambda start, edge_index, values: torch.empty_like(start),
        cost=lambda start, edge_index, values: Cost(
            nbytes(start) * 3 + nbytes(edge_index, values) * 2, numel(edge_index)
        ),
        samples=_values_of_loops_samples,
        error_inputs=lambda: [ErrorInput((torch.ones(4), torch.ones(6).long(), torch.ones(6)), r"\[2, E\]")],
        no_gradient=_ONCE,
    )
)
