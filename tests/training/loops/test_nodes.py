"""Classification of nodes, as PyG's examples train it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from slow import slow_but
from torch import Tensor, nn
from torch_2_11 import OTHER_DRAWS_IN_2_11
from torch_geometric.utils import dropout_edge
from training_forms import (
    ATTRIBUTES,
    CLASSES,
    EDGES,
    FEATURES,
    HIDDEN,
    NODES,
    STEPS,
    TRAIN,
    TYPES,
    WEIGHT,
    Compile,
    Form,
    Loop,
    X,
    Y,
    check,
    check_documented,
    descend,
    mlp,
)


class Net(nn.Module):
    """Two convolutions with an activation and dropout between them."""

    def __init__(self, first: nn.Module, second: nn.Module, act: Any = F.relu, p: float = 0.5) -> None:
        super().__init__()
        self.first, self.second, self.act, self.p = first, second, act, p

    def forward(self, x: Tensor, edge_index: Tensor, *extra: Tensor) -> Tensor:
        x = F.dropout(x, self.p, self.training)
        x = self.act(self.first(x, edge_index, *extra))
        x = F.dropout(x, self.p, self.training)
        return F.log_softmax(self.second(x, edge_index, *extra), dim=1)


def nll(out: Tensor) -> Tensor:
    return F.nll_loss(out[TRAIN], Y[TRAIN])


def fit(compiled: Compile, model: nn.Module, *extra: Tensor) -> Iterator[float]:
    call = compiled(model)
    return descend(call, lambda: nll(call(X, EDGES, *extra)))


def layers(make: Callable[[int, int], nn.Module], *extra: Tensor, act: Any = F.relu) -> Form:
    """Return the form that trains two layers of a kind."""

    def loop(compiled: Compile) -> Iterator[float]:
        return fit(compiled, Net(make(FEATURES, HIDDEN), make(HIDDEN, CLASSES), act), *extra)

    return Form(loop)


def net(make: Callable[[], nn.Module], *extra: Tensor) -> Form:
    return Form(lambda compiled: fit(compiled, make(), *extra))


def refused(form: Form, error: str) -> Form:
    return Form(form.loop, error)


def gat(compiled: Compile) -> Iterator[float]:
    first = pyg.GATConv(FEATURES, 4, heads=2, dropout=0.6)
    second = pyg.GATConv(8, CLASSES, heads=1, concat=False, dropout=0.6)
    return fit(compiled, Net(first, second, F.elu, 0.6))


class Propagated(nn.Module):
    """Linear layers before a propagation."""

    def __init__(self, propagate: nn.Module) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.propagate = propagate

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, 0.5, self.training)
        x = self.lin2(F.dropout(self.lin1(x).relu(), 0.5, self.training))
        return F.log_softmax(self.propagate(x, edge_index), dim=1)


class Agnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.prop1, self.prop2 = pyg.AGNNConv(requires_grad=False), pyg.AGNNConv(requires_grad=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin1(F.dropout(x, training=self.training)).relu()
        x = self.prop2(self.prop1(x, edge_index), edge_index)
        return F.log_softmax(self.lin2(F.dropout(x, training=self.training)), dim=1)


class Dna(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.convs = nn.ModuleList(pyg.DNAConv(HIDDEN, 2, groups=2, dropout=0.3) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin1(x).relu()
        found = x.view(-1, 1, HIDDEN)
        for conv in self.convs:
            found = torch.cat([found, conv(found, edge_index).relu().view(-1, 1, HIDDEN)], dim=1)
        return F.log_softmax(self.lin2(found[:, -1]), dim=1)


def super_gat(compiled: Compile) -> Iterator[float]:
    """Add the layers' own loss of attention, which they keep as attributes of a forward pass."""
    first = pyg.SuperGATConv(FEATURES, 4, heads=2, attention_type="MX", edge_sample_ratio=0.8)
    second = pyg.SuperGATConv(8, CLASSES, heads=2, attention_type="MX", concat=False)
    model = Net(first, second, F.elu)
    call = compiled(model)

    def loss() -> Tensor:
        out = nll(call(X, EDGES))
        return out + 0.5 * (first.get_attention_loss() + second.get_attention_loss())

    return descend(call, loss)


