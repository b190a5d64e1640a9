"""Sparse matrices that a model holds are read anew at each call, in every layout and from every place."""

import copy

import pytest
import torch
from slow import slow_after
from sparse_matrices import matrix
from torch import Tensor, nn
from torch_geometric.data import Data

import gnnc
from gnnc.errors import InputError

LAYOUTS = {
    "coo": lambda m: m,
    "uncoalesced": lambda m: torch.sparse_coo_tensor(m.indices().repeat(1, 2), m.values().repeat(2), m.shape),
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
}
PLACES = {
    "buffer": (lambda module, m: module.register_buffer("adj", m), lambda module: module.adj),
    "parameter": (
        lambda module, m: setattr(module, "adj", nn.Parameter(m, requires_grad=False)),
        lambda module: module.adj,
    ),
    "attribute": (lambda module, m: setattr(module, "adj", m), lambda module: module.adj),
    "list": (lambda module, m: setattr(module, "adjs", ["name", m]), lambda module: module.adjs[1]),
    "tuple": (lambda module, m: setattr(module, "adjs", (m, m)), lambda module: module.adjs[1]),
    "dict": (lambda module, m: setattr(module, "of", {"u": {"v": m}}), lambda module: module.of["u"]["v"]),
    "data": (lambda module, m: setattr(module, "data", Data(adj_t=m)), lambda module: module.data.adj_t),
}
CASES = [
    *[("attribute", layout) for layout in LAYOUTS],
    *[(place, "coo") for place in PLACES if place != "attribute"],
    *[(place, "csr") for place in PLACES if place not in ("attribute", "parameter")],
]
N = 30

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:Converting sparse tensor"),
]


class Propagation(nn.Module):
    """LightGCN with the adjacency in the model, as public implementations have it."""

    def __init__(self, place: str, adjacency: Tensor) -> None:
        super().__init__()
        self.embedding, self.lin = nn.Embedding(N, 16), nn.Linear(16, 8)
        self.put, self.get = PLACES[place]
        self.put(self, adjacency)

    def forward(self, users: Tensor) -> Tensor:
        rows = [self.embedding.weight]
        for _ in range(2):
            rows.append(torch.sparse.mm(self.get(self), rows[-1]))
        return self.lin(torch.stack(rows).mean(0))[users]


def assert_equal(compiled: gnnc.CompiledModel, *args: Tensor) -> None:
    expected = compiled.model(*args)
    torch.testing.assert_close(compiled(*args), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("case", slow_after(9, CASES))
def test_the_matrix_of_each_call(case):
    place, layout = case
    first, second = (LAYOUTS[layout](matrix(N, N, count, count)) for count in (90, 70))
    model = Propagation(place, first).eval()
    compiled = gnnc.compile(model, "fp32")
    users = torch.tensor([1, 5, 7])
    assert_equal(compiled, users)
    assert_equal(compiled, users)
    model.put(model, second)
    assert_equal(compiled, users)
    values = second._values() if second.layout is torch.sparse_coo else second.values()
    values.mul_(3)
    assert_equal(compiled, users)
    if place in ("buffer", "parameter"):
        assert len(compiled._dispatch.captures) == 1


@torch.no_grad()
def test_another_layout_is_another_program():
    model = Propagation("buffer", matrix(N, N, 90, 0))
    compiled = gnnc.compile(model.eval(), "fp32")
    for layout in ("csr", "coo"):
        model.adj = LAYOUTS[layout](matrix(N, N, 80, 1))
        assert_equal(compiled, torch.tensor([3, 4]))


@torch.no_grad()
def test_the_model_is_as_before_capture():
    model = Propagation("buffer", matrix(N, N, 90, 0)).eval()
    names, matrix_before = list(model.state_dict()), model.adj
    compiled = gnnc.compile(model, "int8", example_inputs=(torch.tensor([1, 2]),))
    assert list(model.state_dict()) == names
    assert model.adj is matrix_before
    assert "adj" in dict(model.named_buffers())
    copied = copy.deepcopy(compiled)
    assert_equal_loosely(copied, torch.tensor([4]))


def assert_equal_loosely(compiled: gnnc.CompiledModel, users: Tensor) -> None:
    expected = compiled.model(users)
    assert float((compiled(users) - expected).norm()) < 0.05 * float(expected.norm())


class Takes(nn.Module):
    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        return adj @ x


OTHERS = {
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "3-d coo": lambda: torch.stack([torch.eye(4), torch.eye(4)]).to_sparse_coo(),
    "batched csr": lambda: torch.stack([torch.eye(4), torch.eye(4)]).to_sparse_csr(),
    "vector": lambda: torch.ones(4).to_sparse_coo(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_sparse_tensors_are_refused_by_name(name):
    compiled = gnnc.compile(Takes(), "fp32")
    with pytest.raises(InputError, match=r"argument adj .*adj\.to_dense\(\)"):
        compiled(torch.ones(4, 3), OTHERS[name]())


def test_a_matrix_that_requires_a_gradient_is_refused_by_name():
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.adj = torch.eye(4).to_sparse().requires_grad_()

        def forward(self, x: Tensor) -> Tensor:
            return self.adj @ x

    compiled = gnnc.compile(Product(), "fp32")
    with pytest.raises(gnnc.UnsupportedError, match=r"sparse matrix self.adj requires a gradient"):
        compiled(torch.randn(4, 3))
    with torch.no_grad():
        compiled(torch.randn(4, 3))
