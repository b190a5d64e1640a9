"""Adjacencies of torch.sparse, in every layout, on the layers that take them in PyG."""

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from slow import slow_after
from sparse_matrices import matrix
from torch import Tensor, nn

import gnnc
from gnnc.capture.sparse_components import components

WIDTH = 12
SIZES = [(50, 300), (31, 90), (7, 0)]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "coo": lambda matrix: matrix,
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: pyg.GCNConv(WIDTH, 8),
    "gat": lambda: pyg.GATConv(WIDTH, 4, heads=2),
    "transformer": lambda: pyg.TransformerConv(WIDTH, 4, heads=2),
    "appnp": lambda: pyg.APPNP(K=2, alpha=0.1),
    "eg": lambda: pyg.EGConv(WIDTH, 8, aggregators=["sum", "mean", "symnorm"]),
    "sage": lambda: pyg.SAGEConv(WIDTH, 8),
    "sage-max": lambda: pyg.SAGEConv(WIDTH, 8, aggr="max"),
    "gin": lambda: pyg.GINConv(nn.Linear(WIDTH, 8)),
}
CASES = [
    *(("gcn", "csr"), ("gcn", "coo"), ("gat", "csr"), ("gat", "coo"), ("transformer", "coo")),
    *(("appnp", "csr"), ("eg", "csr"), ("sage", "csr"), ("sage", "csc"), ("sage-max", "coo"), ("gin", "csc")),
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:Converting sparse tensor"),
]


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]().eval()


