"""Joint messages: several reductions in one pass over the edges.

``message`` ops over one CSR that read the same rows become one op, whose body computes shared values
once and returns a value for each reduction: the aggregators of PNA, or a softmax aggregation beside a
mean.
"""

from os.path import commonprefix

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.joint_body import JointBody
from gnnc.ir.nodes import argument, same_shape, shape_of, unpack
from gnnc.passes.base import Context
from gnnc.passes.rewrite.node_builder import NodeBuilder

aten, gnnc = torch.ops.aten, torch.ops.gnnc

_GRAPH = ("rowptr", "col", "num_dst")
_OPERANDS = ("dst", "src", "edge", "const")
"""Lists of operands of ``message``, by destination, by source, by edge, and constant."""


def join_messages(gm: fx.GraphModule, builder: NodeBuilder, ctx: Context) -> None:
    """Join the messages of ``gm`` that read the same rows, in place."""
    position = {node: number for number, node in enumerate(gm.graph.nodes)}
    groups: list[list[Node]] = []
    for node in gm.graph.nodes:
        if node.target is not gnnc.message.default:
            continue
        alike = [group for group in groups if _are_alike(node, group[0])]
        free = [group for group in alike if _in_one_place([*group, node], position)]
        if alike and not free:
            ctx.note(node, "a pass of its own over the edges: it needs the result of one that it could join")
        if free:
            free[0].append(node)
        else:
            groups.append([node])
    for group in groups:
        if len(group) > 1:
            _join(gm.graph, group, builder)


def _are_alike(node: Node, first: Node) -> bool:
    same_edges = unpack(node, *_GRAPH) == unpack(first, *_GRAPH)
    same_value = same_shape(shape_of(node), shape_of(first)) and (
        node.meta["val"].dtype == first.meta["val"].dtype
    )
    return same_edges and same_value and not set(_rows(node)).isdisjoint(_rows(first))


def _in_one_place(group: list[Node], position: dict[Node, int]) -> bool:
    """Return whether every operand stands before the first use of a result: none depends on another."""
    operands = {arg for member in group for arg in member.all_input_nodes}
    users = {user for member in group for user in member.users}
    return operands.isdisjoint(group) and max(map(position.get, operands)) < min(map(position.get, users))  # type: ignore[type-var]


def _rows(message: Node) -> list[Node]:
    """Return the operands that a message reads rows of."""
    return [operand for rows in unpack(message, "dst", "src", "edge") for operand in rows]


def _join(graph: fx.Graph, group: list[Node], builder: NodeBuilder) -> None:
    joint = JointBody()
    results = [
        value for node in group for value in joint.add(argument(node, "body"), unpack(node, *_OPERANDS))
    ]
    reduce = ",".join(argument(node, "reduce") for node in group)
    rowptr, col, num_dst = unpack(group[0], *_GRAPH)
    made = builder.call(
        gnnc.message.default,
        rowptr,
        col,
        joint.text(results),
        reduce,
        *joint.operands,
        num_dst,
        layer=_common(group),
    )
    for place, node in enumerate(group):
        part = builder.call(aten.select.int, made, 1, place, layer=node.meta["layer"])
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _common(group: list[Node]) -> str:
    """Return the path of the innermost module around all of the messages."""
    return ".".join(commonprefix([str(node.meta["layer"]).split(".") for node in group]))  # type: ignore[type-var]
