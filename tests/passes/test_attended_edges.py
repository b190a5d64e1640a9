"""Products with edge features in attention: they move to the nodes, or not, and mean the same."""

import copy
from collections.abc import Callable

import pytest
import torch
from raised import nasty_graphs
from torch import Tensor, nn
from torch_geometric.nn import TransformerConv
from torch_geometric.utils import softmax

import gnnc
from gnnc.ir.attention import FEATURE_SUM, feature_dot, match_attention, with_features

NODES, EDGES, WIDTH, FEATURES = 20, 200, 12, 6
GRAPHS = nasty_graphs()


class Attention(nn.Module):
    """Attention of two heads over edges with features; the subclasses change one of its terms."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, 32) for _ in range(3))
        self.edge = nn.Linear(FEATURES, 32, bias=False)

    def logits(self, query: Tensor, key: Tensor, edge: Tensor) -> Tensor:
        return (query * (edge + key)).sum(-1) / 2

    def message(self, value: Tensor, edge: Tensor) -> Tensor:
        return value + edge

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        src, dst = edge_index
        query, key, value = (layer(x).view(-1, 2, 16) for layer in (self.query, self.key, self.value))
        edge = self.edge(edge_attr).view(-1, 2, 16)
        alpha = softmax(self.logits(query[dst], key[src], edge), dst, num_nodes=x.shape[0])
        messages = alpha[:, :, None] * self.message(value[src], edge)
        return torch.zeros(x.shape[0], 2, 16).index_add(0, dst, messages)


class ActivatedLogits(Attention):
    def logits(self, query: Tensor, key: Tensor, edge: Tensor) -> Tensor:
        return (query * (edge + key).relu()).sum(-1)


class ActivatedMessage(Attention):
    def message(self, value: Tensor, edge: Tensor) -> Tensor:
        return (value + edge).relu()


class Biased(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Linear(FEATURES, 32)


def transformer(heads: int) -> nn.Module:
    return TransformerConv(WIDTH, 64 // heads, heads=heads, edge_dim=FEATURES)


MODELS = {"by hand": Attention, "TransformerConv": lambda: transformer(4)}


def graph(edges: int = EDGES) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(NODES, WIDTH), torch.randint(NODES, (2, edges)), torch.randn(edges, FEATURES)


def reordered(model: nn.Module, *args: Tensor) -> tuple[list[str], list[str]]:
    """Return the bodies after reorder, and its notes."""
    compiled = gnnc.compile(model.eval(), "fp32", example_inputs=args)
    after = dict(compiled.stages)["reorder"]
    bodies = [node.args[2] for node in after.graph.nodes if "gnnc.edge_map" in str(node.target)]
    bodies += [node.args[2] for node in after.graph.nodes if "gnnc.message" in str(node.target)]
    return bodies, [note for note in compiled.explain().splitlines() if "product with edge features" in note]


@pytest.mark.parametrize("name", MODELS)
def test_both_products_move(name: str) -> None:
    bodies, notes = reordered(MODELS[name](), *graph())
    assert bodies == [feature_dot(0.5 if name == "by hand" else 0.25), FEATURE_SUM]
    assert len(notes) == 2


def test_one_head_needs_no_blocks() -> None:
    bodies, _ = reordered(transformer(heads=1), *graph())
    assert bodies == [feature_dot(0.125), FEATURE_SUM]


@pytest.mark.parametrize(("make", "moved"), [(ActivatedLogits, [FEATURE_SUM]), (Biased, [])])
def test_what_is_not_linear_stays(make: Callable[[], nn.Module], moved: list[str]) -> None:
    bodies, notes = reordered(make(), *graph())
    assert [body for body in bodies if body in (FEATURE_SUM, feature_dot(0.5))] == moved
    assert len(notes) == len(moved)


def test_an_activated_message_stays() -> None:
    bodies, notes = reordered(ActivatedMessage(), *graph())
    assert feature_dot(0.5) in bodies and FEATURE_SUM not in bodies and len(notes) == 1


def test_few_edges_a_node_stay() -> None:
    bodies, notes = reordered(Attention(), *graph(NODES // 2))
    assert bodies and not notes


def test_training_keeps_them() -> None:
    model = Attention().train()
    compiled = gnnc.compile(model, "fp32")
    compiled(*graph()).sum().backward()
    assert "product with edge features is computed on" not in compiled.explain()
    want = copy.deepcopy(model)
    want.zero_grad()
    want(*graph()).sum().backward()
    for one, other in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_results_are_those_of_eager(name: str, heads: int, precision: str) -> None:
    torch.manual_seed(0)
    nodes, edge_index = GRAPHS[name]
    edges = edge_index.shape[1]
    x, features = torch.randn(nodes, WIDTH), torch.randn(edges, FEATURES)
    model = transformer(heads).eval()
    with torch.no_grad():
        want = copy.deepcopy(model).double()(x.double(), edge_index, features.double())
        got = gnnc.compile(model, precision)(x, edge_index, features)
    assert (got - want).norm() <= {"fp32": 1e-6, "bf16": 0.02, "int8": 0.03}[precision] * want.norm()


def test_the_parts_are_matched_again() -> None:
    args = graph()
    compiled = gnnc.compile(Attention().eval(), "fp32", example_inputs=args)
    after = dict(compiled.stages)["reorder"]
    (sum_,) = after.graph.find_nodes(op="call_function", target=torch.ops.gnnc.spmm.default)
    found = match_attention(sum_)
    assert found is not None and found.kind == "dot" and found.scale == 0.5
    extended = with_features(found)
    assert extended is not None and extended.feature_sum is not None and extended.edge is None
    (dot,) = after.graph.find_nodes(op="call_function", target=torch.ops.gnnc.edge_map.default)
    dot.args = (*dot.args[:2], feature_dot(0.25), *dot.args[3:])
    assert with_features(found) is None  # another factor than that of the rows