def assert_equal(compiled: gnnc.CompiledModel, x, adjacency: Tensor) -> None:
    with torch.no_grad():
        expected = compiled.model(x, adjacency)
        torch.testing.assert_close(compiled(x, adjacency), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_equals_eager(name, layout):
    compiled = gnnc.compile(model_of(name), "fp32")
    for seed, (nodes, edges) in enumerate(SIZES):
        adjacency = LAYOUTS[layout](matrix(nodes, nodes, edges, seed))
        assert_equal(compiled, torch.randn(nodes, WIDTH), adjacency)
    assert "\n  2. " not in compiled.explain()


def test_bipartite():
    torch.manual_seed(0)
    compiled = gnnc.compile(pyg.SAGEConv((WIDTH, WIDTH), 8).eval(), "fp32")
    for seed, (sources, targets) in enumerate([(50, 20), (30, 31), (20, 20)]):
        pair = torch.randn(sources, WIDTH), torch.randn(targets, WIDTH)
        assert_equal(compiled, pair, matrix(targets, sources, 90, seed).to_sparse_csr())


@torch.no_grad()
def test_a_layout_that_the_layer_refuses_names_the_way_out():
    """PyG adds no self loops to CSC."""
    compiled = gnnc.compile(model_of("gcn"), "fp32")
    coo = matrix(50, 50, 300, 0)
    x = torch.randn(50, WIDTH)
    way = r"pass edge_index \(and edge weights\) instead of the sparse_csc adjacency, or .*to_sparse_csr\(\)"
    with pytest.raises(gnnc.CaptureError, match=way):
        compiled(x, coo.to_sparse_csc())
    assert_equal(compiled, x, coo.to_sparse_csr())


class Reads(nn.Module):
    """Asks an adjacency that it makes itself for its parts, in an order that it did not make."""

    def forward(self, x, edge_index, weight):
        size = (x.shape[0], x.shape[0])
        adjacency = torch.sparse_coo_tensor(edge_index.flip(0), weight, size)
        raw = adjacency._values() * 2
        adjacency = adjacency.coalesce()
        csr, csc = adjacency.to_sparse_csr(), adjacency.to_sparse_csc()
        twice = csr.clone()
        twice.values().mul_(2)
        return (
            (raw, adjacency.indices(), adjacency.values(), csr.crow_indices(), csr.col_indices()),
            (csc.ccol_indices(), csc.row_indices(), csc.values(), csr.values()),
            (adjacency @ x, csr @ x, twice @ x, torch.sparse.mm(adjacency.t(), x)),
        )


@torch.no_grad()
def test_parts_of_an_adjacency_made_in_forward():
    compiled = gnnc.compile(Reads(), "fp32")
    for seed, nodes in enumerate((20, 31)):
        generator = torch.Generator().manual_seed(seed)
        edge_index = torch.randint(nodes, (2, 90), generator=generator)  # with duplicates
        arguments = torch.randn(nodes, 5), edge_index, torch.rand(90, generator=generator)
        torch.testing.assert_close(compiled(*arguments), compiled.model(*arguments), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_parts_of_a_matrix_that_is_not_coalesced_are_refused():
    class Asks(nn.Module):
        def forward(self, x, edge_index):
            return torch.sparse_coo_tensor(edge_index, x, (x.shape[0], x.shape[0])).values()

    with pytest.raises(gnnc.CaptureError, match=r"not coalesced: call coalesce\(\)"):
        gnnc.compile(Asks(), "fp32")(torch.rand(9), torch.randint(9, (2, 9)))


class Product(nn.Module):
    """A linear layer before an adjacency, as torch.sparse multiplies it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, 8)

    def forward(self, x, adjacency):
        return adjacency @ self.lin(x)


class OwnProduct(Product):
    """Makes the adjacency of its parts."""

    def forward(self, x, adjacency):
        pointer, column, value = adjacency
        size = (x.shape[0], x.shape[0])
        return super().forward(x, torch.sparse_csr_tensor(pointer, column, value, size))


def parts(adjacency: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if adjacency.layout == torch.sparse_csc:
        return adjacency.ccol_indices(), adjacency.row_indices(), adjacency.values()
    return adjacency.crow_indices(), adjacency.col_indices(), adjacency.values()


BAD_POINTERS = {
    "far in the middle": ((5, 10**6), r"\[6\] = \d+ after 1000000 "),
    "far at the end": ((-1, 10**6), r"\[50\] = 1000000 "),
    "short of the end": ((-1, 270), r"\[50\] = 270 "),
    "begins late": ((0, 3), r"\[0\] = 3 is"),
    "negative": ((5, -5), r"\[5\] = -5 after "),
}


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("how", BAD_POINTERS)
@pytest.mark.parametrize("layout", slow_after(1, ["csr", "csc"]))
def test_offsets_that_would_lead_out_of_the_matrix_are_refused(layout, how):
    (place, value), message = BAD_POINTERS[how]
    good, x = LAYOUTS[layout](matrix(50, 50, 290, 0)), torch.randn(50, WIDTH)
    pointer, plain, values = parts(good)
    wrong = pointer.clone()
    wrong[place] = value
    make = torch.sparse_csr_tensor if layout == "csr" else torch.sparse_csc_tensor
    bad, compiled = make(wrong, plain, values, (50, 50), check_invariants=False), gnnc.compile(Product())
    for call in (compiled, gnnc.compile(Product())):  # after a good call, and as the first
        if call is compiled:
            call(x, good)
        with pytest.raises(gnnc.GraphError, match=message):
            call(x, bad)
    with pytest.raises(gnnc.GraphError, match=message):
        gnnc.compile(Product(), example_inputs=(x, bad))
    pointer[place] = value  # in place
    with pytest.raises(gnnc.GraphError, match=message):
        compiled(x, good)
    compiled(x, LAYOUTS[layout](matrix(50, 50, 290, 1)))


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_offsets_of_a_matrix_made_in_forward_are_checked(dtype):
    adjacency, x = matrix(50, 50, 290, 0).to_sparse_csr(), torch.randn(50, WIDTH)
    pointer, column, value = parts(adjacency)
    given = pointer.to(dtype), column.to(dtype), value
    compiled = gnnc.compile(OwnProduct())
    compiled(x, given)
    given[0][5] = 10**6
    with pytest.raises(gnnc.GraphError, match=r"\[6\] = \d+ after 1000000 is no offset"):
        compiled(x, given)


def values_of(adjacency: Tensor) -> Tensor:
    return adjacency._values() if adjacency.layout == torch.sparse_coo else adjacency.values()


def repeated(adjacency: Tensor) -> Tensor:
    """The same edges twice, in a COO matrix that is not coalesced."""
    indices, values = adjacency.indices().repeat(1, 2), adjacency.values().repeat(2)
    return torch.sparse_coo_tensor(indices, values, adjacency.shape)


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "multiplied": lambda adjacency: adjacency.mul_(2),
    "values multiplied": lambda adjacency: values_of(adjacency).mul_(3),
    "copied into": lambda adjacency: adjacency.copy_(adjacency * -0.5),
    "zeroed": lambda adjacency: adjacency.zero_(),
}


@pytest.mark.first(2)
@torch.no_grad()
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layout", [*LAYOUTS, "repeated"])
def test_an_adjacency_edited_in_place_is_seen(layout, mode):
    compiled, x = gnnc.compile(Product(), "fp32"), torch.randn(50, WIDTH)
    with mode():
        for edit in IN_PLACE.values():
            adjacency = {**LAYOUTS, "repeated": repeated}[layout](matrix(50, 50, 290, 0))
            assert_equal(compiled, x, adjacency)
            edit(adjacency)
            assert_equal(compiled, x, adjacency)
            assert_equal(compiled, x, adjacency)
    assert "\n  2. " not in compiled.explain()


def of_tensors(layout: str) -> tuple[Tensor, list[Tensor]]:
    """Return an adjacency, and the tensors that it is made of."""
    if layout == "repeated":
        known = repeated(matrix(50, 50, 290, 0))
        tensors = [known._indices().clone(), known._values().clone()]
        return torch.sparse_coo_tensor(*tensors, known.shape), tensors
    known = LAYOUTS[layout](matrix(50, 50, 290, 0))
    if layout == "coo":
        tensors = [known.indices().clone(), known.values().clone()]
        return torch.sparse_coo_tensor(*tensors, known.shape, is_coalesced=True), tensors
    make = torch.sparse_csr_tensor if layout == "csr" else torch.sparse_csc_tensor
    tensors = [part.clone() for part in parts(known)]
    return make(*tensors, known.shape), tensors


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layout", [*LAYOUTS, "repeated"])
def test_edits_of_the_tensors_that_an_adjacency_is_made_of_are_seen(layout, mode):
    compiled, x = gnnc.compile(Product(), "fp32"), torch.randn(50, WIDTH)
    with mode():
        adjacency, tensors = of_tensors(layout)
        for _ in range(2):
            for tensor in tensors:
                assert_equal(compiled, x, adjacency)
                assert_equal(compiled, x, adjacency)
                if tensor.is_floating_point():
                    tensor.mul_(torch.rand(tensor.shape))
                elif layout == "repeated":
                    tensor.copy_(49 - tensor)
                elif layout == "coo":
                    tensor[1].copy_(49 - tensor[1])
                elif tensor is tensors[1]:
                    tensor.copy_(49 - tensor)
            assert_equal(compiled, x, adjacency)
    assert "\n  2. " not in compiled.explain()


@torch.no_grad()
def test_a_second_matrix_of_the_same_tensors_writes_into_the_first():
    compiled, x = gnnc.compile(Product(), "fp32"), torch.randn(50, WIDTH)
    adjacency = matrix(50, 50, 290, 0)
    assert_equal(compiled, x, adjacency)
    other = torch.sparse_coo_tensor(adjacency.indices(), adjacency.values(), (50, 50), is_coalesced=True)
    for _ in range(2):
        other.values().mul_(torch.rand(adjacency.values().shape))
        assert_equal(compiled, x, adjacency)


@torch.no_grad()
def test_a_coo_matrix_whose_tensors_nobody_holds_is_not_compared(monkeypatch):
    adjacency = matrix(50, 50, 290, 0)
    first = components(adjacency)
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("compared"))
    assert components(adjacency) is first


@torch.no_grad()
def test_other_edges_put_into_an_adjacency_are_seen():
    compiled, x = gnnc.compile(Product(), "fp32"), torch.randn(50, WIDTH)
    for layout in ("csr", "coo"):
        adjacency, other = (LAYOUTS[layout](matrix(50, 50, count, 0)) for count in (290, 90))
        assert_equal(compiled, x, adjacency)
        adjacency.resize_as_sparse_(other).copy_(other)
        assert_equal(compiled, x, adjacency)
    adjacency = matrix(50, 50, 290, 0)
    assert_equal(compiled, x, adjacency)
    adjacency.add_(matrix(50, 50, 90, 1))
    assert_equal(compiled, x, adjacency)


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("layout", [*LAYOUTS, "repeated"])
def test_writes_around_torch_are_seen_once_the_cache_is_cleared(layout):
    compiled, x = gnnc.compile(Product(), "fp32"), torch.randn(50, WIDTH)
    adjacency = {**LAYOUTS, "repeated": repeated}[layout](matrix(50, 50, 290, 0))
    assert_equal(compiled, x, adjacency)
    values_of(adjacency).numpy()[:] *= 3
    compiled.clear_cache()
    assert_equal(compiled, x, adjacency)


def test_an_adjacency_that_stays_as_it_is_is_taken_apart_once():
    for layout in LAYOUTS:
        adjacency = LAYOUTS[layout](repeated(matrix(50, 50, 290, 0)))
        first, again = components(adjacency), components(adjacency)
        assert all(first[name] is again[name] for name in first)


@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_parts_that_an_edit_leaves_alone_stay_the_same_objects(layout):
    """So that what was made of them, as the order of the edges, is found again."""
    adjacency = LAYOUTS[layout](matrix(50, 50, 290, 0))
    before = components(adjacency)
    adjacency.mul_(2)
    after = components(adjacency)
    assert all(before[name] is after[name] for name in before.keys() - {"values"})
    assert torch.equal(after["values"], adjacency.values())


class Does(nn.Module):
    """One step on an adjacency."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step

    def forward(self, adjacency):
        result = self.step(adjacency)
        return result if result.layout == torch.strided else result.to_dense()


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda a: torch.sum(a, 1, True),
    "columns by keyword": lambda a: a.sum(dim=(-1,), keepdim=True),
    "rows": lambda a: torch.sum(a, dim=0, keepdim=True),
    "rows from the end": lambda a: a.sum(-2, keepdim=True),
    "wider": lambda a: a.sum(dim=1, keepdim=True, dtype=torch.float64),
}
COO_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "no keepdim": lambda a: a.sum(dim=1),
    "no keepdim, wider": lambda a: torch.sum(a, 0, dtype=torch.float64),
    "of torch.sparse": lambda a: torch.sparse.sum(a, 1),
    "of torch.sparse, wider": lambda a: torch.sparse.sum(a, (0,), torch.float64),
}
SUM_CASES = [
    *((layout, name, values) for layout in ("csr", "coo") for name in SUMS for values in ("float", "int")),
    *(("coo", name, values) for name in COO_SUMS for values in ("float", "int")),
]


