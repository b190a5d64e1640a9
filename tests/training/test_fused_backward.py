"""The backward graph on the CPU: what rides on the kernels of its products and aggregations."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import gnnc


class _Net(nn.Module):
    def __init__(self, convs: list[nn.Module], activation: nn.Module) -> None:
        super().__init__()
        self.convs, self.activation = nn.ModuleList(convs), activation

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first, second = self.convs
        return second(self.activation(first(x, edge_index)), edge_index)


NETS = {
    "gcn": lambda: _Net([GCNConv(9, 24), GCNConv(24, 5)], nn.ReLU()),
    "sage": lambda: _Net([SAGEConv(9, 24), SAGEConv(24, 5)], nn.ReLU()),
    "gcn elu": lambda: _Net([GCNConv(9, 24), GCNConv(24, 5)], nn.ELU(0.7)),
    "gin eps": lambda: _Net(
        [GINConv(nn.Linear(9, 24), train_eps=True), GINConv(nn.Linear(24, 5), 0.3)], nn.ReLU()
    ),
    "gcn leaky": lambda: _Net([GCNConv(9, 24), GCNConv(24, 5)], nn.LeakyReLU(0.3)),
}
ALONE = ("threshold_backward", "elu_backward", "leaky_relu_backward", "relu_backward")


def graph(edges: int = 300) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(60, 9), torch.randint(0, 59, (2, edges))


def backward_of(compiled: nn.Module) -> list[str]:
    nodes = compiled.backward_graph_module.graph.nodes
    return [str(node.target) for node in nodes if node.op == "call_function"]


@pytest.mark.first(4)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NETS)
def test_gradients_with_fused_masks_and_sums(name: str, precision: str) -> None:
    model, (x, edge_index) = NETS[name](), graph()
    weight = torch.randn(60, 5)
    want = torch.autograd.grad((model(x, edge_index) * weight).sum(), list(model.parameters()))
    compiled = gnnc.compile(model, precision=precision)
    got = torch.autograd.grad((compiled(x, edge_index) * weight).sum(), list(model.parameters()))
    cosine = F.cosine_similarity(*[torch.cat([g.flatten() for g in grads]) for grads in (got, want)], dim=0)
    assert cosine > (0.999999 if precision == "fp32" else 0.999)
    targets = backward_of(compiled)
    assert not [t for t in targets if any(op in t for op in ALONE)]
    # The gradient of eps is no sum of columns; that of the bias is the only op on tangents that stay FP32.
    alone = 2 if precision == "fp32" else 1
    assert targets.count("aten.sum.dim_IntList") == alone * name.count("eps")
    assert "aten.mul.Tensor" not in targets
    if precision == "fp32":
        for mine, eager in zip(got, want, strict=True):
            torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)


def test_products_that_share_the_features_round_them_as_they_load() -> None:
    model, (_, edge_index) = _Net([SAGEConv(40, 8), SAGEConv(8, 5)], nn.ReLU()), graph()
    compiled = gnnc.compile(model, precision="bf16")
    compiled(torch.randn(60, 40), edge_index).sum().backward()
    assert str(compiled.backward_graph_module.graph).count("fused") >= 6
    assert "aten._to_copy.default" not in backward_of(compiled)


def test_an_empty_graph_has_bias_gradients_and_no_others() -> None:
    model = NETS["sage"]()
    compiled = gnnc.compile(model, precision="fp32")
    compiled(torch.randn(4, 9), torch.empty(2, 0, dtype=torch.int64)).sum().backward()
    torch.testing.assert_close(model.convs[1].lin_l.bias.grad, torch.full((5,), 4.0))
    assert torch.equal(model.convs[1].lin_l.weight.grad, torch.zeros(5, 24))


class _Attention(nn.Module):
    """Two layers of attention: ``lin`` alone, or with more that PyG's layer can do."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.first = GATConv(9, 6, heads=4, **options)
        self.second = GATConv(24, 5, heads=1, **options)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(F.elu(self.first(x, edge_index)), edge_index)


class _Bipartite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GATConv((9, 9), 6, heads=2, add_self_loops=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv((x, x[:40]), edge_index % 40, size=(60, 40))


ATTENTIONS = {
    "gat": _Attention,
    "without loops": lambda: _Attention(add_self_loops=False),
    "steeper": lambda: _Attention(negative_slope=0.9, bias=False),
    "bipartite": _Bipartite,
}


@pytest.mark.first(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_gradients_of_attention_store_nothing_for_an_edge(name: str, precision: str) -> None:
    model, (x, edge_index) = ATTENTIONS[name](), graph()
    x.requires_grad_()
    leaves = [x, *model.parameters()]
    weight = torch.randn_like(model(x, edge_index))
    want = torch.autograd.grad((model(x, edge_index) * weight).sum(), leaves)
    compiled = gnnc.compile(model, precision=precision)
    got = torch.autograd.grad((compiled(x, edge_index) * weight).sum(), leaves)
    cosine = F.cosine_similarity(*[torch.cat([g.flatten() for g in grads]) for grads in (got, want)], dim=0)
    assert cosine > (0.999999 if precision == "fp32" else 0.999)
    assert not [t for t in backward_of(compiled) if "sddmm" in t or "softmax" in t or "index_select" in t]
    assert "attention_backward" in str(compiled)
    if precision == "fp32":
        for mine, eager in zip(got, want, strict=True):
            torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["first.att_src", "first.lin.weight", "second.lin.weight"])
def test_frozen_parameters_of_attention(frozen: str) -> None:
    model, (x, edge_index) = _Attention(), graph()
    model.get_parameter(frozen).requires_grad_(False)
    leaves = [p for p in model.parameters() if p.requires_grad]
    want = torch.autograd.grad(model(x, edge_index).square().sum(), leaves)
    got = torch.autograd.grad(gnnc.compile(model, precision="fp32")(x, edge_index).square().sum(), leaves)
    for mine, eager in zip(got, want, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_attention_over_edges_with_features_keeps_its_ops() -> None:
    model, (x, edge_index) = _Attention(edge_dim=3), graph()
    attr = torch.randn(edge_index.shape[1], 3)
    model.forward = lambda x, edge_index: model.second(model.first(x, edge_index, attr), edge_index, attr)
    want = torch.autograd.grad(model(x, edge_index).square().sum(), list(model.parameters()))
    got = torch.autograd.grad(
        gnnc.compile(model, precision="fp32")(x, edge_index).square().sum(), list(model.parameters())
    )
    for mine, eager in zip(got, want, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-3, atol=1e-2)
