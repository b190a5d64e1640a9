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
from torch_geometric.loader import RandomNodeLoader
from torch_geometric.utils import k_hop_subgraph, subgraph
from training_forms import (
    CLASSES,
    EDGES,
    FEATURES,
    HIDDEN,
    NODES,
    WEIGHT,
    Compile,
    Form,
    X,
    Y,
    check,
    check_documented,
    descend,
    graph,
)

import gnnc


def sampled(compiled: Compile) -> Iterator[float]:
    call = compiled(pyg.models.GraphSAGE(FEATURES, HIDDEN, 2, CLASSES))
    batches = list(islice(Sampler(EDGES, NODES, (4, 4)).batches(20), 4))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        nodes, edge_index = batch
        return F.cross_entropy(call(X[nodes], edge_index)[:20], Y[nodes[:20]])

    return descend(call, loss, over=batches)


def neighbor_batches(pairs: bool = False) -> list[Data]:
    """Return batches as ``NeighborLoader`` yields them: seeds first, and sizes by hop.

    With ``pairs``, as ``LinkNeighborLoader`` does: seeds are the ends of edges and random pairs, with labels.
    """
    sampler, found, generator = Sampler(EDGES, NODES, (4, 3)), [], torch.Generator().manual_seed(0)
    for start in range(0, NODES, 16):
        seeds = torch.arange(start, min(start + 16, NODES))
        labels, ends = torch.empty(0), torch.empty(2, 0, dtype=torch.long)
        if pairs:
            linked = EDGES[:, start : start + 16]
            ends = torch.cat([linked, torch.randint(NODES, linked.shape, generator=generator)], 1)
            labels = (torch.arange(ends.shape[1]) < linked.shape[1]).float()
            seeds, ends = ends.unique(return_inverse=True)
        nodes, edges, node_counts, edge_counts = sampler.sample_by_hop(seeds)
        found.append(
            Data(
                x=X[nodes],
                edge_index=edges,
                y=Y[nodes],
                n_id=nodes,
                batch_size=len(seeds),
                edge_label_index=ends,
                edge_label=labels,
                num_sampled_nodes=node_counts,
                num_sampled_edges=edge_counts,
            )
        )
    return found


def neighbor_loader(compiled: Compile) -> Iterator[float]:
    """Train on the seeds of each batch."""
    call = compiled(pyg.models.GraphSAGE(FEATURES, HIDDEN, 2, CLASSES, dropout=0.5))

    def loss(batch: Data) -> Tensor:
        size = batch.batch_size
        return F.cross_entropy(call(batch.x, batch.edge_index)[:size], batch.y[:size])

    return descend(call, loss, over=neighbor_batches())


def trimmed(compiled: Compile) -> Iterator[float]:
    """Drop the nodes and edges that a layer no more reads (``trim_to_layer``)."""
    call = compiled(pyg.models.GraphSAGE(FEATURES, HIDDEN, 2, CLASSES))

    def loss(batch: Data) -> Tensor:
        hops = {
            "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
            "num_sampled_edges_per_hop": batch.num_sampled_edges,
        }
        size = batch.batch_size
        return F.cross_entropy(call(batch.x, batch.edge_index, **hops)[:size], batch.y[:size])

    return descend(call, loss, over=neighbor_batches())


class ByHop(nn.Module):
    """A layer for each hop of a sample: targets are the first of the sources (``NeighborSampler``)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = pyg.SAGEConv(FEATURES, HIDDEN), pyg.SAGEConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, hops: list[tuple[Tensor, int]]) -> Tensor:
        (outer, middle), (inner, size) = hops
        x = self.conv1((x, x[:middle]), outer).relu()
        return self.conv2((x, x[:size]), inner)


def by_hop(compiled: Compile) -> Iterator[float]:
    call = compiled(ByHop())

    def loss(batch: Data) -> Tensor:
        size, (near, _) = batch.batch_size, batch.num_sampled_edges
        middle = size + batch.num_sampled_nodes[1]
        inner = batch.edge_index[:, :near]
        return F.cross_entropy(call(batch.x, [(batch.edge_index, middle), (inner, size)]), batch.y[:size])

    kept = [batch for batch in neighbor_batches() if batch.batch_size == 16]
    return descend(call, loss, over=kept)


def link_neighbor_loader(compiled: Compile) -> Iterator[float]:
    """Score the pairs of each batch by the embeddings of their ends."""
    call = compiled(pyg.models.GraphSAGE(FEATURES, HIDDEN, 2))

    def loss(batch: Data) -> Tensor:
        start, end = batch.edge_label_index
        z = call(batch.x, batch.edge_index)
        return F.binary_cross_entropy_with_logits((z[start] * z[end]).sum(-1), batch.edge_label)

    return descend(call, loss, over=neighbor_batches(pairs=True))


def cluster_loader(compiled: Compile) -> Iterator[float]:
    """Train on the subgraphs of two clusters each; layers are those of Cluster-GCN."""
    order = torch.randperm(NODES, generator=torch.Generator().manual_seed(0))
    parts = [torch.cat(pair) for pair in zip(order.chunk(6)[::2], order.chunk(6)[1::2], strict=True)]
    call = compiled(Clusters())

    def loss(nodes: Tensor) -> Tensor:
        edges, _ = subgraph(nodes, EDGES, relabel_nodes=True, num_nodes=NODES)
        return F.nll_loss(call(X[nodes], edges), Y[nodes])

    return descend(call, loss, over=parts)


class Clusters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = pyg.ClusterGCNConv(FEATURES, HIDDEN), pyg.ClusterGCNConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(self.conv1(x, edge_index).relu(), 0.2, self.training)
        return self.conv2(x, edge_index).log_softmax(-1)


class Saint(nn.Module):
    """GraphSAINT: weights of edges undo the bias of the sample; all layers are read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = pyg.GraphConv(FEATURES, HIDDEN, aggr="add")
        self.conv2, self.lin = pyg.GraphConv(HIDDEN, HIDDEN, aggr="add"), nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        first = F.dropout(self.conv1(x, edge_index, weight).relu(), 0.2, self.training)
        second = F.dropout(self.conv2(first, edge_index, weight).relu(), 0.2, self.training)
        return self.lin(torch.cat([first, second], -1)).log_softmax(-1)


