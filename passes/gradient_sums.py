"""Gradient sums: gradients that are only added up become one body, in which they are added edge by edge.

A value of a body that two ops read has two gradients, each with bodies of its own that run the same chain
backwards. An example is the message of an EGNN, which is summed and also moves positions. The two gradients
are added inside one body, and their sums by destination, by source and over all edges are sums of that body.
The gradient of an edge state that is also summed by node has a term copied from the destination's row. Bodies
that read that gradient add the term themselves.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.body import GROUPS, body_text, name_operands, parse_body, values_of
from gnnc.ir.body_sums import sum_of_values
from gnnc.ir.joint_body import JointBody
from gnnc.ir.nodes import argument, aten_name, same_shape, set_argument, shape_of, unpack
from gnnc.ir.op import has_body
from gnnc.ir.parts import GRADIENTS, Parts
from gnnc.passes.base import Context
from gnnc.passes.rewrite.node_builder import NodeBuilder
from gnnc.passes.rewrite.transposes import Transposes

aten, gnnc = torch.ops.aten, torch.ops.gnnc

_LINEAR_REDUCTIONS = (None, "sum", "mean")


@dataclass(frozen=True, slots=True)
class GradientSums:
    """Merge bodies whose results are only added; add gradients of edges inside the bodies that read them."""

    name: ClassVar[str] = "gradient_sums"

    def applies(self, parts: Parts, ctx: Context) -> bool:
        """Return whether the graph holds gradients, and the backend computes what bodies share once."""
        bodies = sum(has_body(node) for node in parts.forward.graph.nodes)
        shares = ctx.target.joint_bodies or ctx.target.stored_steps
        return shares and GRADIENTS in parts.forward.meta and bodies > 1

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with fewer bodies in its joint graph."""
        gm = parts.forward
        builder = NodeBuilder(gm)
        for node in list(gm.graph.nodes):
            if _is_sum(node) and _are_alike(*node.args[:2]):  # type: ignore[arg-type]
                _merge(node, builder, ctx)
        transposes = Transposes(gm, parts)
        for node in reversed(gm.graph.nodes):
            if _is_sum(node) and (readers := _readers(node, transposes)):
                _add_inside(node, readers, transposes, ctx)
        return parts


def _is_sum(node: Node) -> bool:
    if aten_name(node) != "add.Tensor" or argument(node, "alpha") != 1:
        return False
    left, right = unpack(node, "self", "other")
    return isinstance(left, Node) and isinstance(right, Node) and _same(left, right) and left is not right


def _same(left: Node, right: Node) -> bool:
    values = left.meta["val"], right.meta["val"]
    return same_shape(shape_of(left), shape_of(right)) and values[0].dtype == values[1].dtype


def _are_alike(left: Node, right: Node) -> bool:
    """Return whether two bodies run on the same edges, are reduced alike, and are read by their sum alone."""
    if not has_body(left) or left.target != right.target or len(left.users) + len(right.users) != 2:
        return False
    how = [_reduction(node) for node in (left, right)]
    return how[0] == how[1] and how[0][0] in _LINEAR_REDUCTIONS


def _reduction(node: Node) -> tuple[Any, ...]:
    named = (argument(node, name, None) for name in ("reduce", "num_dst"))
    return (*named, *unpack(node, "rowptr", "col"))


