"""Shared values: edge values of many columns that several bodies read, and that are stored for them.

A network with edge states, such as MeshGraphNet, reads the states of a layer in two places: the sum over the
edges of each node, and the states of the next layer. A body that computed them from the first layer on would
run all layers before its own again.
"""

from collections.abc import Callable, Collection, Hashable

from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import holds_tensor, shape_of
from gnnc.passes.edges.edge_products import flops_of, width_of
from gnnc.passes.edges.rowwise import Scatter, as_gather, as_scatter, is_narrow, row_inputs
from gnnc.passes.rewrite.assumed_sizes import FLOAT_BYTES, FLOPS_A_BYTE

_Bodies = frozenset[Hashable]


class SharedValues:
    """Decisions which edge values are stored because several bodies read them.

    They are based on the graph at the time of construction, before anything is raised. The scatters by one
    index that depend on the same number of scatters before them count as one body, which may reduce several
    values; so do all parts of an edge softmax, and, where one pass over the edges may compute several bodies,
    all readers that depend on the same number of scatters.

    Args:
        gm: the normalized graph.
        indices: returns the indices of the gathers that a node depends on, row by row.
        in_softmax: the scatters that are part of edge softmaxes.
        joins: whether one pass over the edges may compute several bodies.

    Attributes:
        reasons: why a value is stored, for each that is.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        indices: Callable[[Node], Collection[Node]],
        in_softmax: Collection[Node],
        *,
        joins: bool,
    ) -> None:
        self._indices, self._in_softmax, self._joins = indices, in_softmax, joins
        self._depth: dict[Node, int] = {}
        for node in gm.graph.nodes:
            self._depth[node] = max(map(self._depth_behind, node.all_input_nodes), default=0)
        self.reasons: dict[Node, str] = {}
        alone = self._bodies_of_all(gm.graph, lambda node, bodies: False)
        self._branches = {node for node in alone if self._is_branch(node, alone)}
        self._bodies_of_all(gm.graph, self._decide)

    def _depth_behind(self, node: Node) -> int:
        return self._depth[node] + (self._scatter(node) is not None)

    def _scatter(self, node: Node) -> Scatter | None:
        scatter = None if node in self._in_softmax else as_scatter(node)
        return scatter if isinstance(scatter, Scatter) else None

    def _bodies_of_all(
        self, graph: fx.Graph, is_stored: Callable[[Node, _Bodies], bool]
    ) -> dict[Node, _Bodies]:
        """Return the bodies that compute each edge value; a stored value stands for its own readers."""
        found: dict[Node, _Bodies] = {}
        for node in reversed(graph.nodes):
            if holds_tensor(node) and self._indices(node):
                bodies = frozenset().union(*(self._read_by(user, node, found) for user in node.users))
                ends = is_narrow(node) or is_stored(node, bodies)
                found[node] = frozenset([self._body(node, node)]) if ends else bodies
        return found

    def _read_by(self, user: Node, node: Node, found: dict[Node, _Bodies]) -> _Bodies:
        scatter = self._scatter(user)
        if scatter is not None and scatter.source is node:
            return frozenset([self._body((scatter.index, self._depth[user]), user)])
        if self._reads_outside(user, node):
            return frozenset([self._body(user, node)])
        return found.get(user, frozenset())

    def _body(self, name: Hashable, node: Node) -> Hashable:
        """Return what tells the body behind ``node`` from those of other passes over the edges."""
        return self._depth[node] if self._joins else name

    def _reads_outside(self, user: Node, node: Node) -> bool:
        """Return whether a reader is no part of a region, so that the value is stored for it."""
        scatter = self._scatter(user)
        is_sum = user in self._in_softmax or (scatter is not None and scatter.source is node)
        return not is_sum and node not in (row_inputs(user) or ())

    def _is_branch(self, node: Node, bodies: dict[Node, _Bodies]) -> bool:
        """Return whether no single value is all that the bodies of ``node`` read of it."""
        if len(bodies[node]) < 2 or is_narrow(node) or self._is_of_one_end(node):
            return False
        fixed = all(isinstance(size, int) for size in shape_of(node)[1:])
        return fixed and not any(bodies.get(user) == bodies[node] for user in node.users)

    def _is_of_one_end(self, node: Node) -> bool:
        """Return whether a value depends on rows of one end alone, so that it is computed on the nodes."""
        if as_gather(node) is not None:
            return True
        inputs = row_inputs(node) or ()
        of_one = len(self._indices(node)) == 1 and bool(inputs)
        return of_one and all(self._is_of_one_end(arg) for arg in inputs)

    def _decide(self, node: Node, bodies: _Bodies) -> bool:
        if node not in self._branches or len(bodies) < 2:
            return False
        again = (len(bodies) - 1) * self._flops(node) / FLOPS_A_BYTE
        written_anyway = any(self._reads_outside(user, node) for user in node.users)
        stored = FLOAT_BYTES * width_of(node) * (len(bodies) + (-1 if written_anyway else 1))
        if again <= stored:
            return False
        self.reasons[node] = (
            f"stored for every edge: {len(bodies)} bodies read it; to compute it again costs as much as "
            f"{again:.0f} bytes an edge, to store it {stored:.0f}"
        )
        return True

    def _flops(self, node: Node) -> int:
        """Return the operations of a row behind gathers, stored leaves, and values that may be stored."""
        total, pending, seen = 0, [node], set[Node]()
        while pending:
            current = pending.pop()
            if current in seen or as_gather(current) is not None:
                continue
            seen.add(current)
            total += flops_of(current)
            pending += [arg for arg in row_inputs(current) or () if arg not in self._branches]
        return total
