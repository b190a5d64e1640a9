"""Graphs with several types of nodes and edges."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from slow import slow_but
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from training_forms import CLASSES, HIDDEN, Compile, Form, check, check_documented, descend

Tensors = dict[Any, Tensor]
COUNTS = {"paper": 40, "author": 25}
WIDTHS = {"paper": 8, "author": 5}
RELATIONS = [("author", "writes", "paper"), ("paper", "rev_writes", "author"), ("paper", "cites", "paper")]


def made() -> tuple[Tensors, Tensors, Tensor]:
    """Return features and edges by type, and classes of the papers that depend on both."""
    generator = torch.Generator().manual_seed(0)
    x = {kind: torch.randn(count, WIDTHS[kind], generator=generator) for kind, count in COUNTS.items()}
    edges = {
        key: torch.stack([torch.randint(COUNTS[key[end]], (90,), generator=generator) for end in (0, 2)])
        for key in RELATIONS
    }
    writes = edges["author", "writes", "paper"]
    heard = torch.zeros(COUNTS["paper"], 3).index_add(0, writes[1], x["author"][writes[0], :3])
    return x, edges, (x["paper"][:, :3] + heard).argmax(1)


X, EDGES, Y = made()
PAPERS = torch.arange(COUNTS["paper"]) % 2 == 0


class Convolutions(nn.Module):
    """Layers of a convolution for each relation, and a linear layer for papers."""

    def __init__(self, make: Callable[[tuple[str, str, str]], nn.Module], aggr: str = "sum") -> None:
        super().__init__()
        layers = [pyg.HeteroConv({key: make(key) for key in RELATIONS}, aggr=aggr) for _ in range(2)]
        self.convs, self.lin = nn.ModuleList(layers), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensors, edges: Tensors) -> Tensor:
        for conv in self.convs:
            x = {kind: F.leaky_relu(value) for kind, value in conv(x, edges).items()}
        return self.lin(x["paper"])


def mixed(key: tuple[str, str, str]) -> nn.Module:
    if key[0] == key[2]:
        return pyg.GCNConv(-1, HIDDEN)
    if key[0] == "author":
        return pyg.SAGEConv((-1, -1), HIDDEN)
    return pyg.GATConv((-1, -1), HIDDEN, add_self_loops=False)


class Transformer(nn.Module):
    """HGT: heterogeneous attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lins = nn.ModuleDict({kind: nn.Linear(width, HIDDEN) for kind, width in WIDTHS.items()})
        self.conv = pyg.HGTConv(HIDDEN, HIDDEN, (list(COUNTS), RELATIONS), heads=2)
        self.lin = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensors, edges: Tensors) -> Tensor:
        x = {kind: self.lins[kind](value).relu() for kind, value in x.items()}
        return self.lin(self.conv(x, edges)["paper"])


class Han(nn.Module):
    """Attention over nodes, then over relations."""

    def __init__(self) -> None:
        super().__init__()
        metadata = list(COUNTS), RELATIONS
        self.conv1 = pyg.HANConv(WIDTHS, HIDDEN, metadata, heads=2, dropout=0.2)
        self.conv2 = pyg.HANConv(HIDDEN, HIDDEN, metadata, heads=2)  # a mask for authors would be unused
        self.lin = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensors, edges: Tensors) -> Tensor:
        return self.lin(self.conv2(self.conv1(x, edges), edges)["paper"])


