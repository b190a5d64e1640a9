"""Join sums: a product over all edges and the sums of its sides run in one pass over the edges.

The gradients of a weight and of a bias inside a body are such: ``g^T x`` and the sum of ``g``. The kernel of
the product has the rows of both sides at hand, and adds them up on the way.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.body import GROUPS
from gnnc.ir.joint_body import JointBody
from gnnc.ir.nodes import argument, unpack
from gnnc.ir.parts import Parts
from gnnc.ir.summed_rows import summed_rows
from gnnc.passes.base import Context
from gnnc.passes.join_bodies import KIND, note_taken
from gnnc.passes.rewrite.grouping import Group, Partition, contract

_EDGE_SUM = torch.ops.gnnc.edge_sum.default


@dataclass(frozen=True, slots=True)
class JoinSums:
    """Group sums over all edges with a product of the same rows, where the backend has a kernel for that."""

    name: ClassVar[str] = "join_sums"

    def applies(self, parts: Parts, ctx: Context) -> bool:
        """Return whether the backend has the kernel, and a graph two sums."""
        return ctx.target.joint_sums and any(len(_sums(gm)) > 1 for _, gm in parts.per_call())

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with groups as submodules; as it is where no kernel takes any of them."""
        joint = parts.map(lambda _, gm: _joined(gm))
        return joint if note_taken(joint, ctx) else parts


def _sums(gm: fx.GraphModule) -> list[Node]:
    return list(gm.graph.find_nodes(op="call_function", target=_EDGE_SUM))


def _joined(gm: fx.GraphModule) -> fx.GraphModule:
    by_edges: dict[tuple[Node, ...], list[Node]] = {}
    for node in _sums(gm):
        by_edges.setdefault(unpack(node, "rowptr", "col"), []).append(node)
    partition = Partition()
    for nodes in by_edges.values():
        _group(nodes, partition)
    return contract(gm, partition) if partition.groups else gm


def _group(nodes: list[Node], partition: Partition) -> None:
    """Add a group for each product whose sides are added up, too: one sum for each side."""
    joint = JointBody()  # equal values of different bodies are one value there
    rows = {
        node: summed_rows(joint.add(argument(node, "body"), unpack(node, *GROUPS.values()))[0])
        for node in nodes
    }
    products = {(side, node): node for node in nodes if len(rows[node]) == 2 for side in rows[node]}
    groups: dict[Node, Group] = {}
    for node in nodes:
        if len(rows[node]) != 1:
            continue
        for key in [key for key in products if key[0] is rows[node][0]]:
            product = products[key]
            if product not in groups and partition.would_cycle(None, product, node):
                continue
            if product not in groups:
                groups[product] = partition.start(KIND, product)
                partition.add(groups[product], (product,))
            if partition.add(groups[product], (node,)):
                del products[key]
                break