@pytest.mark.first(2)
@torch.no_grad()
@pytest.mark.parametrize(("layout", "name", "values"), SUM_CASES)
def test_sums_have_the_shape_and_dtype_of_eager(layout, name, values):
    model = Does({**SUMS, **COO_SUMS}[name])
    adjacency = matrix(50, 31, 290, 0)
    if values == "int":
        whole = (adjacency.values() * 9).short()
        adjacency = torch.sparse_coo_tensor(adjacency.indices(), whole, (50, 31)).coalesce()
    adjacency = LAYOUTS[layout](adjacency)
    torch.testing.assert_close(gnnc.compile(model, "fp32")(adjacency), model(adjacency))


class Makes(nn.Module):
    """Makes an adjacency, by the constructors that take more than its parts."""

    def forward(self, edge_index, weight):
        given = {"size": (9, 9), "device": edge_index.device, "requires_grad": False}
        wide = torch.sparse_coo_tensor(edge_index, weight, dtype=torch.float64, **given)
        plain = torch.sparse_coo_tensor(edge_index, weight, check_invariants=False, **given).coalesce()
        csr = plain.to_sparse_csr()
        pointer, column, value = csr.crow_indices(), csr.col_indices(), csr.values()
        again = torch.sparse_csr_tensor(pointer, column, value, dtype=torch.float64, **given)
        wider = torch.sparse_compressed_tensor(
            pointer, column, value, layout=torch.sparse_csr, dtype=torch.float64, **given
        )
        dense = torch.ones(9, 3, dtype=torch.float64)
        return wide @ dense, again @ dense, wider @ dense


