"""Training of attention whose logits a body computes: which gradients become one op, and which stay apart.

The CPU has no kernel of that op: its reference runs here.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch_geometric.nn import GATv2Conv, SuperGATConv, TransformerConv

import gnnc
from gnnc.passes import joint
from gnnc.passes.base import Context
from gnnc.passes.rewrite.body_attention_gradients import join_body_attention_gradients

GRAPH = torch.randn(40, 24), torch.randint(39, (2, 200))
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gatv2": lambda: GATv2Conv(24, 8, heads=2),
    "gatv2 of one matrix": lambda: GATv2Conv(24, 7, heads=3, share_weights=True, bias=False),
    "dot products": lambda: TransformerConv(24, 8, heads=4),
    "one head": lambda: TransformerConv(24, 5, heads=1, root_weight=False),
}
APART = {
    "dropout": (lambda: GATv2Conv(24, 8, heads=2, dropout=0.5), "changed before the sum"),
    "wide heads": (lambda: TransformerConv(24, 130), "heads of 130 columns"),
}


@pytest.fixture(autouse=True)
def _with_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pass join gradients as for a backend that has a kernel."""

    def join(gm: GraphModule, most: int, ctx: Context) -> None:
        assert most == 0, "the CPU has a kernel: these tests need no patch"
        join_body_attention_gradients(gm, 128, ctx)

    monkeypatch.setattr(joint, "join_body_attention_gradients", join)


def gradients(
    call: Callable[..., Tensor], owner: nn.Module, x: Tensor, edge_index: Tensor
) -> list[Tensor | None]:
    leaf = x.clone().requires_grad_()
    out = call(leaf, edge_index)
    (out * torch.linspace(0.1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return [leaf.grad, *(p.grad for p in owner.parameters())]


def check(model: nn.Module, x: Tensor, edge_index: Tensor) -> gnnc.CompiledModel:
    exact = copy.deepcopy(model).double()
    compiled = gnnc.compile(model, "fp32")
    found, right = gradients(compiled, model, x, edge_index), gradients(exact, exact, x.double(), edge_index)
    for got, want in zip(found, right, strict=True):
        assert (got is None) == (want is None)
        if got is None or want is None:  # the weight of the root, which this layer does not use
            continue
        assert float((got - want).abs().max()) <= 2e-5 * float(want.abs().max().clamp(min=1.0))
    return compiled


@pytest.mark.parametrize("edges", ["many", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_float64(name: str, edges: str) -> None:
    torch.manual_seed(0)
    x, edge_index = GRAPH
    compiled = check(MODELS[name](), x, edge_index if edges == "many" else edge_index[:, :0])
    backward = str(compiled.backward_graph_module.graph)  # pyright: ignore[reportOptionalMemberAccess]
    assert backward.count("gnnc.body_attention_backward") == 1
    assert not any(op in backward for op in ("softmax", "sddmm", "message", "edge_map", "edge_sum"))


def test_gradients_of_frozen_parameters_are_not_computed() -> None:
    torch.manual_seed(0)
    model = GATv2Conv(24, 8, heads=2)
    model.att.requires_grad_(False)
    exact = copy.deepcopy(model).double()
    compiled = gnnc.compile(model, "fp32")
    compiled(*GRAPH).square().sum().backward()
    exact(GRAPH[0].double(), GRAPH[1]).square().sum().backward()
    assert "gnnc.body_attention_backward" in str(compiled.backward_graph_module.graph)  # pyright: ignore
    assert model.att.grad is None
    for got, want in zip(model.parameters(), exact.parameters(), strict=True):
        if want.grad is not None:
            torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-4, atol=1e-4)  # pyright: ignore


def test_both_ends_may_be_other_nodes() -> None:
    torch.manual_seed(0)
    model = GATv2Conv((24, 24), 8, heads=2, add_self_loops=False)
    x, edge_index = GRAPH
    edges = torch.stack([edge_index[0], edge_index[1] % 12])

    class Bipartite(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = model

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv((x, x[:12]), edge_index)

    compiled = check(Bipartite(), x, edges)
    assert "gnnc.body_attention_backward" in str(compiled.backward_graph_module.graph)  # pyright: ignore


@pytest.mark.parametrize("name", APART)
def test_other_gradients_stay_apart_and_are_named(name: str) -> None:
    torch.manual_seed(0)
    make, reason = APART[name]
    compiled = gnnc.compile(make().train(), "fp32")
    compiled(*GRAPH).sum().backward()
    assert "gnnc.body_attention_backward" not in str(compiled.backward_graph_module.graph)  # pyright: ignore
    text = str(compiled.explain())
    assert "its gradients store values of each edge" in text and reason in text


def test_logits_of_edges_with_features_keep_their_ops() -> None:
    torch.manual_seed(0)
    model, attr = GATv2Conv(24, 8, heads=2, edge_dim=3), torch.randn(200, 3)
    compiled = gnnc.compile(model, "fp32")
    compiled(*GRAPH, attr).sum().backward()
    assert "gnnc.body_attention_backward" not in str(compiled.backward_graph_module.graph)  # pyright: ignore


def test_products_of_two_kinds_keep_their_ops() -> None:
    torch.manual_seed(0)
    compiled = gnnc.compile(SuperGATConv(24, 8, heads=2, attention_type="MX").eval(), "fp32")
    leaf = GRAPH[0].clone().requires_grad_()
    compiled(leaf, GRAPH[1]).sum().backward()
    assert "gnnc.body_attention_backward" not in str(compiled.backward_graph_module.graph)  # pyright: ignore
