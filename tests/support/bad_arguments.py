"""Arguments that a compiled model refuses, and unusual ones that it takes."""

import torch
from torch import nn
from torch_geometric.nn import GCNConv, global_mean_pool

import gnnc

NUM_NODES, WIDTH, CLASSES = 20, 8, 3


class Classifier(nn.Module):
    """Pools nodes into graphs: it has an edge list, a batch vector and a size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, CLASSES)

    def forward(self, x, edge_index, batch):
        return global_mean_pool(self.conv(x, edge_index), batch, size=4)


def good() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(NUM_NODES, WIDTH, generator=generator),
        torch.randint(NUM_NODES, (2, 60), generator=generator),
        torch.arange(NUM_NODES) % 4,
    )


def with_index(row, column, value):
    x, edge_index, batch = good()
    edge_index[row, column] = value
    return x, edge_index, batch


X, EDGES, BATCH = good()


BAD = {
    "source too large": (with_index(0, 7, NUM_NODES), gnnc.GraphError, r"edge_index\[0, 7\] = 20"),
    "destination too large": (with_index(1, 3, 10**12), gnnc.GraphError, r"edge_index\[1, 3\]"),
    "source negative": (with_index(0, 0, -1), gnnc.GraphError, r"edge_index\[0, 0\] = -1"),
    "destination negative": (with_index(1, 0, -5), gnnc.GraphError, r"edge_index\[1, 0\] = -5"),
    "float edge_index": ((X, EDGES.float(), BATCH), gnnc.GraphError, r"\.long\(\)"),
    "one-dimensional edge_index": ((X, EDGES[0], BATCH), gnnc.GraphError, "shape"),
    "three rows": ((X, EDGES[[0, 1, 0]], BATCH), gnnc.GraphError, r"\[2, number of edges\]"),
    "transposed edge_index": ((X, EDGES.t(), BATCH), gnnc.GraphError, r"\[2, number of edges\]"),
    "batch too large": ((X, EDGES, BATCH + 1), gnnc.GraphError, r"batch\[3\] = 4"),
    "batch negative": ((X, EDGES, BATCH - 1), gnnc.GraphError, r"batch\[0\] = -1"),
    "batch too short": ((X, EDGES, BATCH[:-1]), gnnc.InputError, "batch dim 0 is 19"),
    "float batch": ((X, EDGES, BATCH.float()), gnnc.GraphError, r"\.long\(\)"),
    "wrong width": ((X[:, :5], EDGES, BATCH), gnnc.InputError, r"x: float32\[.*8\].*got shape \(20, 5\)"),
    "half x": ((X.half(), EDGES, BATCH), gnnc.InputError, r"x\.float\(\)"),
    "double x": ((X.double(), EDGES, BATCH), gnnc.InputError, r"x\.float\(\)"),
    "integer x": ((X.long(), EDGES, BATCH), gnnc.GnncError, "x: float32"),
    "one-dimensional x": ((X[:, 0], EDGES, BATCH), gnnc.GnncError, "Classifier"),
    "x is None": ((None, EDGES, BATCH), gnnc.InputError, "x is None"),
    "edge_index is None": ((X, None, BATCH), gnnc.InputError, "edge_index is None"),
    "missing argument": ((X, EDGES), gnnc.InputError, "missing a required argument: 'batch'"),
    "too many arguments": ((X, EDGES, BATCH, BATCH), gnnc.InputError, "too many positional"),
    "no arguments": ((), gnnc.InputError, "missing a required argument: 'x'"),
}


EMPTY = torch.empty(2, 0, dtype=torch.int64)


GOOD = {
    "no edges": (X, EMPTY, BATCH),
    "no edges in int32": (X, EMPTY.int(), BATCH),
    "one node": (X[:1], EMPTY, BATCH[:1]),
    "one node with a loop": (X[:1], torch.zeros(2, 1, dtype=torch.int64), BATCH[:1]),
    "seven nodes, no edges": (X[:7], EMPTY, BATCH[:7]),
    "as many edges as nodes": (X, EDGES[:, :NUM_NODES], BATCH),
    "int32 indices": (X, EDGES.int(), BATCH.int()),
    "strided indices": (X, EDGES.t().contiguous().t(), BATCH.repeat_interleave(2)[::2]),
    "transposed x": (X.t().contiguous().t(), EDGES, BATCH),
    "every other row of x": (X.repeat_interleave(2, 0)[::2], EDGES, BATCH),
    "some columns of x": (torch.cat([X, X], 1)[:, :WIDTH], EDGES, BATCH),
}