@torch.no_grad()
def test_an_adjacency_is_made_with_the_dtype_that_is_asked_for():
    edge_index = torch.randint(9, (2, 40), generator=torch.Generator().manual_seed(0))
    model, weight = Makes(), torch.rand(40)
    torch.testing.assert_close(gnnc.compile(model, "fp32")(edge_index, weight), model(edge_index, weight))


@torch.no_grad()
def test_only_other_dimensions_are_transposed():
    adjacency, x = matrix(50, 50, 290, 0).to_sparse_csr(), torch.randn(50, WIDTH)
    for dims, expected in (((0, 1), adjacency.mT), ((-1, 1), adjacency), ((1, -2), adjacency.mT)):
        model = Does(lambda a, dims=dims: torch.transpose(a, *dims) @ x)
        torch.testing.assert_close(gnnc.compile(model, "fp32")(adjacency), expected @ x)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "out": (lambda a: torch.mm(a, torch.ones(50, 2), out=torch.empty(50, 2)), r"mm\(out=\)"),
    "dense_dim": (lambda a: a.to_sparse_csr(dense_dim=0), r"to_sparse_csr\(dense_dim=\)"),
    "memory_format": (lambda a: a.clone(memory_format=torch.preserve_format), r"clone\(memory_format=\)"),
    "whole": (lambda a: a.sum(dtype=torch.float64), "sum"),
    "both dimensions": (lambda a: a.sum(dim=(0, 1), keepdim=True), "sum"),
    "no such dimension": (lambda a: a.sum(dim=2), "sum"),
    "not coalesced": (lambda a: a._coalesced_(False), "_coalesced_"),
    "blocks": (lambda a: a.to_sparse(layout=torch.sparse_csr, blocksize=(2, 2)), r"to_sparse\(blocksize=\)"),
}


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_without_a_meaning_here_are_refused(name):
    step, match = REFUSED[name]
    with pytest.raises(gnnc.CaptureError, match=rf"{match} of a torch\.sparse tensor cannot be captured"):
        gnnc.compile(Does(step), "fp32")(matrix(50, 50, 290, 0))


