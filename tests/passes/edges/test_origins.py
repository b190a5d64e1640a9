"""Ids are held against the table that they are read from, however the model gets at them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import HypergraphConv
from traced import relative_error

import gnnc
from gnnc.capture.export import capture
from gnnc.passes import Context, run_pass
from gnnc.passes.edges.origins import Origins, Part
from gnnc.passes.normalize import Normalize

SOURCES, TARGETS, EDGES, F = 9, 5, 20, 8

Swap = Callable[[Tensor], Tensor]

SWAPS: dict[str, Swap] = {
    "flip": lambda e: e.flip([0]),
    "flip from the end": lambda e: e.flip(-2),
    "index": lambda e: e[[1, 0]],
    "index_select": lambda e: e.index_select(0, torch.tensor([1, 0])),
    "stack": lambda e: torch.stack([e[1], e[-2]]),
    "cat": lambda e: torch.cat([e[1:], e[:1]]),
    "chunk": lambda e: torch.cat(e.chunk(2)[::-1]),
    "unbind": lambda e: torch.stack(e.unbind()[::-1]),
    "transposed": lambda e: e.t().flip(1).t(),
    "roll": lambda e: e.roll(1, 0),
    "flat": lambda e: e.reshape(-1).roll(e.shape[1]).view(2, -1),
    "twice and once more": lambda e: e.flip(0).flip(0)[[1, 0]],
    "without self loops": lambda e: e.flip(0)[:, e[0] != e[1]],
}


class Swapped(nn.Module):
    """Sums sources into targets, by an ``edge_index`` that it swaps first."""

    def __init__(self, swap: Swap) -> None:
        super().__init__()
        self.swap, self.lin = swap, nn.Linear(F, F)

    def forward(self, x: Tensor, targets: Tensor, edge_index: Tensor) -> Tensor:
        dst, src = self.swap(edge_index)
        return torch.zeros_like(targets).index_add(0, dst, self.lin(x)[src] * targets[dst])


class Incidence(nn.Module):
    """Hyperedges, fewer or more than nodes."""

    def __init__(self, num_edges: int) -> None:
        super().__init__()
        self.conv, self.num_edges = HypergraphConv(F, F), num_edges

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index, num_edges=self.num_edges)


class Pairs(nn.Module):
    """Scores pairs that stand in columns, and not in rows."""

    def forward(self, x: Tensor, targets: Tensor, edge_index: Tensor) -> Tensor:
        pairs = edge_index.t()
        return (x[pairs[:, 0]] * targets[pairs[:, 1]]).sum(-1)


def edges(sources: int, targets: int) -> Tensor:
    """Edges that reach the last row of both tables."""
    generator = torch.Generator().manual_seed(0)
    src, dst = (torch.randint(size, (EDGES,), generator=generator) for size in (sources, targets))
    src[3], dst[4] = sources - 1, targets - 1
    return torch.stack([src, dst])


@torch.no_grad()
def assert_checked(model: nn.Module, args: tuple[Any, ...], sizes: tuple[int, int], **options: Any) -> None:
    """The last argument, an ``edge_index``, is taken as it is, and refused with one wrong id."""
    good = args[-1]
    compiled = gnnc.compile(model.eval(), **options)
    bound = 1e-5 if options["precision"] == "fp32" else 5e-2
    assert relative_error(compiled(*args), model(*args)) < bound
    for row, size in enumerate(sizes):
        for wrong in (size, size + 3, -1):
            bad = good.clone()
            bad[row, 2] = wrong
            with pytest.raises(gnnc.GraphError, match=rf"\[{row}, 2\] = {wrong} .* 0\.\.{size - 1}"):
                compiled(*args[:-1], bad)
    assert relative_error(compiled(*args), model(*args)) < bound


ON_ALL = pytest.mark.parametrize(
    ("precision", "backend"), [(p, b) for p in ("fp32", "int8") for b in ("cpu", "reference")]
)


@pytest.mark.first(1)
@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS.keys())
def test_swapped_rows(swap: Swap) -> None:
    args = torch.randn(SOURCES, F), torch.randn(TARGETS, F), edges(SOURCES, TARGETS)
    assert_checked(Swapped(swap), args, (SOURCES, TARGETS), precision="fp32")


@pytest.mark.first(1)
@ON_ALL
def test_flipped_rows_everywhere(precision: str, backend: str) -> None:
    args = torch.randn(SOURCES, F), torch.randn(TARGETS, F), edges(SOURCES, TARGETS)
    model = Swapped(SWAPS["flip"])
    assert_checked(model, args, (SOURCES, TARGETS), precision=precision, backend=backend)
    assert_checked(model, args, (SOURCES, TARGETS), precision=precision, backend=backend, example_inputs=args)


@pytest.mark.first(1)
@ON_ALL
@pytest.mark.parametrize("num_edges", [5, 17])
def test_hyperedges(precision: str, backend: str, num_edges: int) -> None:
    args = torch.randn(SOURCES, F), edges(SOURCES, num_edges)
    assert_checked(Incidence(num_edges), args, (SOURCES, num_edges), precision=precision, backend=backend)


def test_columns_of_pairs() -> None:
    args = torch.randn(SOURCES, F), torch.randn(TARGETS, F), edges(SOURCES, TARGETS)
    assert_checked(Pairs(), args, (SOURCES, TARGETS), precision="fp32")


@torch.no_grad()
def test_columns_of_one_input() -> None:
    class Atoms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.element, self.charge = nn.Embedding(5, F), nn.Embedding(3, F)

        def forward(self, z: Tensor) -> Tensor:
            return self.element(z[:, 0]) + self.charge(z[:, 1])

    model = Atoms()
    z = torch.tensor([[4, 2], [0, 0], [3, 1]])
    compiled = gnnc.compile(model, precision="fp32")
    assert torch.equal(compiled(z), model(z))
    with pytest.raises(gnnc.GraphError, match=r"z\[1, 1\] = 3 .* 0\.\.2"):
        compiled(torch.tensor([[4, 2], [0, 3]]))


def origins(read: Callable[[Tensor], Tensor]) -> list[Part]:
    """The origins of an index that is read so from ``edge_index``."""

    class Reader(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return x[read(edge_index)]

    graph = capture(Reader(), (torch.randn(SOURCES, F), edges(SOURCES, SOURCES)), {}).graph_module
    graph = run_pass(Normalize(), graph, Context()).graph
    (gather,) = (node for node in graph.nodes if str(node.target) == "aten.index.Tensor" and node.users)
    return Origins(graph).of(gather.args[1][0])


ROWS = [Part("edge_index", 0), Part("edge_index", 1)]


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda e: e[0], ROWS[:1]),
        (lambda e: e.flip(0)[0], ROWS[1:]),
        (lambda e: e[1, :].int().long(), ROWS[1:]),
        (lambda e: e[1, 3:], []),
        (lambda e: e.t()[:4, 0], []),
        (lambda e: e[1].split(10)[0], []),
        (lambda e: torch.cat([e, e.flip(0)], 1)[0], [Part("edge_index")]),
        (lambda e: torch.cat([e, torch.arange(4).expand(2, -1)], 1)[1], ROWS[1:]),
        (lambda e: e[0].unique(), []),
        (lambda e: e[1] + 1, []),
    ],
    ids=[
        "row",
        "flipped",
        "copied",
        "part of a row",
        "part of a column",
        "split",
        "both ways",
        "with loops",
        "computed",
        "shifted",
    ],
)
def test_origins(read: Callable[[Tensor], Tensor], expected: list[Part]) -> None:
    assert origins(read) == expected


def test_a_mask_may_drop_ids_that_are_no_nodes() -> None:
    """Only self loops are known to leave every id that counts."""

    class Masked(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            src, dst = edge_index[:, edge_index[0] >= 0]
            return torch.zeros_like(x).index_add(0, dst, x[src])

    args = torch.randn(SOURCES, F), torch.tensor([[0, 1, -1], [2, 3, 0]])
    model = Masked()
    assert relative_error(gnnc.compile(model, precision="fp32")(*args), model(*args)) < 1e-5


@pytest.mark.first(1)
@pytest.mark.parametrize("cut", [lambda e, k: e[:, :k], lambda e, k: e.narrow(1, 0, k)])
@torch.no_grad()
def test_ids_that_are_cut_off_may_be_no_nodes(cut: Callable[[Tensor, int], Tensor]) -> None:
    """Padding, and the edges of layers that a trimmed batch with one node has left behind."""

    class Trimmed(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor, kept: int, nodes: int) -> Tensor:
            src, dst = cut(edge_index, kept)
            x = x[:nodes]
            return torch.zeros_like(x).index_add(0, dst, x[src])

    model, x = Trimmed(), torch.randn(SOURCES, F)
    compiled = gnnc.compile(model, precision="fp32")
    for ids, kept, nodes in (([0, 1, 2, -1], 3, 3), ([0, 0, 7, 8], 2, 1), ([0, 8, 8, -1], 1, 1)):
        args = x, torch.tensor([ids, ids]), kept, nodes
        assert relative_error(compiled(*args), model(*args)) < 1e-5
