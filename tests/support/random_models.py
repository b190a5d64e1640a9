"""Random models of PyG's layers, norms and hand-written layers, and graphs and features hard on them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from spellings import READS, WIDTH
from spellings import Layer as Spelled
from torch import Tensor, nn

EDGE_DIM = 3
WIDTHS = (5, 8, 16, 33, 64)
AGGREGATIONS = ("sum", "mean", "max", "min", "std", "var", "softmax", "powermean")
ACTIVATIONS: Sequence[Callable[[Tensor], Tensor]] = (
    F.relu, F.elu, F.silu, F.gelu, torch.tanh, torch.sigmoid, F.leaky_relu, F.softplus, lambda x: x,
)  # fmt: skip


class Draw(random.Random):
    """Random choices of one model."""

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random() < chance

    def aggr(self) -> Any:
        """Return an aggregation, or several."""
        return self.sample(AGGREGATIONS, 2) if self.maybe(0.15) else self.choice(AGGREGATIONS)

    def plain_aggr(self) -> str:
        return self.choice(("sum", "mean", "max", "min"))


def mlp(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o))


def heads(d: Draw, o: int) -> dict[str, Any]:
    """Options of an attention layer; its result has ``o`` columns."""
    if d.maybe(0.3):
        return {"out_channels": o, "heads": d.choice((1, 2, 3)), "concat": False}
    count = next(h for h in (d.choice((1, 2, 4)), 1) if o % h == 0)
    return {"out_channels": o // count, "heads": count}


def pna(d: Draw, i: int, o: int, edge_dim: int | None) -> nn.Module:
    scalers = d.sample(("identity", "amplification", "attenuation", "linear", "inverse_linear"), 2)
    aggregators = d.sample(("mean", "min", "max", "std", "var", "sum"), 2)
    return pyg.PNAConv(i, o, aggregators, scalers, torch.tensor([2, 4, 9, 3]), edge_dim=edge_dim)


def gcn(i: int, o: int, improved: bool, cached: bool, add_self_loops: bool, normalize: bool) -> nn.Module:
    """Return a GCNConv; PyG has no self loops without normalization."""
    loops = add_self_loops and normalize
    return pyg.GCNConv(i, o, improved=improved, cached=cached, add_self_loops=loops, normalize=normalize)


def film(d: Draw, i: int, o: int) -> nn.Module:
    return pyg.FiLMConv(i, o, act=nn.ReLU() if d.maybe() else None, aggr=d.plain_aggr())


PLAIN: Sequence[Callable[[Draw, int, int], nn.Module]] = (
    lambda d, i, o: pyg.SAGEConv(i, o, d.aggr(), d.maybe(), d.maybe(), d.maybe(0.3), bias=d.maybe()),
    lambda d, i, o: pyg.GINConv(mlp(i, o), eps=d.random(), train_eps=d.maybe(), aggr=d.aggr()),
    lambda d, i, o: pyg.GATConv(
        i, **heads(d, o), negative_slope=0.1, add_self_loops=d.maybe(), residual=d.maybe(0.3), bias=d.maybe()
    ),
    lambda d, i, o: pyg.GATv2Conv(
        i, **heads(d, o), share_weights=d.maybe(), add_self_loops=d.maybe(), residual=d.maybe(0.3)
    ),
    lambda d, i, o: pyg.TransformerConv(i, **heads(d, o), beta=d.maybe(), root_weight=d.maybe(0.7)),
    lambda d, i, o: pyg.SuperGATConv(i, **heads(d, o), attention_type=d.choice(("MX", "SD"))),
    lambda d, i, o: pyg.EdgeConv(mlp(2 * i, o), aggr=d.aggr()),
    lambda d, i, o: pyg.FeaStConv(i, o, heads=d.choice((1, 3)), add_self_loops=d.maybe()),
    lambda d, i, o: pyg.ClusterGCNConv(i, o, diag_lambda=d.random(), add_self_loops=d.maybe()),
    lambda d, i, o: pyg.GENConv(
        i, o, aggr=d.choice(("softmax", "powermean", "add", "max")), norm=d.choice(("batch", "layer")),
        num_layers=d.choice((1, 2)), msg_norm=d.maybe(0.3), bias=d.maybe(),
    ),
    lambda d, i, o: pyg.MFConv(i, o, max_degree=d.choice((2, 6))),
    lambda d, i, o: pyg.ResGatedGraphConv(i, o, root_weight=d.maybe(0.7), aggr=d.plain_aggr()),
    lambda d, i, o: nn.Sequential(nn.Linear(i, o), pyg.GatedGraphConv(o, d.choice((1, 2)), d.plain_aggr())),
    lambda d, i, o: nn.Sequential(nn.Linear(i, o), pyg.AGNNConv(add_self_loops=d.maybe())),
    lambda d, i, o: nn.Sequential(nn.Linear(i, o), pyg.AntiSymmetricConv(o, num_iters=d.choice((1, 2)))),
    lambda d, i, o: pyg.GeneralConv(
        i, o, attention=d.maybe(), heads=d.choice((1, 2)), directed_msg=d.maybe(0.7), l2_normalize=d.maybe(),
        skip_linear=d.maybe(), attention_type=d.choice(("additive", "dot_product")),
    ),
    lambda d, i, o: pyg.EGConv(
        i, o, num_heads=1, num_bases=d.choice((2, 4)), add_self_loops=d.maybe(),
        aggregators=d.sample(("sum", "mean", "max", "min", "symnorm", "std", "var"), 2),
    ),
    lambda d, i, o: pyg.DirGNNConv(pyg.SAGEConv(i, o, d.plain_aggr()), alpha=d.random()),
    lambda d, i, o: pna(d, i, o, None),
    film,
)  # fmt: skip
"""Layers that take x [N, i] and edge_index."""
WEIGHTED: Sequence[Callable[[Draw, int, int], nn.Module]] = (
    lambda d, i, o: gcn(i, o, d.maybe(0.3), d.maybe(0.2), d.maybe(), d.maybe(0.8)),
    lambda d, i, o: pyg.GraphConv(i, o, aggr=d.plain_aggr(), bias=d.maybe()),
    lambda d, i, o: pyg.TAGConv(i, o, K=d.choice((1, 3)), normalize=d.maybe()),
    lambda d, i, o: pyg.SGConv(i, o, K=d.choice((1, 3)), add_self_loops=d.maybe()),
    lambda d, i, o: pyg.SSGConv(i, o, alpha=d.random(), K=2, add_self_loops=d.maybe()),
    lambda d, i, o: pyg.ARMAConv(i, o, num_stacks=d.choice((1, 2)), num_layers=2, shared_weights=d.maybe()),
    lambda d, i, o: pyg.LEConv(i, o, bias=d.maybe()),
    lambda d, i, o: pyg.ChebConv(i, o, K=d.choice((1, 3)), normalization=d.choice(("sym", "rw"))),
    lambda d, i, o: nn.Sequential(nn.Linear(i, o), pyg.APPNP(2, d.random(), add_self_loops=d.maybe())),
    lambda d, i, o: nn.Sequential(nn.Linear(i, o), pyg.LGConv(normalize=d.maybe())),
    lambda d, i, o: nn.Sequential(nn.Linear(i, o), pyg.SimpleConv(d.plain_aggr(), "sum")),
    lambda d, i, o: nn.Sequential(nn.Linear(i, o), pyg.WLConvContinuous()),
    lambda d, i, o: nn.Sequential(pyg.MixHopConv(i, o, powers=[0, 1, 2]), nn.Linear(3 * o, o)),
)
"""Layers that also take edge_weight [E]."""
FEATURED: Sequence[Callable[[Draw, int, int], nn.Module]] = (
    lambda d, i, o: pyg.GINEConv(mlp(i, o), edge_dim=EDGE_DIM, train_eps=d.maybe()),
    lambda d, i, o: pyg.GATConv(i, **heads(d, o), edge_dim=EDGE_DIM, fill_value=d.choice(("mean", 0.5))),
    lambda d, i, o: pyg.GATv2Conv(i, **heads(d, o), edge_dim=EDGE_DIM, add_self_loops=d.maybe()),
    lambda d, i, o: pyg.TransformerConv(i, **heads(d, o), edge_dim=EDGE_DIM, beta=d.maybe()),
    lambda d, i, o: nn.Sequential(nn.Linear(i, o), pyg.CGConv(o, EDGE_DIM, d.plain_aggr(), d.maybe())),
    lambda d, i, o: pyg.GENConv(i, o, edge_dim=EDGE_DIM, num_layers=1),
    lambda d, i, o: pyg.NNConv(i, o, mlp(EDGE_DIM, i * o), aggr=d.plain_aggr(), root_weight=d.maybe()),
    lambda d, i, o: pyg.GMMConv(i, o, EDGE_DIM, d.choice((1, 3)), d.maybe(), d.plain_aggr()),
    lambda d, i, o: pyg.PDNConv(i, o, EDGE_DIM, 8, add_self_loops=d.maybe(), normalize=d.maybe()),
    lambda d, i, o: pyg.ResGatedGraphConv(i, o, edge_dim=EDGE_DIM),
    lambda d, i, o: pyg.GeneralConv(i, o, in_edge_channels=EDGE_DIM, attention=d.maybe()),
    lambda d, i, o: pna(d, i, o, EDGE_DIM),
)
"""Layers that also take edge_attr [E, EDGE_DIM]."""
NORMS: Sequence[Callable[[Draw, int], nn.Module]] = (
    lambda d, w: pyg.BatchNorm(w),
    lambda d, w: nn.BatchNorm1d(w),
    lambda d, w: nn.LayerNorm(w),
    lambda d, w: pyg.LayerNorm(w, mode=d.choice(("node", "graph"))),
    lambda d, w: pyg.InstanceNorm(w, affine=d.maybe(), track_running_stats=d.maybe()),
    lambda d, w: pyg.GraphNorm(w),
    lambda d, w: pyg.PairNorm(scale_individually=d.maybe()),
    lambda d, w: pyg.MeanSubtractionNorm(),
    lambda d, w: pyg.DiffGroupNorm(w, groups=3),
    lambda d, w: pyg.GraphSizeNorm(),
)
READOUTS: Sequence[Callable[[Tensor, Tensor, int], Tensor]] = (
    pyg.global_mean_pool, pyg.global_add_pool, pyg.global_max_pool,
    lambda x, batch, size: torch.cat(
        [pyg.global_mean_pool(x, batch, size), pyg.global_max_pool(x, batch, size)], -1
    ),
)  # fmt: skip


class Spelling(nn.Module):
    """A layer written by hand, between linear layers to its width."""

    def __init__(self, d: Draw, i: int, o: int) -> None:
        super().__init__()
        self.first, self.layer, self.last = (
            nn.Linear(i, WIDTH),
            Spelled(d, d.choice(READS)),
            nn.Linear(WIDTH, o),
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x), edge_index))


class Block(nn.Module):
    """A layer, maybe a norm, an activation, maybe a skip."""

    def __init__(self, d: Draw, i: int, o: int) -> None:
        super().__init__()
        self.kind = d.choices(("plain", "weight", "attr", "spelled"), (5, 4, 3, 2))[0]
        layers = {"plain": PLAIN, "weight": WEIGHTED, "attr": FEATURED, "spelled": (Spelling,)}
        self.layer = d.choice(layers[self.kind])(d, i, o)
        self.norm = d.choice(NORMS)(d, o) if d.maybe(0.4) else None
        self.act = d.choice(ACTIVATIONS)
        self.skip = nn.Linear(i, o) if d.maybe(0.25) else None
        self.weighted = self.kind == "weight" and d.maybe()

    def forward(self, x: Tensor, g: "Graph") -> Tensor:
        extra = {"attr": (g.edge_attr,), "weight": (g.edge_weight,) if self.weighted else ()}
        out = x
        for layer in self.layer if isinstance(self.layer, nn.Sequential) else (self.layer,):
            own = isinstance(layer, nn.Linear)
            out = layer(out) if own else layer(out, g.edge_index, *extra.get(self.kind, ()))
        if self.norm is not None:
            takes_batch = isinstance(self.norm, NEED_BATCH)
            out = self.norm(out, g.batch, 2) if takes_batch else self.norm(out)
        out = self.act(out)
        return out if self.skip is None else out + self.skip(x)


NEED_BATCH = ()
"""Norms that get the batch vector: none, since PyG's ask for its largest value in Python."""


