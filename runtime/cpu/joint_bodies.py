"""Lowering of bodies that run in one pass over the edges: what they share is computed once."""

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from gnnc.ir.body import (
    COMPARISONS,
    GROUPS,
    body_operands,
    body_work,
    name_operands,
    parse_body,
    values_of,
)
from gnnc.ir.joint_body import BY_SOURCE, JointBody
from gnnc.ir.nodes import argument, first_operand, op_name, unpack
from gnnc.ir.vjp import exchange_ends
from gnnc.runtime.cpu.edge_body import EdgeBody, emit_steps, plan_steps
from gnnc.runtime.cpu.edge_opcodes import Steps
from gnnc.runtime.cpu.message import Plan, emit_pass, plan_body
from gnnc.runtime.cpu.parts import Part, part_of
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.registry import Decline, kernel
from gnnc.runtime.row_program.build import Inner, Refusal, argument_of, planned

_SLOWER = 4
"""Time of an operation in PyTorch's ops on blocks, in that of the C++ kernel of single bodies: measured."""
_BODIES = ("gnnc.message.default", "gnnc.edge_map.default", "gnnc.edge_sum.default")


@dataclass(frozen=True, slots=True)
class Joint:
    """Bodies of a submodule as one body.

    Attributes:
        body: text of the body.
        parts: the results, in the order of the body's values.
        edges: numbers of the offsets and the columns among the operands of the submodule.
        groups: numbers of the operands of the body, by kind.
    """

    body: str
    parts: tuple[Part, ...]
    edges: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class JointSteps:
    """Plan of a pass of the C++ kernel."""

    joint: Joint
    steps: Steps


@dataclass(frozen=True, slots=True)
class JointBlocks:
    """Plan of a pass in PyTorch's ops."""

    joint: Joint
    blocks: Plan


@kernel(
    "fused:bodies", backend="cpu", name="joint_bodies", priority=20, elements=("int8",), arithmetic="tiles"
)
class JointBodies:
    """Kernel that computes several bodies tile by tile: what they share once."""

    @staticmethod
    @planned
    def plan(node: Node) -> JointSteps:
        """Join the bodies; refuse what the kernel of a single body refuses."""
        inner = Inner(node)
        _, joint, operands = _join(inner)
        return JointSteps(joint, plan_steps(joint.body, joint.parts, inner.results, operands))

    @staticmethod
    def emit(plan: JointSteps, node: Node, emitter: Emitter) -> None:
        """Write the launch of the joint body over the edges of the CSR."""
        edges, groups = _arguments(plan.joint, node)
        given = name_operands(groups)
        emit_steps(emitter, plan.steps, list(map(emitter.vector, edges)), given, _results(node, emitter))


@kernel("fused:bodies", backend="cpu", name="joint_blocks", priority=10, elements=("int8",))
class JointEdgeBlocks:
    """Kernel that computes several bodies in PyTorch's ops, block by block: what they share once."""

    @staticmethod
    @planned
    def plan(node: Node) -> JointBlocks:
        """Join the bodies; refuse what the kernel of a single body refuses."""
        inner = Inner(node)
        bodies, joint, operands = _join(inner)
        _check_arithmetic(bodies)
        blocks = plan_body(joint.body, joint.parts, inner.results, operands)
        _check_gain(bodies, joint.body, operands)
        return JointBlocks(joint, blocks)

    @staticmethod
    def emit(plan: JointBlocks, node: Node, emitter: Emitter) -> None:
        """Write the call that runs the joint body block by block."""
        edges, groups = _arguments(plan.joint, node)
        emit_pass(emitter, plan.blocks, [*edges, *groups], _results(node, emitter))


def _join(inner: Inner) -> tuple[list[Node], Joint, dict[str, Node]]:
    """Return the bodies of a submodule, and their joint body with its operands."""
    bodies = inner.some(*_BODIES)
    if len(inner.results) != len(bodies):
        raise Refusal("holds a body that nothing reads")
    edges, joint = _edges(bodies), JointBody()
    parts: list[Part] = []
    values: list[Node] = []
    for body in inner.results:
        member, groups, part = _member(body)
        values += joint.add(member, groups)
        parts.append(part)
    numbers = tuple(tuple(inner.operand(value, "an operand") for value in group) for group in joint.operands)
    csr = tuple(inner.operand(value, "the CSR") for value in edges)
    return bodies, Joint(joint.text(values), tuple(parts), csr, numbers), name_operands(joint.operands)


def _arguments(joint: Joint, node: Node) -> tuple[list[Node], list[list[Node]]]:
    """Return offsets and columns, and the operands of the joint body, of a call."""
    edges = [argument_of(node, number) for number in joint.edges]
    return edges, [[argument_of(node, number) for number in group] for group in joint.groups]


def _results(node: Node, emitter: Emitter) -> list[Node]:
    return [result for result in emitter.outputs(node) if result is not None]


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
    in_order = [first_operand(value) for value in edge]
    return exchange_ends(body), (src, dst, in_order, const), Part("sources")


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
