"""Nodes first: where nodes or edges are another dimension than the first, values get rows of them.

``raise`` finds gathers and scatters of rows, along dimension 0. In ``x [batch, nodes, features]`` and in the
stacks of ``ARMAConv`` the nodes are dimension 1. From each scatter along another dimension the pass goes
through the ops that this dimension passes through, before and after it, and computes all of them on rows. A
batch becomes rows ``[batch * nodes, features]``, of a graph that has a copy for each item. Where stacks of
weights multiply the same features, rows are ``[nodes, stacks, features]``, and the stacks of weights become
one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import argument, first_operand, holds_tensor, shape_of, value_of
from gnnc.passes.base import Context
from gnnc.passes.edges.index_bounds import index_bounds
from gnnc.passes.edges.ops_on_rows import (
    call_on_rows,
    gathered_index,
    is_elementwise,
    is_scatter,
    is_stacked_product,
    operand_dims,
    scatter_index,
)
from gnnc.passes.edges.row_layouts import BatchesAsRows, NodesInFront, RowLayout
from gnnc.passes.rewrite.node_builder import NodeBuilder, Sizes
from gnnc.passes.rewrite.output_layout import contiguous_outputs, restore_contiguous_outputs

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class NodesFirst:
    """Compute on rows of nodes and edges around each scatter along another dimension than the first.

    ``meta["index_bounds"]`` has the bounds of the indices whose gathers and scatters it replaced.
    """

    name: ClassVar[str] = "nodes_first"

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Return ``gm`` with gathers and scatters along dimension 0."""
        seeds = [node for node in gm.graph.nodes if _is_seed(node)]
        layout, dims = _layout_of(seeds)
        if layout is None:
            return gm
        contiguous = contiguous_outputs(gm)
        gm.meta["index_bounds"] = index_bounds(gm, _index_uses(dims))
        _Rewrite(gm, dims, layout).run()
        restore_contiguous_outputs(gm, contiguous)
        return gm


def _is_seed(node: Node) -> bool:
    """Return whether a node scatters floating-point slices along another dimension than the first."""
    return is_scatter(node) and argument(node, "dim") != 0 and value_of(node).is_floating_point()


def _layout_of(seeds: list[Node]) -> tuple[RowLayout | None, dict[Node, int]]:
    """Return the layout that serves all scatters, and the values to compute in it; None where there is none.

    Rows of all stacks or channels of a node have one width in every call where their numbers are fixed. A
    batch has another size in each call, so that its items must be rows.
    """
    if not seeds:
        return None, {}
    has_channels_first = any(argument(node, "dim") == len(shape_of(node)) - 1 for node in seeds)
    dims = _dims_of_nodes(seeds, NodesInFront())
    if has_channels_first or any(map(is_stacked_product, dims)):
        sizes = [size for node, dim in dims.items() for size in shape_of(node)[:dim]]
        if all(isinstance(size, int) for size in sizes):
            return NodesInFront(), dims
    return (None, {}) if has_channels_first else (BatchesAsRows(), _dims_of_nodes(seeds, BatchesAsRows()))


def _dims_of_nodes(seeds: list[Node], layout: RowLayout) -> dict[Node, int]:
    """Return the values to compute on rows, and which dimension the rows are for.

    A value reached with two dimensions keeps the first; 0 is that of a value whose operands had another.
    """
    pending = [(node, argument(node, "dim")) for node in seeds]
    found: dict[Node, int] = {}
    while pending:
        node, dim = pending.pop()
        sources = _sources(node, dim, layout)
        if node in found or sources is None:
            continue
        found[node] = dim
        pending += [(arg, own) for arg, own in sources.items() if own != 0]
        if dim != 0:
            pending += [(user, new) for user in node.users for new in _dims_in_user(node, dim, user, layout)]
    return found


def _sources(node: Node, dim: int, layout: RowLayout) -> dict[Node, int] | None:
    """Return the operands with the rows of a value, by their dimension; None where the op mixes rows."""
    sources = operand_dims(node, dim)
    if not sources:
        return sources
    same = {arg: own for arg, own in sources.items() if layout.keeps(arg, own, node, dim)}
    if is_elementwise(node):
        return same or None
    batch_stays = not layout.merges_batch or all(_passes_in_place(node, k) for k in range(dim))
    return same if len(same) == len(sources) and batch_stays else None


def _passes_in_place(node: Node, dim: int) -> bool:
    """Return whether a dimension passes through from the same dimension of all operands."""
    sources = operand_dims(node, dim)
    return sources is not None and all(own == dim for own in sources.values())


def _dims_in_user(node: Node, dim: int, user: Node, layout: RowLayout) -> Iterator[int]:
    """Yield the dimension of the result of ``user`` that ``dim`` of its operand passes through to."""
    if not holds_tensor(user):
        return
    for new in range(len(shape_of(user))):
        if (_sources(user, new, layout) or {}).get(node) == dim:
            yield new
            return


def _index_uses(dims: dict[Node, int]) -> Iterator[tuple[Node, Any]]:
    """Yield (index, upper bound) of the gathers and scatters along the dimension of their rows."""
    for node, dim in dims.items():
        scattered = scatter_index(node)
        indexed = gathered_index(node) if scattered is None else (argument(node, "dim"), scattered)
        if indexed is not None and indexed[0] == dim:
            yield indexed[1], shape_of(first_operand(node))[dim]


class _Rewrite:
    """Insertion of each value of a table on rows."""

    def __init__(self, gm: fx.GraphModule, dims: dict[Node, int], layout: RowLayout) -> None:
        self.graph = gm.graph
        self.dims = dims
        self.layout = layout
        self.builder = NodeBuilder(gm)
        self.sizes = Sizes(self.builder)
        self.values: dict[Node, Node] = {}

    def run(self) -> None:
        self._find_sizes()
        for node in list(self.graph.nodes):
            if node in self.dims:
                self.values[node] = call_on_rows(node, self.dims[node], self.layout, self)
        for node, value in self.values.items():
            dim = self.dims[node]
            node.replace_all_uses_with(value if dim == 0 else self.layout.back(value, node, dim, self))
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))

    def _find_sizes(self) -> None:
        """Read each size off a value that stays: that of a replaced value would depend on its replacement."""
        for node in list(self.graph.nodes):
            if node in self.dims or not self.dims.keys().isdisjoint(node.all_input_nodes):
                continue
            if isinstance(node.meta.get("val"), torch.SymInt):
                self.builder.move_up(node)  # rows that are computed before the node may have this size
                node.replace_all_uses_with(self.sizes.add(node))
            elif holds_tensor(node):
                for dim in range(len(shape_of(node))):
                    self.sizes.of(node, dim)

    def with_rows(self, node: Node, dim: int) -> Node:
        """Return a tensor with rows for its dimension ``dim``."""
        if dim == 0:
            return node
        if self.dims.get(node) == dim:
            return self.values[node]
        return self.layout.convert(node, dim, self)
