"""``explain()`` names the matrices of all edges that a program stores, with their bytes."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GINEConv, MessagePassing

import gnnc

WIDTH = 64


class Running(MessagePassing):
    """A sum of running sums, which no thread of a GPU computes column by column."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i - x_j).cumsum(-1)


class RunningOverEdges(nn.Module):
    """A sum of running sums over the edges, in the order of the caller: no kernel computes those."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]].cumsum(0))


def explained(model: nn.Module, *rest: Tensor, backend: str) -> str:
    """Return what a compiled model explains of its edges."""
    compiled = gnnc.compile(model.eval(), "fp32", backend=backend)
    x, edge_index = torch.randn(30, WIDTH), torch.randint(30, (2, 200))
    with torch.no_grad():
        if backend == "cpu":
            compiled(x, edge_index, *rest)
        else:
            with pytest.raises(gnnc.BackendError, match="not here"):
                compiled(x, edge_index, *rest)
    return compiled.explain()


def test_an_op_over_all_edges_stores_their_rows() -> None:
    text = explained(RunningOverEdges(), backend="cpu")
    assert f"stores {WIDTH * 4} bytes for every edge" in text


@pytest.mark.usefixtures("compiler")
def test_a_body_that_no_kernel_takes_runs_on_matrices() -> None:
    text = explained(Running(), backend="cuda-offline:sm_90")
    assert f"runs on matrices of all edges, the widest of {WIDTH * 4} bytes an edge" in text


@pytest.mark.parametrize("backend", ["cpu", "cuda-offline:sm_90"])
def test_one_pass_over_the_edges_stores_nothing(backend: str, request: pytest.FixtureRequest) -> None:
    if backend != "cpu":
        request.getfixturevalue("compiler")
    layer = GINEConv(nn.Linear(WIDTH, WIDTH), edge_dim=16)
    for model, rest in ((GCNConv(WIDTH, WIDTH), ()), (layer, (torch.randn(200, 16),))):
        text = explained(model, *rest, backend=backend)
        assert "bytes an edge" not in text and "for every edge" not in text
