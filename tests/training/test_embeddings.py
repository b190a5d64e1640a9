"""Gradients of embeddings whose options change them, in messages and on nodes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GINEConv
from torch_geometric.utils import scatter
from training_steps import EDGES, WIDTH, X, compare

import gnnc

KINDS = torch.arange(EDGES.shape[1]) % 3
OPTIONS = ({"padding_idx": 0}, {"padding_idx": -1}, {"scale_grad_by_freq": True})


class Products(nn.Module):
    """Messages multiplied by an embedding of their kind."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.kinds, self.dense = nn.Embedding(3, 8, **options), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, edge_index: Tensor, kind: Tensor) -> Tensor:
        rows = self.dense(x)[edge_index[0]] * self.kinds(kind)
        return scatter(rows, edge_index[1], 0, x.shape[0], "sum")


class AlsoRead(Products):
    """Products whose table is read past the embedding, too."""

    def forward(self, x: Tensor, edge_index: Tensor, kind: Tensor) -> Tensor:
        rows = self.dense(x)[edge_index[0]] * self.kinds(kind) + self.kinds.weight[kind]
        return scatter(rows, edge_index[1], 0, x.shape[0], "sum")


class Edges(nn.Module):
    """GINE with an embedding as features of edges."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.kinds, self.dense = nn.Embedding(3, 8, **options), nn.Linear(WIDTH, 8)
        self.conv = GINEConv(nn.Linear(8, 4))

    def forward(self, x: Tensor, edge_index: Tensor, kind: Tensor) -> Tensor:
        return self.conv(self.dense(x), edge_index, self.kinds(kind))


class Nodes(Products):
    """Sum of an embedding of nodes over the edges."""

    def forward(self, x: Tensor, edge_index: Tensor, kind: Tensor) -> Tensor:
        h = self.dense(x) * self.kinds(kind[: x.shape[0]])
        return scatter(h[edge_index[0]], edge_index[1], 0, x.shape[0], "sum")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [Products, AlsoRead, Edges, Nodes])
def test_options_of_an_embedding_change_its_gradient_as_in_eager(
    kind: type[nn.Module], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = kind(**options)

    def step(call: Any, owner: nn.Module) -> Tensor:
        out = call(X, EDGES, KINDS)
        out.square().sum().backward()
        return out.detach()

    compare(model, gnnc.compile(model, precision="fp32"), step)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_the_row_of_a_padding_index_has_no_gradient_in_low_precision(precision: str) -> None:
    torch.manual_seed(0)
    model = Edges(padding_idx=0)
    gnnc.compile(model, precision=precision)(X, EDGES, KINDS).square().sum().backward()
    gradient = model.kinds.weight.grad
    assert not gradient[0].any()
    assert gradient[1:].any(1).all()


@pytest.mark.parametrize("kind", [Products, Nodes])
def test_the_gradient_of_a_sparse_embedding_is_dense_and_has_the_values_of_eager(
    kind: type[nn.Module],
) -> None:
    torch.manual_seed(0)
    model = kind(sparse=True)
    eager = copy.deepcopy(model)
    gnnc.compile(model, precision="fp32")(X, EDGES, KINDS).square().sum().backward()
    eager(X, EDGES, KINDS).square().sum().backward()
    found, expected = model.kinds.weight.grad, eager.kinds.weight.grad
    assert found.layout == torch.strided
    torch.testing.assert_close(found, expected.to_dense(), rtol=1e-4, atol=1e-4)


def test_without_gradients_an_embedding_with_options_stays_in_the_message() -> None:
    def kernels(**options: Any) -> str:
        torch.manual_seed(0)
        fast = gnnc.compile(Products(**options).eval(), precision="fp32")
        with torch.no_grad():
            fast(X, EDGES, KINDS)
        return str(fast.explain())

    assert kernels(padding_idx=0) == kernels()
