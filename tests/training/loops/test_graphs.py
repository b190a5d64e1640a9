"""Classification and regression of graphs, in batches of a DataLoader."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from slow import slow_but
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.utils import to_dense_adj, to_dense_batch
from training_forms import (
    CLASSES,
    FEATURES,
    HIDDEN,
    Compile,
    Form,
    check,
    check_documented,
    descend,
    mlp,
)

MOST = 12
"""Nodes of the largest graph."""


def data(count: int = 14) -> list[Data]:
    """Return graphs of several sizes, classes and targets that depend on their features, and positions."""
    generator, found = torch.Generator().manual_seed(0), []
    for i in range(count):
        nodes = 5 + i % (MOST - 4)
        x = torch.randn(nodes, FEATURES, generator=generator)
        edge_index = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        found.append(
            Data(
                x=x,
                edge_index=edge_index,
                edge_attr=torch.randn(3 * nodes, 4, generator=generator),
                y=x.mean(0)[:CLASSES].argmax()[None],
                target=x.sum(0)[:1],
                pos=torch.randn(nodes, 3, generator=generator),
                z=torch.randint(1, 9, (nodes,), generator=generator),
            )
        )
    return found


def batches() -> list[Batch]:
    """Return shuffled batches, the last of which is smaller."""
    loader = DataLoader(data(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    return list(loader)


Call = Callable[[Any, Batch], Tensor]


def classes(model: nn.Module, arguments: Callable[[Batch], tuple[Any, ...]], lr: float = 0.01) -> Callable:
    """Return the loop that trains a model on the classes of graphs."""

    def loop(compiled: Compile) -> Iterator[float]:
        call = compiled(model)
        return descend(call, lambda batch: F.cross_entropy(call(*arguments(batch)), batch.y), lr, batches())

    return loop


class Pooled(nn.Module):
    """Two convolutions, a readout and a linear layer."""

    def __init__(self, conv: Callable[[int, int], nn.Module], readout: Any, width: int = HIDDEN) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(FEATURES, HIDDEN), conv(HIDDEN, HIDDEN)
        self.readout, self.lin = readout, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, *edges: Tensor) -> Tensor:
        x = self.conv1(x, edge_index, *edges).relu()
        x = self.conv2(x, edge_index, *edges).relu()
        return self.lin(F.dropout(self.readout(x, batch), 0.5, self.training))


def gin_conv(a: int, b: int) -> nn.Module:
    return pyg.GINConv(mlp(a, b, norm=True))


def usual(batch: Batch) -> tuple[Any, ...]:
    return batch.x, batch.edge_index, batch.batch


def pooled(conv: Callable[[int, int], nn.Module], readout: Callable[[], Any], width: int = HIDDEN) -> Form:
    """Return the form of ``Pooled`` models."""
    return Form(lambda compiled: classes(Pooled(conv, readout(), width), usual)(compiled))


def maker(make: Callable[[], nn.Module], arguments: Callable[[Batch], tuple[Any, ...]] = usual) -> Form:
    return Form(lambda compiled: classes(make(), arguments)(compiled))


class OfBatch(nn.Module):
    """Model that takes the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = pyg.GraphConv(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, data: Batch) -> Tensor:
        x = self.conv(data.x, data.edge_index).relu()
        return self.lin(pyg.global_mean_pool(x, data.batch)).log_softmax(1)


