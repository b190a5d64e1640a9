"""Layers whose message is a network on edges, as those of molecules, meshes and point clouds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.utils import scatter

WIDTH, FEATURES, HEADS, RELATIONS, VECTORS = 64, 16, 4, 4, 16


def random_edges(kind: str, nodes: int) -> Tensor:
    """Return no edges ("none"), 700 random ones ("plain"), or such with a hub at either end ("hub")."""
    torch.manual_seed(1)
    if kind == "none":
        return torch.zeros(2, 0, dtype=torch.long)
    edge_index = torch.randint(nodes, (2, 700))
    if kind == "hub":
        edge_index[1, :500] = 3
        edge_index[0, :300] = 7
    return edge_index


def mlp(inputs: int, out: int = WIDTH, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return two linear layers with an activation between."""
    return nn.Sequential(nn.Linear(inputs, WIDTH), activation(), nn.Linear(WIDTH, out))


def pna() -> nn.Module:
    """Return PNA with four aggregators and three scalers."""
    scalers = ["identity", "amplification", "attenuation"]
    return pyg.PNAConv(WIDTH, WIDTH, ["mean", "min", "max", "std"], scalers, torch.ones(40, dtype=torch.long))


class MeshBlock(nn.Module):
    """Block of MeshGraphNet: edge states, then node states, each by an MLP with a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.edge_norm = mlp(3 * WIDTH), nn.LayerNorm(WIDTH)
        self.node, self.node_norm = mlp(2 * WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new states of nodes and edges."""
        src, dst = edge_index
        edges = edges + self.edge_norm(self.edge(torch.cat([x[dst], x[src], edges], 1)))
        received = scatter(edges, dst, dim=0, dim_size=x.shape[0], reduce="sum")
        return x + self.node_norm(self.node(torch.cat([x, received], 1))), edges


class MeshGraphNet(nn.Module):
    """Encoder, two blocks and decoder of a mesh network."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([MeshBlock(), MeshBlock()])
        self.decode = mlp(WIDTH, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return three values of each node."""
        edges = self.encode(edge_attr)
        for block in self.blocks:
            x, edges = block(x, edge_index, edges)
        return self.decode(x)


class EgnnBlock(nn.Module):
    """Layer of EGNN: messages of features and distances move both the features and the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.message = mlp(2 * WIDTH + 1 + FEATURES, activation=nn.SiLU)
        self.move = mlp(WIDTH, 1, nn.SiLU)
        self.node = mlp(2 * WIDTH, activation=nn.SiLU)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new features and positions."""
        src, dst = edge_index
        offset = pos[dst] - pos[src]
        distance = offset.square().sum(1, keepdim=True)
        message = torch.nn.functional.silu(self.message(torch.cat([x[dst], x[src], distance, edge_attr], 1)))
        step = offset / (distance + 1e-8).sqrt() * self.move(message)
        pos = pos + scatter(step, dst, dim=0, dim_size=x.shape[0], reduce="mean")
        received = scatter(message, dst, dim=0, dim_size=x.shape[0], reduce="sum")
        return x + self.node(torch.cat([x, received], 1)), pos


class GvpLayer(nn.Module):
    """Message passing by a geometric vector perceptron: scalars and vectors, gated by each other's norms."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * VECTORS + 1, VECTORS, bias=False)
        self.scalars = nn.Linear(2 * WIDTH + FEATURES + VECTORS, WIDTH)
        self.vectors = nn.Linear(VECTORS, VECTORS, bias=False)
        self.gate = nn.Linear(WIDTH, VECTORS)

    def forward(
        self, x: Tensor, vectors: Tensor, pos: Tensor, edge_index: Tensor, edge_attr: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the new scalars [N, F] and vectors [N, 3, V]."""
        src, dst = edge_index
        offset = pos[dst] - pos[src]
        hidden = self.mix(torch.cat([vectors[dst], vectors[src], offset.unsqueeze(2)], 2))
        norms = (hidden.square().sum(1) + 1e-8).sqrt()
        scalars = self.scalars(torch.cat([x[dst], x[src], edge_attr, norms], 1)).relu()
        out = self.vectors(hidden) * self.gate(scalars).sigmoid().unsqueeze(1)
        return (
            x + scatter(scalars, dst, dim=0, dim_size=x.shape[0], reduce="mean"),
            vectors + scatter(out, dst, dim=0, dim_size=x.shape[0], reduce="mean"),
        )


class CompGcn(nn.Module):
    """Layer of CompGCN: neighbors minus the embedding of the relation, by a weight for each direction."""

    def __init__(self) -> None:
        super().__init__()
        self.relations = nn.Parameter(torch.randn(RELATIONS, WIDTH))
        self.into, self.out, self.loop, self.relation = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new features of nodes and relations."""
        src, dst = edge_index
        relation, nodes = self.relations[edge_type], x.shape[0]
        into = scatter(self.into(x[src] - relation), dst, dim=0, dim_size=nodes, reduce="mean")
        out = scatter(self.out(x[dst] - relation), src, dim=0, dim_size=nodes, reduce="mean")
        return torch.tanh((into + out + self.loop(x)) / 3), self.relation(self.relations)


@dataclass(frozen=True, slots=True)
class EdgeLayer:
    """A layer and its arguments.

    Attributes:
        build: returns the layer.
        arguments: names of the arguments behind x, in order; see ``arguments_of``.
    """

    build: Callable[[], nn.Module]
    arguments: tuple[str, ...] = ("edge_index",)


_ATTR = ("edge_index", "edge_attr")


def attention(conv: Any, heads: int, **options: Any) -> Callable[[], nn.Module]:
    """Return a function that makes a layer of attention, as wide as its input."""
    return lambda: conv(WIDTH, WIDTH // heads, heads=heads, **options)


EDGE_LAYERS: dict[str, EdgeLayer] = {
    "GATv2": EdgeLayer(attention(pyg.GATv2Conv, HEADS)),
    "Transformer + edges": EdgeLayer(attention(pyg.TransformerConv, HEADS, edge_dim=FEATURES), _ATTR),
    "GINE": EdgeLayer(lambda: pyg.GINEConv(mlp(WIDTH), edge_dim=FEATURES), _ATTR),
    "EdgeConv": EdgeLayer(lambda: pyg.EdgeConv(mlp(2 * WIDTH))),
    "CG": EdgeLayer(lambda: pyg.CGConv(WIDTH, dim=FEATURES), _ATTR),
    "PNA": EdgeLayer(pna),
    "MeshGraphNet": EdgeLayer(MeshGraphNet, _ATTR),
    "EGNN": EdgeLayer(EgnnBlock, ("pos", *_ATTR)),
    "GVP": EdgeLayer(GvpLayer, ("vectors", "pos", *_ATTR)),
    "CompGCN": EdgeLayer(CompGcn, ("edge_index", "edge_type")),
}
"""Layers of width 64 with 16 edge features, by name."""


def arguments_of(layer: EdgeLayer, nodes: int, edges: int) -> dict[str, Tensor]:
    """Return random arguments of a layer, by name, in order."""
    drawn = {
        "edge_index": lambda: torch.randint(nodes, (2, edges)),
        "edge_attr": lambda: torch.randn(edges, FEATURES),
        "edge_type": lambda: torch.randint(RELATIONS, (edges,)),
        "pos": lambda: torch.randn(nodes, 3),
        "vectors": lambda: torch.randn(nodes, 3, VECTORS),
    }
    return {"x": torch.randn(nodes, WIDTH), **{name: drawn[name]() for name in layer.arguments}}
