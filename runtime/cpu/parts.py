"""Results of a pass over edges: how the values of a body become each of them."""

from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

from gnnc.ir.nodes import argument, op_name

Kind = Literal["rows", "sources", "edges", "all"]


@dataclass(frozen=True, slots=True)
class Part:
    """Result of a pass over the edges, of one or more values of the body.

    Attributes:
        kind: values of the edges are reduced by ``rows`` or added up by ``sources``, kept for ``edges``, or a
            value that the edges of a block share is added up over ``all``.
        reductions: names of the reductions by rows.
    """

    kind: Kind
    reductions: tuple[str, ...] = ()


def part_of(node: Node) -> Part:
    """Return the result that an op with a body makes."""
    match op_name(node):
        case "message":
            return Part("rows", tuple(argument(node, "reduce").split(",")))
        case "edge_map":
            return Part("edges")
    return Part("all")
