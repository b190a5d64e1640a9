"""Link prediction, graph autoencoders and other embeddings of nodes that no labels train."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from slow import slow_but
from torch import Tensor, nn
from torch_geometric.utils import negative_sampling, structured_negative_sampling
from training_forms import (
    EDGES,
    FEATURES,
    HIDDEN,
    NODES,
    STEPS,
    TYPES,
    Compile,
    Form,
    X,
    check,
    check_documented,
    descend,
    mlp,
)

KNOWN, HELD = EDGES[:, ::2], EDGES[:, 1::2]
"""Edges that messages take, and edges to predict."""


class Encoder(nn.Module):
    """Two GCN layers."""

    def __init__(self, conv: Any = pyg.GCNConv) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(FEATURES, HIDDEN), conv(HIDDEN, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


class Variational(nn.Module):
    """GCN layers for means and deviations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(FEATURES, HIDDEN)
        self.mean, self.deviation = pyg.GCNConv(HIDDEN, 4), pyg.GCNConv(HIDDEN, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x, edge_index).relu()
        return self.mean(x, edge_index), self.deviation(x, edge_index)


class Predictor(nn.Module):
    """Model of PyG's link prediction: methods encode and decode; forward scores pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def encode(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.encoder(x, edge_index)

    def decode(self, z: Tensor, pairs: Tensor) -> Tensor:
        return (z[pairs[0]] * z[pairs[1]]).sum(-1)

    def forward(self, x: Tensor, edge_index: Tensor, pairs: Tensor) -> Tensor:
        return self.decode(self.encode(x, edge_index), pairs)


def sampled_pairs() -> tuple[Tensor, Tensor]:
    """Return held edges with as many negative ones, and their labels."""
    negative = negative_sampling(EDGES, NODES, HELD.shape[1])
    labels = torch.cat([torch.ones(HELD.shape[1]), torch.zeros(negative.shape[1])])
    return torch.cat([HELD, negative], 1), labels


def in_forward(compiled: Compile) -> Iterator[float]:
    """Score positive edges, and negative ones that are new in each step, in forward."""
    call = compiled(Predictor())

    def loss() -> Tensor:
        pairs, labels = sampled_pairs()
        return F.binary_cross_entropy_with_logits(call(X, KNOWN, pairs), labels)

    return descend(call, loss)


def by_methods(compiled: Compile) -> Iterator[float]:
    """Call encode and decode of the compiled model, as PyG's example does."""
    call = compiled(Predictor())

    def loss() -> Tensor:
        z = call.encode(X, KNOWN)
        pairs, labels = sampled_pairs()
        return F.binary_cross_entropy_with_logits(call.decode(z, pairs).view(-1), labels)

    return descend(call, loss)


def pair_perceptron(compiled: Compile) -> Iterator[float]:
    """Train a compiled GNN and an eager MLP of pairs by one optimizer."""
    call, head = compiled(Encoder(pyg.SAGEConv)), mlp(4, 1)
    parameters = nn.ModuleList([call, head]).parameters()
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        z = call(X, KNOWN)
        pairs, labels = sampled_pairs()
        out = head(z[pairs[0]] * z[pairs[1]]).view(-1)
        value = F.binary_cross_entropy_with_logits(out, labels)
        value.backward()
        optimizer.step()
        yield value.item()


def gae(compiled: Compile) -> Iterator[float]:
    call = compiled(pyg.GAE(Encoder()))
    return descend(call, lambda: call.recon_loss(call.encode(X, KNOWN), HELD))


def compiled_encoder(model: Callable[[nn.Module], Any], encoder: Callable[[], nn.Module]) -> Any:
    """Return the loop of an autoencoder around a compiled encoder."""

    def loop(compiled: Compile) -> Iterator[float]:
        owner = model(compiled(encoder()))
        kl = (lambda: owner.kl_loss() / NODES) if hasattr(owner, "kl_loss") else (lambda: torch.zeros(()))

        def loss() -> Tensor:
            z = owner.encode(X, KNOWN)
            return owner.recon_loss(z, HELD) + kl()

        return descend(owner, loss)

    return loop


def vgae(compiled: Compile) -> Iterator[float]:
    call = compiled(pyg.VGAE(Variational()))

    def loss() -> Tensor:
        z = call.encode(X, KNOWN)
        return call.recon_loss(z, HELD) + call.kl_loss() / NODES

    return descend(call, loss)


