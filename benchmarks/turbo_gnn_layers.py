"""Attention layers of PyG in the kernels of Turbo-GNN, a peer of ``layers.py``.

Turbo-GNN (``pip install --no-build-isolation --pre turbo-gnn``, with nvcc) has one kernel for logits, softmax
and sum of GATv2 and of dot attention, and gradients of them. Products with weights run in cuBLAS.
"""

from functools import cache
from typing import Any

import torch
import torch_geometric.nn as pyg
from layer_zoo import Twice
from torch import Tensor, nn
from torch_geometric.utils import add_self_loops, remove_self_loops


@cache
def _library() -> Any:
    import turbo_gnn

    return turbo_gnn


class _Graphs:
    """Graphs of Turbo-GNN, one for the edges and one for the edges with self loops, built once."""

    def __init__(self) -> None:
        self.built: dict[tuple[int, bool], Any] = {}

    def of(self, edge_index: Tensor, nodes: int, *, loops: bool) -> Any:
        """Return the graph of the edges, with a loop at each node if ``loops``."""
        key = (edge_index.data_ptr(), loops)
        if key not in self.built:
            index = (
                add_self_loops(remove_self_loops(edge_index)[0], num_nodes=nodes)[0] if loops else edge_index
            )
            kind = _library().AdjacencyForwardBackwardWithNodeBuckets
            self.built[key] = kind.from_edge_list(index, nodes, index_dtype=torch.int32)
        return self.built[key]


class _Attention(nn.Module):
    """Layer of attention with the parameters of one of PyG."""

    def __init__(self, layer: Any, graphs: _Graphs) -> None:
        super().__init__()
        self.layer, self.graphs = layer, graphs


class _Gatv2(_Attention):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        layer = self.layer
        shape = (-1, layer.heads, layer.out_channels)
        sources, rows = layer.lin_l(x).view(shape), layer.lin_r(x).view(shape)
        graph = self.graphs.of(edge_index, x.shape[0], loops=layer.add_self_loops)
        out = _library().gatv2_aggr(graph, rows, sources, layer.att[0].to(rows.dtype), layer.negative_slope)
        return out.flatten(1) + layer.bias


class _DotAttention(_Attention):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        layer = self.layer
        shape = (-1, layer.heads, layer.out_channels)
        query, key, value = (
            part(x).view(shape) for part in (layer.lin_query, layer.lin_key, layer.lin_value)
        )
        graph = self.graphs.of(edge_index, x.shape[0], loops=False)
        scale = layer.out_channels**-0.5
        # Its Q is gathered at the sources of the edges, its K that of the row.
        out = _library().graph_transformer_aggr(graph, x, key, query, value, scale)
        return out.flatten(1) + layer.lin_skip(x)


_KINDS = {pyg.GATv2Conv: _Gatv2, pyg.TransformerConv: _DotAttention}


def is_supported(layer: nn.Module) -> bool:
    """Return whether the kernels compute a layer: attention without edge features, heads of 32 or 64 wide."""
    if isinstance(layer, Twice):
        return is_supported(layer.first)
    return type(layer) in _KINDS and layer.edge_dim is None and layer.out_channels in (32, 64, 128, 256)


def in_turbo_gnn(layer: nn.Module, graphs: _Graphs | None = None) -> nn.Module:
    """Return a layer in the kernels of Turbo-GNN, with the same parameters."""
    graphs = graphs or _Graphs()
    if isinstance(layer, Twice):
        parts = iter((layer.first, layer.second))
        return Twice(lambda: in_turbo_gnn(next(parts), graphs))
    return _KINDS[type(layer)](layer, graphs)
