"""Sizes that costs are compared at: the sizes of the examples, or those of an assumed graph."""

from collections.abc import Collection
from typing import Any

import sympy
import torch
from torch import fx

from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import operand, shape_of
from gnnc.ir.op import Cost, op_of, size_expr

_NODES = 1 << 17
EDGES_PER_NODE = 8
"""Edges per node of the assumed graph, which stands in where there are no examples."""

FLOAT_BYTES = 4
"""Size of a value, where costs are compared before precisions are known."""

FLOPS_A_BYTE = 16.0
"""Flops that a core with wide vectors does in the time of a byte of memory traffic; a multiply-add is two."""


class AssumedSizes:
    """Evaluator of symbolic sizes and costs.

    Args:
        gm: a graph whose placeholders have meta values.
        examples: values of its placeholders, or None.
        edges_per_node: ratio of the assumed graph, used without examples.
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
        """Return the number that an expression of sizes evaluates to."""
        values = {s: sympy.Integer(self._known.get(s, self._assumed(s))) for s in expr.free_symbols}
        return float(expr.xreplace(values))

    def _assumed(self, symbol: sympy.Basic) -> int:
        return self._edges if symbol in self._edge_symbols else _NODES

    def time(self, cost: Cost) -> float:
        """Return the time of a cost, in bytes of memory traffic."""
        return max(self.value(cost.bytes), self.value(cost.flops) / FLOPS_A_BYTE)


def _edge_symbols(gm: fx.GraphModule) -> set[sympy.Basic]:
    """Return the symbols in the lengths of ``col`` operands."""
    symbols = set[sympy.Basic]()
    for node in gm.graph.nodes:
        op = op_of(node)
        if op is not None and op.crosses_edges:
            symbols |= size_expr(shape_of(operand(node, "col"))[0]).free_symbols
    return symbols


def _sizes(gm: fx.GraphModule, examples: tuple[Any, ...]) -> dict[sympy.Basic, int]:
    sizes: dict[sympy.Basic, int] = {}
    for node, value in zip(placeholders(gm), examples, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        for size, actual in zip(node.meta["val"].shape, value.shape, strict=True):
            expr = size_expr(size)
            if isinstance(expr, sympy.Symbol):
                sizes[expr] = actual
    return sizes
