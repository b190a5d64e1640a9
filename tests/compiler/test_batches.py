"""Mini-batches of sampled neighbors: one program, no memory left behind, bipartite layers."""

import gc
import itertools

import measure
import pytest
import torch
import torch_geometric.nn as pyg
from compare import capture_count
from sampling import Sampler
from torch import Tensor, nn

import gnnc

NODES, WIDTH = 500, 12


def graph() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NODES, WIDTH, generator=generator), torch.randint(
        NODES, (2, 4000), generator=generator
    )


class Layers(nn.Module):
    """A bipartite layer a hop, as the batches of a neighbor loader are used with trimmed adjacencies."""

    def __init__(self) -> None:
        super().__init__()
        self.far, self.near = pyg.SAGEConv(WIDTH, 16), pyg.GATConv((16, 16), 5, add_self_loops=False)

    def forward(self, x, far, near, targets):
        x = self.far((x, x[: targets[0].shape[0]]), far).relu()
        return self.near((x, x[: targets[1].shape[0]]), near)


@pytest.mark.slow
def test_a_thousand_sampled_batches():
    """One capture; what is cached goes with each batch; temporaries grow to the largest batch and stay."""
    torch.manual_seed(0)
    model = pyg.models.GraphSAGE(WIDTH, 16, 2, 5).eval()
    compiled = gnnc.compile(model, "int8")
    x, edge_index = graph()
    batches = Sampler(edge_index, NODES, (5, 5)).batches(16)
    resident = []
    with torch.no_grad():
        for number, (nodes, edges) in enumerate(itertools.islice(batches, 1000)):
            got = compiled(x[nodes], edges)[:16]
            if number % 100 == 0:
                expected = model(x[nodes], edges)[:16]
                assert (got - expected).norm() <= 0.05 * expected.norm()
                gc.collect()
                resident.append(measure.rss_mb())
    del nodes, edges, got
    assert capture_count(compiled) == 1
    (program,) = compiled._dispatch.programs()
    assert program.runner.cache.nbytes == 0
    assert program.executable.arena_bytes <= 1 << 18
    assert resident[-1] - resident[2] <= 8, resident


@torch.no_grad()
def test_bipartite_batches():
    torch.manual_seed(0)
    model = Layers().eval()
    compiled = gnnc.compile(model, "int8")
    x, edge_index = graph()
    sampler = Sampler(edge_index, NODES, (4,))
    for seeds in (16, 5, 40, 1):
        inner, near = sampler.sample(torch.randperm(NODES)[:seeds])
        outer, far = sampler.sample(inner)
        arguments = x[outer], far, near, (inner, inner[:seeds])
        expected = model(*arguments)
        assert (compiled(*arguments) - expected).norm() <= 0.05 * expected.norm()
    assert capture_count(compiled) == 1
