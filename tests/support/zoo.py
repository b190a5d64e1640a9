"""Models that the end-to-end tests compile: each with arguments for a graph of any size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    APPNP,
    AGNNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    JumpingKnowledge,
    SAGEConv,
    SGConv,
    TransformerConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
    models,
)

FEATURES = 12

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def random_graph(nodes: int, edges: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return x ``[nodes, FEATURES]`` and edge_index ``[2, edges]``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, FEATURES, generator=generator)
    return x, torch.randint(nodes, (2, edges), generator=generator)


def plain(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, edge_index)``."""
    return random_graph(nodes, edges, seed), {}


def weighted(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, edge_index, edge_weight)``."""
    weight = torch.rand(edges, generator=torch.Generator().manual_seed(seed))
    return (*random_graph(nodes, edges, seed), weight), {}


def pooled(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, edge_index, batch, size=3)``."""
    return (*random_graph(nodes, edges, seed), torch.arange(nodes) * 3 // max(nodes, 1)), {"size": 3}


def keywords(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return keyword arguments only."""
    x, edge_index = random_graph(nodes, edges, seed)
    return (), {"edge_index": edge_index, "x": x}


class Stack(nn.Module):
    """Convolutions with norms, activations, and optional residuals and jumping knowledge."""

    def __init__(
        self,
        make: Callable[[int, int], nn.Module],
        *,
        layers: int = 2,
        norm: Callable[[int], nn.Module] = nn.Identity,
        residual: bool = False,
        jump: str | None = None,
    ) -> None:
        super().__init__()
        widths = [FEATURES] + [16] * layers
        self.convs = nn.ModuleList(make(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True))
        self.norms = nn.ModuleList(norm(16) for _ in range(layers))
        self.residual = residual
        self.jump = JumpingKnowledge(jump) if jump else None
        self.head = nn.Linear(16 * layers if jump == "cat" else 16, 5)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        extra = () if edge_weight is None else (edge_weight,)
        outputs = []
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            out = norm(conv(x, edge_index, *extra)).relu()
            x = x + out if self.residual and number else out
            outputs.append(x)
        return self.head(self.jump(outputs) if self.jump else x)


class Pooled(nn.Module):
    """One convolution, then one value a graph."""

    def __init__(self, pool: Callable[..., Tensor]) -> None:
        super().__init__()
        self.conv, self.pool, self.head = GCNConv(FEATURES, 16), pool, nn.Linear(16, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
        return self.head(self.pool(self.conv(x, edge_index).relu(), batch, size=size))


class LinkPrediction(nn.Module):
    """Dot products of the embeddings at both ends of each edge."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(FEATURES, 16)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        z = self.conv(x, edge_index)
        return (z[edge_index[0]] * z[edge_index[1]]).sum(-1)


class IndexAdd(nn.Module):
    """Mean aggregation written with ``index_add_``."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        x = self.lin(x)
        out = torch.zeros_like(x).index_add_(0, dst, x[src])
        ones = torch.ones(dst.shape[0], device=x.device)
        count = torch.zeros(x.shape[0], device=x.device).index_add_(0, dst, ones)
        return (out / count.clamp(min=1)[:, None]).relu()


class ScatterAdd(nn.Module):
    """Weighted sum written with ``scatter_add``."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, 8)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        src, dst = edge_index
        x = self.lin(x)
        message = x.index_select(0, src) * weight.unsqueeze(-1)
        return torch.zeros_like(x).scatter_add(0, dst.unsqueeze(-1).expand_as(message), message)


class ScatterReduce(nn.Module):
    """Largest neighbor written with ``scatter_reduce``."""

    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.lin, self.reduce = nn.Linear(FEATURES, 8), reduce

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        message = self.lin(x)[src]
        index = dst.unsqueeze(-1).expand_as(message)
        out = x.new_zeros(x.shape[0], 8)
        return out.scatter_reduce(0, index, message, self.reduce, include_self=False)


class SparseCsr(nn.Module):
    """Two sparse products with an adjacency built in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, crow: Tensor, col: Tensor, value: Tensor) -> Tensor:
        adjacency = torch.sparse_csr_tensor(crow, col, value, (x.shape[0], x.shape[0]))
        x = (adjacency @ self.first(x)).relu()
        return torch.sparse.mm(adjacency, self.second(x))


def csr_arguments(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, crow, col, value)``."""
    x, (src, dst) = random_graph(nodes, edges, seed)
    order = torch.sort(dst * nodes + src).indices
    crow = torch.zeros(nodes + 1, dtype=torch.long)
    crow[1:] = torch.bincount(dst, minlength=nodes).cumsum(0)
    value = torch.rand(edges, generator=torch.Generator().manual_seed(seed))
    return (x, crow, src[order], value), {}


def _mlp(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Linear(a, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, b))


@dataclass(frozen=True)
class Entry:
    """A model and its arguments.

    Attributes:
        make: builds the model.
        arguments: ``(nodes, edges, seed) -> (args, kwargs)``.
        attention: whether the program must hold an edge softmax.
    """

    make: Callable[[], nn.Module]
    arguments: Callable[..., Arguments] = plain
    attention: bool = False


ZOO: dict[str, Entry] = {
    "gcn": Entry(lambda: Stack(GCNConv)),
    "gcn-edge-weight": Entry(lambda: Stack(GCNConv), weighted),
    "gcn-keywords": Entry(lambda: Stack(GCNConv), keywords),
    "gcn-deep-residual": Entry(lambda: Stack(GCNConv, layers=4, norm=nn.LayerNorm, residual=True)),
    "gcn-no-norm": Entry(lambda: Stack(lambda a, b: GCNConv(a, b, normalize=False))),
    "sage-mean": Entry(lambda: Stack(SAGEConv)),
    "sage-max": Entry(lambda: Stack(lambda a, b: SAGEConv(a, b, aggr="max"))),
    "sage-sum": Entry(lambda: Stack(lambda a, b: SAGEConv(a, b, aggr="sum"))),
    "gin": Entry(lambda: Stack(lambda a, b: GINConv(_mlp(a, b), train_eps=True))),
    "gat": Entry(lambda: Stack(lambda a, b: GATConv(a, b // 4, heads=4)), attention=True),
    "gat-mean": Entry(lambda: Stack(lambda a, b: GATConv(a, b, heads=3, concat=False)), attention=True),
    "gatv2": Entry(lambda: Stack(lambda a, b: GATv2Conv(a, b // 4, heads=4)), attention=True),
    "graphconv": Entry(lambda: Stack(GraphConv), weighted),
    "agnn": Entry(lambda: Stack(lambda a, b: AGNNConv() if a == b else GCNConv(a, b)), attention=True),
    "transformer": Entry(lambda: Stack(lambda a, b: TransformerConv(a, b // 4, heads=4)), attention=True),
    "appnp": Entry(lambda: APPNP(K=4, alpha=0.1)),
    "sg": Entry(lambda: SGConv(FEATURES, 5, K=2)),
    "batch-norm": Entry(lambda: Stack(GCNConv, norm=nn.BatchNorm1d)),
    "layer-norm": Entry(lambda: Stack(SAGEConv, norm=nn.LayerNorm)),
    "jump-cat": Entry(lambda: Stack(GCNConv, jump="cat")),
    "jump-max": Entry(lambda: Stack(GCNConv, jump="max")),
    "pool-add": Entry(lambda: Pooled(global_add_pool), pooled),
    "pool-mean": Entry(lambda: Pooled(global_mean_pool), pooled),
    "pool-max": Entry(lambda: Pooled(global_max_pool), pooled),
    "link-prediction": Entry(LinkPrediction),
    "models.GCN": Entry(lambda: models.GCN(FEATURES, 16, 2, 5)),
    "models.GraphSAGE": Entry(lambda: models.GraphSAGE(FEATURES, 16, 2, 5)),
    "models.GIN": Entry(lambda: models.GIN(FEATURES, 16, 2, 5)),
    "models.GAT": Entry(lambda: models.GAT(FEATURES, 16, 2, 5, heads=4), attention=True),
    "index_add": Entry(IndexAdd),
    "scatter_add": Entry(ScatterAdd, weighted),
    "scatter_reduce-amax": Entry(lambda: ScatterReduce("amax")),
    "scatter_reduce-mean": Entry(lambda: ScatterReduce("mean")),
    "sparse-csr": Entry(SparseCsr, csr_arguments),
}


def build(name: str) -> nn.Module:
    """Return the model ``name`` in eval mode, with fixed weights and running statistics."""
    return prepared(ZOO[name])


def prepared(entry: Entry) -> nn.Module:
    """Return the entry's model in eval mode, with fixed weights and running statistics."""
    torch.manual_seed(0)
    model = entry.make()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d) and module.running_mean is not None:
            nn.init.normal_(module.running_mean)  # pyright: ignore[reportArgumentType]
            nn.init.uniform_(module.running_var, 0.5, 2.0)  # pyright: ignore[reportArgumentType]
    return model.eval()
