"""Joint graphs of the whole zoo: no features of edges that the model lacks, and FP32 where that must be."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from joint_graphs import Joint, joint_graph, lowered_to, partitioned
from slow import slow_but
from torch import Tensor, fx
from torch.fx import Node
from zoo import ZOO
from zoo_layers import LAYERS

from gnnc.ir.nodes import argument, aten_name, first_operand, is_view, op_name, outputs_of
from gnnc.ir.op import op_of, size_expr
from gnnc.ir.parts import BACKWARD_LAYER, SAVED

MODELS = ZOO | LAYERS
MOST_HEADS = 4
"""Most values of an edge that are no features: one for each head."""
UNTRACED = ("super-gat", "super-gat-sd")
"""Layers that draw negative edges in train(), which no trace does."""
OWN = {
    "arma": "scatters along dimension 1 stay ATen",
    "res-gated-edges": "products with edge features",
    "gatv2-edges": "products with edge features",
    "transformer-edges": "products with edge features",
    "gine": "products with edge features",
    "nn": "products with edge features",
    "cg": "products with edge features",
    "pna-edges": "products with edge features, which two aggregations read",
    "gen-edges": "products with edge features",
    "heat": "products with edge features",
    "meta-layer": "returns features of edges",
    "models.AttentiveFP": "products with edge features",
}
"""Models whose forward pass has features of edges, and why."""


@pytest.fixture(
    scope="module",
    params=slow_but(("gcn", "sage-max"), [name for name in MODELS if name not in UNTRACED]),
)
def joint(request: pytest.FixtureRequest) -> Joint:
    return joint_graph(request.param)


def values_of(node: Node) -> Iterator[Tensor]:
    value = node.meta.get("val")
    yield from (item for item in (value if isinstance(value, tuple | list) else (value,)) if _is_float(item))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def edge_counts(joint: Joint) -> set[Any]:
    """Return the numbers of edges as expressions: what CSRs have, but no number of nodes, as pooling has."""
    edges, nodes = set(), set()
    for _, gm in (*joint.before, *joint.after):
        for node in gm.graph.nodes:
            op = op_of(node)
            if op is None:
                continue
            ids = "src" if op.name == "csr" else "col"
            if ids in op.parameters:
                edges.add(size_expr(argument(node, ids).meta["val"].shape[0]))
            if op.kind == "aggregate" and op.name != "edge_sum":
                nodes |= {size_expr(value.shape[0]) for value in values_of(node)}
    return edges - nodes


def crosses_edges(node: Node) -> bool:
    op = op_of(node)
    return op is not None and op.crosses_edges


def edge_features(graph: fx.Graph, edges: set[Any]) -> dict[str, int]:
    """Return the columns of each value that has more than one for each head, at every edge."""
    found = {}
    for node in graph.nodes:
        for value in values_of(node):
            sizes = list(value.shape)
            along = [size for size in sizes if size_expr(size) in edges]
            if along:
                sizes.remove(along[0])
                width = math.prod(sizes)
                if not isinstance(width, int) or width > MOST_HEADS:
                    found[node.name] = width
    return found


def test_gradients_have_no_edge_features_that_the_model_lacks(joint: Joint) -> None:
    edges = edge_counts(joint)
    assert edges or not any(map(crosses_edges, joint.before.forward.graph.nodes))
    own = edge_features(joint.before.forward.graph, edges)
    assert not own or joint.name in OWN, own
    found = edge_features(joint.after.forward.graph, edges)
    assert {name: width for name, width in found.items() if width not in own.values()} == {}


NORMS = ("batch_norm", "layer_norm", "group_norm", "softmax", "var_mean")
"""Parts of the names of ATen ops that compute statistics."""


def stays_fp32(node: Node, logits: set[Node]) -> bool:
    """Return whether all floats that a node reads and makes must be FP32."""
    if op_name(node) in ("edge_softmax", "edge_softmax_backward"):
        return True
    if any(part in aten_name(node) for part in NORMS):
        return True
    is_bias_sum = BACKWARD_LAYER in str(node.meta.get("layer")) and aten_name(node).startswith("sum")
    return is_bias_sum or (op_of(node) is None and node in logits)


def around_softmaxes(graph: fx.Graph) -> set[Node]:
    """Return the values next to an edge softmax: what makes its logits, and what reads their gradient."""
    found: set[Node] = set()
    pending = [(node, True) for node in graph.nodes if op_name(node) == "edge_softmax"]
    pending += [(node, False) for node in graph.nodes if op_name(node) == "edge_softmax_backward"]
    while pending:
        node, backwards = pending.pop()
        found.add(node)
        near = [node.args[1]] if op_name(node) == "edge_softmax" else node.all_input_nodes
        for other in near if backwards else node.users:
            if other not in found and op_of(other) is None and other.op == "call_function":
                pending.append((other, backwards))
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8"])
def test_sums_and_statistics_stay_fp32(joint: Joint, precision: str) -> None:
    graph = lowered_to(joint, precision).forward.graph
    around = around_softmaxes(graph)
    for node in graph.nodes:
        if node.op != "call_function" or not stays_fp32(node, around):
            continue
        read = [value for arg in node.all_input_nodes for value in values_of(arg)]
        for value in (*read, *values_of(node)):
            assert value.dtype == torch.float32, (node, node.meta.get("layer"), value.dtype)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_primitives_sum_in_fp32(joint: Joint, precision: str) -> None:
    for node in lowered_to(joint, precision).forward.graph.nodes:
        op = op_of(node)
        if op is not None and op.kind in ("dense", "aggregate", "edge"):
            assert all(value.dtype == torch.float32 for value in values_of(node)), node


def test_no_matrix_is_saved_in_fp32_beside_its_quantized_values(joint: Joint) -> None:
    forward = partitioned(joint, "int8").forward
    outputs = outputs_of(forward.graph)
    saved = {outputs[place] for place in forward.meta.get(SAVED, {}).values()}  # of a linear model none are
    quantized = [node for node in saved if op_name(node) == "quantize"]
    assert not {_without_views(first_operand(node)) for node in quantized} & set(map(_without_views, saved))


def _without_views(node: Node) -> Node:
    while is_view(node):
        node = first_operand(node)
    return node
