"""Join bodies: the bodies of one set of edges that read the same values run in one pass over the edges.

Such are above all the gradients of the operands of a body, each of which computes the body again. A group
becomes a submodule, whose graph stays visible; the kernel computes what its bodies share once. Sums over the
transpose join the group of the CSR: the kernel adds what an edge gives to the row of its source.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.body import GROUPS
from gnnc.ir.graph import clone
from gnnc.ir.joint_body import BY_SOURCE
from gnnc.ir.nodes import argument, unpack
from gnnc.ir.op import has_body
from gnnc.ir.parts import Parts
from gnnc.passes.base import Context
from gnnc.passes.rewrite.grouping import Group, Partition, contract
from gnnc.passes.rewrite.structure_edit import drop_results
from gnnc.passes.rewrite.transposes import Edges, Transposes

gnnc = torch.ops.gnnc

KIND = "bodies"
"""Kind of the submodules, as kernels are registered for it."""


@dataclass(frozen=True, slots=True)
class JoinBodies:
    """Group the bodies that one pass over the edges computes, where the backend has a kernel for that."""

    name: ClassVar[str] = "join_bodies"

    def applies(self, parts: Parts, ctx: Context) -> bool:
        """Return whether the backend has the kernel, and a graph two bodies."""
        return ctx.target.joint_bodies and any(len(_bodies(gm)) > 1 for _, gm in parts.per_call())

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with groups as submodules; as it is where no kernel takes any of them."""
        joint = _joined(parts.map(lambda _, gm: clone(gm)))
        return joint if note_taken(joint, ctx) else parts


def note_taken(parts: Parts, ctx: Context) -> bool:
    """Note the groups of bodies that a kernel takes; return whether there is one."""
    taken = [call for _, gm in parts.per_call() for call in _calls(gm) if _is_taken(call, ctx)]
    for call in taken:
        count = len(_bodies(_inner(call)))
        ctx.note(call, f"{count} bodies are computed in one pass over the edges")
    return bool(taken)


def _joined(parts: Parts) -> Parts:
    unread: set[str] = set()

    def joined(gm: fx.GraphModule) -> fx.GraphModule:
        transposes = Transposes(gm, parts)
        result = _join(gm, transposes)
        unread.update(transposes.replaced)
        return result

    # The backward graph comes first: what it takes becomes an input of the forward graph, too.
    backward = None if parts.backward is None else joined(parts.backward)
    joint = replace(parts, backward=backward, forward=joined(parts.forward))
    if unread:
        drop_results(joint, unread)
    return joint


def _calls(gm: fx.GraphModule) -> list[Node]:
    return [node for node in gm.graph.find_nodes(op="call_module") if node.meta.get("kind") == KIND]


def _inner(call: Node) -> Any:
    owner = call.graph.owning_module
    assert owner is not None
    return owner.get_submodule(str(call.target))


def _is_taken(call: Node, ctx: Context) -> bool:
    lowering = ctx.target.lowering
    return lowering is None or lowering.choose(call).kernel is not None


def _bodies(gm: fx.GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if has_body(node)]


def _join(gm: fx.GraphModule, transposes: Transposes) -> fx.GraphModule:
    partition = Partition()
    members = [member for node in _bodies(gm) if (member := _member(node, transposes)) is not None]
    members.sort(key=lambda member: member.by_source)  # a group begins with a body of the CSR itself
    groups: list[tuple[Group, Edges, set[Node]]] = []
    for member in members:
        for group, edges, rows in groups:
            alike = edges == member.edges and not rows.isdisjoint(member.rows)
            if alike and not partition.would_cycle(group, member.node):
                partition.add(group, member.nodes(transposes))
                rows |= member.rows
                break
        else:
            if not member.by_source:
                group = partition.start(KIND, member.node)
                partition.add(group, (member.node,))
                groups.append((group, member.edges, set(member.rows)))
    for group, _, _ in groups:
        if sum(has_body(node) for node in group.nodes) == 1:
            partition.dissolve(group)
    return contract(gm, partition)


@dataclass(frozen=True, slots=True)
class _Member:
    """Op with a body that may join a group.

    Attributes:
        node: the op.
        edges: the CSR whose edges it goes over, or which it has the transpose of.
        rows: the operands that it reads rows of, those of edges in the order of the CSR.
        by_source: whether it goes over the transpose.
    """

    node: Node
    edges: Edges
    rows: frozenset[Node]
    by_source: bool

    def nodes(self, transposes: Transposes) -> tuple[Node, ...]:
        """Return the op, behind the edge values that it reads in the order of the transpose."""
        if not self.by_source:
            return (self.node,)
        self.node.meta[BY_SOURCE] = True
        return (*transposes.own_copies(self.node), self.node)


def _member(node: Node, transposes: Transposes) -> _Member | None:
    dst, src, edge = unpack(node, *list(GROUPS.values())[:3])
    of = transposes.of(node)
    if of is None:
        return _Member(node, unpack(node, "rowptr", "col"), frozenset((*dst, *src, *edge)), False)
    if node.target is not gnnc.message.default or argument(node, "reduce") != "sum":
        return None
    in_order = [transposes.in_order(value) for value in edge]
    rows = frozenset(value for value in (*dst, *src, *in_order) if value is not None)
    return None if None in in_order else _Member(node, of, rows, True)
