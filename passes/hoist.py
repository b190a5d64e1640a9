"""Hoist: split off the computations that depend on the graph alone, to run once for each distinct graph.

The *structure* graph holds every parameter-free node that is computed from the graph arguments: edge
lists, batch vectors, edge weights and edge types, sizes. The *compute* graph has the other nodes and
takes the structure's results as placeholders of the source kind ``structure``.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import infer_meta, placeholders
from gnnc.ir.nodes import (
    ancestors,
    first_operand,
    is_random,
    is_result,
    outputs_of,
    result_index,
    schema_of,
    unpack,
)
from gnnc.ir.op import op_of
from gnnc.ir.parts import Parts
from gnnc.ir.source import Source, source_of
from gnnc.passes.base import Context, is_tensor
from gnnc.passes.edges.graph_inputs import structural_inputs
from gnnc.passes.rewrite.boundary import Boundary, run_structure
from gnnc.torch_private import LazyGraphModule, rename

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


@dataclass(frozen=True, slots=True)
class Hoist:
    """Split the forward graph into a structure graph and what remains.

    Where ``ctx.examples`` are given, they become the values of the new forward graph's placeholders.
    """

    name: ClassVar[str] = "hoist"

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with a structure graph; one that has it already stays as it is."""
        if parts.structure is not None:
            return parts
        gm = parts.forward
        split = _Split(gm, structural_inputs(gm))
        for node in split.random:
            ctx.note(node, f"{node.name} draws random numbers: it runs at each call")
        structure, compute = split.structure_graph(), split.compute_graph()
        structure.graph.eliminate_dead_code()
        infer_meta(structure)
        structure.recompile()
        run_structure(gm, compute, structure, ctx)
        return replace(parts, structure=structure, forward=compute)


@dataclass(slots=True)
class _Split:
    """Side of every node, structure or compute, and the construction of the two graphs.

    Attributes:
        gm: the whole graph.
        seeds: the inputs that structure may depend on.
        hoisted: nodes that the structure graph computes or takes as inputs.
        sizes: nodes that depend on sizes alone and cost nothing: both graphs have a copy.
        boundary: hoisted nodes whose values the compute graph reads.
        names: names of the boundary's nodes in the structure graph.
        random: nodes that would be hoisted if they drew no random numbers.
    """

    gm: fx.GraphModule
    seeds: set[Node]
    hoisted: set[Node] = field(default_factory=set)
    sizes: set[Node] = field(default_factory=set)
    boundary: list[Node] = field(default_factory=list)
    names: dict[Node, str] = field(default_factory=dict)
    random: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        for node in self.gm.graph.nodes:
            self._place(node)
        position = {node: i for i, node in enumerate(self.gm.graph.nodes)}
        self.boundary = sorted(self._boundary(), key=lambda node: _place(node, position))

    def _place(self, node: Node) -> None:
        if node in self.seeds:
            self.hoisted.add(node)
        if _is_size(node):
            self.sizes.add(node)
        if node.op != "call_function":
            return
        args = node.all_input_nodes
        if node.target is _aten.sym_size.int and first_operand(node) not in self.hoisted:
            # The size of an input is known before anything runs; the tensor itself is not needed.
            if first_operand(node).op == "placeholder":
                self.sizes.add(node)
        elif not all(arg in self.hoisted or arg in self.sizes or _is_constant(arg) for arg in args):
            return
        elif is_random(node):
            self.random.append(node)
        elif any(arg in self.hoisted for arg in args):
            self.hoisted.add(node)
        elif node.target in _CHEAP or (not is_tensor(node) and op_of(node) is None):
            self.sizes.add(node)
        elif any(arg in self.sizes for arg in args):
            # Computed from constants alone, it would stay: the result is as large as they are.
            (self.sizes if node.target in _RESHAPES else self.hoisted).add(node)

    def _boundary(self) -> set[Node]:
        """Return the hoisted nodes that compute reads; behind a reshape, the tensor that is reshaped."""
        boundary: set[Node] = set()
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
                boundary.add(node)
        return boundary

    def _is_sunk(self, node: Node) -> bool:
        """Return whether compute has its own copy of the node: a reshape, or the size of an input."""
        if node not in self.hoisted or node.op == "placeholder":
            return False
        if node.target is _aten.sym_size.int:
            return first_operand(node).op == "placeholder"
        if node.target in _RESHAPES:
            return True
        return not is_tensor(node) and not is_result(node) and all(
            not is_tensor(arg) for arg in node.all_input_nodes
        )  # fmt: skip

    def structure_graph(self) -> fx.GraphModule:
        """Return the structure graph; its outputs are the boundary's values."""
        needed = ancestors(self.boundary)
        graph, copies = fx.Graph(), dict[Node, Node]()
        for node in placeholders(self.gm):
            if node in needed and (node in self.hoisted or _is_constant(node) or _is_size(node)):
                copies[node] = graph.node_copy(node)
        for node in self.gm.graph.nodes:
            if node in needed and node in self.sizes and node.target is _aten.sym_size.int:
                copies[node] = _size_placeholder(graph, node)
        for node in self.gm.graph.nodes:
            if node in needed and node not in copies and node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                _name(node, copies[node])
        graph.output(tuple(copies[node] for node in self.boundary))
        for node in self.boundary:
            self.names[node] = copies[node].name
        return LazyGraphModule(self.gm, graph, "Structure")

    def compute_graph(self) -> fx.GraphModule:
        """Return the compute graph; the sizes of its placeholders have no data-dependent symbols."""
        needed = self._needed_by_compute()
        graph, copies = fx.Graph(), dict[Node, Node]()
        boundary = Boundary(self.gm, self.boundary)
        for node in placeholders(self.gm):
            if node in needed:
                copies[node] = graph.node_copy(node)
        for node in self.boundary:
            copies[node] = graph.placeholder(self.names[node])
            copies[node].meta = {
                "source": Source("structure", self.names[node]),
                "val": boundary.value(node),
                "layer": node.meta.get("layer", ""),
            }
        for node in self.gm.graph.nodes:
            if node in needed and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta.pop("val", None)
        _protect_cached(graph)
        return LazyGraphModule(self.gm, graph, type(self.gm).__name__)

    def _needed_by_compute(self) -> set[Node]:
        """Return the nodes of the compute graph: nodes not hoisted, the sizes and reshapes that they read."""
        boundary = set(self.boundary)
        pending = [n for n in self.gm.graph.nodes if n not in self.hoisted and n not in self.sizes]
        needed = set(pending)
        while pending:
            for arg in pending.pop().all_input_nodes:
                if arg not in needed and arg not in boundary:
                    needed.add(arg)
                    pending.append(arg)
        return needed


