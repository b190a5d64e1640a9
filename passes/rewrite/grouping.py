"""Groups of nodes that become one fused submodule: a partition of the graph, and its contraction."""

import heapq
import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx import Node

from gnnc.torch_private import LazyGraphModule


@dataclass(eq=False, slots=True)
class Group:
    """Group of nodes that one kernel will compute.

    Attributes:
        kind: the kernel family: ``gemm``, ``spmm``, ``attention`` or ``map``.
        anchor: the node that gives the group its layer and precision.
    """

    kind: str
    anchor: Node
    nodes: dict[Node, None] = field(default_factory=dict)

    def inputs(self) -> list[Node]:
        """Return the nodes outside that the group reads, in order of first use."""
        reads = (arg for node in sorted(self.nodes) for arg in node.all_input_nodes)
        return list(dict.fromkeys(arg for arg in reads if arg not in self.nodes))

    def outputs(self) -> list[Node]:
        """Return the nodes that are read from outside, in graph order."""
        return [node for node in sorted(self.nodes) if set(node.users) - self.nodes.keys()]


class Partition:
    """Partition of a graph's nodes into disjoint groups; contracting the groups leaves no cycle."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._of: dict[Node, Group] = {}
        self._reserved: dict[Node, str] = {}

    def group_of(self, node: Node) -> Group | None:
        """Return the group of ``node``, or None."""
        return self._of.get(node)

    def reserve(self, nodes: Iterable[Node], kind: str) -> None:
        """Let groups of one kind alone take ``nodes``."""
        self._reserved.update(dict.fromkeys(nodes, kind))

    def start(self, kind: str, anchor: Node) -> Group:
        """Add an empty group."""
        group = Group(kind, anchor)
        self.groups.append(group)
        return group

    def add(self, group: Group, nodes: Iterable[Node]) -> bool:
        """Add ``nodes`` to ``group`` if all are free and no cycle arises; return whether they were added."""
        new = [node for node in nodes if node not in group.nodes]
        if any(node in self._of for node in new) or self.would_cycle(group, *new):
            return False
        if any(self._reserved.get(node, group.kind) != group.kind for node in new):
            return False
        for node in new:
            group.nodes[node] = None
            self._of[node] = group
        return True

    def would_cycle(self, group: Group | None, *new: Node) -> bool:
        """Return whether adding ``new`` to ``group`` would make a cycle."""
        inside = {*new, *(group.nodes if group else ())}
        reads = {arg for node in inside for arg in node.all_input_nodes} - inside
        return self._depend_on(reads, inside)

    def remove(self, group: Group, node: Node) -> None:
        """Remove ``node`` from ``group``."""
        del group.nodes[node]
        del self._of[node]

    def dissolve(self, group: Group) -> None:
        """Remove ``group`` and free its nodes."""
        for node in list(group.nodes):
            self.remove(group, node)
        self.groups.remove(group)

    def _depend_on(self, starts: Iterable[Node], inside: set[Node]) -> bool:
        """Return whether one of ``starts`` depends on ``inside``, with the other groups contracted."""
        seen: set[Node] = set()
        pending = list(starts)
        while pending:
            node = pending.pop()
            if node in inside:
                return True
            if node in seen:
                continue
            group = self._of.get(node)
            members = (node,) if group is None or node in inside else tuple(group.nodes)
            seen.update(members)
            pending += [arg for member in members for arg in member.all_input_nodes]
        return False


def contract(gm: fx.GraphModule, partition: Partition) -> fx.GraphModule:
    """Return ``gm`` with every group as a ``call_module`` of a submodule ``fused_<k>``."""
    graph = fx.Graph()
    modules: dict[str, torch.nn.Module] = dict(gm.named_children())
    names = (name for k in itertools.count() if (name := f"fused_{k}") not in modules)
    copies: dict[Node, Node] = {}
    for element in _ordered(gm.graph, partition):
        if isinstance(element, Node):
            copies[element] = graph.node_copy(element, copies.__getitem__)
            continue
        name = next(names)
        modules[name] = _submodule(element)
        copies |= _call(graph, name, element, copies)
    result = LazyGraphModule(modules, graph, class_name=type(gm).__name__)
    result.meta.update(gm.meta)
    return result


def _ordered(graph: fx.Graph, partition: Partition) -> Iterator[Node | Group]:
    """Yield nodes and groups in a topological order that stays near the order of the graph."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    elements = {node: partition.group_of(node) or node for node in graph.nodes}
    reads = {id(element): (element, _reads(element)) for element in elements.values()}
    readers: dict[int, list[int]] = {key: [] for key in reads}
    waiting: dict[int, int] = {}
    for key, (_, arguments) in reads.items():
        sources = {id(elements[arg]) for arg in arguments}
        waiting[key] = len(sources)
        for source in sources:
            readers[source].append(key)
    ready = [(_place(element, position), key) for key, (element, _) in reads.items() if not waiting[key]]
    heapq.heapify(ready)
    while ready:
        _, key = heapq.heappop(ready)
        yield reads[key][0]
        for reader in readers[key]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (_place(reads[reader][0], position), reader))


def _reads(element: Node | Group) -> list[Node]:
    return element.inputs() if isinstance(element, Group) else element.all_input_nodes


def _place(element: Node | Group, position: dict[Node, int]) -> int:
    return position[element] if isinstance(element, Node) else min(map(position.__getitem__, element.nodes))


def _submodule(group: Group) -> fx.GraphModule:
    graph = fx.Graph()
    inner: dict[Node, Node] = {}
    for node in group.inputs():
        inner[node] = graph.placeholder(node.name)
        inner[node].meta = {k: node.meta[k] for k in ("val", "layer") if k in node.meta}
    for node in sorted(group.nodes):
        inner[node] = graph.node_copy(node, inner.__getitem__)
    outputs = tuple(inner[node] for node in group.outputs())
    result = graph.output(outputs if len(outputs) > 1 else outputs[0])
    result.meta["val"] = _value(group.outputs())
    return LazyGraphModule(torch.nn.Module(), graph, class_name=f"Fused{group.kind.capitalize()}")


def _call(graph: fx.Graph, name: str, group: Group, copies: dict[Node, Node]) -> dict[Node, Node]:
    """Insert the call of a submodule; return the node that replaces each output of the group."""
    outputs = group.outputs()
    call = graph.call_module(name, tuple(copies[node] for node in group.inputs()))
    meta = {k: group.anchor.meta[k] for k in ("layer", "precision") if k in group.anchor.meta}
    call.meta = {**meta, "val": _value(outputs), "fused": True, "kind": group.kind}
    if len(outputs) == 1:
        return {outputs[0]: call}
    results = {}
    for i, node in enumerate(outputs):
        results[node] = graph.call_function(operator.getitem, (call, i))
        results[node].meta = dict(node.meta)
    return results


def _value(outputs: list[Node]) -> object:
    values = tuple(node.meta.get("val") for node in outputs)
    return values if len(values) > 1 else values[0]
