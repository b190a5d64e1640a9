"""Results of a pass over edges: how the values of a body become each of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node

from gnnc.ir.nodes import argument, op_name
from gnnc.runtime.row_program import build
from gnnc.runtime.row_program.build import Refusal

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


def check_float32(results: Sequence[Node]) -> None:
    """Refuse results that are not float32, or whose width is not fixed."""
    for result in results:
        if result.meta["val"].dtype != torch.float32:
            raise Refusal(f"the result is {result.meta['val'].dtype}")
        build.fixed_width(result)


def part_of(node: Node) -> Part:
    """Return the result that an op with a body makes."""
    match op_name(node):
        case "message":
            return Part("rows", tuple(argument(node, "reduce").split(",")))
        case "edge_map":
            return Part("edges")
    return Part("all")
