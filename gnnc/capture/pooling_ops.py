"""Poolings that merge nodes by a loop over edges: the loop is one op, which a program calls like ATen.

``EdgePooling`` merges the two ends of edges in the order of their scores, and ``ClusterPooling`` the
connected components of the edges above a threshold. Both compute on ids alone, on the CPU.
"""

from typing import Any

import torch
from torch import Tensor

from gnnc.errors import InputError

_LIBRARY = torch.library.Library("gnnc_pooling", "DEF")


def merge_edges(
    _pool: Any, x: Tensor, edge_index: Tensor, batch: Tensor, edge_score: Tensor
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return what ``EdgePooling._merge_edges`` returns, from one op instead of a loop over edges.

    Args:
        _pool: the layer.
        x: features of nodes [N, F].
        edge_index: edges [2, E].
        batch: graph of each node [N].
        edge_score: score of each edge [E].
    """
    from torch_geometric.nn.pool.edge_pool import UnpoolInfo
    from torch_geometric.utils import coalesce, scatter

    order = torch.argsort(edge_score, descending=True)
    cluster, merged, alone = torch.ops.gnnc_pooling.match(order, edge_index, x.shape[0])
    count = merged.shape[0] + alone.shape[0]
    score = torch.cat([edge_score[merged], edge_score.new_ones(alone.shape[0])])
    new_x = scatter(x, cluster, dim=0, dim_size=count, reduce="sum") * score.view(-1, 1)
    new_edges = coalesce(cluster[edge_index], num_nodes=count)
    new_batch = batch.new_zeros(count).scatter(0, cluster, batch)
    return new_x, new_edges, new_batch, UnpoolInfo(edge_index, cluster, batch, score)


def cluster_edges(
    pool: Any, x: Tensor, edge_index: Tensor, batch: Tensor, edge_score: Tensor
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return what ``ClusterPooling._merge_edges`` returns, with the components of the graph from one op.

    Args:
        pool: the layer.
        x: features of nodes [N, F].
        edge_index: edges [2, E], without loops.
        batch: graph of each node [N].
        edge_score: score of each edge [E].
    """
    from torch_geometric.nn.pool.cluster_pool import UnpoolInfo
    from torch_geometric.utils import dense_to_sparse

    nodes = x.shape[0]
    contracted = edge_index[:, edge_score > pool.threshold]
    cluster, firsts = torch.ops.gnnc_pooling.components(contracted, nodes)
    count = firsts.shape[0]
    one = torch.zeros(nodes, count, device=x.device).scatter(1, cluster.unsqueeze(1), 1.0)
    adjacency = _matrix(edge_index, torch.ones_like(edge_score), nodes)
    scores = _matrix(edge_index, edge_score, nodes)
    merged = _matrix(contracted, edge_score.new_ones(contracted.shape[1]), nodes)
    alone = (merged.sum(dim=-1) + merged.sum(dim=-2)) == 0
    on_diagonal = torch.eye(nodes, dtype=torch.bool, device=x.device) & alone.unsqueeze(1)
    scores = torch.where(on_diagonal, 1.0, scores)
    joined = one.t() @ adjacency @ one
    kept = ~torch.eye(count, dtype=torch.bool, device=x.device)
    new_edges, _ = dense_to_sparse(joined * kept)
    new_batch = batch.new_zeros(count).scatter(0, cluster, batch)
    return (scores @ one).t() @ x, new_edges, new_batch, UnpoolInfo(edge_index, cluster, batch)


def _matrix(edge_index: Tensor, values: Tensor, nodes: int) -> Tensor:
    """Return the adjacency [nodes, nodes] of edges with values [E]; those of equal edges are added."""
    places = edge_index[0] * nodes + edge_index[1]
    return values.new_zeros(nodes * nodes).index_add(0, places, values).view(nodes, nodes)


def _match(order: Tensor, edge_index: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cluster of each node [N], the edges whose ends were merged [M], and the other nodes [R]."""
    sources, targets = _ids(edge_index, nodes)
    clusters, merged = [-1] * nodes, []
    for edge in order.tolist():
        source, target = sources[edge], targets[edge]
        if clusters[source] < 0 and clusters[target] < 0:
            clusters[source] = clusters[target] = len(merged)
            merged.append(edge)
    alone = [node for node, cluster in enumerate(clusters) if cluster < 0]
    for place, node in enumerate(alone, len(merged)):
        clusters[node] = place
    return _tensor(clusters, edge_index), _tensor(merged, edge_index), _tensor(alone, edge_index)


def _components(edge_index: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return the connected component of each node [N], numbered by its first node, and these nodes [C]."""
    parents = list(range(nodes))
    for source, target in zip(*_ids(edge_index, nodes), strict=True):
        first, second = sorted((_root(parents, source), _root(parents, target)))
        parents[second] = first
    roots = [_root(parents, node) for node in range(nodes)]
    firsts = sorted(set(roots))
    numbers = {node: number for number, node in enumerate(firsts)}
    return _tensor([numbers[root] for root in roots], edge_index), _tensor(firsts, edge_index)


def _root(parents: list[int], node: int) -> int:
    while parents[node] != node:
        parents[node] = parents[parents[node]]
        node = parents[node]
    return node


def _ids(edge_index: Tensor, nodes: int) -> list[list[int]]:
    if edge_index.numel() and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < nodes:
        raise InputError(f"the edges that a pooling merges name nodes outside of 0..{nodes - 1}")
    return edge_index.tolist()


def _tensor(numbers: list[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long, device=like.device)


def _fake_match(order: Tensor, edge_index: Tensor, nodes: Any) -> tuple[Tensor, Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size
    return order.new_empty(nodes), order.new_empty(size()), order.new_empty(size())


def _fake_components(edge_index: Tensor, nodes: Any) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return edge_index.new_empty(nodes), edge_index.new_empty(count)


_LIBRARY.define(
    "match(Tensor order, Tensor edge_index, SymInt nodes) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "components(Tensor edge_index, SymInt nodes) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)
for _name, _reference, _fake in (
    ("match", _match, _fake_match),
    ("components", _components, _fake_components),
):
    _LIBRARY.impl(_name, _reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnnc_pooling::{_name}", _fake, lib=_LIBRARY)