class Sage(nn.Module):
    """Homogeneous model that ``to_hetero`` rewrites."""

    def __init__(self, width: int = -1) -> None:
        super().__init__()
        self.conv1, self.conv2 = pyg.SAGEConv((width, width), HIDDEN), pyg.SAGEConv((HIDDEN, HIDDEN), CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


class Gat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GATConv((-1, -1), HIDDEN, add_self_loops=False)
        self.lin, self.out = pyg.Linear(-1, HIDDEN), pyg.Linear(-1, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.out((self.conv(x, edge_index) + self.lin(x)).relu())


def hetero(make: Callable[[], nn.Module], with_bases: bool = False) -> Callable[[], nn.Module]:
    metadata = list(COUNTS), RELATIONS
    if with_bases:
        options = {"in_channels": {"x": 16}, "num_bases": 2}
        return lambda: Widened(pyg.to_hetero_with_bases(make(), metadata, **options))
    return lambda: pyg.to_hetero(make(), metadata, aggr="sum")


class Widened(nn.Module):
    """Features of all types, made equally wide before the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.lins = nn.ModuleDict({kind: nn.Linear(width, 16) for kind, width in WIDTHS.items()})
        self.model = model

    def forward(self, x: Tensors, edges: Tensors) -> Tensors:
        return self.model({kind: self.lins[kind](value) for kind, value in x.items()}, edges)


class Links(nn.Module):
    """``to_hetero`` encoder and a perceptron that scores pairs of authors and papers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = pyg.to_hetero(Sage(), (list(COUNTS), RELATIONS), aggr="sum")
        self.lin1, self.lin2 = nn.Linear(2 * CLASSES, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensors, edges: Tensors, pairs: Tensor) -> Tensor:
        z = self.encoder(x, edges)
        found = torch.cat([z["author"][pairs[0]], z["paper"][pairs[1]]], dim=-1)
        return self.lin2(self.lin1(found).relu()).view(-1)


def ready(model: nn.Module, *arguments: Any) -> nn.Module:
    """Let the lazy layers of a model get their parameters, as PyG's examples do."""
    with torch.no_grad():
        model(*arguments)
    return model


def classify(make: Callable[[], nn.Module]) -> Callable[[Compile], Iterator[float]]:
    def loop(compiled: Compile) -> Iterator[float]:
        call = compiled(ready(make(), X, EDGES))

        def loss() -> Tensor:
            out = call(X, EDGES)
            papers = out if isinstance(out, Tensor) else out["paper"]
            return F.cross_entropy(papers[PAPERS], Y[PAPERS])

        return descend(call, loss)

    return loop


def links(compiled: Compile) -> Iterator[float]:
    """Fit ratings of pairs, as PyG's example for movies does."""
    pairs = EDGES["author", "writes", "paper"]
    ratings = torch.rand(pairs.shape[1], generator=torch.Generator().manual_seed(1)) * 5
    call = compiled(ready(Links(), X, EDGES, pairs))
    return descend(call, lambda: F.mse_loss(call(X, EDGES, pairs), ratings))


class OfHeteroData(nn.Module):
    """Model that takes a ``HeteroData``."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Convolutions(mixed)

    def forward(self, data: HeteroData) -> Tensor:
        return self.model(data.x_dict, data.edge_index_dict)


def data_object(compiled: Compile) -> Iterator[float]:
    data = HeteroData()
    for kind, value in X.items():
        data[kind].x = value
    for key, edge_index in EDGES.items():
        data[key].edge_index = edge_index
    call = compiled(ready(OfHeteroData(), data))
    return descend(call, lambda: F.cross_entropy(call(data)[PAPERS], Y[PAPERS]))


class Bipartite(nn.Module):
    """Authors to papers and back, over pairs of features (bipartite SAGE)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = pyg.SAGEConv((WIDTHS["author"], WIDTHS["paper"]), HIDDEN)
        self.down = pyg.SAGEConv((HIDDEN, WIDTHS["author"]), HIDDEN)
        self.out = pyg.GATv2Conv((HIDDEN, HIDDEN), CLASSES, add_self_loops=False)

    def forward(self, x: Tensors, edges: Tensors) -> Tensor:
        writes, back = edges["author", "writes", "paper"], edges["paper", "rev_writes", "author"]
        papers = self.up((x["author"], x["paper"]), writes).relu()
        authors = self.down((papers, x["author"]), back).relu()
        return self.out((authors, papers), writes)


FORMS: dict[str, Form] = {
    "to-hetero": Form(classify(hetero(Sage))),
    "to-hetero-gat": Form(classify(hetero(Gat))),
    "to-hetero-bases": Form(classify(hetero(lambda: Sage(16), True))),
    "hetero-conv": Form(classify(lambda: Convolutions(mixed))),
    "hetero-mean": Form(classify(lambda: Convolutions(lambda _: pyg.SAGEConv((-1, -1), HIDDEN), "mean"))),
    "hgt": Form(classify(Transformer)),
    "han": Form(classify(Han)),
    "bipartite": Form(classify(Bipartite)),
    "hetero-links": Form(links),
    "hetero-data": Form(data_object),
}


@pytest.mark.parametrize("name", slow_but(("to-hetero",), list(FORMS)))
def test_losses_are_those_of_eager(name: str) -> None:
    check(FORMS[name])


def test_the_page_lists_these_forms() -> None:
    check_documented("Types of nodes and edges", FORMS)
