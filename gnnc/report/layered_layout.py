"""Places the nodes of an acyclic graph in layers by depth: data flows from top to bottom.

The classic steps: depth by longest path, inputs just above their first use, a way-point in every
layer that a long edge crosses, few crossings by the mean position of neighbors, then positions
near those of the neighbors without overlap.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import networkx as nx

_SWEEPS = 8
_WAYPOINT_WIDTH = 0.25


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of all nodes; y is the layer, 0 at the top.

    Attributes:
        position: center of each node.
        routes: for each edge, the points that it passes, its ends included.
        width: extent in x; positions start at 0.
        layers: number of layers.
    """

    position: dict[Hashable, tuple[float, float]]
    routes: dict[tuple[Hashable, Hashable], list[tuple[float, float]]]
    width: float
    layers: int


def layered_layout(graph: nx.DiGraph, widths: Mapping[Hashable, float], gap: float = 0.35) -> Layout:
    """Lay out ``graph``, whose nodes are ``widths[node]`` wide, with ``gap`` between neighbors."""
    if not graph:
        return Layout({}, {}, 0.0, 0)
    depth = _depths(graph)
    chained, chains = _with_waypoints(graph, depth)
    size = {node: widths.get(node, _WAYPOINT_WIDTH) for node in chained}
    rows = _order(chained, depth)
    x = _positions(chained, rows, size, gap)
    left = min(x[node] - size[node] / 2 for node in chained)
    right = max(x[node] + size[node] / 2 for node in chained)
    place = {node: (x[node] - left, float(depth[node])) for node in chained}
    routes = {edge: [place[node] for node in chain] for edge, chain in chains.items()}
    position = {node: place[node] for node in graph}
    return Layout(position, routes, right - left, len(rows))


def _depths(graph: nx.DiGraph) -> dict[Hashable, int]:
    order = list(nx.topological_sort(graph))
    depth: dict[Hashable, int] = {}
    for node in order:
        depth[node] = max((depth[p] + 1 for p in graph.predecessors(node)), default=0)
    for node in reversed(order):
        uses = [depth[s] for s in graph.successors(node)]
        if uses and not graph.in_degree(node):
            depth[node] = min(uses) - 1
    return depth


def _with_waypoints(
    graph: nx.DiGraph, depth: dict[Hashable, int]
) -> tuple[nx.DiGraph, dict[tuple[Hashable, Hashable], list[Hashable]]]:
    chained = nx.DiGraph()
    chained.add_nodes_from(graph)
    chains: dict[tuple[Hashable, Hashable], list[Hashable]] = {}
    for edge in graph.edges:
        start, end = edge
        points = [("waypoint", start, end, level) for level in range(depth[start] + 1, depth[end])]
        depth.update({point: point[3] for point in points})
        chain = [start, *points, end]
        nx.add_path(chained, chain)
        chains[edge] = chain
    return chained, chains


def _order(graph: nx.DiGraph, depth: Mapping[Hashable, int]) -> list[list[Hashable]]:
    rows: list[list[Hashable]] = [[] for _ in range(max(depth.values()) + 1)]
    for node in graph:
        rows[depth[node]].append(node)
    rank = {node: float(i) for row in rows for i, node in enumerate(row)}
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            near = graph.predecessors if down else graph.successors
            row.sort(key=lambda node, near=near: _mean((rank[n] for n in near(node)), rank[node]))
            rank.update({node: float(i) for i, node in enumerate(row)})
    return rows


def _mean(values: Iterable[float], default: float) -> float:
    found = list(values)
    return sum(found) / len(found) if found else default


def _positions(
    graph: nx.DiGraph,
    rows: list[list[Hashable]],
    size: Mapping[Hashable, float],
    gap: float,
) -> dict[Hashable, float]:
    x: dict[Hashable, float] = {}
    for row in rows:
        total = sum(size[node] + gap for node in row)
        at = -total / 2
        for node in row:
            x[node] = at + (size[node] + gap) / 2
            at += size[node] + gap
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            near = graph.predecessors if down else graph.successors
            wanted = [_mean((x[n] for n in near(node)), x[node]) for node in row]
            x.update(zip(row, _separate(wanted, [size[n] for n in row], gap), strict=True))
    return x


def _separate(wanted: list[float], size: list[float], gap: float) -> list[float]:
    """Return the positions nearest to ``wanted`` (least squares) that keep order and distance.

    With the required distances subtracted this is isotonic regression: pool neighbors that
    violate the order into groups placed at their mean.
    """
    offset = [0.0]
    for left, right in zip(size, size[1:], strict=False):
        offset.append(offset[-1] + (left + right) / 2 + gap)
    groups: list[tuple[float, int]] = []
    for want, shift in zip(wanted, offset, strict=True):
        mean, count = want - shift, 1
        while groups and groups[-1][0] > mean:
            other, many = groups.pop()
            mean, count = (mean * count + other * many) / (count + many), count + many
        groups.append((mean, count))
    base = [mean for mean, count in groups for _ in range(count)]
    return [b + shift for b, shift in zip(base, offset, strict=True)]
