"""Random layers in plain PyTorch: each reads, weighs, sends, reduces and goes on in one of many spellings."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.utils import add_self_loops, degree, scatter, softmax

WIDTH = 8


class Parameters(nn.Module):
    """All that a layer may use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.edge, self.pair = nn.Linear(2, 1), nn.Linear(2 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.scale, self.vectors = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.randn(4, WIDTH))
        self.table = nn.Parameter(torch.rand(3))
        self.lin, self.ln, self.bn = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)


class Edges:
    """The edges of a layer: both ends, their rows, and the parameters."""

    def __init__(self, p: Parameters, x: Tensor, src: Tensor, dst: Tensor, xi: Tensor, xj: Tensor) -> None:
        self.p, self.x, self.n = p, x, x.shape[0]
        self.src, self.dst, self.xi, self.xj = src, dst, xi, xj


def columns(index: Tensor, like: Tensor) -> Tensor:
    return index.view(-1, *[1] * (like.dim() - 1)).expand(-1, *like.shape[1:])


def ones(index: Tensor) -> Tensor:
    return torch.ones(index.shape[0])


def zeros(rows: Tensor, n: int) -> Tensor:
    return rows.new_zeros(n, *rows.shape[1:])


def total(rows: Tensor, index: Tensor, n: int) -> Tensor:
    return zeros(rows, n).index_add(0, index, rows)


def mean(rows: Tensor, index: Tensor, n: int) -> Tensor:
    count = torch.zeros(n).scatter_add_(0, index, ones(index)).clamp(min=1)
    return total(rows, index, n) / count.view(-1, *[1] * (rows.dim() - 1))


def largest(rows: Tensor, index: Tensor, n: int) -> Tensor:
    return zeros(rows, n).scatter_reduce(0, columns(index, rows), rows, "amax", include_self=False)


def destinations_first(edge_index: Tensor, n: int) -> tuple[Tensor, Tensor]:
    dst = edge_index[1]
    src = edge_index[0]
    return src, dst


def with_loops(edge_index: Tensor, n: int) -> tuple[Tensor, Tensor]:
    both = torch.cat([edge_index, torch.arange(n).expand(2, -1)], 1)
    return both[0], both[1]


def both_ways(edge_index: Tensor, n: int) -> tuple[Tensor, Tensor]:
    both = torch.cat([edge_index, edge_index.flip(0)], dim=-1)
    return both[0], both[1]


READS: Sequence[Callable[..., Any]] = (
    lambda e, n: tuple(e),
    lambda e, n: (e[0], e[1]),
    lambda e, n: e.unbind(0),
    lambda e, n: (e.select(0, 0), e.select(-2, 1)),
    lambda e, n: e.flip(0).flip(0).unbind(),
    lambda e, n: (e.t()[:, 0], e.t()[:, 1]),
    lambda e, n: (e[1], e[0]),
    lambda e, n: tuple(part.squeeze(0) for part in e.chunk(2)),
    lambda e, n: (e[:1].reshape(-1), e[-1:].flatten()),
    lambda e, n: tuple(add_self_loops(e, num_nodes=n)[0]),
    destinations_first,
    with_loops,
    both_ways,
)
GATHERS: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
    lambda x, i: x[i],
    lambda x, i: x[(i,)],
    lambda x, i: x[i, ...],
    lambda x, i: x.index_select(0, i),
    lambda x, i: torch.index_select(x, -x.dim(), i),
    lambda x, i: torch.gather(x, 0, columns(i, x)),
    lambda x, i: F.embedding(i, x),
    lambda x, i: x.take_along_dim(i[:, None], 0),
)


def symmetric(c: Edges) -> Tensor:
    norm = degree(c.dst, c.n).pow(-0.5)
    norm[norm == float("inf")] = 0
    return norm[c.src] * norm[c.dst]


def masked(c: Edges) -> Tensor:
    norm = total(ones(c.src), c.src, c.n).rsqrt()
    return norm.masked_fill(norm == torch.inf, 0.0)[c.src]


def inverse(c: Edges) -> Tensor:
    count = scatter(ones(c.dst), c.dst, 0, c.n, "sum")
    return torch.where(count > 0, count**-1.0, torch.zeros_like(count)).index_select(0, c.dst)


def logits(c: Edges) -> Tensor:
    return F.leaky_relu(c.xi @ c.p.a + c.xj @ c.p.b, 0.2)