class TopK(nn.Module):
    """Convolutions with poolings between them; readouts of all levels are added."""

    def __init__(self, pool: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.pool1 = pyg.GraphConv(FEATURES, HIDDEN), pool(HIDDEN)
        self.conv2, self.pool2 = pyg.GraphConv(HIDDEN, HIDDEN), pool(HIDDEN)
        self.lin = nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        found = []
        for conv, pool in ((self.conv1, self.pool1), (self.conv2, self.pool2)):
            x = conv(x, edge_index).relu()
            x, edge_index, _, batch, *_ = pool(x, edge_index, None, batch)
            found.append(torch.cat([pyg.global_max_pool(x, batch), pyg.global_mean_pool(x, batch)], 1))
        return self.lin(found[0] + found[1])


class Asap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = pyg.GraphConv(FEATURES, HIDDEN), pyg.ASAPooling(HIDDEN, 0.8)
        self.lin = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x, _, _, batch, _ = self.pool(self.conv(x, edge_index).relu(), edge_index, None, batch)
        return self.lin(pyg.global_mean_pool(x, batch))


class EdgePooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = pyg.GraphConv(FEATURES, HIDDEN), pyg.EdgePooling(HIDDEN)
        self.lin = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x, _, batch, _ = self.pool(self.conv(x, edge_index).relu(), edge_index, batch)
        return self.lin(pyg.global_mean_pool(x, batch))


class Clustered(nn.Module):
    """Nodes are assigned to clusters, on dense matrices; losses of the assignment are added."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.lin = pyg.GraphConv(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.pool = pyg.DMoNPooling([HIDDEN, HIDDEN], 4) if kind == "dmon" else nn.Linear(HIDDEN, 4)
        self.dense, self.kind = pyg.DenseGraphConv(HIDDEN, HIDDEN), kind

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x, edge_index).relu()
        x, mask = to_dense_batch(x, batch, max_num_nodes=MOST)
        adj = to_dense_adj(edge_index, batch, max_num_nodes=MOST)
        if self.kind == "dmon":
            _, x, adj, *losses = self.pool(x, adj, mask)
        else:
            pool = pyg.dense_mincut_pool if self.kind == "mincut" else pyg.dense_diff_pool
            x, adj, *losses = pool(x, adj, self.pool(x), mask)
        x = self.dense(x, adj).relu()
        return self.lin(x.mean(1)), sum(losses[1:], losses[0])


def clustered(kind: str) -> Form:
    def loop(compiled: Compile) -> Iterator[float]:
        call = compiled(Clustered(kind))

        def loss(batch: Batch) -> Tensor:
            out, own = call(*usual(batch))
            return F.cross_entropy(out, batch.y) + 0.1 * own

        return descend(call, loss, over=batches())

    return Form(loop)


class Gmt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = pyg.GCNConv(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.pool = pyg.aggr.GraphMultisetTransformer(HIDDEN, k=4, heads=2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.lin(self.pool(self.conv(x, edge_index).relu(), batch))


class Dgcnn(nn.Module):
    """SortPool: the nodes of a graph, sorted by their last feature, are a sequence for a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = pyg.GCNConv(FEATURES, HIDDEN), pyg.GCNConv(HIDDEN, 1)
        self.pool = pyg.aggr.SortAggregation(k=4)
        self.conv, self.lin = nn.Conv1d(1, 6, HIDDEN + 1, HIDDEN + 1), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        first = self.conv1(x, edge_index).tanh()
        x = torch.cat([first, self.conv2(first, edge_index).tanh()], 1)
        x = self.pool(x, batch)[:, None]
        return self.lin(self.conv(x).relu().flatten(1))


class Upfd(nn.Module):
    """The features of each graph's first node join its readout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = pyg.SAGEConv(FEATURES, HIDDEN), nn.Linear(FEATURES, HIDDEN)
        self.out = nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        readout = pyg.global_max_pool(self.conv(x, edge_index).relu(), batch)
        root = (batch[1:] - batch[:-1]).nonzero().view(-1)
        root = torch.cat([root.new_zeros(1), root + 1])
        return self.out(torch.cat([self.lin(x[root]).relu(), readout], 1))


class WithEdges(nn.Module):
    """Layers that read edge features, in a batch."""

    def __init__(self, conv: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(FEATURES, HIDDEN), conv(HIDDEN, HIDDEN)
        self.lin = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x, edge_index, edge_attr).relu(), edge_index, edge_attr).relu()
        return self.lin(pyg.global_add_pool(x, batch))


def with_edges(batch: Batch) -> tuple[Any, ...]:
    return batch.x, batch.edge_index, batch.edge_attr, batch.batch


class Gps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.edge = nn.Linear(FEATURES, HIDDEN), nn.Linear(4, HIDDEN)
        self.conv = pyg.GPSConv(HIDDEN, pyg.GINEConv(mlp(HIDDEN, HIDDEN)), heads=2, norm="layer_norm")
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        x = self.conv(self.lin(x), edge_index, batch, edge_attr=self.edge(edge_attr))
        return self.out(pyg.global_add_pool(x, batch))


class Mpnn(nn.Module):
    """NNConv with a GRU cell, and Set2Set (Gilmer et al.)."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.gru = nn.Linear(FEATURES, HIDDEN), nn.GRU(HIDDEN, HIDDEN)
        self.conv = pyg.NNConv(HIDDEN, HIDDEN, mlp(4, HIDDEN * HIDDEN), aggr="mean", root_weight=False)
        self.read, self.out = pyg.Set2Set(HIDDEN, 2), nn.Linear(2 * HIDDEN, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        x = self.lin(x).relu()
        state = x[None]
        for _ in range(2):
            x, state = self.gru(self.conv(x, edge_index, edge_attr).relu()[None], state)
            x = x[0]
        return self.out(self.read(x, batch)).view(-1)


def regression(make: Callable[[], nn.Module], arguments: Callable[[Batch], tuple[Any, ...]]) -> Form:
    """Return the form that fits a number for each graph."""

    def loop(compiled: Compile) -> Iterator[float]:
        call = compiled(make())
        return descend(
            call, lambda b: F.mse_loss(call(*arguments(b)).view(-1), b.target), 0.005, over=batches()
        )

    return Form(loop)


def attentive_fp() -> nn.Module:
    return pyg.models.AttentiveFP(FEATURES, HIDDEN, 1, edge_dim=4, num_layers=2, num_timesteps=2, dropout=0.2)


class Points(nn.Module):
    """PointNet on given edges: positions are features, the largest value of each graph is read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = pyg.PointNetConv(mlp(3 + 3, HIDDEN), mlp(HIDDEN, HIDDEN))
        self.conv2, self.lin = pyg.PointNetConv(mlp(HIDDEN + 3, HIDDEN)), nn.Linear(HIDDEN, CLASSES)

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.conv1(pos, pos, edge_index).relu()
        return self.lin(pyg.global_max_pool(self.conv2(x, pos, edge_index).relu(), batch))


class Potential(nn.Module):
    """Energy of a molecule from distances along given edges (as SchNet's interactions)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lin = nn.Embedding(10, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.filter, self.out = mlp(6, HIDDEN), mlp(HIDDEN, 1)
        self.register_buffer("centers", torch.linspace(0, 5, 6))

    def forward(self, z: Tensor, pos: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        src, dst = edge_index
        distance = (pos[src] - pos[dst]).square().sum(1).add(1e-6).sqrt()
        weight = self.filter(torch.exp(-(distance[:, None] - self.centers).square()))
        x = self.table(z)
        x = x + torch.zeros_like(x).index_add(0, dst, self.lin(x)[src] * weight)
        return pyg.global_add_pool(self.out(x), batch)


def forces(compiled: Compile) -> Iterator[float]:
    """Fit energies and their negative gradients by positions."""
    call = compiled(Potential())

    def loss(batch: Batch) -> Tensor:
        pos = batch.pos.clone().requires_grad_()
        energy = call(batch.z, pos, batch.edge_index, batch.batch)
        force = torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]
        return F.mse_loss(energy.view(-1), batch.target) + force.square().mean()

    return descend(call, loss, over=batches())


FORMS: dict[str, Form] = {
    "gin-graphs": pooled(gin_conv, lambda: pyg.global_add_pool),
    "graph-conv-of-data": maker(OfBatch, lambda batch: (batch,)),
    "attention-pool": pooled(pyg.GCNConv, lambda: pyg.aggr.AttentionalAggregation(nn.Linear(HIDDEN, 1))),
    "set2set": pooled(pyg.SAGEConv, lambda: pyg.Set2Set(HIDDEN, 2), 2 * HIDDEN),
    "set-transformer": pooled(pyg.GCNConv, lambda: pyg.aggr.SetTransformerAggregation(HIDDEN, heads=2)),
    "several-readouts": pooled(
        pyg.GATConv, lambda: pyg.aggr.MultiAggregation(["mean", "max", "std"]), 3 * HIDDEN
    ),
    "top-k-pool": maker(lambda: TopK(lambda width: pyg.TopKPooling(width, 0.8))),
    "sag-pool": maker(lambda: TopK(lambda width: pyg.SAGPooling(width, 0.8))),
    "asap-pool": maker(Asap),
    "edge-pool": maker(EdgePooled),
    "diff-pool": clustered("diff"),
    "mincut-pool": clustered("mincut"),
    "dmon-pool": clustered("dmon"),
    "graph-multiset": maker(Gmt),
    "sort-pool": maker(Dgcnn),
    "root-features": maker(Upfd),
    "gine": maker(
        lambda: WithEdges(lambda a, b: pyg.GINEConv(mlp(a, b), edge_dim=4, train_eps=True)), with_edges
    ),
    "gat-edge-features": maker(lambda: WithEdges(lambda a, b: pyg.GATConv(a, b, edge_dim=4)), with_edges),
    "gps-graphs": maker(Gps, with_edges),
    "nn-conv": regression(Mpnn, with_edges),
    "attentive-fp": regression(attentive_fp, with_edges),
    "point-net": maker(Points, lambda b: (b.pos, b.edge_index, b.batch)),
    "energies": regression(Potential, lambda b: (b.z, b.pos, b.edge_index, b.batch)),
    "forces": Form(forces),
}


@pytest.mark.parametrize("name", slow_but(("gin-graphs", "diff-pool"), list(FORMS)))
def test_losses_are_those_of_eager(name: str) -> None:
    check(FORMS[name])


def test_the_page_lists_these_forms() -> None:
    check_documented("Graphs", FORMS)
