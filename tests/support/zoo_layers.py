"""The layers of PyG beyond ``zoo``: edge features, relations, positions, dicts of node types.

Each is compiled as it comes, unmodified, between two plain layers of its own width where it takes
``(x, edge_index, ...)``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from zoo import FEATURES, Arguments, Entry, pooled, random_graph, weighted

EDGE_FEATURES = 4
RELATIONS = 3
HIDDEN = 16
TYPES = ("paper", "author")
RELATION_KEYS = (
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "rev_writes", "author"),
)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + 100)


def edge_features(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, edge_index, edge_attr [E, EDGE_FEATURES])``."""
    attr = torch.randn(edges, EDGE_FEATURES, generator=_generator(seed))
    return (*random_graph(nodes, edges, seed), attr), {}


def pseudo(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, edge_index, pseudo-coordinates [E, 2])``."""
    return (*random_graph(nodes, edges, seed), torch.rand(edges, 2, generator=_generator(seed))), {}


def relations(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, edge_index, edge_type)``."""
    types = torch.randint(RELATIONS, (edges,), generator=_generator(seed))
    return (*random_graph(nodes, edges, seed), types), {}


def positions(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, pos [N, 3], edge_index)``."""
    x, edge_index = random_graph(nodes, edges, seed)
    return (x, torch.randn(nodes, 3, generator=_generator(seed)), edge_index), {}


def normals(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, pos [N, 3], unit normal [N, 3], edge_index)``."""
    (x, pos, edge_index), _ = positions(nodes, edges, seed)
    normal = torch.randn(nodes, 3, generator=_generator(seed + 1))
    return (x, pos, torch.nn.functional.normalize(normal, dim=-1), edge_index), {}


def two_graphs(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, positive edges, negative edges)``."""
    x, first = random_graph(nodes, edges, seed)
    return (x, first, random_graph(nodes, edges, seed + 50)[1]), {}


def hyperedges(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, hyperedge_index, num_edges=nodes)``: as many hyperedges as nodes."""
    return random_graph(nodes, edges, seed), {"num_edges": nodes}


def atoms(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, edge_index, batch)`` with two graphs known to the model."""
    args, _ = pooled(nodes, edges, seed)
    return args, {}


def typed_nodes(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, edge_index, node_type, edge_type, edge_attr)``."""
    (x, edge_index, edge_type), _ = relations(nodes, edges, seed)
    node_type = torch.randint(2, (nodes,), generator=_generator(seed + 1))
    attr = torch.randn(edges, EDGE_FEATURES, generator=_generator(seed + 2))
    return (x, edge_index, node_type, edge_type, attr), {}


def dictionaries(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x_dict, edge_index_dict)``: ``nodes`` papers, two more authors."""
    generator = _generator(seed)
    counts = {"paper": nodes, "author": nodes + 2}
    x = {kind: torch.randn(counts[kind], FEATURES, generator=generator) for kind in TYPES}
    edge_index = {
        key: torch.stack(
            [torch.randint(counts[end], (edges + step,), generator=generator) for end in (key[0], key[2])]
        )
        for step, key in zip((0, 3, 5), RELATION_KEYS, strict=True)
    }
    if edges < 2:
        edge_index = {key: index[:, :edges] for key, index in edge_index.items()}
    return (x, edge_index), {}


class Between(nn.Module):
    """A linear layer, the convolution under test, a linear layer."""

    def __init__(self, conv: nn.Module, width: int = HIDDEN) -> None:
        super().__init__()
        self.first, self.conv, self.head = nn.Linear(FEATURES, HIDDEN), conv, nn.Linear(width, 5)

    def forward(self, x: Tensor, edge_index: Tensor, extra: Tensor | None = None) -> Tensor:
        x = self.first(x).relu()
        x = self.conv(x, edge_index) if extra is None else self.conv(x, edge_index, extra)
        return self.head(x.relu())


class OnPositions(nn.Module):
    """A convolution over points: features, positions, maybe normals."""

    def __init__(self, conv: nn.Module, width: int = HIDDEN) -> None:
        super().__init__()
        self.first, self.conv, self.head = nn.Linear(FEATURES, HIDDEN), conv, nn.Linear(width, 5)

    def forward(self, x: Tensor, pos: Tensor, *rest: Tensor) -> Tensor:
        return self.head(self.conv(self.first(x).relu(), pos, *rest).relu())


class Initial(nn.Module):
    """Layers that look back at the first features: GCN2, FA."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 5)
        self.convs = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = start = self.first(x).relu()
        for conv in self.convs:
            x = conv(x, start, edge_index).relu()
        return self.head(x)


