"""The C++ kernels for sorting edges, swapped into structure programs."""

import re

import torch
from torch import Tensor
from torch.fx import Node

from gnnc.capture.edge_index import Order, cached_order
from gnnc.errors import GraphError
from gnnc.runtime.structure.runner import StructureRunner

Csr = tuple[Tensor, Tensor, Tensor]


def use_kernels(runner: StructureRunner) -> None:
    """Let every part of a structure program sort with ``gnnc_cpu.csr``, and only what is not sorted."""
    for group in runner.groups:
        graph = group.module.graph
        for node in graph.find_nodes(op="call_function", target=torch.ops.gnnc.csr.default):
            _use_kernel(node)
        for node in graph.find_nodes(op="call_function", target=torch.ops.gnnc.degree.default):
            node.target = degree
        graph.eliminate_dead_code()
        group.module.recompile()


def _use_kernel(node: Node) -> None:
    src, dst, num_src, num_dst = node.args
    (edges, src_row), (other, dst_row) = _row_of_input(src), _row_of_input(dst)
    if edges is not None and edges is other:
        node.target, node.args = csr_of_edges, (edges, src_row, dst_row, num_src, num_dst)
    else:
        node.target = csr


def _row_of_input(value: object) -> tuple[Node | None, int]:
    """The input and the row of it that a node selects."""
    if isinstance(value, Node) and value.target is torch.ops.aten.select.int:
        edges, dim, row = value.args
        if isinstance(edges, Node) and edges.op == "placeholder" and dim == 0:
            return edges, row  # type: ignore[return-value]
    return None, 0


def csr_of_edges(edge_index: Tensor, src_row: int, dst_row: int, num_src: int, num_dst: int) -> Csr:
    """As ``csr``, of two rows of an edge list: the order that an ``EdgeIndex`` holds is taken over.

    Raises:
        GraphError: an id is out of range.
    """
    src, dst = edge_index[src_row], edge_index[dst_row]
    order = cached_order(edge_index, dst_row)
    known = None if order is None else _in_order(src, dst, num_src, num_dst, order)
    return csr(src, dst, num_src, num_dst) if known is None else known


def _in_order(src: Tensor, dst: Tensor, num_src: int, num_dst: int, order: Order) -> Csr | None:
    """The CSR in an order that is claimed; None where the claim does not hold."""
    rowptr, positions = order
    if rowptr.numel() != num_dst + 1 or any(t.dtype != torch.int64 for t in (src, rowptr)):
        return None
    if positions is not None:
        if positions.shape != src.shape or positions.dtype != torch.int64:
            return None
        positions = positions.contiguous()
    rowptr = rowptr.clone(memory_format=torch.contiguous_format)
    col = torch.empty(src.shape[0], dtype=torch.int32)
    perm = torch.empty(src.shape[0], dtype=torch.int64)
    holds = torch.ops.gnnc_cpu.csr_ordered(src, dst, num_src, num_dst, rowptr, positions, col, perm)
    return (rowptr, col, perm) if holds else None


def csr(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Csr:
    """Sort edges by destination; see ``gnnc.csr``.

    Raises:
        GraphError: an id is out of range.
    """
    rowptr = torch.empty(num_dst + 1, dtype=torch.int64)
    col = torch.empty(src.shape[0], dtype=torch.int32)
    perm = torch.empty(src.shape[0], dtype=torch.int64)
    try:
        torch.ops.gnnc_cpu.csr.default(src, dst, num_src, num_dst, rowptr, col, perm)
    except RuntimeError as error:
        raise GraphError(
            f"[gnnc.csr] {_first_line(error)}: node ids must be in 0..{num_src - 1} (sources) and "
            f"0..{num_dst - 1} (destinations); check edge_index against the number of rows of x"
        ) from None
    return rowptr, col, perm


def degree(rowptr: Tensor) -> Tensor:
    """Count the edges of each row, float32 ``[num_dst]``; see ``gnnc.degree``."""
    out = torch.empty(rowptr.shape[0] - 1)
    torch.ops.gnnc_cpu.degree.default(rowptr, out)
    return out


def _first_line(error: Exception) -> str:
    """What a kernel's check says, without the place in the source."""
    return re.sub(r"^.*\.cpp:\d+, ", "", str(error).strip().splitlines()[0])
