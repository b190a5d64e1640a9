"""Structure kernels of the CPU backend: C++ that sorts edges, unless an EdgeIndex has sorted them."""

import re

import torch
from torch import Tensor
from torch.fx import Node

from gnnc.capture.edge_index import Order, cached_order
from gnnc.errors import GraphError
from gnnc.ir.nodes import operand, unpack
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import expr
from gnnc.runtime.registry import STRUCTURE, Decline, kernel
from gnnc.runtime.structure.kernels import PartEmitter, structure_kernel

Csr = tuple[Tensor, Tensor, Tensor]


@kernel(f"{STRUCTURE}gnnc.csr", backend="cpu", name="csr_of_edges", priority=1)
class CsrOfEdges:
    """Kernel `csr_of_edges`, for two rows of an edge list that is an argument of the model."""

    @staticmethod
    def plan(node: Node) -> tuple[int, int] | Decline:
        """Return the rows of the sources and of the destinations."""
        src, dst = map(_row_of_input, unpack(node, "src", "dst"))
        if src is None or dst is None or src[0] is not dst[0]:
            return Decline("its ends are not two rows of an argument, whose order an EdgeIndex may hold")
        return src[1], dst[1]

    @staticmethod
    def emit(plan: tuple[int, int], node: Node, emitter: PartEmitter) -> None:
        """Add the call."""
        edge_index = operand(operand(node, "src"), "self")
        emitter.call(node, csr_of_edges, edge_index, *plan, *unpack(node, "num_src", "num_dst"))


def _row_of_input(value: object) -> tuple[Node, int] | None:
    """Return the input that a node selects a row of, and the row; None for any other node."""
    if isinstance(value, Node) and value.target is torch.ops.aten.select.int:
        edges, dim, row = unpack(value, "self", "dim", "index")
        if isinstance(edges, Node) and edges.op == "placeholder" and dim == 0:
            return edges, row
    return None


def csr_of_edges(edge_index: Tensor, src_row: int, dst_row: int, num_src: int, num_dst: int) -> Csr:
    """Return the CSR of an edge list, taking over the order that an ``EdgeIndex`` around it holds.

    Args:
        edge_index: integer ``[2, E]``.
        src_row: the row of the sources.
        dst_row: the row of the destinations.
        num_src: number of source nodes.
        num_dst: number of destination nodes.

    Raises:
        GraphError: an id is out of range.
    """
    src, dst = edge_index[src_row], edge_index[dst_row]
    order = cached_order(edge_index, dst_row)
    known = None if order is None else _in_order(src, dst, num_src, num_dst, order)
    return csr(src, dst, num_src, num_dst) if known is None else known


def _in_order(src: Tensor, dst: Tensor, num_src: int, num_dst: int, order: Order) -> Csr | None:
    """Return the CSR in the order of an EdgeIndex; None where the edges are not in that order."""
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


@structure_kernel("gnnc.csr", backend="cpu", name="csr")
def csr(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Csr:
    """Sort edges by destination; see ``gnnc.csr``.

    Raises:
        GraphError: an id is out of range.
    """
    rowptr, col, perm = _empty_csr(num_dst, src.shape[0])
    try:
        torch.ops.gnnc_cpu.csr.default(src, dst, num_src, num_dst, rowptr, col, perm)
    except RuntimeError as error:
        raise _graph_error("csr", error, num_src, num_dst) from None
    return rowptr, col, perm


@structure_kernel("gnnc.csr_with_loops", backend="cpu", name="csr_with_loops")
def csr_with_loops(src: Tensor, dst: Tensor, num_nodes: int) -> Csr:
    """Sort edges by destination, with one self loop at each node in place of those given.

    See ``gnnc.csr_with_loops``.

    Raises:
        GraphError: an id is out of range.
    """
    rowptr, col, perm = _empty_csr(num_nodes, src.shape[0] + num_nodes)
    try:
        edges = torch.ops.gnnc_cpu.csr_with_loops.default(src, dst, num_nodes, rowptr, col, perm)
    except RuntimeError as error:
        raise _graph_error("csr_with_loops", error, num_nodes, num_nodes) from None
    return rowptr, col[:edges], perm[:edges]


def _empty_csr(rows: int, edges: int) -> Csr:
    rowptr, perm = torch.empty(rows + 1, dtype=torch.int64), torch.empty(edges, dtype=torch.int64)
    return rowptr, torch.empty(edges, dtype=torch.int32), perm


def _graph_error(op: str, error: RuntimeError, num_src: int, num_dst: int) -> GraphError:
    return GraphError(
        f"[gnnc.{op}] {_first_line(error)}: node ids must be in 0..{num_src - 1} (sources) and "
        f"0..{num_dst - 1} (destinations); check edge_index against the number of rows of x"
    )


@structure_kernel("gnnc.csr_transpose", backend="cpu", name="csr_transpose")
def csr_transpose(rowptr: Tensor, col: Tensor, num_src: int) -> Csr:
    """Sort the edges of a CSR by source, by counting; see ``gnnc.csr_transpose``.

    Raises:
        GraphError: an id is out of range.
    """
    num_dst, edges = rowptr.shape[0] - 1, col.shape[0]
    nodes = torch.arange(num_dst, dtype=torch.int32)
    rows = torch.repeat_interleave(nodes, rowptr.diff(), output_size=edges)
    return csr(rows, col, num_dst, num_src)


@kernel("gnnc.csr_transpose", backend="cpu", name="csr_transpose_at_each_call")
class TransposeAtEachCall:
    """Kernel ``csr_transpose`` where the number of sources is no size of the arguments, but of a value."""

    @staticmethod
    def plan(node: Node) -> None:
        """Take any node."""

    @staticmethod
    def emit(plan: None, node: Node, emitter: Emitter) -> None:
        """Write the call that sorts the edges by source."""
        arguments = [emitter.argument(value) for value in unpack(node, "rowptr", "col", "num_src")]
        result = emitter.let_call("csr", emitter.bind(csr_transpose, "csr_transpose"), arguments)
        emitter.define(node, result)
        for index, user in enumerate(emitter.outputs(node)):
            if user is not None:
                emitter.define(user, expr("{}[{}]", result, index))


@structure_kernel("gnnc.degree", backend="cpu", name="degree")
def degree(rowptr: Tensor) -> Tensor:
    """Count the edges of each row, float32 ``[num_dst]``; see ``gnnc.degree``."""
    out = torch.empty(rowptr.shape[0] - 1, dtype=torch.float32)
    torch.ops.gnnc_cpu.degree.default(rowptr, out)
    return out


def _first_line(error: Exception) -> str:
    """Return the message of a kernel's check, without the source file and line."""
    return re.sub(r"^.*\.cpp:\d+, ", "", str(error).strip().splitlines()[0])
