"""Bad input is refused before a kernel reads memory, and the compiled model stays usable."""

import pytest
import torch
from bad_arguments import BAD, BATCH, EDGES, GOOD, NUM_NODES, WIDTH, Classifier, X, good, with_index
from torch import nn
from torch_geometric.nn import GCNConv, global_mean_pool

import gnnc


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


@pytest.mark.first(2)
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


@pytest.mark.first(1)
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


@pytest.mark.first(1)
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


class ByOtherRows(nn.Module):
    """Sums in both directions, of which one reads rows of a table that is shorter than its result."""

    def forward(self, x, edge_index, y, like):
        src, dst = edge_index[0], edge_index[1]
        there = x.new_zeros(like.shape[0], x.shape[1]).index_add(0, dst, x[src] * y[dst])
        return there, x.new_zeros(y.shape[0], x.shape[1]).index_add(0, src, x[dst])


@torch.no_grad()
def test_ids_that_are_fine_for_the_sum_and_not_for_the_rows_are_refused():
    model, compiled = ByOtherRows(), gnnc.compile(ByOtherRows(), "fp32")
    edge_index = torch.tensor([[0, 3, 2, 3], [3, 0, 1, 3]])
    x, y, like = torch.randn(10, 8), torch.randn(4, 8), torch.randn(9, 1)
    torch.testing.assert_close(compiled(x, edge_index, y, like), model(x, edge_index, y, like))
    edge_index = torch.tensor([[0, 3, 2, 3], [3, 0, 8, 3]])
    with pytest.raises(gnnc.GraphError, match=r"edge_index\[1, 2\] = 8 .* 0\.\.3"):
        compiled(x, edge_index, y, like)


class Looks(nn.Module):
    """A product in a given dtype, and values of it by number."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.dtype = dtype

    def forward(self, x, ids):
        return (x @ self.weight.to(self.dtype))[ids]


def names_both_dtypes() -> bool:
    """Return whether the installed torch names both dtypes of a product that it refuses, as 2.13 does."""
    try:
        torch.ones(1, 2, dtype=torch.long) @ torch.ones(2)
    except RuntimeError as error:
        return "have the same dtype, but got" in str(error)
    return False


needs_both_dtypes = pytest.mark.skipif(
    not names_both_dtypes(), reason="this torch does not name both dtypes of a product that it refuses"
)


@needs_both_dtypes
@torch.no_grad()
def test_integers_where_the_model_has_floats_are_named():
    compiled = gnnc.compile(Looks().eval(), "fp32")
    with pytest.raises(gnnc.InputError, match=r"x, ids holds integers .* pass x\.float\(\)"):
        compiled(X.long(), torch.arange(3))


@needs_both_dtypes
@torch.no_grad()
def test_integers_are_not_blamed_for_other_dtypes():
    compiled = gnnc.compile(Looks(torch.float64).eval(), "fp32")
    with pytest.raises(gnnc.InputError, match="dtype") as caught:
        compiled(X, torch.arange(3))
    assert "holds integers" not in str(caught.value)
