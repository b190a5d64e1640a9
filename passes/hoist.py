"""Hoist: what depends on the graph alone leaves the program and runs once a graph.

The graph splits in two. *Structure* holds every parameter-free node that is computed from the
graph arguments: edge lists, batch vectors, edge weights and edge types, sizes. *Compute* keeps the
rest and takes the structure's results as placeholders of the source kind ``structure``.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import infer_meta, placeholders
from gnnc.ir.op import op_of
from gnnc.ir.source import Source, source_of
from gnnc.ir.verify import verify
from gnnc.passes.base import Context, is_tensor
from gnnc.passes.boundary import Boundary, run_structure
from gnnc.passes.graph_inputs import structural_inputs

_aten = torch.ops.aten

_CHEAP = frozenset(
    {
        _aten.sym_size.int, _aten.full.default, _aten.ones.default, _aten.zeros.default,
        _aten.arange.default, _aten.arange.start, _aten.arange.start_step,
        _aten.scalar_tensor.default,
    }
)  # fmt: skip
_RESHAPES = frozenset(
    {
        _aten.unsqueeze.default, _aten.view.default, _aten.reshape.default,
        _aten._unsafe_view.default, _aten.expand.default, _aten.squeeze.dim, _aten.alias.default,
        _aten.detach.default,
    }
)  # fmt: skip
_CSR_RESULTS = ("rowptr", "col", "perm")


@dataclass(frozen=True, slots=True)
class Hoist:
    """Split the graph; the structure half goes to ``ctx.structure``.

    It stands in the compute graph's ``meta["structure"]`` too, so that every later stage can be run
    on its own. Where ``ctx.examples`` are given, they become the values of the compute graph's
    placeholders.
    """

    name: ClassVar[str] = "hoist"

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Return the compute graph."""
        split = _Split(gm, structural_inputs(gm))
        for node in split.random:
            ctx.note(node, f"{node.name} draws random numbers: it runs at each call")
        structure, compute = split.structure_graph(), split.compute_graph()
        structure.graph.eliminate_dead_code()
        infer_meta(structure)
        structure.recompile()
        verify(structure, f"{self.name} (structure)")
        compute.meta["structure"] = ctx.structure = structure
        run_structure(gm, compute, structure, ctx)
        return compute


@dataclass(slots=True)
class _Split:
    """Decides for every node on which side it runs, and builds the two graphs.

    Attributes:
        gm: the whole graph.
        seeds: the inputs that structure may depend on.
        hoisted: nodes that the structure graph computes (or takes as inputs).
        sizes: nodes that depend on sizes alone and cost nothing: each side has its own.
        boundary: hoisted nodes whose value the compute graph takes, in graph order.
    """

    gm: fx.GraphModule
    seeds: set[Node]
    hoisted: set[Node] = field(default_factory=set)
    sizes: set[Node] = field(default_factory=set)
    boundary: list[Node] = field(default_factory=list)
    random: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        for node in self.gm.graph.nodes:
            self._place(node)
        self.boundary = _in_order(self.gm.graph, self._boundary())

    def _place(self, node: Node) -> None:
        if node in self.seeds:
            self.hoisted.add(node)
        if node.op != "call_function":
            return
        if node.target is _aten.sym_size.int and not self._is_hoisted(node.args[0]):
            # Where the size is an input's, no tensor of the compute side is needed to know it.
            (self.sizes.add(node) if _is_input(node.args[0]) else None)
            return
        if not all(arg in self.hoisted or arg in self.sizes or _is_constant(arg)
                   for arg in node.all_input_nodes):  # fmt: skip
            return
        if _is_random(node):
            self.random.append(node)
        elif any(arg in self.hoisted for arg in node.all_input_nodes):
            self.hoisted.add(node)
        elif node.target in _CHEAP or not is_tensor(node) and op_of(node) is None:
            self.sizes.add(node)
        elif self._from_sizes(node):
            (self.sizes if node.target in _RESHAPES else self.hoisted).add(node)

    def _is_hoisted(self, arg: Any) -> bool:
        return arg in self.hoisted

    def _from_sizes(self, node: Node) -> bool:
        """Constants alone are no reason to hoist: the result would be as large as they are."""
        return any(arg in self.sizes for arg in node.all_input_nodes)

    def _boundary(self) -> set[Node]:
        """Hoisted nodes that compute reads, reshapes taken back so that the tensor itself crosses."""
        found: set[Node] = set()
        pending = [
            arg
            for node in self.gm.graph.nodes
            if node not in self.hoisted and node not in self.sizes
            for arg in node.all_input_nodes
        ]
        seen: set[Node] = set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.sizes or self._is_sunk(node):
                pending += node.all_input_nodes
            elif node in self.hoisted and node.op != "placeholder":
                found.add(node)
        return found

    def _is_sunk(self, node: Node) -> bool:
        """Whether compute repeats the node: a reshape, or the size of a tensor at hand."""
        if node not in self.hoisted or node.op == "placeholder":
            return False
        if node.target is _aten.sym_size.int:
            return node.args[0].op == "placeholder"  # type: ignore[union-attr]
        if node.target in _RESHAPES:
            return True
        return not is_tensor(node) and node.target is not operator.getitem and all(
            not is_tensor(arg) for arg in node.all_input_nodes
        )  # fmt: skip

    def structure_graph(self) -> fx.GraphModule:
        """Return the structure graph; its outputs are the boundary's values."""
        needed = _ancestors(self.boundary)
        graph, copies = fx.Graph(), dict[Node, Node]()
        for node in self.gm.graph.nodes:
            if node in needed and node.op == "placeholder" and not is_size_base(node, needed, self.hoisted):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        for node in self.gm.graph.nodes:
            if node in needed and node.target is _aten.sym_size.int and node in self.sizes:
                copies[node] = _size_placeholder(graph, node, copies)
        for node in self.gm.graph.nodes:
            if node in needed and node not in copies and node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                _name(node, copies[node])
        graph.output(tuple(copies[node] for node in self.boundary))
        for node, out in zip(self.boundary, output_args(graph), strict=True):
            node.meta["structure_name"] = out.name
        return fx.GraphModule(self.gm, graph, "Structure")

    def compute_graph(self) -> fx.GraphModule:
        """Return the compute graph, sizes of its placeholders free of data-dependent symbols."""
        kept = self._kept()
        graph, copies = fx.Graph(), dict[Node, Node]()
        boundary = Boundary(self.gm, self.boundary)
        for node in placeholders(self.gm):
            if node in kept or not self._is_graph_input(node):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        for node in self.boundary:
            copies[node] = graph.placeholder(node.meta["structure_name"])
            copies[node].meta = {
                "source": Source("structure", node.meta["structure_name"]),
                "val": boundary.value(node),
                "layer": node.meta.get("layer", ""),
            }
        for node in self.gm.graph.nodes:
            if node in kept and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta.pop("val", None)
        _protect_cached(graph)
        return fx.GraphModule(self.gm, graph, type(self.gm).__name__)

    def _is_graph_input(self, node: Node) -> bool:
        return node in self.hoisted

    def _kept(self) -> set[Node]:
        """Nodes of the compute graph: its own, and the sizes and reshapes that they need."""
        stop = set(self.boundary)
        own = [n for n in self.gm.graph.nodes if n not in self.hoisted and n not in self.sizes]
        kept, pending = set(own), list(own)
        while pending:
            for arg in pending.pop().all_input_nodes:
                if arg not in kept and arg not in stop:
                    kept.add(arg)
                    pending.append(arg)
        return kept