def saint(compiled: Compile) -> Iterator[float]:
    generator, batches = torch.Generator().manual_seed(0), []
    for _ in range(4):
        nodes = torch.randint(NODES, (30,), generator=generator).unique()
        edges, kept = subgraph(
            nodes, EDGES, torch.arange(EDGES.shape[1]), relabel_nodes=True, num_nodes=NODES
        )
        batches.append((nodes, edges, WEIGHT[kept], torch.rand(len(nodes), generator=generator)))
    call = compiled(Saint())

    def loss(batch: tuple[Tensor, ...]) -> Tensor:
        nodes, edges, weights, share = batch
        return (F.nll_loss(call(X[nodes], edges, weights), Y[nodes], reduction="none") * share).mean()

    return descend(call, loss, over=batches)


def random_nodes(compiled: Compile) -> Iterator[float]:
    """Train on random parts of the graph, drawn by PyG's ``RandomNodeLoader``."""
    data = Data(x=X, edge_index=EDGES, y=Y)
    call = compiled(pyg.models.GAT(FEATURES, HIDDEN, 2, CLASSES, heads=2))
    torch.manual_seed(3)
    parts = list(RandomNodeLoader(data, num_parts=3, shuffle=True))
    return descend(call, lambda b: F.cross_entropy(call(b.x, b.edge_index), b.y), over=parts)


class Shadow(nn.Module):
    """ShaDow: each seed has a subgraph of its own, whose root and mean are read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = pyg.SAGEConv(FEATURES, HIDDEN), nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, root: Tensor) -> Tensor:
        x = self.conv(x, edge_index).relu()
        return self.lin(torch.cat([x[root], pyg.global_mean_pool(x, batch, root.shape[0])], -1))


def shadow(compiled: Compile) -> Iterator[float]:
    call, batches = compiled(Shadow()), []
    for start in range(0, 48, 12):
        seeds, parts = torch.arange(start, start + 12), []
        for seed in seeds.tolist():
            nodes, edges, _, _ = k_hop_subgraph(seed, 1, EDGES, relabel_nodes=True, num_nodes=NODES)
            parts.append(Data(x=X[nodes], edge_index=edges, root=(nodes == seed).int().argmax()))
        batch = Batch.from_data_list(parts)
        assert batch.ptr is not None
        batches.append((batch, batch.root + batch.ptr[:-1], Y[seeds]))

    def loss(item: tuple[Batch, Tensor, Tensor]) -> Tensor:
        batch, root, y = item
        return F.cross_entropy(call(batch.x, batch.edge_index, batch.batch, root), y)

    return descend(call, loss, over=batches)


class Inductive(nn.Module):
    """GAT with linear skips, for several labels a node (PPI)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.lin1 = pyg.GATConv(FEATURES, 4, heads=2), nn.Linear(FEATURES, 8)
        self.conv2, self.lin2 = pyg.GATConv(8, CLASSES, heads=2, concat=False), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.elu(self.conv1(x, edge_index) + self.lin1(x))
        return self.conv2(x, edge_index) + self.lin2(x)


def several_graphs(compiled: Compile) -> Iterator[float]:
    """Train on graphs of their own, and evaluate on another between the steps."""
    graphs = [graph(20 + 3 * i, 60 + 9 * i, i) for i in range(4)]
    call = compiled(Inductive())

    def loss(item: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, edge_index, y = item
        call.eval()
        with torch.no_grad():
            call(*graphs[-1][:2])
        call.train()
        target = F.one_hot(y, CLASSES).float()
        return F.binary_cross_entropy_with_logits(call(x, edge_index), target)

    return descend(call, loss, over=graphs[:3])


FORMS: dict[str, Form] = {
    "sampled-neighbors": Form(sampled),
    "neighbor-loader": Form(neighbor_loader),
    "trim-to-layer": Form(trimmed),
    "neighbors-by-hop": Form(by_hop),
    "link-neighbor-loader": Form(link_neighbor_loader),
    "cluster-loader": Form(cluster_loader),
    "graph-saint": Form(saint),
    "random-nodes": Form(random_nodes),
    "shadow": Form(shadow),
    "several-graphs": Form(several_graphs),
}


@pytest.mark.parametrize("name", slow_but(("sampled-neighbors", "trim-to-layer"), list(FORMS)))
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