def _merge(node: Node, builder: NodeBuilder, ctx: Context) -> None:
    """Replace the sum of two bodies by the body of the sum."""
    joint, members = JointBody(), unpack(node, "self", "other")
    values = [
        value
        for member in members
        for value in joint.add(argument(member, "body"), unpack(member, *GROUPS.values()))
    ]
    body = sum_of_values(joint.text(values), values_of(name_operands(joint.operands)))
    first = members[0]
    args = [*unpack(first, "rowptr", "col"), body]
    args += [argument(first, "reduce")] if first.target is gnnc.message.default else []
    args += joint.operands
    args += [argument(first, "num_dst")] if first.target is gnnc.message.default else []
    made = builder.call(first.target, *args, layer=node.meta["layer"])
    node.replace_all_uses_with(made)
    for old in (node, *members):
        node.graph.erase_node(old)
    ctx.note(made, "two gradients are added up at each edge, and summed once")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Op that reads an edge value: directly, or in the order of the transpose by ``reordered``."""

    node: Node
    reordered: Node | None


def _readers(total: Node, transposes: Transposes) -> list[_Reader]:
    """Return the bodies that read a sum one of whose summands copies rows; none where others read it."""
    found = []
    for user in total.users:
        if has_body(user) and transposes.of(user) is None:
            found.append(_Reader(user, None))
        elif transposes.in_order(user) is total and user.users:
            found += [_Reader(reader, user) for reader in user.users]
        else:
            return []
    return found if all(_copied(total, reader, transposes) for reader in found) else []


def _copied(total: Node, reader: _Reader, transposes: Transposes) -> tuple[Node, Node] | None:
    """Return the summand that stays, and the rows of the destinations that the other one copies."""
    if not has_body(reader.node):
        return None
    of = transposes.of(reader.node)
    if (of is None) != (reader.reordered is None):
        return None
    rowptr = argument(reader.node, "rowptr") if of is None else of[0]
    if any(total in group for group in unpack(reader.node, "dst", "src", "const")):
        return None
    left, right = unpack(total, "self", "other")
    for other, side in ((left, right), (right, left)):
        if side.target is gnnc.sddmm.default and argument(side, "op") == "copy_dst":
            rows = unpack(side, "a")[0]
            if argument(side, "rowptr") is rowptr and rows.meta["val"].dtype == total.meta["val"].dtype:
                return other, rows
    return None


def _add_inside(total: Node, readers: list[_Reader], transposes: Transposes, ctx: Context) -> None:
    """Let bodies read the summands of an edge value, and add them."""
    for reader in readers:
        found = _copied(total, reader, transposes)
        assert found is not None
        other, rows = found
        graph, value = total.graph, other
        if reader.reordered is not None:
            with graph.inserting_before(reader.reordered):
                value = graph.call_function(
                    aten.index_select.default, (other, 0, unpack(reader.reordered, "index")[0])
                )
            value.meta = dict(reader.reordered.meta)
        old = total if reader.reordered is None else reader.reordered
        _replace(reader, old, value, rows)
        ctx.note(reader.node, "a gradient of its edges is added up where it is read, stored for no edge")


def _replace(reader: _Reader, old: Node, value: Node, rows: Node) -> None:
    """Let a body read ``value`` and the rows of the destinations in place of their sum."""
    node, group = reader.node, "dst" if reader.reordered is None else "src"
    *_, edge = unpack(node, "dst", "src", "edge")
    more = [*unpack(node, group)[0], rows]
    letter = next(letter for letter, name in GROUPS.items() if name == group)
    body = _with_sum(argument(node, "body"), f"e{edge.index(old)}", f"{letter}{len(more) - 1}")
    changed = {"body": body, group: more, "edge": [value if given is old else given for given in edge]}
    for name, new in changed.items():
        set_argument(node, name, new)


def _with_sum(text: str, summand: str, other: str) -> str:
    """Return a body that reads ``summand`` + ``other`` in the place of ``summand``."""
    graph = fx.Graph()
    result = graph.graph_copy(parse_body(text).graph, {})
    first = next(node for node in graph.find_nodes(op="placeholder") if node.target == summand)
    with graph.inserting_before(next(iter(graph.nodes))):
        second = graph.placeholder(other)
    last = list(graph.find_nodes(op="placeholder"))[-1]
    with graph.inserting_after(last):
        total = graph.call_function(aten.add.Tensor, (first, second))
    first.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    result = fx.map_arg(result, lambda node: total if node is first else node)
    graph.output(result)
    return body_text(graph)