def softmax_by_hand(c: Edges) -> Tensor:
    top = torch.full((c.n,), -torch.inf).scatter_reduce(0, c.dst, logits(c), "amax")
    weight = (logits(c) - top[c.dst]).exp()
    return weight / (total(weight, c.dst, c.n)[c.dst] + 1e-16)


def softmax_without_maximum(c: Edges) -> Tensor:
    weight = logits(c).exp()
    return weight / total(weight, c.dst, c.n)[c.dst]


def softmax_with_clamp(c: Edges) -> Tensor:
    weight = (logits(c) - largest(logits(c), c.dst, c.n)[c.dst]).exp()
    return weight / total(weight, c.dst, c.n).clamp(min=1e-2)[c.dst]


WEIGHTS: Sequence[Callable[[Edges], Tensor | None]] = (
    lambda c: None,
    lambda c: (1 / total(ones(c.dst), c.dst, c.n).clamp(min=1))[c.dst],
    lambda c: torch.sigmoid((c.xi * c.xj).sum(-1)),
    lambda c: torch.tanh(torch.einsum("ef,ef->e", c.xi, c.xj)),
    lambda c: F.cosine_similarity(c.xi, c.xj, dim=-1),
    lambda c: (-(c.xi - c.xj).pow(2).sum(dim=-1, keepdim=True) * 0.1).exp(),
    lambda c: 1 / (1 + (c.xi - c.xj).norm(dim=1, keepdim=True)),
    lambda c: softmax(logits(c), c.dst, num_nodes=c.n),
    lambda c: softmax(logits(c), c.src, num_nodes=c.n),
    lambda c: logits(c).softmax(0),
    lambda c: c.p.edge(torch.stack([c.xi.mean(-1), c.xj.amax(-1)], 1)).sigmoid(),
    lambda c: torch.arange(c.src.shape[0]).float().remainder(3) * 0.5,
    lambda c: c.p.table[(c.src + c.dst) % 3],
    lambda c: (c.src == c.dst).float() + 0.5,
    lambda c: (degree(c.dst, c.n)[c.src] - degree(c.dst, c.n)[c.dst]).abs().add(1).log(),
    symmetric,
    masked,
    inverse,
    softmax_by_hand,
    softmax_without_maximum,
    softmax_with_clamp,
)
MESSAGES: Sequence[Callable[[Edges], Tensor]] = (
    lambda c: c.xj,
    lambda c: c.xj - c.xi,
    lambda c: c.p.pair(torch.cat([c.xi, c.xj], -1)),
    lambda c: torch.hstack((c.xj[:, :4], c.xi[:, 4:])),
    lambda c: torch.sigmoid(c.xi) * c.xj,
    lambda c: (c.xj + c.p.a).relu() + 1e-7,
    lambda c: torch.where(c.xi > c.xj, c.xi, c.xj * 0.5),
    lambda c: torch.maximum(c.xi, c.xj),
    lambda c: c.p.mlp(c.xj - 0.5 * c.xi),
    lambda c: F.softplus(c.xj) - F.silu(c.xi),
    lambda c: (c.xi @ c.p.square) * c.xj,
    lambda c: c.xj @ c.p.square.t(),
    lambda c: torch.matmul(c.xj, c.p.square.permute(1, 0)),
    lambda c: torch.matmul(c.xj, c.p.square.transpose(0, 0)),
    lambda c: torch.einsum("ef,fg->eg", c.xj, c.p.square),
    lambda c: c.xj * c.p.scale + c.xi.mean(-1, keepdim=True),
    lambda c: c.xj * c.p.vectors[(c.src * 7 + c.dst) % 4],
    lambda c: F.normalize(c.xj, dim=-1),
    lambda c: F.layer_norm(c.xj + c.xi, (WIDTH,)),
    lambda c: torch.addcmul(c.xi, c.xj, c.xi, value=0.3),
    lambda c: torch.lerp(c.xi, c.xj, 0.3),
    lambda c: c.xj.clamp(-1, 1).pow(2),
    lambda c: c.xj.cumsum(-1),
    lambda c: c.xj.roll(1, -1),
    lambda c: c.xj.sort(dim=-1).values,
    lambda c: c.xj.flip(1),
    lambda c: (c.xj.double() * c.xi.double()).float(),
    lambda c: c.xj * (c.src % 2 == 0).float().unsqueeze(1),
)


def deviation(rows: Tensor, index: Tensor, n: int) -> Tensor:
    center = mean(rows, index, n)
    return (mean(rows * rows, index, n) - center * center).clamp(min=0).add(1e-3).sqrt()


