"""Calls on whose own sizes forward fails are refused before each reading of the sizes is traced."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

import gnnc
from gnnc.capture import export

X, EDGES = torch.randn(20, 8), torch.randint(20, (2, 60))


class Stack(nn.Module):
    """A layer, and a head that no wrong edge list reaches."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv, self.head = conv, nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return [nodes, 3]."""
        return self.head(self.conv(x, edge_index))


class Pairs(nn.Module):
    """A model that takes its edges as ``[E, 2]``."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the sums of the sources, [nodes, F]."""
        return torch.zeros_like(x).index_add(0, edge_index[:, 1], x[edge_index[:, 0]])


class ThroughNumpy(nn.Module):
    """A model that computes a step in NumPy."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return [nodes, F]."""
        offsets = torch.from_numpy(edge_index.numpy()[0]).float().sum()
        return x + offsets


LAYERS = {
    "gcn": lambda: GCNConv(8, 8),
    "sage": lambda: SAGEConv(8, 8),
    "gin": lambda: GINConv(nn.Linear(8, 8)),
}
BAD = {
    "float": EDGES.float(),
    "three rows": EDGES[[0, 1, 0]],
    "one row": EDGES[:1],
    "transposed": EDGES.t(),
    "empty and one-dimensional": EDGES.new_empty(0),
}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets an entry for each trace."""
    made: list[bool] = []
    original = export._traced

    def traced(*args: object) -> object:
        made.append(True)
        return original(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(export, "_traced", traced)
    return made


@pytest.mark.parametrize("layer", LAYERS)
def test_edge_lists_of_another_form_are_refused_untraced(layer: str, traces: list[bool]) -> None:
    compiled = gnnc.compile(Stack(LAYERS[layer]()).eval(), "fp32")
    for label, edges in BAD.items():
        with pytest.raises(gnnc.GraphError, match="edge_index has"):
            compiled(X, edges)
        assert not traces, label


@pytest.mark.parametrize("x", [X[:, :5], X.long(), X[:, 0]], ids=["width", "integers", "one-dimensional"])
def test_features_of_another_form_are_traced_once(x: Tensor, traces: list[bool]) -> None:
    compiled = gnnc.compile(Stack(SAGEConv(8, 8)).eval(), "fp32")
    with pytest.raises(gnnc.CaptureError, match="Stack"):
        compiled(x, EDGES)
    assert len(traces) <= 1


def test_forward_that_takes_another_form_is_traced(traces: list[bool]) -> None:
    compiled = gnnc.compile(Pairs(), "fp32")
    edges = EDGES.t().contiguous()
    torch.testing.assert_close(compiled(X, edges), Pairs()(X, edges))
    assert traces


def test_what_fake_tensors_cannot_do_decides_nothing(traces: list[bool]) -> None:
    """Dynamo traces calls of NumPy, which fake tensors refuse."""
    model = ThroughNumpy()
    torch.testing.assert_close(gnnc.compile(model, "fp32")(X, EDGES), model(X, EDGES))
    assert len(traces) > 1


class Counted(nn.Module):
    """A batch norm, and a buffer that counts calls, before a way that some readings of the sizes fail on."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.norm, self.way = nn.BatchNorm1d(8), way
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return [nodes, F]."""
        h = self.norm(x)
        self.count.add_(1)
        if self.way == "sizes":
            return h * {20: 1.0, 21: 2.0}[x.shape[0]]
        if self.way == "fails":
            raise ValueError("never")
        return h.index_add(0, edge_index[0], h[edge_index[1]])


@pytest.mark.parametrize(
    ("way", "edges", "steps"),
    [("plain", EDGES, 1), ("plain", EDGES[[0, 1, 0]], 1), ("sizes", EDGES, 1), ("fails", EDGES, 0)],
    ids=["plain", "three rows", "sizes", "fails"],
)
def test_buffers_are_written_by_the_call_alone(way: str, edges: Tensor, steps: int) -> None:
    model = Counted(way).requires_grad_(False).train()
    compiled = gnnc.compile(model, "fp32")
    if steps:
        compiled(X, edges)
    else:
        with pytest.raises(gnnc.GnncError):
            compiled(X, edges)
    assert int(model.norm.num_batches_tracked) == steps and float(model.get_buffer("count")) == steps
