"""Partition: cut a joint graph into the forward graph and the backward graph.

The forward graph computes the outputs, random numbers, and masks and other narrow matrices that gradients
read in place of a wide one. It returns, behind its outputs, the values that the backward graph reads; where
an FP32 matrix has a copy in 16 or 8 bits, it returns the copy. The backward graph computes some values again
instead: views, constants, values of weights alone, attention weights, elementwise arithmetic on returned
values, and, from the mask, dropout of such values.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx
from torch.fx import Node

from gnnc.errors import PrecisionError
from gnnc.ir.graph import placeholders
from gnnc.ir.groups import GROUP_BITS
from gnnc.ir.nodes import (
    ancestors,
    descendants,
    first_operand,
    holds_tensor,
    is_float,
    is_random,
    is_result,
    is_view,
    op_name,
    outputs_of,
)
from gnnc.ir.parts import GRADIENTS, KEPT_WIDE, RESULTS, SAVED, Parts
from gnnc.ir.source import WRITTEN, Source, source_of
from gnnc.passes.base import Context
from gnnc.passes.rewrite.dropped import Dropped
from gnnc.passes.rewrite.node_builder import is_of_model
from gnnc.passes.rewrite.recompute import dropout_of, edge_counts, is_cheap, is_made_of_nodes
from gnnc.passes.rewrite.saved_copies import (
    SavedCopy,
    add_copy,
    find_copy,
    is_half_copy,
    may_be_copied,
    read_copies,
    why_wide,
)
from gnnc.passes.rewrite.saved_groups import GroupCopy, add_group_copy
from gnnc.precision import FP32, Precision
from gnnc.torch_private import LazyGraphModule

SIDE = "side"
"""Key of ``node.meta``: the part that a node of a joint graph belongs to, ``forward`` or ``backward``."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Cut the joint graph in two.

    Attributes:
        save_bits: bits of the matrices of features that only the backward graph reads: 4 or 2, in groups of
            64 columns and stochastically rounded; None: those of the program's precision.
    """

    save_bits: Literal[4, 2] | None = None
    name: ClassVar[str] = "partition"

    def __post_init__(self) -> None:
        """Refuse bits that there are no packed values of."""
        if self.save_bits is not None and self.save_bits not in GROUP_BITS:
            raise PrecisionError(
                f"Partition: save_bits must be None or one of {GROUP_BITS}, got {self.save_bits!r}"
            )

    @property
    def measures_gradients(self) -> bool:
        """True if ``summary()`` is to have the relative errors of gradients on the example inputs."""
        return self.save_bits is not None

    def applies(self, parts: Parts, ctx: Context) -> bool:
        """Return whether the forward graph holds gradients."""
        return GRADIENTS in parts.forward.meta

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with a backward graph, and with the forward graph alone as forward graph."""
        gm = parts.forward
        count = len(outputs_of(gm.graph)) - len(gm.meta[GRADIENTS])
        _set_sides(gm, count)
        cut = _Cut(
            gm,
            count,
            precision=ctx.precision,
            rounds_again=ctx.target.fused_gemm_tn,
            save_bits=self.save_bits,
        )
        if cut.has_groups:
            reads = "what only the backward graph reads is saved"
            ctx.note(None, f"{reads} in {self.save_bits} bits, stochastically rounded")
        forward, backward = cut.forward_graph(), cut.backward_graph()
        return replace(parts, forward=forward, backward=backward)


def _set_sides(gm: fx.GraphModule, count: int) -> None:
    """Mark each call with the part that computes it."""
    outputs = outputs_of(gm.graph)
    forward = ancestors(node for node in outputs[:count] if isinstance(node, Node))
    late = descendants(node for node in placeholders(gm) if _kind(node) == "tangent")
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    for node in calls:
        if node not in forward and node not in late and _is_kept(node, forward):
            forward |= ancestors([node])
    forward.update(node for node in calls if is_result(node) and first_operand(node) in forward)
    for node in calls:
        node.meta[SIDE] = "forward" if node in forward else "backward"


def _is_kept(node: Node, forward: set[Node]) -> bool:
    """Return whether the forward graph computes a value that no output needs and no tangent reaches."""
    if is_random(node):
        return True
    if not holds_tensor(node) or is_of_model(node):
        return False
    read = [arg for arg in node.all_input_nodes if _is_floating(arg) and arg.op == "call_function"]
    size = node.meta["val"].dtype.itemsize
    wider = [arg for arg in read if arg.meta["val"].dtype.itemsize > size]
    return bool(wider) and node.meta["val"].dim() >= max(arg.meta["val"].dim() for arg in read)


def _is_floating(node: Node) -> bool:
    return holds_tensor(node) and node.meta["val"].is_floating_point()


def _is_forward_input(node: Node) -> bool:
    """Return whether a node is a placeholder of the forward graph: a seed is where that draws from it."""
    if node.op != "placeholder" or _kind(node) == "tangent":
        return False
    return _kind(node) != "seed" or any(user.meta.get(SIDE) == "forward" for user in node.users)


