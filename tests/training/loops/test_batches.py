"""Training on mini-batches: another graph at every step, one program."""

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from sampling import Sampler
from slow import slow_but
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from training_forms import (
    CLASSES,
    EDGES,
    FEATURES,
    HIDDEN,
    NODES,
    Compile,
    Form,
    X,
    Y,
    check,
    check_documented,
    descend,
    graph,
    mlp,
)

import gnnc


def sampled(compiled: Compile) -> Iterator[float]:
    call = compiled(pyg.models.GraphSAGE(FEATURES, HIDDEN, 2, CLASSES))
    batches = list(islice(Sampler(EDGES, NODES, (4, 4)).batches(20), 4))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        nodes, edge_index = batch
        return F.cross_entropy(call(X[nodes], edge_index)[:20], Y[nodes[:20]])

    return descend(call, loss, over=batches)


class GraphLevel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = pyg.GINConv(mlp(FEATURES, HIDDEN, norm=True)), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
        return self.head(pyg.global_add_pool(self.conv(x, edge_index).relu(), batch, size))


def graphs(compiled: Compile) -> Iterator[float]:
    call, parts = compiled(GraphLevel()), [graph(8 + i, 20 + i, i) for i in range(12)]
    data = [Data(x=x, edge_index=edges, y=y[:1]) for x, edges, y in parts]
    batches = [Batch.from_data_list(data[start : start + 4]) for start in (0, 4, 8)]

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(call(batch.x, batch.edge_index, batch.batch, 4), batch.y)

    return descend(call, loss, over=batches)


FORMS: dict[str, Form] = {"sampled-neighbors": Form(sampled), "graph-batches": Form(graphs)}


@pytest.mark.parametrize("name", slow_but(("sampled-neighbors",), list(FORMS)))
def test_losses_are_those_of_eager(name: str) -> None:
    check(FORMS[name])


def test_the_page_lists_these_forms() -> None:
    check_documented("Mini-batches", FORMS)


@pytest.mark.slow
def test_sixty_batches_are_one_program() -> None:
    torch.manual_seed(0)
    compiled = gnnc.compile(pyg.models.GraphSAGE(FEATURES, HIDDEN, 2, CLASSES).train(), "fp32")
    for nodes, edge_index in islice(Sampler(EDGES, NODES, (4, 4)).batches(20), 60):
        compiled(X[nodes], edge_index)[:20].sum().backward()
    assert len(compiled._dispatch.programs()) == 1
