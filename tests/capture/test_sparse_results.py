"""Sparse matrices among the results of forward are those of eager, in its layout."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_geometric.nn import FAConv, GATConv, GATv2Conv

import gnnc

NODES = 6
LAYOUTS = {
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
}


def adjacency(edges: int) -> Tensor:
    """Return a dense adjacency of ``edges`` draws."""
    dense = torch.zeros(NODES, NODES)
    dense[torch.randint(NODES, (edges,)), torch.randint(NODES, (edges,))] = 0.5
    return dense


def assert_same(got: object, want: object) -> None:
    """Check layouts, shapes and values of two results."""
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
    for a, b in pairs:
        assert (a.layout, a.shape, a.dtype) == (b.layout, b.shape, b.dtype)
        if a.layout is torch.sparse_coo:
            assert a.is_coalesced() == b.is_coalesced()
        dense = [t if t.layout is torch.strided else t.to_dense() for t in (a, b)]
        torch.testing.assert_close(*dense)


class WithAttention(nn.Module):
    """A layer that returns the attention weights on the adjacency."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, adj: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows, and a matrix of [nodes, nodes, heads]."""
        args = (x, x, adj) if isinstance(self.conv, FAConv) else (x, adj)
        return self.conv(*args, return_attention_weights=True)


class Matrices(nn.Module):
    """A forward that returns what it makes of an adjacency, in containers."""

    def forward(self, x: Tensor, adj: Tensor) -> dict[str, object]:
        """Return matrices of both orders, alone and in a list."""
        return {"transposed": adj.t(), "scaled": [adj * 2, adj @ x]}


class Alone(nn.Module):
    """A forward whose only result is a matrix that it builds."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return [nodes, nodes], not coalesced."""
        size = x.shape[0], x.shape[0]
        return torch.sparse_coo_tensor(edge_index, x[edge_index[0], 0], size)


LAYERS = {
    "gat": lambda: WithAttention(GATConv(8, 4, heads=2, add_self_loops=False)),
    "gat with loops": lambda: WithAttention(GATConv(8, 4, heads=2)),
    "gatv2": lambda: WithAttention(GATv2Conv(8, 4, add_self_loops=False)),
    "fa": lambda: WithAttention(FAConv(8, add_self_loops=False)),
    "matrices": Matrices,
}


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_matrices_are_returned(layer: str, layout: str) -> None:
    if layout == "csc" and layer != "matrices":
        pytest.skip("PyG's layers take no CSC")
    torch.manual_seed(0)
    model = LAYERS[layer]().eval()
    compiled = gnnc.compile(model, "fp32")
    for edges in (9, 20):
        args = torch.randn(NODES, 8), LAYOUTS[layout](adjacency(edges))
        assert_same(compiled(*args), model(*args))


@torch.no_grad()
def test_a_matrix_alone_is_the_result() -> None:
    model, compiled = Alone(), gnnc.compile(Alone(), "fp32")
    for nodes in (5, 9):
        args = torch.randn(nodes, 3), torch.randint(nodes, (2, 12))
        assert_same(compiled(*args), model(*args))
