"""Lowering of bodies: a C++ kernel runs them on tiles of edges, and stores, reduces or sums their values."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.body import body_operands, values_of
from gnnc.ir.nodes import argument, unpack
from gnnc.runtime.cpu.edge_opcodes import Steps
from gnnc.runtime.cpu.edge_ops import translate
from gnnc.runtime.cpu.parts import Part, check_float32, part_of
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import Expr, tuple_of
from gnnc.runtime.registry import kernel
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import planned


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
    """Kernel that runs a body on tiles of edges; the values of a tile stay in L1."""

    @staticmethod
    @planned
    def plan(node: Node) -> Steps:
        """Translate the body; refuse results that are not float32 and bodies with other ops."""
        return plan_steps(argument(node, "body"), (part_of(node),), (node,), body_operands(node))

    @staticmethod
    def emit(plan: Steps, node: Node, emitter: Emitter) -> None:
        """Write the launch of the body over the edges of the CSR."""
        edges = [emitter.vector(end) for end in unpack(node, "rowptr", "col")]
        emit_steps(emitter, plan, edges, body_operands(node), (node,))


def plan_steps(
    body: str, parts: Sequence[Part], results: Sequence[Node], operands: Mapping[str, Node]
) -> Steps:
    """Translate a body.

    Args:
        body: the body.
        parts: the results.
        results: the node of each result.
        operands: the body's operands, by name.

    Raises:
        Refusal: a result is not float32, a width is not fixed, or no step computes an op of the body.
    """
    check_float32(results)
    for name, value in operands.items():
        if name[0] != "c":
            build.fixed_width(value)
    return translate(body, values_of(operands), parts)


def emit_steps(
    emitter: Emitter, plan: Steps, edges: Sequence[Expr], given: Mapping[str, Any], results: Sequence[Node]
) -> None:
    """Write the call of a body; ``edges`` are offsets and columns, ``given`` the operands by name."""
    *rows, consts, ids = plan.operands
    groups: list[Expr] = [tuple_of(emitter.matrix(given[name]) for name in group) for group in rows]
    groups.append(
        tuple_of(
            emitter.matrix(given[name]) if number in plan.tables else emitter.exact(given[name])
            for number, name in enumerate(consts)
        )
    )
    groups.append(tuple_of(emitter.vector(given[name]) for name in ids))
    sums = plan.sums(len(results))
    outs = tuple_of(
        emitter.allocate(result, dense=number in sums).written for number, result in enumerate(results)
    )
    run = emitter.bind(torch.ops.gnnc_cpu_valid.edge_body.default, "edge_body")
    tables = [emitter.bind(table, name) for name, table in plan.flat().items()]
    emitter.call(run, [*edges, *groups, *tables, outs])
