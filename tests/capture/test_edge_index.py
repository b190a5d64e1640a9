"""PyG's ``EdgeIndex``: what it knows of its order is used, checked, and never trusted."""

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.fx import Node
from torch_geometric import EdgeIndex

import gnnc
from gnnc.runtime import registry
from gnnc.runtime.cpu import structure
from gnnc.runtime.structure.kernels import PartEmitter

NODES, WIDTH = 50, 12

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def edges(num_dst: int = NODES, count: int = 300, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ends = [torch.randint(size, (count,), generator=generator) for size in (NODES, num_dst)]
    return torch.stack(ends)


def features(rows: int = NODES) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def unsorted() -> EdgeIndex:
    return EdgeIndex(edges(), sparse_size=(NODES, NODES))


def undirected() -> EdgeIndex:
    both = torch.cat([edges(), edges().flip(0)], 1)
    return EdgeIndex(both, sparse_size=(NODES, NODES), is_undirected=True).sort_by("row")[0]


FORMS = {
    "unsorted": unsorted,
    "by row": lambda: unsorted().sort_by("row")[0],
    "by column": lambda: unsorted().sort_by("col")[0],
    "by row, cached": lambda: unsorted().sort_by("row")[0].fill_cache_(),
    "by column, cached": lambda: unsorted().sort_by("col")[0].fill_cache_(),
    "by column, half cached": lambda: unsorted().sort_by("col")[0].fill_cache_(no_transpose=True),
    "transposed": lambda: unsorted().sort_by("row")[0].fill_cache_().flip(0),  # PyG keeps the wrong pointer
    "transposed, cached": lambda: unsorted().sort_by("row")[0].flip(0).fill_cache_(),
    "undirected": undirected,
    "undirected, cached": lambda: undirected().fill_cache_(),
    "no size": lambda: EdgeIndex(edges()).sort_by("col")[0].fill_cache_(),
    "too few columns": lambda: EdgeIndex(edges(40), sparse_size=(NODES, 40)).sort_by("col")[0].fill_cache_(),
    "none": lambda: EdgeIndex(edges(count=0), sparse_size=(NODES, NODES)).sort_by("col")[0].fill_cache_(),
}


@pytest.fixture(scope="module", params=["source_to_target", "target_to_source"])
def compiled(request):
    torch.manual_seed(0)
    return gnnc.compile(pyg.GraphConv(WIDTH, 8, flow=request.param).eval(), "fp32")


@pytest.fixture
def sorts(monkeypatch) -> list[int]:
    """One entry for each sort of ours."""
    calls, sort = [], structure.csr

    def counted(*args: Any) -> Any:
        calls.append(1)
        return sort(*args)

    def emit(plan: None, node: Node, emitter: PartEmitter) -> None:
        emitter.call(node, counted, *node.args)

    (kernel,) = (kernel for kernel in registry.kernels("cpu") if kernel.name == "csr")
    monkeypatch.setattr(structure, "csr", counted)
    monkeypatch.setattr(kernel.implementation, "emit", emit)
    return calls


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_every_order_equals_eager(compiled, form):
    x, edge_index = features(), FORMS[form]()
    plain = edge_index.as_tensor()
    expected = compiled.model(x, plain)
    torch.testing.assert_close(compiled(x, edge_index), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(compiled(x, edge_index), compiled(x, plain.clone()))
    assert "\n  2. " not in compiled.explain()


@pytest.mark.parametrize("form", [form for form in FORMS if form.endswith(", cached")])
@torch.no_grad()
def test_a_cached_order_is_not_sorted_again(compiled, sorts, form):
    compiled(features(), FORMS[form]())
    assert sorts == []


@torch.no_grad()
def test_what_is_not_sorted_is_sorted_once(compiled, sorts):
    x, edge_index = features(), unsorted()
    for _ in range(3):
        compiled(x, edge_index)
    assert sorts == [1]


@pytest.mark.parametrize("form", ["by row, cached", "by column, cached"])
@torch.no_grad()
def test_an_order_that_became_wrong_is_not_believed(compiled, sorts, form):
    x, edge_index = features(), FORMS[form]()
    compiled(x, edge_index)
    under = edge_index.as_tensor()
    under[1, 7] = (under[1, 7] + 1) % NODES
    under[0, 9] = (under[0, 9] + 1) % NODES
    expected = compiled.model(x, under.clone())
    torch.testing.assert_close(compiled(x, edge_index), expected, rtol=1e-5, atol=1e-5)
    assert sorts == [1]
    under[0, 3] = NODES
    with pytest.raises(gnnc.GraphError, match=rf"\[0, 3\] = {NODES}"):
        compiled(x, edge_index)


@torch.no_grad()
def test_a_bipartite_order_is_used(sorts):
    torch.manual_seed(0)
    compiled = gnnc.compile(pyg.SAGEConv((WIDTH, WIDTH), 8).eval(), "fp32")
    pair = features(), features(20)
    for order in ("row", "col"):
        edge_index = EdgeIndex(edges(20), sparse_size=(NODES, 20)).sort_by(order)[0].fill_cache_()
        expected = compiled.model(pair, edge_index.as_tensor())
        torch.testing.assert_close(compiled(pair, edge_index), expected, rtol=1e-5, atol=1e-5)
    assert sorts == []


@torch.no_grad()
def test_a_layer_that_adds_loops_sorts_with_them(sorts):
    torch.manual_seed(0)
    model = pyg.GCNConv(WIDTH, 8).eval()
    compiled = gnnc.compile(model, "int8")
    edge_index = FORMS["by column, cached"]()
    expected = model(features(), edge_index.as_tensor())
    assert (compiled(features(), edge_index) - expected).norm() <= 0.02 * expected.norm()
    assert not sorts


def test_wrong_claims_are_refused():
    src, dst = edges()
    rowptr, col, perm = structure.csr(src, dst, NODES, NODES)

    def taken(rowptr: Tensor, order: Tensor, source: Tensor = src) -> Any:
        return structure._in_order(source, dst, NODES, NODES, (rowptr, order))

    unstable = perm.clone()
    unstable[: int(rowptr[1])] = perm[: int(rowptr[1])].flip(0)
    for order in (perm, unstable):
        for got, wanted in zip(taken(rowptr, order), (rowptr, col, perm), strict=True):
            assert torch.equal(got, wanted)
    swapped, twice, far, shifted = perm.clone(), perm.clone(), perm.clone(), rowptr.clone()
    swapped[[0, -1]] = swapped[[-1, 0]]
    twice[1] = twice[0]
    far[5] = 10**12
    shifted[3] = 10**9
    outside = src.clone()
    outside[4] = -1
    for wrong in (swapped, twice, far, -perm):
        assert taken(rowptr, wrong) is None
    assert taken(shifted, perm) is None
    assert taken(rowptr.flip(0), perm) is None
    assert taken(rowptr[1:], perm) is None
    assert taken(rowptr, perm, outside) is None