SCATTERS: Sequence[Callable[[Tensor, Tensor, int], Tensor]] = (
    lambda m, i, n: torch.zeros((n, *m.shape[1:])).index_add_(0, i, m),
    lambda m, i, n: zeros(m, n).index_add(0, i, m, alpha=0.5),
    lambda m, i, n: zeros(m, n).scatter_add(0, columns(i, m), m),
    lambda m, i, n: zeros(m, n).index_put((i,), m, accumulate=True),
    lambda m, i, n: m.new_full((n, *m.shape[1:]), 0.25).index_add(0, i, m),
    lambda m, i, n: zeros(m, n).scatter_reduce(0, columns(i, m), m, "amin", include_self=True),
    lambda m, i, n: torch.ones_like(zeros(m, n)).scatter_reduce(0, columns(i, m), m, "mean"),
    lambda m, i, n: zeros(m, n).index_reduce(0, i, m, "amax", include_self=False),
    lambda m, i, n: total(m, i, n) / torch.bincount(i, minlength=n).clamp_(min=1).float()[:, None],
    lambda m, i, n: total(m.clamp(max=3).exp(), i, n).log1p(),
    lambda m, i, n: scatter(m, i, 0, n, "sum"),
    lambda m, i, n: scatter(m, i, 0, n, "mean"),
    lambda m, i, n: scatter(m, i, 0, n, "max"),
    lambda m, i, n: scatter(m, i, 0, n, "min"),
    total,
    mean,
    largest,
    deviation,
)


def halves(c: Edges, out: Tensor) -> Tensor:
    left, right = out.chunk(2, -1)
    return torch.cat([left * right.sigmoid(), right], -1)


ENDS: Sequence[Callable[[Edges, Tensor], Tensor]] = (
    lambda c, out: out + c.x,
    lambda c, out: c.p.lin(out),
    lambda c, out: c.p.pair(torch.cat([c.x, out], dim=1)),
    lambda c, out: F.relu(out, inplace=True),
    lambda c, out: F.normalize(out, p=2.0, dim=-1),
    lambda c, out: c.p.ln(out),
    lambda c, out: c.p.bn(out),
    lambda c, out: out - out.mean(0, keepdim=True),
    lambda c, out: out.log_softmax(-1),
    lambda c, out: out * degree(c.dst, c.n).unsqueeze(-1).clamp(max=4),
    lambda c, out: torch.sigmoid(c.p.lin(out)) * c.x + out.tanh(),
    lambda c, out: (out.t() * 2).t(),
    lambda c, out: out.view(-1, 2, WIDTH // 2).flip(1).reshape(-1, WIDTH),
    lambda c, out: out * (c.x[:, 0] > 0.1).unsqueeze(1),
    lambda c, out: out + out.sum(0) * 0.01,
    lambda c, out: out.detach().clone().mul_(0.5),
    lambda c, out: torch.einsum("nf,fg->ng", out, c.p.square),
    halves,
)


class Layer(nn.Module):
    """One layer, drawn from ``rng``; ``read`` says how it reads the edges."""

    def __init__(self, rng: random.Random, read: Callable[..., Any]) -> None:
        super().__init__()
        self.p, self.read = Parameters(), read
        self.gathers = rng.choice(GATHERS), rng.choice(GATHERS)
        self.weight, self.message, self.scatter = (rng.choice(of) for of in (WEIGHTS, MESSAGES, SCATTERS))
        self.ends = rng.sample(ENDS, rng.choice((0, 1, 1, 2)))
        self.heads = rng.random() < 0.15

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = self.read(edge_index, x.shape[0])
        c = Edges(self.p, x, src, dst, self.gathers[0](x, dst), self.gathers[1](x, src))
        weight, message = self.weight(c), self.message(c)
        if weight is not None:
            weight = weight.view(-1, 1)
            if self.heads:
                message = (message.view(-1, 2, WIDTH // 2) * weight.unsqueeze(-1)).flatten(1)
            else:
                message = weight * message
        out = self.scatter(message, c.dst, c.n)
        for end in self.ends:
            out = end(c, out)
        return out


class Stack(nn.Module):
    """One or two layers."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


def spelled(seed: int) -> nn.Module:
    """Return the model of a seed, in eval mode; half of those of two layers read the edges in one way."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    count = rng.choice((1, 1, 2))
    reads = [rng.choice(READS) for _ in range(count)]
    if rng.random() < 0.5:
        reads = reads[:1] * count
    return Stack([Layer(rng, read) for read in reads]).eval()