def edge_features(layout: str, nodes: int, edges: int, width: int) -> Tensor:
    """A matrix whose entries are rows of edge features."""
    ends = matrix(nodes, nodes, edges, 0).indices()
    values = torch.randn(ends.shape[1], width)
    if layout == "coo":
        return torch.sparse_coo_tensor(ends, values, (nodes, nodes, width)).coalesce()
    csr = torch.sparse_coo_tensor(ends, torch.ones(ends.shape[1]), (nodes, nodes)).to_sparse_csr()
    return torch.sparse_csr_tensor(csr.crow_indices(), csr.col_indices(), values, (nodes, nodes, width))


FEATURE_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gmm": lambda: pyg.GMMConv(WIDTH, 8, dim=3, kernel_size=2),
    "gmm-separate": lambda: pyg.GMMConv((WIDTH, WIDTH), 8, dim=3, kernel_size=2, separate_gaussians=True),
    "nn": lambda: pyg.NNConv(WIDTH, 4, nn.Linear(3, WIDTH * 4)),
    "gine": lambda: pyg.GINEConv(nn.Linear(WIDTH, 8), edge_dim=3),
    "gat": lambda: pyg.GATConv(WIDTH, 4, heads=2, edge_dim=3, add_self_loops=False),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, 4, heads=2, edge_dim=3, add_self_loops=False),
    "cg": lambda: pyg.CGConv(WIDTH, dim=3),
    "gen": lambda: pyg.GENConv(WIDTH, 8, edge_dim=3),
    "pna": lambda: pyg.PNAConv(WIDTH, 8, ["mean", "max"], ["identity"], torch.tensor([0, 3, 9]), edge_dim=3),
    "transformer": lambda: pyg.TransformerConv(WIDTH, 4, heads=2, edge_dim=3),
    "general": lambda: pyg.GeneralConv(WIDTH, 8, in_edge_channels=3),
}


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("name", slow_after(4, FEATURE_LAYERS))
def test_edge_features_as_entries(name, layout):
    torch.manual_seed(0)
    compiled = gnnc.compile(FEATURE_LAYERS[name]().eval(), "fp32")
    for nodes, edges in SIZES:
        adjacency = edge_features(layout, nodes, edges, 3)
        x = torch.randn(nodes, WIDTH)
        try:
            expected = compiled.model((x, x) if name == "gmm-separate" else x, adjacency)
        except (RuntimeError, TypeError, NotImplementedError):
            pytest.skip("the layer takes no such matrix in this layout")
        got = compiled((x, x) if name == "gmm-separate" else x, adjacency)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


