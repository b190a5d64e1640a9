"""Lowering of ops that make one value, or one row, for each edge."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import as_node
from gnnc.runtime.plans import sddmm
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.registry import kernel


@kernel("gnnc.sddmm", "gnnc.qsddmm", backend="cpu", name="sddmm", priority=10, elements=("int8",))
class Sddmm:
    """``gnnc_cpu.sddmm``: a dot, sum, difference, product or copy of the rows at an edge's ends."""

    plan = staticmethod(sddmm.plan)

    @staticmethod
    def emit(plan: sddmm.Plan, node: Node, emitter: Emitter) -> None:
        """Write the launch."""
        rowptr, col, a, b, _, *scales = node.args
        first = a if a is not None else b
        second = b if b is not None else a
        width = plan.width
        out = emitter.allocate(node, dense=True)
        op = emitter.bind(torch.ops.gnnc_cpu.sddmm.default, "sddmm")
        factors = [emitter.vector(as_node(scale)) for scale in scales] if plan.is_scaled else [None, None]
        edges = [emitter.vector(as_node(rowptr)), emitter.vector(as_node(col))]
        rows = [emitter.matrix(as_node(value), width) for value in (first, second)]
        emitter.call(op, [*edges, *rows, *factors, plan.op, plan.heads, out.written])


@kernel("gnnc.edge_softmax", backend="cpu", name="edge_softmax", priority=10)
class EdgeSoftmax:
    """``gnnc_cpu.edge_softmax``: softmax over each row's edges."""

    plan = staticmethod(sddmm.softmax_plan)

    @staticmethod
    def emit(plan: float, node: Node, emitter: Emitter) -> None:
        """Write the launch."""
        out = emitter.allocate(node, dense=True)
        op = emitter.bind(torch.ops.gnnc_cpu.edge_softmax.default, "edge_softmax")
        rowptr, logits = (as_node(arg) for arg in node.args[:2])
        emitter.call(op, [emitter.vector(rowptr), emitter.dense(logits), plan, out.written])