def _is_constant(node: Node) -> bool:
    source = source_of(node)
    return source is not None and source.kind == "constant"


def _is_size(node: Node) -> bool:
    source = source_of(node)
    return source is not None and source.kind == "size"


def _size_placeholder(graph: fx.Graph, node: Node) -> Node:
    base, dim = unpack(node, "self", "dim")
    source = source_of(base)
    name = f"{base.name if source is None else source.name}.shape[{dim}]"
    placeholder = graph.placeholder("num_" + "".join(c if c.isalnum() else "_" for c in name[:-1]))
    placeholder.meta = {**node.meta, "source": Source("size", name)}
    return placeholder


def _csr_result(node: Node) -> tuple[Node, int] | None:
    if not is_result(node):
        return None
    producer = first_operand(node)
    op = op_of(producer)
    is_csr = op is not None and op.kind == "structure"
    return (producer, result_index(node)) if is_csr else None


def _place(node: Node, position: dict[Node, int]) -> tuple[int, int]:
    """Return the sort key of a boundary value: its place in the graph, results of one CSR together."""
    result = _csr_result(node)
    return (position[node], 0) if result is None else (position[result[0]], result[1])


def _name(original: Node, copy: Node) -> None:
    """Name the results of a CSR ``rowptr``, ``col`` and ``perm``, for all later stages."""
    result = _csr_result(original)
    if result is not None:
        producer, position = result
        rename(copy, schema_of(producer).returns[position].name)
    elif original.target is _aten.argsort.default and _csr_result(first_operand(original)):
        rename(copy, "inverse_perm")


def _protect_cached(graph: fx.Graph) -> None:
    """Clone structure values that the model returns: the caller may write into them, not into the cache."""
    output = graph.output_node()

    def copied(value: Any) -> Any:
        source = source_of(value) if isinstance(value, Node) else None
        if source is None or source.kind != "structure" or not is_tensor(value):
            return value
        with graph.inserting_before(output):
            return graph.call_function(_aten.clone.default, (value,))

    output.args = (tuple(copied(value) for value in outputs_of(graph)),)
