"""Lowering of bodies that run in one pass over the edges: what they share is computed once."""

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from gnnc.ir.body import (
    COMPARISONS,
    GROUPS,
    body_inputs,
    body_operands,
    body_work,
    parse_body,
    values_of,
)
from gnnc.ir.joint_body import BY_SOURCE, JointBody
from gnnc.ir.nodes import argument, first_operand, op_name, unpack
from gnnc.ir.vjp import rename_operands
from gnnc.runtime.cpu.edge_body import EdgeBody
from gnnc.runtime.cpu.message import Part, Plan, emit_pass, part_of, plan_body
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.registry import Decline, kernel
from gnnc.runtime.row_program.build import Inner, Refusal, argument_of, planned

_SLOWER = 4
"""Time of an operation in PyTorch's ops on blocks, in that of the C++ kernel of single bodies: measured."""
_OTHER_END = {"i": "j", "j": "i"}
_BODIES = ("gnnc.message.default", "gnnc.edge_map.default", "gnnc.edge_sum.default")


@dataclass(frozen=True, slots=True)
class JointPlan:
    """Plan of a pass, and the numbers of its operands.

    Attributes:
        edges: numbers of the offsets and the columns.
        groups: numbers of the operands of the joint body, by kind.
        blocks: the pass.
    """

    edges: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    blocks: Plan


@kernel("fused:bodies", backend="cpu", name="joint_bodies", priority=10, elements=("int8",))
class JointBodies:
    """Kernel that computes several bodies block by block: what they share once."""

    @staticmethod
    @planned
    def plan(node: Node) -> JointPlan:
        """Join the bodies; refuse what the kernel of a single body refuses."""
        inner = Inner(node)
        bodies = inner.some(*_BODIES)
        if len(inner.results) != len(bodies):
            raise Refusal("holds a body that nothing reads")
        _check_arithmetic(bodies)
        edges, joint = _edges(bodies), JointBody()
        parts: list[Part] = []
        values: list[Node] = []
        for body in inner.results:
            member, groups, part = _member(body)
            values += joint.add(member, groups)
            parts.append(part)
        operands = {
            f"{kind}{number}": value
            for kind, group in zip(GROUPS, joint.operands, strict=True)
            for number, value in enumerate(group)
        }
        text = joint.text(values)
        _check_gain(bodies, text, operands)
        return JointPlan(
            edges=tuple(inner.operand(value, "the CSR") for value in edges),
            groups=tuple(
                tuple(inner.operand(value, "an operand") for value in group) for group in joint.operands
            ),
            blocks=plan_body(text, tuple(parts), list(inner.results), operands),
        )

    @staticmethod
    def emit(plan: JointPlan, node: Node, emitter: Emitter) -> None:
        """Write the call."""
        edges = [argument_of(node, number) for number in plan.edges]
        groups = [[argument_of(node, number) for number in group] for group in plan.groups]
        results = [result for result in emitter.outputs(node) if result is not None]
        emit_pass(emitter, plan.blocks, [*edges, *groups], results)


def _edges(bodies: list[Node]) -> tuple[Node, Node]:
    """Return offsets and columns of the CSR."""
    edges = {unpack(body, "rowptr", "col") for body in bodies if not body.meta.get(BY_SOURCE)}
    if len(edges) != 1:
        raise Refusal(f"the bodies read {len(edges)} CSRs")
    return next(iter(edges))


def _member(node: Node) -> tuple[str, tuple[Any, ...], Part]:
    """Return the body, the operands and the result of an op, for the edges in the order of the CSR."""
    body, (dst, src, edge, const) = argument(node, "body"), unpack(node, *GROUPS.values())
    if not node.meta.get(BY_SOURCE):
        return body, (dst, src, edge, const), part_of(node)
    names = {name: _OTHER_END[name[0]] + name[1:] for name in body_inputs(body) if name[0] in _OTHER_END}
    in_order = [first_operand(value) for value in edge]
    return rename_operands(body, names), (src, dst, in_order, const), Part("sources")


def _check_arithmetic(bodies: list[Node]) -> None:
    """Refuse extrema, and comparisons with them: kernels of single bodies add up in another order."""
    for body in bodies:
        names = {op_name(node) for node in parse_body(argument(body, "body")).graph.nodes}
        if not names.isdisjoint(COMPARISONS) or {"max", "min"} & set(part_of(body).reductions):
            raise Refusal("an extremum is compared with values that the kernel of a single body computes")


def _check_gain(bodies: list[Node], joint: str, operands: dict[str, Node]) -> None:
    """Refuse where the kernel of single bodies takes no longer, though it computes shared values again."""
    apart = sum(
        body_work(argument(body, "body"), values_of(body_operands(body)))
        * (_SLOWER if isinstance(EdgeBody.plan(body), Decline) else 1)
        for body in bodies
    )
    together = _SLOWER * body_work(joint, values_of(operands))
    if together >= apart:
        raise Refusal(
            f"its {len(bodies)} bodies take {apart:.0f} operations an edge apart, {together:.0f} here"
        )