class SparseFeatures(nn.Module):
    """Products of a sparse matrix of features with weights, in several spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = pyg.GCNConv(WIDTH, 8), nn.Linear(WIDTH, 8, bias=False)
        self.weight = nn.Parameter(torch.randn(WIDTH, 8))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        products = torch.sparse.mm(x, self.weight) + (x @ self.weight).relu()
        return self.conv(x, edge_index) + self.lin(x) + products


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_sparse_input_features(layout, precision):
    torch.manual_seed(0)
    compiled = gnnc.compile(SparseFeatures().eval(), precision)
    for seed, (nodes, edges) in enumerate([(50, 300), (31, 90), (7, 5)]):
        x = LAYOUTS[layout](matrix(nodes, WIDTH, 3 * nodes, seed))
        edge_index = torch.randint(nodes, (2, edges))
        expected = compiled.model(x, edge_index)
        error = float((compiled(x, edge_index) - expected).norm() / expected.norm())
        assert error < (1e-5 if precision == "fp32" else 0.03)


class TwoHops(nn.Module):
    """Products of two sparse matrices: multiplied with features, and read entry by entry."""

    def forward(self, x: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        product = (left @ right).to_sparse_coo().coalesce()
        return torch.sparse.mm(left, right) @ x, product.indices(), product.values()


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_products_of_sparse_matrices(layout):
    compiled = gnnc.compile(TwoHops(), "fp32")
    for seed, (rows, middle, columns, edges) in enumerate([(10, 8, 9, 30), (20, 7, 5, 40)]):
        left = LAYOUTS[layout](matrix(rows, middle, edges, seed))
        right = LAYOUTS[layout](matrix(middle, columns, edges, seed + 10))
        x = torch.randn(columns, 4)
        (got, *parts), (expected, *wanted) = compiled(x, left, right), compiled.model(x, left, right)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        dense, other = (
            torch.sparse_coo_tensor(*each, (rows, columns)).to_dense() for each in (parts, wanted)
        )
        torch.testing.assert_close(dense, other, rtol=1e-4, atol=1e-4)  # eager's CSR product sorts no row
        assert parts[0].shape == wanted[0].shape


class Selection(nn.Module):
    """Rows and columns of a sparse matrix, also twice."""

    def forward(self, x: Tensor, adj: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        return adj.index_select(0, rows) @ x, adj.index_select(1, columns).to_dense()


@torch.no_grad()
def test_selections_of_rows_and_columns():
    compiled = gnnc.compile(Selection(), "fp32")
    for count in (30, 45):
        args = (
            torch.randn(9, 4),
            matrix(12, 9, count, count),
            torch.tensor([3, 0, 3]),
            torch.tensor([8, 8, 1, 2]),
        )
        for got, expected in zip(compiled(*args), compiled.model(*args), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
