"""Lowering of bodies: a C++ kernel runs them on tiles of edges, and keeps, reduces or sums their values."""

from collections.abc import Sequence

import torch
from torch.fx import Node

from gnnc.ir.body import body_operands, values_of
from gnnc.ir.nodes import argument, op_name, operand
from gnnc.runtime.cpu.edge_opcodes import Steps
from gnnc.runtime.cpu.edge_ops import translate
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import Expr, tuple_of
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Refusal, planned


@kernel(
    "gnnc.edge_map",
    "gnnc.message",
    "gnnc.edge_sum",
    backend="cpu",
    name="edge_body",
    priority=20,
    elements=("int8",),
    arithmetic="tiles",
)
class EdgeBody:
    """Kernel that gathers, computes and reduces tile by tile, in registers that stay in cache."""

    @staticmethod
    @planned
    def plan(node: Node) -> Steps:
        """Translate the body; refuse results that are not float32 and bodies with other ops."""
        if node.meta["val"].dtype != torch.float32:
            raise Refusal(f"the result is {node.meta['val'].dtype}")
        build.fixed_width(node)
        operands = values_of(body_operands(node))
        for name, value in operands.items():
            if name[0] != "c":
                build.fixed_width(value)
        return translate(argument(node, "body"), operands, _reductions(node))

    @staticmethod
    def emit(plan: Steps, node: Node, emitter: Emitter) -> None:
        """Write the call."""
        rowptr, col = (emitter.vector(operand(node, name)) for name in ("rowptr", "col"))
        given = body_operands(node)
        *rows, consts, ids = plan.operands
        groups: list[Expr] = [tuple_of(emitter.matrix(given[name]) for name in group) for group in rows]
        groups.append(
            tuple_of(
                emitter.matrix(given[name]) if number in plan.tables else emitter.exact(given[name])
                for number, name in enumerate(consts)
            )
        )
        groups.append(tuple_of(emitter.vector(given[name]) for name in ids))
        out = emitter.allocate(node, dense=_reductions(node) is None)
        run = emitter.bind(torch.ops.gnnc_cpu_valid.edge_body.default, "edge_body")
        tables = [emitter.bind(table, name) for name, table in plan.flat().items()]
        emitter.call(run, [rowptr, col, *groups, *tables, out.written])


def _reductions(node: Node) -> Sequence[str] | None:
    """Return the reductions of a body's values by row: none for ``edge_map``; None for ``edge_sum``."""
    if op_name(node) == "edge_sum":
        return None
    reduce = argument(node, "reduce", None)
    return () if reduce is None else tuple(reduce.split(","))