@dataclass
class Graph:
    """The arguments of a call behind x."""

    edge_index: Tensor
    edge_weight: Tensor
    edge_attr: Tensor
    batch: Tensor


class Model(nn.Module):
    """A model of one to three blocks and an end: per node, per graph, or over all layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        d = Draw(seed)
        torch.manual_seed(seed)
        widths = [d.choice(WIDTHS) for _ in range(d.choice((1, 2, 2, 3)) + 1)]
        self.features = widths[0]
        self.blocks = nn.ModuleList(Block(d, i, o) for i, o in zip(widths, widths[1:], strict=False))
        self.end = d.choice(("nodes", "nodes", "graphs", "all", "linear"))
        self.readout = d.choice(READOUTS)
        self.lin = nn.Linear(widths[-1], 7)
        for module in self.modules():
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2)

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor, batch: Tensor
    ) -> Tensor:
        g, rows = Graph(edge_index, edge_weight, edge_attr, batch), []
        for block in self.blocks:
            x = block(x, g)
            rows.append(x)
        match self.end:
            case "graphs":
                return self.readout(x, batch, 2)
            case "all":
                return torch.cat(rows, -1)
            case "linear":
                return self.lin(x)
        return x

    def __repr__(self) -> str:
        layers = [f"{block.layer} norm={block.norm} kind={block.kind}" for block in self.blocks]
        return f"{layers} end={self.end}"


GRAPHS: Sequence[tuple[str, Callable[[torch.Generator, int, int], Tensor]]] = (
    ("random", lambda g, n, e: torch.randint(n, (2, e), generator=g)),
    ("no edges", lambda g, n, e: torch.zeros(2, 0, dtype=torch.long)),
    ("isolated", lambda g, n, e: torch.randint(max(1, n // 3), (2, e), generator=g)),
    ("self loops", lambda g, n, e: torch.randint(n, (1, e), generator=g).expand(2, -1).contiguous()),
    ("duplicates", lambda g, n, e: torch.randint(n, (2, max(1, e // 6)), generator=g).repeat(1, 6)),
    ("hub", lambda g, n, e: torch.stack([torch.randint(n, (e,), generator=g), torch.zeros(e).long()])),
    ("star", lambda g, n, e: torch.stack([torch.zeros(e).long(), torch.randint(n, (e,), generator=g)])),
    ("loops and more", lambda g, n, e: torch.cat([torch.arange(n).expand(2, -1)[:, ::2],
                                                  torch.randint(n, (2, e), generator=g)], 1)),
)  # fmt: skip


def one_outlier(x: Tensor) -> Tensor:
    x = x.clone()
    x[x.shape[0] // 2, 0] = 1e3
    return x


VALUES: Sequence[tuple[str, Callable[[Tensor], Tensor]]] = (
    ("normal", lambda x: x),
    ("zeros", torch.zeros_like),
    ("zero rows", lambda x: x * (torch.arange(x.shape[0]) % 3 > 0).float()[:, None]),
    ("large", lambda x: x * 1e4),
    ("tiny", lambda x: x * 1e-6),
    ("outlier", one_outlier),
    ("rows of all sizes", lambda x: x * torch.logspace(-3, 3, x.shape[0])[:, None]),
    ("one sign", lambda x: x.abs() + 3),
)


def arguments(seed: int, features: int) -> tuple[str, tuple[Tensor, ...]]:
    """Return the kind of a graph, and (x, edge_index, edge_weight, edge_attr, batch)."""
    rng, g = random.Random(f"arguments {seed}"), torch.Generator().manual_seed(seed)
    nodes = rng.choice((1, 2, 13, 40, 90))
    shape, make = rng.choice(GRAPHS)
    values, change = rng.choice(VALUES)
    edge_index = make(g, nodes, rng.choice((1, 3 * nodes, 6 * nodes)))
    edges = edge_index.shape[1]
    x = change(torch.randn(nodes, features, generator=g))
    weight = torch.rand(edges, generator=g) + 0.1
    attr = torch.rand(edges, EDGE_DIM, generator=g)
    batch = (torch.arange(nodes) >= nodes // 2).long()
    return f"{shape}, {values}, {nodes} nodes", (x, edge_index, weight, attr, batch)
