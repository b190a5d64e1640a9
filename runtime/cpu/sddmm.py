"""Lowering of ops that compute one value, or one row, for every edge."""

import torch
from torch.fx import Node

from gnnc.ir.nodes import as_node, operand, unpack
from gnnc.runtime.plans import sddmm
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.registry import kernel


@kernel("gnnc.sddmm", "gnnc.qsddmm", backend="cpu", name="sddmm", priority=10, elements=("int8",))
class Sddmm:
    """Kernel ``gnnc_cpu_valid.sddmm``: dot, sum, difference, product or copy of rows at both ends."""

    plan = staticmethod(sddmm.plan)

    @staticmethod
    def emit(plan: sddmm.Plan, node: Node, emitter: Emitter) -> None:
        """Write the launch that stores a value for each edge."""
        a, b = unpack(node, "a", "b")
        first = a if a is not None else b
        second = b if b is not None else a
        width = plan.width
        out = emitter.allocate(node, dense=True)
        op = emitter.bind(torch.ops.gnnc_cpu_valid.sddmm.default, "sddmm")
        scales = ("a_scale", "b_scale") if plan.is_scaled else ()
        factors = [emitter.vector(operand(node, scale)) for scale in scales] or [None, None]
        edges = [emitter.vector(operand(node, name)) for name in ("rowptr", "col")]
        rows = [emitter.matrix(as_node(value), width) for value in (first, second)]
        emitter.call(op, [*edges, *rows, *factors, plan.op, plan.heads, out.written])


@kernel("gnnc.edge_softmax", backend="cpu", name="edge_softmax", priority=10)
class EdgeSoftmax:
    """Kernel ``gnnc_cpu_valid.edge_softmax``: softmax over the edges of a row."""

    plan = staticmethod(sddmm.softmax_plan)

    @staticmethod
    def emit(plan: float, node: Node, emitter: Emitter) -> None:
        """Write the launch of the softmax."""
        out = emitter.allocate(node, dense=True)
        op = emitter.bind(torch.ops.gnnc_cpu_valid.edge_softmax.default, "edge_softmax")
        rowptr, logits = emitter.vector(operand(node, "rowptr")), emitter.dense(operand(node, "logits"))
        emitter.call(op, [rowptr, logits, plan, out.written])


@kernel("gnnc.edge_softmax_backward", backend="cpu", name="edge_softmax_backward", priority=10)
class EdgeSoftmaxBackward:
    """Kernel ``gnnc_cpu_valid.edge_softmax_backward``: gradient of a softmax over the edges of a row."""

    plan = staticmethod(sddmm.softmax_backward_plan)

    @staticmethod
    def emit(plan: int, node: Node, emitter: Emitter) -> None:
        """Write the launch of the gradient of a softmax."""
        out = emitter.allocate(node, dense=True)
        op = emitter.bind(torch.ops.gnnc_cpu_valid.edge_softmax_backward.default, "edge_softmax_backward")
        values = [emitter.dense(operand(node, name)) for name in ("alpha", "grad")]
        emitter.call(op, [emitter.vector(operand(node, "rowptr")), *values, out.written])
