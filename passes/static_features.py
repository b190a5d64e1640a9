"""StaticFeatures: quantize the feature matrices that calls bring once, for as long as they stay the same.

The scales and quantized values of an argument move from the joint graph to a graph of their own, whose
results are cached beside the structure, by the identity and version of the argument. The gradient of a
weight reads them too, in the place of the FP32 argument. In a training run over a whole graph the features
are quantized in the first step only; features that are new at each step are quantized in each.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx
from torch.fx import Node

from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import argument, arguments, aten_name, is_view, op_name
from gnnc.ir.parts import GRADIENTS, Parts
from gnnc.ir.qtype import QType
from gnnc.ir.source import Source, source_of, wants_gradient
from gnnc.passes.base import Context

_QUANTIZES = ("scale", "quantize", "row_shift")


@dataclass(frozen=True, slots=True)
class StaticFeatures:
    """Move the quantization of arguments to a graph whose results are cached.

    Attributes:
        inference: whether it acts in inference too. There a product quantizes its input as it loads it, which
            costs less than a pass of its own where each call brings new features.
    """

    inference: bool = False
    name: ClassVar[str] = "static_features"

    def applies(self, parts: Parts, ctx: Context) -> bool:
        """Return whether the graph quantizes an argument, and the backend keeps the result."""
        if not ctx.target.static_features or ctx.examples is not None or parts.features is not None:
            return False
        is_asked = self.inference or GRADIENTS in parts.forward.meta
        return is_asked and bool(_results(_moved(parts.forward.graph)))

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with a features graph."""
        compute = parts.forward
        _quantize_for_weights(compute.graph)
        moved = _moved(compute.graph)
        results = _results(moved)
        features = _features_graph(compute, moved, results)
        for number, node in enumerate(results):
            _take(compute, node, Source("features", str(number)), moved)
        compute.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        for node in placeholders(features):
            source = source_of(node)
            assert source is not None
            ctx.note(
                node, f"{source.name} is quantized once, for as long as it is the same tensor, unchanged"
            )
        return replace(parts, features=features)


def _moved(graph: fx.Graph) -> dict[Node, None]:
    """Return the nodes that compute scales and quantized values of arguments, in order."""
    moved: dict[Node, None] = {}
    for node in graph.nodes:
        is_moved = op_name(node) in _QUANTIZES or is_view(node) or aten_name(node) == "_to_copy.default"
        read = node.all_input_nodes
        if is_moved and read and all(arg in moved or _is_features(arg) for arg in read):
            moved[node] = None
    return moved


def _is_features(node: Node) -> bool:
    """Return whether a node is a floating argument whose gradient is not wanted."""
    source = source_of(node)
    if source is None or source.kind != "input" or wants_gradient(node):
        return False
    return node.meta["val"].is_floating_point()


def _results(moved: Iterable[Node]) -> list[Node]:
    """Return the scales and quantized values that nodes which stay read."""
    inside = set(moved)
    return [node for node in moved if op_name(node) in _QUANTIZES and not inside.issuperset(node.users)]


def _quantize_for_weights(graph: fx.Graph) -> None:
    """Let the gradients of weights read the quantized values of arguments, where there are any."""
    quantized = {
        node.args[0]: node
        for node in graph.nodes
        if op_name(node) == "quantize" and QType.parse(str(node.args[2])).granularity == "row"
    }
    for node in graph.nodes:
        if op_name(node) != "qgemm_tn":
            continue
        given = arguments(node)
        for name in ("a", "b"):
            values = quantized.get(given[name])
            if given[f"{name}_scale"] is None and values is not None and _is_features(given[name]):
                given[name], given[f"{name}_scale"] = values, argument(values, "scale")
        node.args, node.kwargs = tuple(given[name] for name in ("a", "b", "a_scale", "b_scale")), {}


def _features_graph(
    compute: fx.GraphModule, moved: Iterable[Node], results: Iterable[Node]
) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[Any, Node]()
    read = {arg for node in moved for arg in node.all_input_nodes}
    for node in placeholders(compute):
        if node in read:
            copies[node] = graph.node_copy(node)
    for node in moved:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    features = fx.GraphModule(compute, graph, "Features")
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    for node in placeholders(features):
        if not node.users:
            graph.erase_node(node)
    return features


def _take(compute: fx.GraphModule, node: Node, source: Source, moved: dict[Node, None]) -> None:
    """Replace a node by a placeholder for its value, which the features graph computes."""
    with compute.graph.inserting_after(placeholders(compute)[-1]):
        taken = compute.graph.placeholder(node.name)
    kept = ("val", "layer", "qtype")
    taken.meta = {key: node.meta[key] for key in kept if key in node.meta}
    taken.meta["source"] = source
    node.replace_all_uses_with(taken, delete_user_cb=lambda user: user not in moved)
