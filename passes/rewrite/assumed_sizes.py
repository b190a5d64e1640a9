"""Sizes to compare costs with: those of the examples, or an assumed graph."""

from collections.abc import Collection
from typing import Any

import sympy
import torch
from torch import fx

from gnnc.ir.graph import placeholders
from gnnc.ir.op import Cost, op_of, size_expr

_NODES = 1 << 17
EDGES_PER_NODE = 8
"""Assumed where no examples say how large the graph is."""

FLOAT_BYTES = 4
"""Of a value where costs are compared before precisions are known."""

FLOPS_A_BYTE = 16.0
"""Multiply-adds count twice. Cores with wide vectors do about this many a byte of memory traffic."""


class Typical:
    """Evaluates symbolic costs.

    Args:
        gm: a graph whose placeholders have meta values.
        examples: values of its placeholders, or None.
        edges_per_node: used where there are none.
        edges: symbols that count edges, besides the lengths of ``col`` operands.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        examples: tuple[Any, ...] | None,
        edges_per_node: int,
        edges: Collection[sympy.Basic] = (),
    ) -> None:
        self._edges = _NODES * edges_per_node
        self._edge_symbols = _edge_symbols(gm) | set(edges)
        self._known = {} if examples is None else _sizes(gm, examples)

    def value(self, expr: sympy.Expr) -> float:
        """Return the value of an expression of sizes."""
        values = {s: sympy.Integer(self._known.get(s, self._assumed(s))) for s in expr.free_symbols}
        return float(expr.xreplace(values))

    def _assumed(self, symbol: sympy.Basic) -> int:
        return self._edges if symbol in self._edge_symbols else _NODES

    def time(self, cost: Cost) -> float:
        """Return a time in arbitrary units (bytes moved)."""
        return max(self.value(cost.bytes), self.value(cost.flops) / FLOPS_A_BYTE)


def _edge_symbols(gm: fx.GraphModule) -> set[sympy.Basic]:
    """Return the symbols in the lengths of ``col`` operands."""
    found = set[sympy.Basic]()
    for node in gm.graph.nodes:
        op = op_of(node)
        col = node.args[1] if op is not None and op.name in ("spmm", "sddmm", "edge_map") else None
        if isinstance(col, fx.Node):
            found |= size_expr(col.meta["val"].shape[0]).free_symbols
    return found


def _sizes(gm: fx.GraphModule, examples: tuple[Any, ...]) -> dict[sympy.Basic, int]:
    known: dict[sympy.Basic, int] = {}
    for node, value in zip(placeholders(gm), examples, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        for size, actual in zip(node.meta["val"].shape, value.shape, strict=True):
            expr = size_expr(size)
            if isinstance(expr, sympy.Symbol):
                known[expr] = actual
    return known