class Signed(nn.Module):
    """Two signed convolutions over friends and foes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = pyg.SignedConv(FEATURES, 8, first_aggr=True)
        self.second = pyg.SignedConv(8, 8, first_aggr=False)

    def forward(self, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return self.second(self.first(x, positive, negative).relu(), positive, negative)


class Jumping(nn.Module):
    """DNA: attention of each layer over all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 5)
        self.convs = nn.ModuleList(pyg.DNAConv(HIDDEN, heads=2) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        steps = [self.first(x).relu()]
        for conv in self.convs:
            steps.append(conv(torch.stack(steps, 1), edge_index).relu())
        return self.head(steps[-1])


class Typed(nn.Module):
    """HEAT: types of nodes and edges, and edge features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.HEATConv(FEATURES, HIDDEN, 2, RELATIONS, 4, EDGE_FEATURES, 4, heads=2, concat=False)
        self.head = nn.Linear(HIDDEN, 5)

    def forward(
        self, x: Tensor, edge_index: Tensor, node_type: Tensor, edge_type: Tensor, edge_attr: Tensor
    ) -> Tensor:
        return self.head(self.conv(x, edge_index, node_type, edge_type, edge_attr).relu())


class Transformer(nn.Module):
    """GPS with a convolution inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 5)
        self.conv = pyg.GPSConv(HIDDEN, pyg.GCNConv(HIDDEN, HIDDEN), heads=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.head(self.conv(self.first(x).relu(), edge_index))


class Hetero(nn.Module):
    """Two layers over dicts of node types, then a head for papers."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList([make(FEATURES), make(HIDDEN)])
        self.head = nn.Linear(HIDDEN, 5)

    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]
    ) -> Tensor:
        for conv in self.convs:
            x_dict = {key: x.relu() for key, x in conv(x_dict, edge_index_dict).items()}
        return self.head(x_dict["paper"])


class Meta(nn.Module):
    """A graph network block with edge, node and global models."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * FEATURES + EDGE_FEATURES, 8), nn.ReLU())
        self.node = nn.Sequential(nn.Linear(FEATURES + 8, 8), nn.ReLU())
        self.layer = pyg.MetaLayer(self._edges, self._nodes)

    def _edges(self, src: Tensor, dst: Tensor, attr: Tensor, u: Any, batch: Any) -> Tensor:
        return self.edge(torch.cat([src, dst, attr], 1))

    def _nodes(self, x: Tensor, edge_index: Tensor, attr: Tensor, u: Any, batch: Any) -> Tensor:
        total = attr.new_zeros(x.shape[0], attr.shape[1]).index_add(0, edge_index[1], attr)
        return self.node(torch.cat([x, total], 1))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        x, edge_attr, _ = self.layer(x, edge_index, edge_attr)
        return x, edge_attr


class ReturnsAttention(nn.Module):
    """GAT that gives its attention weights back, in the caller's order of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GATConv(FEATURES, 8, heads=2, add_self_loops=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        out, (_, alpha) = self.conv(x, edge_index, return_attention_weights=True)
        return out, alpha


class GraphLevel(nn.Module):
    """GIN with a sum over each of three graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.gnn = pyg.models.GIN(FEATURES, HIDDEN, 3)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
        return self.head(pyg.global_add_pool(self.gnn(x, edge_index), batch, size=size))


def _mlp(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Linear(a, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, b))


def _attention_of_aggregators() -> nn.Module:
    sizes = {"in_channels": HIDDEN, "out_channels": HIDDEN, "num_heads": 2}
    several = pyg.MultiAggregation(["mean", "max", "std"], mode="attn", mode_kwargs=sizes)
    return pyg.SAGEConv(HIDDEN, HIDDEN, aggr=several)


def _layer(make: Callable[[], nn.Module], width: int = HIDDEN) -> Callable[[], nn.Module]:
    return lambda: Between(make(), width)


def _hetero_conv(width: int) -> nn.Module:
    def conv(key: tuple[str, str, str]) -> nn.Module:
        if key[0] == key[2]:
            return pyg.GCNConv(width, HIDDEN)
        return (
            pyg.SAGEConv((width, width), HIDDEN)
            if key[0] == "author"
            else pyg.GATConv((width, width), HIDDEN, add_self_loops=False)
        )

    return pyg.HeteroConv({key: conv(key) for key in RELATION_KEYS}, aggr="sum")


def _hgt(width: int) -> nn.Module:
    return pyg.HGTConv(width, HIDDEN, (list(TYPES), list(RELATION_KEYS)), heads=2)


def _han(width: int) -> nn.Module:
    return pyg.HANConv(width, HIDDEN, (list(TYPES), list(RELATION_KEYS)), heads=2)


def _to_hetero() -> nn.Module:
    model = pyg.models.GraphSAGE(FEATURES, HIDDEN, 2, 5)
    return pyg.to_hetero(model, (list(TYPES), list(RELATION_KEYS)))


def _pna(width: int = HIDDEN) -> nn.Module:
    degrees = torch.tensor([0, 3, 8, 10, 7, 2, 1])
    return pyg.PNAConv(
        width, width, ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"], degrees,
        towers=2, post_layers=1,
    )  # fmt: skip


def _degrees() -> Tensor:
    return torch.tensor([0, 3, 8, 10, 7, 2, 1])


LAYERS: dict[str, Entry] = {
    "simple-mean": Entry(_layer(lambda: pyg.SimpleConv("mean"))),
    "cheb": Entry(_layer(lambda: pyg.ChebConv(HIDDEN, HIDDEN, K=3))),
    "cheb-weighted": Entry(_layer(lambda: pyg.ChebConv(HIDDEN, HIDDEN, K=2)), weighted),
    "sage-min": Entry(_layer(lambda: pyg.SAGEConv(HIDDEN, HIDDEN, aggr="min"))),
    "sage-std": Entry(_layer(lambda: pyg.SAGEConv(HIDDEN, HIDDEN, aggr="std"))),
    "sage-three": Entry(_layer(lambda: pyg.SAGEConv(HIDDEN, HIDDEN, aggr=["mean", "max", "sum"]))),
    "sage-attention-of-aggregators": Entry(_layer(_attention_of_aggregators)),
    "sage-softmax": Entry(_layer(lambda: pyg.SAGEConv(HIDDEN, HIDDEN, aggr="softmax"))),
    "sage-powermean": Entry(_layer(lambda: pyg.SAGEConv(HIDDEN, HIDDEN, aggr="powermean"))),
    "sage-project": Entry(_layer(lambda: pyg.SAGEConv(HIDDEN, HIDDEN, project=True, normalize=True))),
    "gated-graph": Entry(_layer(lambda: pyg.GatedGraphConv(HIDDEN, 2))),
    "res-gated": Entry(_layer(lambda: pyg.ResGatedGraphConv(HIDDEN, HIDDEN))),
    "res-gated-edges": Entry(
        _layer(lambda: pyg.ResGatedGraphConv(HIDDEN, HIDDEN, edge_dim=EDGE_FEATURES)), edge_features
    ),
    "gat-edges": Entry(
        _layer(lambda: pyg.GATConv(HIDDEN, 8, heads=2, edge_dim=EDGE_FEATURES)), edge_features, True
    ),
    "gat-residual": Entry(_layer(lambda: pyg.GATConv(HIDDEN, 8, heads=2, residual=True)), attention=True),
    "gatv2-edges": Entry(
        _layer(lambda: pyg.GATv2Conv(HIDDEN, 8, heads=2, edge_dim=EDGE_FEATURES)), edge_features, True
    ),
    "transformer-edges": Entry(
        _layer(lambda: pyg.TransformerConv(HIDDEN, 8, heads=2, edge_dim=EDGE_FEATURES, beta=True)),
        edge_features,
        True,
    ),
    "attention-returned": Entry(ReturnsAttention, attention=True),
    "tag": Entry(_layer(lambda: pyg.TAGConv(HIDDEN, HIDDEN, K=3))),
    "gine": Entry(_layer(lambda: pyg.GINEConv(_mlp(HIDDEN, HIDDEN), edge_dim=EDGE_FEATURES)), edge_features),
    "arma": Entry(_layer(lambda: pyg.ARMAConv(HIDDEN, HIDDEN, num_stacks=2, num_layers=2))),
    "ssg": Entry(_layer(lambda: pyg.SSGConv(HIDDEN, HIDDEN, alpha=0.1, K=3))),
    "mf": Entry(_layer(lambda: pyg.MFConv(HIDDEN, HIDDEN, max_degree=4))),
    "rgcn": Entry(_layer(lambda: pyg.RGCNConv(HIDDEN, HIDDEN, RELATIONS)), relations),
    "rgcn-bases": Entry(_layer(lambda: pyg.RGCNConv(HIDDEN, HIDDEN, RELATIONS, num_bases=2)), relations),
    "rgcn-blocks": Entry(_layer(lambda: pyg.RGCNConv(HIDDEN, HIDDEN, RELATIONS, num_blocks=4)), relations),
    "fast-rgcn": Entry(_layer(lambda: pyg.FastRGCNConv(HIDDEN, HIDDEN, RELATIONS)), relations),
    "rgat": Entry(_layer(lambda: pyg.RGATConv(HIDDEN, HIDDEN, RELATIONS)), relations, True),
    "signed": Entry(Signed, two_graphs),
    "dna": Entry(Jumping),
    "gmm": Entry(_layer(lambda: pyg.GMMConv(HIDDEN, HIDDEN, dim=2, kernel_size=3)), pseudo),
    "nn": Entry(
        _layer(lambda: pyg.NNConv(HIDDEN, HIDDEN, _mlp(EDGE_FEATURES, HIDDEN * HIDDEN))), edge_features
    ),
    "cg": Entry(_layer(lambda: pyg.CGConv(HIDDEN, dim=EDGE_FEATURES)), edge_features),
    "edge": Entry(_layer(lambda: pyg.EdgeConv(_mlp(2 * HIDDEN, HIDDEN)))),
    "feast": Entry(_layer(lambda: pyg.FeaStConv(HIDDEN, HIDDEN, heads=3))),
    "le": Entry(_layer(lambda: pyg.LEConv(HIDDEN, HIDDEN)), weighted),
    "pna": Entry(_layer(_pna)),
    "pna-edges": Entry(
        _layer(
            lambda: pyg.PNAConv(
                HIDDEN, HIDDEN, ["mean", "max"], ["identity"], _degrees(), edge_dim=EDGE_FEATURES
            )
        ),
        edge_features,
    ),
    "cluster-gcn": Entry(_layer(lambda: pyg.ClusterGCNConv(HIDDEN, HIDDEN, diag_lambda=0.1))),
    "gen": Entry(_layer(lambda: pyg.GENConv(HIDDEN, HIDDEN, aggr="softmax", learn_t=True))),
    "gen-edges": Entry(_layer(lambda: pyg.GENConv(HIDDEN, HIDDEN, edge_dim=EDGE_FEATURES)), edge_features),
    "gen-powermean": Entry(_layer(lambda: pyg.GENConv(HIDDEN, HIDDEN, aggr="powermean"))),
    "gcn2": Entry(lambda: Initial(lambda: pyg.GCN2Conv(HIDDEN, alpha=0.1, theta=0.5, layer=1))),
    "fa": Entry(lambda: Initial(lambda: pyg.FAConv(HIDDEN))),
    "film": Entry(_layer(lambda: pyg.FiLMConv(HIDDEN, HIDDEN))),
    "film-relations": Entry(_layer(lambda: pyg.FiLMConv(HIDDEN, HIDDEN, num_relations=RELATIONS)), relations),
    "super-gat": Entry(
        _layer(lambda: pyg.SuperGATConv(HIDDEN, 8, heads=2, attention_type="MX")), attention=True
    ),
    "super-gat-sd": Entry(
        _layer(lambda: pyg.SuperGATConv(HIDDEN, 8, heads=2, attention_type="SD")), attention=True
    ),
    "eg": Entry(_layer(lambda: pyg.EGConv(HIDDEN, HIDDEN, aggregators=["sum", "symnorm", "max"]))),
    "pdn": Entry(_layer(lambda: pyg.PDNConv(HIDDEN, HIDDEN, EDGE_FEATURES, 8)), edge_features),
    "general": Entry(_layer(lambda: pyg.GeneralConv(HIDDEN, HIDDEN))),
    "general-attention": Entry(
        _layer(lambda: pyg.GeneralConv(HIDDEN, HIDDEN, EDGE_FEATURES, attention=True, heads=2)), edge_features
    ),
    "lg": Entry(_layer(pyg.LGConv)),
    "point-net": Entry(
        lambda: OnPositions(pyg.PointNetConv(_mlp(HIDDEN + 3, HIDDEN), _mlp(HIDDEN, HIDDEN))), positions
    ),
    "point-transformer": Entry(lambda: OnPositions(pyg.PointTransformerConv(HIDDEN, HIDDEN)), positions),
    "point-gnn": Entry(
        lambda: OnPositions(pyg.PointGNNConv(_mlp(HIDDEN, 3), _mlp(HIDDEN + 3, 8), _mlp(8, HIDDEN))),
        positions,
    ),
    "ppf": Entry(lambda: OnPositions(pyg.PPFConv(_mlp(HIDDEN + 4, HIDDEN))), normals),
    "gps": Entry(Transformer),
    "anti-symmetric": Entry(_layer(lambda: pyg.AntiSymmetricConv(HIDDEN, num_iters=2))),
    "dir-gnn": Entry(_layer(lambda: pyg.DirGNNConv(pyg.SAGEConv(HIDDEN, HIDDEN)))),
    "mix-hop": Entry(_layer(lambda: pyg.MixHopConv(HIDDEN, HIDDEN, powers=[0, 1, 2]), 3 * HIDDEN)),
    "hypergraph": Entry(lambda: pyg.HypergraphConv(FEATURES, HIDDEN), hyperedges),
    "wl-continuous": Entry(pyg.WLConvContinuous),
    "heat": Entry(Typed, typed_nodes),
    "hetero-conv": Entry(lambda: Hetero(_hetero_conv), dictionaries),
    "hgt": Entry(lambda: Hetero(_hgt), dictionaries),
    "han": Entry(lambda: Hetero(_han), dictionaries),
    "to-hetero": Entry(_to_hetero, dictionaries),
    "meta-layer": Entry(Meta, edge_features),
    "graph-level": Entry(GraphLevel, pooled),
    "models.PNA": Entry(
        lambda: pyg.models.PNA(
            FEATURES,
            HIDDEN,
            2,
            5,
            aggregators=["mean", "min", "max", "std"],
            scalers=["identity", "amplification"],
            deg=_degrees(),
        )
    ),
    "models.EdgeCNN": Entry(lambda: pyg.models.EdgeCNN(FEATURES, HIDDEN, 2, 5)),
    "models.AttentiveFP": Entry(
        lambda: pyg.models.AttentiveFP(FEATURES, HIDDEN, 5, EDGE_FEATURES, 2, 2),
        lambda n, e, s=0: _molecules(n, e, s),
    ),
    "models.PMLP": Entry(lambda: pyg.models.PMLP(FEATURES, HIDDEN, 5, 2)),
    "deep-gcn": Entry(
        _layer(
            lambda: pyg.DeepGCNLayer(
                pyg.GENConv(HIDDEN, HIDDEN), pyg.LayerNorm(HIDDEN, mode="node"), nn.ReLU()
            )
        )
    ),
}


def _molecules(nodes: int, edges: int, seed: int = 0) -> Arguments:
    """Return the arguments ``(x, edge_index, edge_attr, batch)``."""
    (x, edge_index, attr), _ = edge_features(nodes, edges, seed)
    return (x, edge_index, attr, torch.zeros(nodes, dtype=torch.long)), {}
