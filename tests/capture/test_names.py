"""Arguments are judged by their use, not by their name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from shared_captures import shared_captures
from torch import Tensor, nn

import gnnc

WIDTH, KINDS = 8, 3


def edges(nodes: int) -> Tensor:
    return torch.randint(nodes, (2, 4 * nodes), generator=torch.Generator().manual_seed(nodes))


def features(nodes: int) -> Tensor:
    return torch.randn(nodes, WIDTH, generator=torch.Generator().manual_seed(nodes))


class Pairs(nn.Module):
    """Takes edges as ``[E, 2]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(WIDTH, 16)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index.t())


class Triples(nn.Module):
    """Takes edges with their kinds as ``[3, E]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.RGCNConv(WIDTH, 16, KINDS)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index[:2], edge_index[2])


class Stacked(nn.Module):
    """Takes three edge lists as ``[3, 2, E]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(WIDTH, 16)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index[0]) + self.conv(x, edge_index[1]) * self.conv(x, edge_index[2])


class Dense(nn.Module):
    """Takes an adjacency matrix of bool."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, 16)

    def forward(self, x, edge_index):
        return edge_index.float() @ self.lin(x)


class Batch(nn.Module):
    """Takes features by the name ``batch``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(WIDTH, 16)

    def forward(self, batch, edge_index):
        return self.conv(batch, edge_index).relu()


class Links(nn.Module):
    """Scores links that are given as ``[L, 2]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(WIDTH, 16)

    def forward(self, x, edge_index, edge_label_index):
        h = self.conv(x, edge_index)
        return (h[edge_label_index[:, 0]] * h[edge_label_index[:, 1]]).sum(-1)


FORMS: dict[str, tuple[type[nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "[E, 2]": (Pairs, lambda n: (features(n), edges(n).t().contiguous())),
    "[3, E]": (Triples, lambda n: (features(n), torch.cat([edges(n), edges(n)[:1] % KINDS]))),
    "[B, 2, E]": (Stacked, lambda n: (features(n), torch.stack([edges(n), edges(n).flip(0), edges(n)]))),
    "bool": (
        Dense,
        lambda n: (features(n), features(n) @ features(n).t() > 1),
    ),
    "features named batch": (Batch, lambda n: (features(n), edges(n))),
    "links as [L, 2]": (Links, lambda n: (features(n), edges(n), edges(n).t().contiguous()[:9])),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_form_of_another_name_works(form: str):
    torch.manual_seed(0)
    kind, arguments = FORMS[form]
    model, given = kind().eval(), [arguments(nodes) for nodes in (20, 33)]
    with shared_captures():
        for precision, limit in (("fp32", 1e-4), ("bf16", 0.05), ("int8", 0.05)):
            compiled = gnnc.compile(model, precision)
            for call in given:
                expected = model(*call)
                assert (compiled(*call) - expected).norm() <= limit * expected.norm(), precision


@pytest.mark.first(1)
@pytest.mark.parametrize("form", ["[E, 2]", "links as [L, 2]"])
@torch.no_grad()
def test_ids_out_of_range_are_refused_by_name(form: str):
    kind, arguments = FORMS[form]
    compiled = gnnc.compile(kind().eval(), "fp32")
    compiled(*arguments(20))
    *others, pairs = arguments(20)
    pairs[5, 1] = 20
    with pytest.raises(gnnc.GraphError, match=r"index\[5, 1\] = 20 is not a node"):
        compiled(*others, pairs)


class OneHot(nn.Module):
    """Product of a weight with one-hot rows of kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(KINDS, WIDTH)

    def forward(self, kind):
        return self.dense(nn.functional.one_hot(kind, KINDS).float())


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("bad", [-1, KINDS, KINDS + 4])
def test_classes_out_of_range_are_refused_by_name(trained: bool, bad: int):
    model = OneHot()
    compiled = gnnc.compile(model, "fp32")
    with torch.set_grad_enabled(trained):
        kind = torch.tensor([0, 1, 2, 1])
        torch.testing.assert_close(compiled(kind), model(kind))
        kind = torch.tensor([0, bad, 2, 1])
        with pytest.raises(gnnc.GraphError, match=rf"kind\[1\] = {bad} is not a node: ids must be in 0..2"):
            compiled(kind)


@torch.no_grad()
def test_a_form_that_does_not_run_is_named():
    compiled = gnnc.compile(Batch().eval(), "fp32")
    with pytest.raises(gnnc.GraphError, match=r"edge_index has shape \(80, 2\): an edge list is \[2, number"):
        compiled(features(20), edges(20).t())
