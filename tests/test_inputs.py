"""Bad input is refused before a kernel reads memory, and the compiled model stays usable."""

import pytest
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


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Classifier().eval()


@pytest.fixture(scope="module", params=["reference", "cpu"])
def compiled(model, request):
    result = gnnc.compile(model, "int8", backend=request.param)
    with torch.no_grad():
        result(*good())
    return result


class Wide(nn.Module):
    """Its aggregation is wide enough to be quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, 64)

    def forward(self, x, edge_index, batch):
        return global_mean_pool(self.conv(x, edge_index).relu(), batch, size=4)


@pytest.fixture(scope="module")
def static():
    torch.manual_seed(0)
    model = Wide().eval()
    return {
        backend: gnnc.compile(model, "int8", backend=backend, example_inputs=good())
        for backend in ("reference", "cpu")
    }


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
    "bool edge_index": ((X, EDGES > 3, BATCH), gnnc.GraphError, "int64 or int32"),
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


@pytest.mark.parametrize("case", BAD)
@torch.no_grad()
def test_bad_arguments(compiled, case):
    arguments, error, match = BAD[case]
    expected = compiled(*good())
    with pytest.raises(error, match=match):
        compiled(*arguments)
    assert torch.equal(compiled(*good()), expected)


@torch.no_grad()
def test_unknown_keyword(compiled):
    with pytest.raises(gnnc.InputError, match="unexpected keyword argument 'edge_wieght'"):
        compiled(*good(), edge_wieght=X)


@torch.no_grad()
def test_a_bad_first_call_leaves_the_model_usable(model):
    compiled = gnnc.compile(model, "fp32", backend="reference")
    with pytest.raises(gnnc.GraphError):
        compiled(X, EDGES.float(), BATCH)
    with pytest.raises(gnnc.GraphError):
        compiled(*with_index(0, 7, NUM_NODES))
    torch.testing.assert_close(compiled(*good()), model(*good()))


@torch.no_grad()
def test_an_edge_list_that_turns_bad_in_place_is_seen(compiled):
    x, edge_index, batch = good()
    compiled(x, edge_index, batch)
    edge_index[1, 5] = NUM_NODES
    with pytest.raises(gnnc.GraphError, match=r"edge_index\[1, 5\]"):
        compiled(x, edge_index, batch)
    edge_index[1, 5] = 0
    compiled(x, edge_index, batch)


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


@pytest.mark.parametrize("case", GOOD)
@torch.no_grad()
def test_unusual_arguments_work(model, compiled, case):
    arguments = GOOD[case]
    wide = (arguments[0], arguments[1].long(), arguments[2].long())
    expected, actual = model(*wide), compiled(*arguments)
    assert (actual - expected).norm() <= 0.03 * expected.norm() + 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@torch.no_grad()
def test_values_that_are_not_finite_do_not_vanish(compiled, bad):
    x, edge_index, batch = good()
    x[3, 2] = bad
    try:
        result = compiled(x, edge_index, batch)
    except gnnc.PrecisionError as error:
        assert "not finite" in str(error)
    else:
        assert not torch.isfinite(result).all()
    compiled(*good())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@torch.no_grad()
def test_static_scales_do_not_hide_values_that_are_not_finite(static, backend, bad):
    x, edge_index, batch = good()
    x[3, 2] = bad
    with pytest.raises(gnnc.PrecisionError, match="not finite"):
        static[backend](x, edge_index, batch)
    static[backend](*good())


@torch.no_grad()
def test_the_check_of_scales_can_be_turned_off(model):
    compiled = gnnc.compile(model, "int8", backend="reference", check_finite="off")
    x, edge_index, batch = good()
    x[3, 2] = float("inf")
    compiled(x, edge_index, batch)


class Looks(nn.Module):
    """A product in a given dtype, and values of it by number."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.dtype = dtype

    def forward(self, x, ids):
        return (x @ self.weight.to(self.dtype))[ids]


@torch.no_grad()
def test_integers_where_the_model_has_floats_are_named():
    compiled = gnnc.compile(Looks().eval(), "fp32")
    with pytest.raises(gnnc.InputError, match=r"x, ids holds integers .* pass x\.float\(\)"):
        compiled(X.long(), torch.arange(3))


@torch.no_grad()
def test_integers_are_not_blamed_for_other_dtypes():
    compiled = gnnc.compile(Looks(torch.float64).eval(), "fp32")
    with pytest.raises(RuntimeError, match="dtype") as caught:
        compiled(X, torch.arange(3))
    assert not isinstance(caught.value, gnnc.InputError)
