"""Lowering of sums over all edges: the body runs in ATen on blocks of edges, whose sums are added up."""

import torch
from torch import Tensor
from torch.fx import Node

from gnnc.ir.body import GROUPS
from gnnc.ir.nodes import argument, operand, unpack
from gnnc.runtime.cpu.body import Tensors, evaluate_sum
from gnnc.runtime.cpu.message import block_edges, rows_of, split
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Refusal, planned


@kernel("gnnc.edge_sum", backend="cpu", name="edge_sum_blocks", priority=10)
class EdgeSum:
    """Kernel that gathers, computes and sums block by block: no tensor of edges times features."""

    @staticmethod
    @planned
    def plan(node: Node) -> int:
        """Return the edges of a block; refuse results that are not float32."""
        value = node.meta["val"]
        if value.dtype != torch.float32:
            raise Refusal(f"the result is {value.dtype}")
        build.fixed_width(node)
        return block_edges(node)

    @staticmethod
    def emit(plan: int, node: Node, emitter: Emitter) -> None:
        """Write the call."""
        edges = [emitter.vector(operand(node, name)) for name in ("rowptr", "col")]
        groups = [emitter.argument(list(group)) for group in unpack(node, *GROUPS.values())]
        out = emitter.allocate(node, dense=True)
        body = emitter.bind(argument(node, "body"), "body")
        run = emitter.bind(sum_blocks, "edge_sum_blocks")
        emitter.call(run, [body, emitter.bind(plan, "edges"), *edges, *groups, out.written])


def sum_blocks(
    body: str,
    edges: int,
    rowptr: Tensor,
    col: Tensor,
    dst: Tensors,
    src: Tensors,
    edge: Tensors,
    const: Tensors,
    out: Tensor,
) -> None:
    """Compute ``gnnc.edge_sum`` into ``out``, float32, in blocks of about ``edges`` edges."""
    out.zero_()
    for block in split(rowptr, col.shape[0], edges):
        part = slice(block.first_edge, block.last_edge)
        groups = (dst, src, [t[part] for t in edge], const)
        value = evaluate_sum(body, col[part], lambda block=block: rows_of(block, rowptr), groups)
        out += value.reshape(out.shape)
