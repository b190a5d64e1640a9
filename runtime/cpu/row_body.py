"""Lowering of elementwise ops on rows that branch, mask or concatenate, in the kernel of bodies."""

import torch
from torch import Tensor
from torch.fx import Node

from gnnc.ir.nodes import shape_of
from gnnc.runtime.cpu.edge_body import emit_steps, plan_steps
from gnnc.runtime.cpu.edge_opcodes import Steps
from gnnc.runtime.cpu.parts import Part
from gnnc.runtime.plans import row_body
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import expr
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program.build import Refusal, argument_of, planned


@kernel("fused:map", backend="cpu", name="row_body", priority=5)
class RowBody:
    """Kernel ``gnnc_cpu.edge_body`` on a graph in which every row has one edge, its own."""

    @staticmethod
    @planned
    def plan(node: Node) -> tuple[row_body.Plan, Steps]:
        """Take bodies of FP32 rows that have a step for each op."""
        plan = row_body.plan(node)
        given = {name: argument_of(node, index) for name, index in plan.operands}
        if any(value.meta["val"].dtype != torch.float32 for value in given.values()):
            raise Refusal("it reads other rows than FP32")
        return plan, plan_steps(plan.body, (Part("edges"),), (node,), given)

    @staticmethod
    def emit(plan: tuple[row_body.Plan, Steps], node: Node, emitter: Emitter) -> None:
        """Write the launch of the body over the rows."""
        body, steps = plan
        given = {name: argument_of(node, index) for name, index in body.operands}
        make = emitter.bind(own_edges, "own_edges")
        own = emitter.let_call("own", make, [emitter.size(shape_of(node)[0])])
        emit_steps(emitter, steps, [expr("{}[0]", own), expr("{}[1]", own)], given, (node,))


def own_edges(rows: int) -> tuple[Tensor, Tensor]:
    """Return the CSR of a graph in which each of so many nodes has one edge, to itself."""
    return torch.arange(rows + 1), torch.arange(rows, dtype=torch.int32)