def _is_quantization(node: Node) -> bool:
    return op_name(node) in ("scale", "quantize")


def _kind(node: Node) -> str:
    source = source_of(node)
    return "" if source is None else source.kind


@dataclass(slots=True)
class _Cut:
    """The two graphs under construction.

    Attributes:
        gm: the joint graph, whose calls are marked.
        count: number of its outputs that are the caller's.
        again: nodes of the forward graph that the backward graph computes again.
        precision: the precision of the program, in which matrices are saved.
        rounds_again: whether products round the caller's inputs as they load them: no copy of these is kept.
        save_bits: bits of matrices that only the backward graph reads; None: those of the precision.
        dropped: results of dropout that the backward graph computes again from the mask.
        saved: nodes that the forward graph returns for the backward graph.
        rounded: the saved copy in fewer bits that stands for an FP32 value.
    """

    gm: fx.GraphModule
    count: int
    precision: Precision = FP32
    rounds_again: bool = False
    save_bits: int | None = None
    again: set[Node] = field(default_factory=set)
    dropped: dict[Node, Dropped] = field(default_factory=dict)
    saved: dict[Node, None] = field(default_factory=dict)
    rounded: dict[Node, SavedCopy | GroupCopy] = field(default_factory=dict)
    _edges: set[Any] = field(default_factory=set)
    _of_nodes: dict[Node, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._edges = edge_counts(self.gm.graph)
        for node in self.gm.graph.nodes:
            if node.meta.get(SIDE) == "backward":
                for arg in node.all_input_nodes:
                    self._bring(arg)
        for node in outputs_of(self.gm.graph)[self.count :]:
            self._bring(node)
        self._round()
        self._quantize_again()
        self._drop_cheap()

    @property
    def has_groups(self) -> bool:
        """True if a matrix is saved in groups of 4 or 2 bits."""
        return any(isinstance(copy, GroupCopy) for copy in self.rounded.values())

    def _round(self) -> None:
        """Keep the copies in fewer bits of FP32 matrices instead of these."""
        outputs = set(outputs_of(self.gm.graph)[: self.count])
        again = self._rounded_alone(outputs) if self.save_bits is not None else []
        for node in [node for node in self.saved if node not in outputs]:
            copy = self._copy(node)
            if copy is None:
                continue
            del self.saved[node]
            self.rounded[node] = copy
            for part in ancestors(copy.nodes):
                part.meta.setdefault(SIDE, "forward")
            for part in copy.nodes:
                part.meta[SIDE] = "forward"
                self.saved[part] = None
        for node in again:
            self._bring_cheap(node)

    def _copy(self, node: Node) -> SavedCopy | GroupCopy | None:
        if self.save_bits is not None:
            groups = add_group_copy(self.gm, node, self._edges, self.save_bits)
            if groups is not None:
                return groups
        return find_copy(node) or add_copy(node, self._edges, self.precision)

    def _rounded_alone(self, outputs: set[Any]) -> list[Node]:
        """Save matrices instead of their rounded copies; return what the backward graph rounds again."""
        found = []
        for node in [node for node in self.saved if _is_quantization(node) or is_half_copy(node)]:
            matrix = _without_views(first_operand(node))
            if matrix not in outputs and may_be_copied(matrix, self._edges):
                del self.saved[node]
                self.saved[matrix] = None
                found.append(node)
        return found

    def _quantize_again(self) -> None:
        """Quantize again what is saved in FP32, as values that comparisons read are."""
        for node in filter(_is_quantization, list(self.saved)):
            if _without_views(first_operand(node)) in self.saved:
                del self.saved[node]
                self._bring_cheap(node)

    def _drop_cheap(self) -> None:
        """Compute again what elementwise arithmetic makes of the other values that are kept."""
        for node in reversed(list(self.saved)):
            del self.saved[node]
            if is_cheap(node, lambda arg: arg in self.saved or arg in self.rounded):
                self._bring_cheap(node)
            else:
                self.saved[node] = None

    def _bring_cheap(self, node: Node) -> None:
        if node.op == "placeholder" or node in self.saved or node in self.rounded or self._is_again(node):
            return
        if (dropped := self._drop(node)) is not None:
            self._bring_cheap(dropped.before)
            return
        if not holds_tensor(node):
            self._bring(node)
            return
        self.again.add(node)
        for arg in node.all_input_nodes:
            self._bring_cheap(arg)

    def _is_again(self, node: Node) -> bool:
        return node in self.again or node in self.dropped

    def _drop(self, node: Node) -> Dropped | None:
        """Save the mask of a dropout whose values are computed again; None: the node is no such value."""
        dropped = Dropped.of(node)
        if dropped is not None:
            dropped.mask.meta[SIDE] = "forward"
            self.dropped[node] = dropped
            self.saved[dropped.mask] = None
        return dropped

    def _bring(self, node: Node) -> None:
        """Save a value that the backward graph reads, or mark it to be computed again."""
        if node.meta.get(SIDE) == "backward" or node in self.saved or self._is_again(node):
            return
        if node.op == "placeholder":
            if WRITTEN in node.meta:  # the backward graph needs the values before the write
                self.saved[node] = None
            return
        if not self._is_computed_again(node):
            self.saved[node] = None
            return
        if (dropped := self._drop(node)) is not None:
            self._bring(dropped.before)
            return
        self.again.add(node)
        for arg in node.all_input_nodes:
            self._bring(arg)

    def _is_computed_again(self, node: Node) -> bool:
        if dropout_of(node) is not None:
            return is_made_of_nodes(node, self._edges, self._of_nodes)
        if is_random(node) or is_result(node) or not holds_tensor(node):
            return False
        computed = [arg for arg in node.all_input_nodes if not _is_size(arg)]
        if is_view(node) or not computed or _is_of_weights(node) or _is_widened(node):
            return True
        if self.rounds_again and _is_rounded_input(node):
            return True
        return is_made_of_nodes(node, self._edges, self._of_nodes)

    def forward_graph(self) -> fx.GraphModule:
        """Return the forward graph, which returns its outputs, then the values that are saved."""
        graph, copies = fx.Graph(), dict[Node, Node]()
        for node in self.gm.graph.nodes:
            if _is_forward_input(node) or node.meta.get(SIDE) == "forward":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        outputs: list[Any] = []
        for value in outputs_of(self.gm.graph)[: self.count]:
            copied = copies[value] if isinstance(value, Node) else value
            is_given = isinstance(value, Node) and holds_tensor(value) and _is_given(value)
            outputs.append(_clone(graph, copied) if is_given else copied)
        at: dict[str, int] = {}
        for node in self.saved:
            value = _clone(graph, copies[node]) if node.op == "placeholder" else copies[node]
            if value not in outputs:
                outputs.append(value)
            at[node.name] = outputs.index(value)
        graph.output(tuple(outputs))
        forward = LazyGraphModule(self.gm, graph, type(self.gm).__name__)
        forward.meta = {**self.gm.meta, SAVED: at, RESULTS: self.count}
        return forward

    def backward_graph(self) -> fx.GraphModule:
        """Return the backward graph: from tangents and saved values to the gradients."""
        graph, copies = fx.Graph(), dict[Node, Node]()
        read = self._read()
        for node in placeholders(self.gm):
            if node not in self.saved and (node in read or _kind(node) == "tangent"):
                copies[node] = graph.node_copy(node)
        for node in self.saved:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = {
                "val": node.meta["val"],
                "layer": node.meta.get("layer", ""),
                "source": Source("saved", node.name),
            }
            if "qtype" in node.meta:
                copies[node].meta["qtype"] = node.meta["qtype"]
            if self.precision != FP32 and is_float(node):
                is_output = node in outputs_of(self.gm.graph)[: self.count]
                copies[node].meta[KEPT_WIDE] = "an output" if is_output else why_wide(node, self._edges)
        for node in self.gm.graph.nodes:
            if node in self.rounded:
                copies[node] = self.rounded[node].widen(graph, copies, node)
            elif node in self.dropped:
                copies[node] = self.dropped[node].append(graph, copies, node)
            elif node.meta.get(SIDE) == "backward" or node in self.again:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        gradients = [copies[node] for node in outputs_of(self.gm.graph)[self.count :]]
        graph.output(tuple(_clone(graph, g) if _is_given(g) else g for g in gradients))
        backward = LazyGraphModule(self.gm, graph, "Backward")
        read_copies(backward)
        return backward

    def _read(self) -> set[Node]:
        nodes = [n for n in self.gm.graph.nodes if n.meta.get(SIDE) == "backward" or n in self.again]
        return {arg for node in nodes for arg in node.all_input_nodes} | {
            *(dropped.before for dropped in self.dropped.values()),
            *outputs_of(self.gm.graph)[self.count :],
        }


def _without_views(node: Node) -> Node:
    while is_view(node):
        node = first_operand(node)
    return node


def _is_widened(node: Node) -> bool:
    """Return whether a node converts rounded values to FP32: the narrow ones are kept."""
    if str(node.target) not in ("aten._to_copy.default", "gnnc.dequantize.default"):
        return False
    return first_operand(node).meta["val"].dtype.itemsize < node.meta["val"].dtype.itemsize


def _is_rounded_input(node: Node) -> bool:
    if str(node.target) != "aten._to_copy.default":
        return False
    value = first_operand(node)
    return _kind(value) == "input" and WRITTEN not in value.meta


def _is_of_weights(node: Node) -> bool:
    return is_of_model(node) and not any(WRITTEN in arg.meta for arg in ancestors([node]))


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | int)


def _is_given(node: Node) -> bool:
    """Return whether a tensor is an input of the graph, or a view of one."""
    return _without_views(node).op == "placeholder"


def _clone(graph: fx.Graph, value: Node) -> Node:
    clone = graph.call_function(torch.ops.aten.clone.default, (value,))
    clone.meta = {"val": value.meta["val"], "layer": value.meta.get("layer", "")}
    return clone