class Gcn2(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.convs = nn.ModuleList(
            pyg.GCN2Conv(HIDDEN, 0.1, 0.5, layer=i + 1, shared_weights=True) for i in range(depth)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = first = self.lin1(F.dropout(x, 0.1, self.training)).relu()
        for conv in self.convs:
            x = conv(F.dropout(x, 0.1, self.training), first, edge_index).relu()
        return F.log_softmax(self.lin2(x), dim=1)


class Jumping(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList([pyg.GCNConv(FEATURES, HIDDEN), pyg.GCNConv(HIDDEN, HIDDEN)])
        self.jump = pyg.JumpingKnowledge(mode, HIDDEN, 2)
        self.lin = nn.Linear(2 * HIDDEN if mode == "cat" else HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found = []
        for conv in self.convs:
            x = conv(x, edge_index).relu()
            found.append(x)
        return F.log_softmax(self.lin(self.jump(found)), dim=1)


class WithLabels(nn.Module):
    """UniMP: classes of some training nodes are embedded into the features (``MaskLabel``)."""

    def __init__(self, method: str = "add") -> None:
        super().__init__()
        self.labels = pyg.MaskLabel(CLASSES, FEATURES, method)
        width = FEATURES if method == "add" else 2 * FEATURES
        self.convs = nn.ModuleList(
            [pyg.TransformerConv(width, 4, heads=2, concat=False, beta=True), pyg.TransformerConv(4, CLASSES)]
        )
        self.norm = pyg.LayerNorm(4, mode="node")

    def forward(self, x: Tensor, edge_index: Tensor, y: Tensor, known: Tensor) -> Tensor:
        x = self.labels(x, y, known)
        x = self.norm(self.convs[0](x, edge_index)).relu()
        return F.log_softmax(self.convs[1](x, edge_index), dim=1)


def label_embedding(compiled: Compile) -> Iterator[float]:
    call = compiled(WithLabels())

    def loss() -> Tensor:
        known = pyg.MaskLabel.ratio_mask(TRAIN, ratio=0.65)
        hidden = TRAIN & ~known
        return F.nll_loss(call(X, EDGES, Y, known)[hidden], Y[hidden])

    return descend(call, loss)


def label_reuse(compiled: Compile) -> Iterator[float]:
    """One-hot classes of half of the training nodes are features, then predictions are, twice."""
    call = compiled(pyg.models.GAT(FEATURES + CLASSES, HIDDEN, 2, CLASSES, heads=2))

    def loss() -> Tensor:
        used = TRAIN & (torch.rand(NODES) < 0.5)
        onehot = torch.zeros(NODES, CLASSES)
        onehot[used] = F.one_hot(Y[used], CLASSES).float()
        out = call(torch.cat([X, onehot], 1), EDGES)
        with torch.no_grad():
            onehot[~used] = out[~used].softmax(1)
        out = call(torch.cat([X, onehot], 1), EDGES)
        return F.cross_entropy(out[TRAIN & ~used], Y[TRAIN & ~used])

    return descend(call, loss)


def distillation(compiled: Compile) -> Iterator[float]:
    """A GNN is trained, then an MLP on its soft predictions and the classes."""
    teacher = compiled(pyg.models.GCN(FEATURES, HIDDEN, 2, CLASSES))
    for _ in descend(teacher, lambda: F.cross_entropy(teacher(X, EDGES)[TRAIN], Y[TRAIN])):
        pass
    teacher.eval()
    with torch.no_grad():
        soft = teacher(X, EDGES).log_softmax(1)
    student = compiled(pyg.MLP([FEATURES, HIDDEN, CLASSES], dropout=0.5, norm="batch_norm"))

    def loss() -> Tensor:
        out = student(X)
        hard = F.cross_entropy(out[TRAIN], Y[TRAIN])
        return 0.5 * hard + F.kl_div(out.log_softmax(1), soft, reduction="batchmean", log_target=True)

    return (yield from descend(student, loss))


def linkx(compiled: Compile) -> Iterator[float]:
    call = compiled(pyg.models.LINKX(NODES, FEATURES, HIDDEN, CLASSES, num_layers=2, dropout=0.2))
    return descend(call, lambda: F.cross_entropy(call(X, EDGES)[TRAIN], Y[TRAIN]))


class Relational(nn.Module):
    """Layers over edge types without features: the first has a row of weights for every node."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.first, self.second = make(NODES, HIDDEN), make(HIDDEN, CLASSES)

    def forward(self, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        x = self.first(None, edge_index, edge_type).relu()
        return F.log_softmax(self.second(x, edge_index, edge_type), dim=1)


def relational(make: Any) -> Loop:
    def loop(compiled: Compile) -> Iterator[float]:
        call = compiled(Relational(make))
        return descend(call, lambda: nll(call(EDGES, TYPES)))

    return loop


class Embedded(nn.Module):
    """GCN on features that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NODES, HIDDEN)
        self.conv = pyg.GCNConv(HIDDEN, CLASSES)

    def forward(self, edge_index: Tensor) -> Tensor:
        return F.log_softmax(self.conv(self.table.weight, edge_index), dim=1)


def embedding(compiled: Compile) -> Iterator[float]:
    call = compiled(Embedded())
    return descend(call, lambda: nll(call(EDGES)))


class DropEdge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.GCNConv(FEATURES, HIDDEN), pyg.GCNConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = dropout_edge(edge_index, 0.3, training=self.training)
        return F.log_softmax(self.second(self.first(x, edge_index).relu(), edge_index), dim=1)


def drop_edge_outside(compiled: Compile) -> Iterator[float]:
    call = compiled(pyg.models.GCN(FEATURES, HIDDEN, 2, CLASSES))
    return descend(call, lambda: nll(call(X, dropout_edge(EDGES, 0.3)[0]).log_softmax(1)))


class Sign(nn.Module):
    """Linear layers on features that were aggregated before the training."""

    def __init__(self, hops: int) -> None:
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(FEATURES, HIDDEN) for _ in range(hops + 1))
        self.out = nn.Linear((hops + 1) * HIDDEN, CLASSES)

    def forward(self, xs: list[Tensor]) -> Tensor:
        hidden = [F.dropout(lin(x).relu(), 0.5, self.training) for x, lin in zip(xs, self.lins, strict=True)]
        return self.out(torch.cat(hidden, -1)).log_softmax(-1)


def sign(compiled: Compile) -> Iterator[float]:
    mean, hops = pyg.SimpleConv("mean"), [X]
    for _ in range(2):
        hops.append(mean(hops[-1], EDGES))
    call = compiled(Sign(2))
    return descend(call, lambda: nll(call(hops)))


def learned_weights(compiled: Compile) -> Iterator[float]:
    """Edge weights are trained too, as explainers do it: an argument that is a parameter of the loop."""
    call = compiled(pyg.models.GCN(FEATURES, HIDDEN, 2, CLASSES))
    mask = nn.Parameter(torch.zeros(EDGES.shape[1]))
    optimizer = torch.optim.Adam([mask, *call.parameters()], lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = call(X, EDGES, mask.sigmoid()).log_softmax(1)
        loss = nll(out) + 0.01 * mask.sigmoid().sum()
        loss.backward()
        optimizer.step()
        yield loss.item()


def frozen_encoder(compiled: Compile) -> Iterator[float]:
    """Train, freeze the first layer, train on."""
    model = Net(pyg.GCNConv(FEATURES, HIDDEN), pyg.GCNConv(HIDDEN, CLASSES))
    call = compiled(model)
    optimizer = torch.optim.Adam(call.parameters(), lr=0.01)
    for step in range(STEPS):
        if step == 10:
            model.first.requires_grad_(False)
        optimizer.zero_grad()
        loss = nll(call(X, EDGES))
        loss.backward()
        optimizer.step()
        yield loss.item()


def early_stopping(compiled: Compile) -> Iterator[float]:
    """Evaluate after each step, keep the best weights, with a scheduler and clipped gradients."""
    call = compiled(pyg.models.GraphSAGE(FEATURES, HIDDEN, 2, CLASSES, dropout=0.5))
    optimizer = torch.optim.AdamW(call.parameters(), lr=0.02, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    best, kept = float("inf"), {}
    for _ in range(STEPS):
        call.train()
        optimizer.zero_grad()
        F.cross_entropy(call(X, EDGES)[TRAIN], Y[TRAIN], label_smoothing=0.1).backward()
        nn.utils.clip_grad_norm_(call.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        call.eval()
        with torch.no_grad():
            loss = F.cross_entropy(call(X, EDGES)[~TRAIN], Y[~TRAIN]).item()
        if loss < best:
            best, kept = loss, {name: value.clone() for name, value in call.state_dict().items()}
        yield loss
    call.load_state_dict(kept)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.out = pyg.SAGEConv(FEATURES, HIDDEN), norm, pyg.SAGEConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return F.log_softmax(self.out(self.norm(self.conv(x, edge_index)).relu(), edge_index), dim=1)


NORMS = {
    "pair": lambda: pyg.PairNorm(),
    "diff-group": lambda: pyg.DiffGroupNorm(HIDDEN, 3),
    "mean-subtraction": lambda: pyg.MeanSubtractionNorm(),
    "message": lambda: pyg.LayerNorm(HIDDEN),
}


class Gps(nn.Module):
    """Local and global attention side by side, with batch norm."""

    def __init__(self, attention: str = "multihead") -> None:
        super().__init__()
        local = pyg.GINEConv(mlp(HIDDEN, HIDDEN), edge_dim=4)
        self.lin, self.out = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.conv = pyg.GPSConv(HIDDEN, local, heads=2, attn_type=attention, dropout=0.1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.conv(self.lin(x), edge_index, torch.zeros_like(x[:, 0]).long(), edge_attr=edge_attr)
        return F.log_softmax(self.out(x), dim=1)


class GraphFormer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = pyg.models.SGFormer(FEATURES, HIDDEN, CLASSES, trans_num_layers=1, gnn_num_layers=1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net(x, edge_index, torch.zeros(x.shape[0], dtype=torch.long))


class Polynormer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = pyg.models.Polynormer(FEATURES, HIDDEN, CLASSES, local_layers=2, global_layers=1, heads=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net(x, edge_index, torch.zeros(x.shape[0], dtype=torch.long)).log_softmax(1)


def unet(compiled: Compile) -> Iterator[float]:
    call = compiled(pyg.GraphUNet(FEATURES, HIDDEN, CLASSES, depth=2, pool_ratios=[0.6, 0.5]))
    return descend(call, lambda: nll(call(X, EDGES).log_softmax(1)))


def pmlp(compiled: Compile) -> Iterator[float]:
    call = compiled(pyg.models.PMLP(FEATURES, HIDDEN, CLASSES, 2))
    yield from descend(call, lambda: F.cross_entropy(call(X)[TRAIN], Y[TRAIN]))
    call.eval()
    with torch.no_grad():
        assert call(X, EDGES).shape == (NODES, CLASSES)


def film(compiled: Compile) -> Iterator[float]:
    """Many labels a node: a sigmoid for each, and batch norm."""
    model = nn.ModuleList([pyg.FiLMConv(FEATURES, HIDDEN), pyg.FiLMConv(HIDDEN, CLASSES, act=None)])
    call = compiled(Sequence(model))
    target = F.one_hot(Y, CLASSES).float()
    return descend(call, lambda: F.binary_cross_entropy_with_logits(call(X, EDGES), target))


class Sequence(nn.Module):
    def __init__(self, convs: nn.ModuleList) -> None:
        super().__init__()
        self.convs, self.norm = convs, nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[1](
            F.dropout(self.norm(self.convs[0](x, edge_index)), 0.1, self.training), edge_index
        )


class MixHop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = pyg.MixHopConv(FEATURES, 4, powers=[0, 1, 2]), nn.BatchNorm1d(12)
        self.lin = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return F.log_softmax(self.lin(F.dropout(self.norm(self.conv(x, edge_index)), 0.7, self.training)), 1)


def gin_conv(a: int, b: int) -> nn.Module:
    return pyg.GINConv(mlp(a, b, norm=True), train_eps=True)


def arma(a: int, b: int) -> nn.Module:
    return pyg.ARMAConv(a, b, num_stacks=2, num_layers=2, shared_weights=True, dropout=0.25)


def pna(a: int, b: int) -> nn.Module:
    degrees = torch.bincount(torch.bincount(EDGES[1], minlength=NODES))
    return pyg.PNAConv(a, b, ["mean", "min", "max", "std"], ["identity", "amplification"], degrees)


FORMS: dict[str, Form] = {
    "gcn": layers(pyg.GCNConv),
    "gcn-weighted": layers(pyg.GCNConv, WEIGHT),
    "gcn-cached": layers(lambda a, b: pyg.GCNConv(a, b, cached=True)),
    "sage": layers(pyg.SAGEConv),
    "sage-max": layers(lambda a, b: pyg.SAGEConv(a, b, aggr="max", normalize=True)),
    "gin": layers(gin_conv),
    "gat": Form(gat),
    "gatv2": layers(lambda a, b: pyg.GATv2Conv(a, b, heads=2, concat=False), act=F.elu),
    "appnp": net(lambda: Propagated(pyg.APPNP(4, 0.1))),
    "appnp-dropout": net(lambda: Propagated(pyg.APPNP(4, 0.1, dropout=0.3))),
    "arma": layers(arma),
    "cheb": layers(lambda a, b: pyg.ChebConv(a, b, 3)),
    "sgc": layers(lambda a, b: pyg.SGConv(a, b, K=2)),
    "ssgc": layers(lambda a, b: pyg.SSGConv(a, b, alpha=0.1, K=2)),
    "tag": layers(lambda a, b: pyg.TAGConv(a, b, K=2)),
    "agnn": net(Agnn),
    "mix-hop": net(MixHop),
    "dna": net(Dna),
    "super-gat": Form(super_gat, "cannot be captured.*negative_sampling"),
    "graph-conv": layers(pyg.GraphConv, WEIGHT),
    "le": layers(pyg.LEConv),
    "res-gated": layers(pyg.ResGatedGraphConv),
    "cluster-gcn": layers(pyg.ClusterGCNConv),
    "eg": layers(lambda a, b: pyg.EGConv(a, b, num_heads=1)),
    "feast": layers(lambda a, b: pyg.FeaStConv(a, b, heads=2)),
    "mf": layers(lambda a, b: pyg.MFConv(a, b, max_degree=4)),
    "pdn": layers(lambda a, b: pyg.PDNConv(a, b, 4, 6), ATTRIBUTES),
    "dir-gnn": layers(lambda a, b: pyg.DirGNNConv(pyg.SAGEConv(a, b))),
    "gated": net(lambda: Propagated(pyg.GatedGraphConv(CLASSES, 2))),
    "anti-symmetric": net(lambda: Propagated(pyg.AntiSymmetricConv(CLASSES, num_iters=2))),
    "gcn2-8": net(lambda: Gcn2(8)),
    "jump-cat": net(lambda: Jumping("cat")),
    "jump-lstm": net(lambda: Jumping("lstm")),
    "pna": layers(pna),
    "film": Form(film),
    "label-embedding": Form(label_embedding),
    "label-reuse": Form(label_reuse),
    "distillation": Form(distillation),
    "linkx": Form(linkx),
    "pmlp": Form(pmlp),
    "rgcn-no-features": Form(relational(lambda a, b: pyg.RGCNConv(a, b, 3, num_bases=2))),
    "fast-rgcn-no-features": Form(relational(lambda a, b: pyg.FastRGCNConv(a, b, 3, num_bases=2))),
    "embedding": Form(embedding),
    "drop-edge": net(DropEdge),
    "drop-edge-outside": Form(drop_edge_outside),
    "sign": Form(sign),
    "learned-edge-weights": Form(learned_weights),
    "frozen-layer": Form(frozen_encoder),
    "early-stopping": Form(early_stopping),
    "gps": net(Gps, ATTRIBUTES),
    "gps-performer": net(lambda: Gps("performer"), ATTRIBUTES),
    "sg-former": net(GraphFormer),
    "polynormer": net(Polynormer),
    "graph-unet": Form(unet),
    # The bias before a GraphNorm has a gradient of 0 up to rounding, which Adam makes a whole step of.
    "norm-graph": Form(net(lambda: Normed(pyg.GraphNorm(HIDDEN))).loop, tolerance=1e-3),
    **{f"norm-{name}": net(lambda make=make: Normed(make())) for name, make in NORMS.items()},
}
FAST = ("gcn", "gat", "gated", "drop-edge", "rgcn-no-features")


@pytest.mark.parametrize("name", slow_but(FAST, list(FORMS)))
def test_losses_are_those_of_eager(name: str, request: pytest.FixtureRequest) -> None:
    if name == "gps":
        request.applymarker(OTHER_DRAWS_IN_2_11)
    check(FORMS[name])


def test_the_page_lists_these_forms() -> None:
    check_documented("Nodes", FORMS)