def adversarial(make: Callable[[nn.Module, nn.Module], Any], inside: bool) -> Any:
    """Return the loop of an adversarial autoencoder, compiled whole, or with a compiled encoder."""

    def loop(compiled: Compile) -> Iterator[float]:
        judge = mlp(4, 1)
        if inside:
            model = make(compiled(Variational()), judge)
        else:
            model = compiled(make(Variational(), judge))
        ours = torch.optim.Adam(model.encoder.parameters(), lr=0.005)
        theirs = torch.optim.Adam(model.discriminator.parameters(), lr=0.001)
        model.train()
        for _ in range(STEPS):
            ours.zero_grad()
            z = model.encode(X, KNOWN)
            for _ in range(2):
                theirs.zero_grad()
                model.discriminator_loss(z).backward()
                theirs.step()
            value = model.recon_loss(z, HELD) + model.reg_loss(z) + model.kl_loss() / NODES
            value.backward()
            ours.step()
            yield value.item()

    return loop


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = pyg.GCNConv(FEATURES, HIDDEN), nn.PReLU(HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.act(self.conv(x, edge_index))


def shuffled(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    return x[torch.randperm(x.shape[0])], edge_index


def mean_of(z: Tensor, *_: Any, **__: Any) -> Tensor:
    return z.mean(dim=0).sigmoid()


def infomax(compiled: Compile) -> Iterator[float]:
    """DGI: forward embeds the graph and a shuffled one; the loss is a method."""
    call = compiled(pyg.DeepGraphInfomax(HIDDEN, Embedder(), mean_of, shuffled))
    return descend(call, lambda: call.loss(*call(X, EDGES)))


def contrast(compiled: Compile) -> Iterator[float]:
    """Two views of a graph with dropped features and edges are to agree (GRACE)."""
    call = compiled(Encoder())

    def view() -> Tensor:
        kept = torch.rand(EDGES.shape[1]) > 0.2
        return F.normalize(call(F.dropout(X, 0.2), EDGES[:, kept]))

    def loss() -> Tensor:
        return F.cross_entropy(view() @ view().t() / 0.5, torch.arange(NODES))

    return descend(call, loss)


def unsupervised_sage(compiled: Compile) -> Iterator[float]:
    """Neighbors are to be near, random nodes far."""
    call = compiled(pyg.models.GraphSAGE(FEATURES, HIDDEN, 2))

    def loss() -> Tensor:
        z = call(X, EDGES)
        start, near, far = structured_negative_sampling(EDGES, NODES)
        close, apart = (z[start] * z[near]).sum(-1), (z[start] * z[far]).sum(-1)
        return -(F.logsigmoid(close).mean() + F.logsigmoid(-apart).mean())

    return descend(call, loss)


def light_gcn(compiled: Compile) -> Iterator[float]:
    """Rank pairs by embeddings; the loss is a method of the model."""
    call = compiled(pyg.models.LightGCN(NODES, HIDDEN, 2))

    def loss() -> Tensor:
        negative = torch.stack([HELD[0], torch.randint(NODES, (HELD.shape[1],))])
        ranks = call(KNOWN, torch.cat([HELD, negative], 1))
        return call.recommendation_loss(*ranks.chunk(2), node_id=HELD.unique())

    return descend(call, loss)


def signed(compiled: Compile) -> Iterator[float]:
    """Positive and negative edges; the loss is a method with samples of its own."""
    call = compiled(pyg.SignedGCN(FEATURES, HIDDEN, 2, lamb=5))
    return descend(call, lambda: call.loss(call(X, KNOWN, HELD), KNOWN, HELD))


class Relations(nn.Module):
    """R-GCN on embeddings, and a DistMult score for each relation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NODES, HIDDEN)
        self.conv = pyg.RGCNConv(HIDDEN, HIDDEN, 3, num_blocks=4)
        self.relation = nn.Parameter(torch.randn(3, HIDDEN))

    def forward(self, edge_index: Tensor, kinds: Tensor, pairs: Tensor, pair_kinds: Tensor) -> Tensor:
        z = F.dropout(self.conv(self.table.weight, edge_index, kinds).relu(), 0.2, self.training)
        return (z[pairs[0]] * self.relation[pair_kinds] * z[pairs[1]]).sum(1)


def relational_links(compiled: Compile) -> Iterator[float]:
    call = compiled(Relations())
    kinds = TYPES[1::2]

    def loss() -> Tensor:
        pairs, labels = sampled_pairs()
        chosen = torch.cat([kinds, kinds])[: pairs.shape[1]]
        return F.binary_cross_entropy_with_logits(call(KNOWN, TYPES[::2], pairs, chosen), labels)

    return descend(call, loss)


def knowledge_graph(compiled: Compile) -> Iterator[float]:
    """TransE: the loss is a method that samples tails or heads, and calls forward twice."""
    call = compiled(pyg.TransE(NODES, 3, HIDDEN))
    return descend(call, lambda: call.loss(HELD[0], TYPES[1::2], HELD[1]), lr=0.05)


FORMS: dict[str, Form] = {
    "link-prediction": Form(in_forward),
    "link-prediction-methods": Form(by_methods, methods=("encode", "decode")),
    "link-prediction-mlp": Form(pair_perceptron),
    "gae": Form(gae, methods=("encode", "recon_loss")),
    "gae-compiled-encoder": Form(compiled_encoder(pyg.GAE, Encoder)),
    "vgae": Form(vgae, methods=("encode", "recon_loss", "kl_loss")),
    "vgae-compiled-encoder": Form(compiled_encoder(pyg.VGAE, Variational)),
    "argva": Form(adversarial(pyg.ARGVA, inside=False), methods=("encode", "discriminator_loss", "reg_loss")),
    "argva-compiled-encoder": Form(adversarial(pyg.ARGVA, inside=True)),
    "infomax": Form(infomax),
    "contrast": Form(contrast),
    "unsupervised-sage": Form(unsupervised_sage),
    "light-gcn": Form(light_gcn),
    "signed-gcn": Form(signed),
    "rgcn-links": Form(relational_links),
    "trans-e": Form(knowledge_graph, methods=("loss",)),
}


@pytest.mark.parametrize("name", slow_but(("link-prediction", "gae"), list(FORMS)))
def test_losses_are_those_of_eager(name: str) -> None:
    check(FORMS[name])


def test_the_page_lists_these_forms() -> None:
    check_documented("Links and embeddings", FORMS)
