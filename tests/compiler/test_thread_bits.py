"""Models with ops that stay in ATen: the same bits at 1 to 4 threads, or `explain()` names the op."""

import random
from collections.abc import Callable

import pytest
import torch
from kernel_graphs import threads
from slow import slow_after
from torch import Tensor, nn
from torch_geometric.nn import GraphConv

import gnnc

NODES, EDGES, WIDTH = 2603, 9000, 19
"""Sizes that no number of threads divides into whole vectors."""

SECTION = "Last bits depend on the number of threads"
LOSSES = (
    "l1_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "soft_margin_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "huber_loss",
)


def of_loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    loss = getattr(torch.nn.functional, name)
    return lambda x, e: x * loss(x.sin().abs(), x.cos().abs())


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, e: x * x.sum(),
    "mean": lambda x, e: x - x.mean(),
    "norm": lambda x, e: x / x.norm(),
    "softmax": lambda x, e: x.softmax(0),
    "mm": lambda x, e: x @ (x.t() @ x),
    "atan2": lambda x, e: torch.atan2(x, x.flip(0)),
    "pow": lambda x, e: x.abs().pow(0.37),
    "mish": lambda x, e: torch.nn.functional.mish(x),
    "celu": lambda x, e: torch.nn.functional.celu(x.flip(1)),
    "index_put": lambda x, e: torch.zeros_like(x).index_put((e[1],), x[e[0]], accumulate=True),
    "put": lambda x, e: torch.zeros_like(x).put(e[1] % 9, x.flatten()[e[0]], accumulate=True),
    "nanmean": lambda x, e: x - x.nanmean(),
    "inner": lambda x, e: x * torch.inner(x.flatten(), x.flatten()).sigmoid(),
    "tensordot": lambda x, e: x * torch.tensordot(x, x, 2).sigmoid(),
    "cdist": lambda x, e: torch.cdist(x, x[:WIDTH]),
    **{name: of_loss(name) for name in LOSSES},
    "batch_norm": lambda x, e: torch.nn.functional.batch_norm(x, None, None, training=True),
    "cumsum": lambda x, e: x.cumsum(0),
    "sort": lambda x, e: x.sort(0).values,
    "column sums": lambda x, e: x + x.sum(0),
    "sin": lambda x, e: x.sin(),
    "largest": lambda x, e: x - x.amax(),
    "flip": lambda x, e: x.flip(0),
    "edge index_add": lambda x, e: torch.zeros_like(x).index_add(0, e[1], x[e[0]].flip(1)),
}
NAMED = ("sum", "softmax", "pow", "mm", "put", "nanmean", "inner", "tensordot", "cdist", "l1_loss", "kl_div")
"""Ops that no kernel takes, and whose bits differ."""
FAST = ("sum", "softmax", "pow", "index_put", "put", "sort")
"""Ops whose tests run each time."""


class Model(nn.Module):
    """A layer, ops by name, and a layer."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.first, self.last = GraphConv(WIDTH, WIDTH), GraphConv(WIDTH, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        for name in self.names:
            x = OPS[name](x, edge_index)
        return self.last(x, edge_index)


def differs(fast: gnnc.CompiledModel, x: Tensor, edge_index: Tensor) -> bool:
    """Return whether a call has other bits at 2, 3 or 4 threads than at one."""
    results = []
    for count in (1, 2, 3, 4):
        with threads(count):
            fast.clear_cache()
            results.append(fast(x, edge_index).view(torch.int32))
    return not all(torch.equal(results[0], other) for other in results)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", slow_after(6, sorted(OPS, key=lambda name: name not in FAST)))
@torch.no_grad()
def test_an_op(name: str) -> None:
    fast = gnnc.compile(Model((name,)).eval(), "fp32", backend="cpu")
    other_bits = differs(fast, torch.randn(NODES, WIDTH), torch.randint(NODES, (2, EDGES)))
    named = SECTION in fast.explain()
    assert named or not other_bits
    assert named or name not in NAMED


@pytest.mark.first(1)
@pytest.mark.parametrize("seed", slow_after(2, range(12)))
@torch.no_grad()
def test_random_models(seed: int) -> None:
    rng = random.Random(seed)
    names = tuple(rng.sample(list(OPS), rng.randint(1, 3)))
    fast = gnnc.compile(Model(names).eval(), "fp32", backend="cpu")
    other_bits = differs(fast, torch.randn(NODES, WIDTH), torch.randint(NODES, (2, EDGES)))
    assert SECTION in fast.explain() or not other_bits, names


@torch.no_grad()
def test_the_layer_of_the_op_is_named() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaling = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.scaling(x)

    fast = gnnc.compile(Outer(), "fp32", backend="cpu")
    fast(torch.randn(5, 3))
    lines = fast.explain().split(SECTION)[1].splitlines()
    assert lines[1].strip().startswith("scaling sum: ATen divides it among threads")


@torch.no_grad()
def test_models_of_kernels_alone_have_no_such_section() -> None:
    fast = gnnc.compile(Model(()).eval(), "int8", backend="cpu")
    fast(torch.randn(40, WIDTH), torch.randint(40, (2, 90)))
    assert SECTION not in fast.explain()