def is_size_base(node: Node, needed: set[Node], hoisted: set[Node]) -> bool:
    """Whether only sizes of the placeholder ``node`` matter to the needed nodes."""
    return node not in hoisted and all(
        user.target is _aten.sym_size.int for user in node.users if user in needed
    )


def output_args(graph: fx.Graph) -> tuple[Any, ...]:
    """Return what the graph's output returns."""
    return graph.output_node().args[0]  # type: ignore[return-value]


def _is_input(arg: Any) -> bool:
    return isinstance(arg, Node) and arg.op == "placeholder"


def _is_constant(node: Node) -> bool:
    source = source_of(node)
    return source is not None and source.kind == "constant"


def _is_random(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _in_order(graph: fx.Graph, nodes: set[Node]) -> list[Node]:
    return [node for node in graph.nodes if node in nodes]


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    found, pending = set[Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _size_placeholder(graph: fx.Graph, node: Node, copies: dict[Node, Node]) -> Node:
    base, dim = node.args
    assert isinstance(base, Node)
    name = f"{getattr(source_of(base), 'name', base.name)}.shape[{dim}]"
    for other in copies.values():
        if other.meta.get("source") == Source("size", name):
            return other
    placeholder = graph.placeholder("num_" + "".join(c if c.isalnum() else "_" for c in name[:-1]))
    placeholder.meta = {**node.meta, "source": Source("size", name)}
    return placeholder


def _name(original: Node, copy: Node) -> None:
    """Call the results of a CSR by what they are: they are what one reads in every later stage."""
    producer = original.args[0] if original.target is operator.getitem else None
    op = op_of(producer) if isinstance(producer, Node) else None
    if op is None or op.name not in ("csr", "csr_transpose"):
        return
    suffix = "_t" if op.name == "csr_transpose" else ""
    copy._rename(_CSR_RESULTS[original.args[1]] + suffix)  # type: ignore[index]


def _protect_cached(graph: fx.Graph) -> None:
    """Give the caller a copy of a structure value that the model returns: the cache keeps its own."""
    output = graph.output_node()

    def copied(value: Any) -> Any:
        source = source_of(value) if isinstance(value, Node) else None
        if source is None or source.kind != "structure" or not is_tensor(value):
            return value
        with graph.inserting_before(output):
            return graph.call_function(_aten.clone.default, (value,))

    output.args = (tuple(copied(value) for value in output.args[0]),)  # type: ignore[union-attr]


