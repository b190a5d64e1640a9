"""Training on a thousand mini-batches: one program, and memory that does not grow."""

import gc
import statistics
from itertools import islice

import graphs
import measure
import pytest
import torch
import torch.nn.functional as F
from sampling import Sampler
from torch_geometric.nn.models import GraphSAGE

import gnnc

COUNT, FEATURES, CLASSES = 1000, 16, 5


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_thousand_batches_are_one_program_in_flat_memory(precision: str) -> None:
    torch.manual_seed(0)
    nodes = graphs.SHAPES["cora"].nodes
    x, y = torch.randn(nodes, FEATURES), torch.randint(CLASSES, (nodes,))
    model = GraphSAGE(FEATURES, 16, 2, CLASSES, dropout=0.5).train()
    compiled = gnnc.compile(model, precision)
    optimizer = torch.optim.Adam(compiled.parameters(), lr=0.01)
    memory, programs, losses = [], set(), []
    batches = Sampler(graphs.generate("cora"), nodes, (5, 5)).batches(32)
    for count, (chosen, edge_index) in enumerate(islice(batches, COUNT)):
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(x[chosen], edge_index)[:32], y[chosen[:32]])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        programs.add(len(compiled._dispatch.programs()))
        if count % 50 == 49:
            gc.collect()
            memory.append(measure.rss_mb())
    assert programs == {1} and len(compiled._dispatch.captures) == 1
    assert all(map(torch.isfinite, torch.tensor(losses)))
    start, end = statistics.median(memory[2:6]), statistics.median(memory[-4:])
    assert end - start < 8, f"{end - start:.1f} MiB more after {COUNT} batches"
