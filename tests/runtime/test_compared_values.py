"""Values of bodies on the CPU: the same bits in every block, so that extrema find them again."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import gnnc
from gnnc.ir.body import measure_body
from gnnc.runtime.backend import get_backend
from gnnc.runtime.cpu.body import row_product
from gnnc.runtime.cpu.message import Part, Plan, run_blocks

SILU = "t0 = aten.mul.Tensor(j0, c0); t1 = aten.silu.default(t0); return t1"
MLP = (
    "t0 = aten.relu.default(j0); t1 = aten.linear.default(t0, c0, c1); t2 = aten.silu.default(t1); return t2"
)
HITS = "t8 = aten.eq.Tensor({}, i0); t9 = aten._to_copy.default(t8, dtype=torch.float32); {}"
SUM = "t10 = aten.sum.dim_IntList(t9, [0]); return t10"


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    get_backend("cpu")


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (5, 5), (7, 7), (16, 1), (17, 33), (64, 64)])
@pytest.mark.parametrize("rows", [1, 11, 768])
def test_a_row_of_a_product_depends_on_no_other(inputs: int, outputs: int, rows: int) -> None:
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    want = x.double() @ weight.double().t() + bias.double()
    got = row_product(x, weight, bias, False)
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4)
    order = torch.randperm(rows)
    assert torch.equal(row_product(x[order], weight, bias, False), got[order])
    assert torch.equal(row_product(x[: rows // 2 + 1], weight, bias, False), got[: rows // 2 + 1])
    assert torch.equal(row_product(x, weight.t(), bias, True), got)
    assert torch.equal(row_product(x, weight.t().contiguous(), bias, True), got)
    assert torch.equal(row_product(x[:, None, :], weight, bias, False), got[:, None, :])


def test_products_of_other_types_and_of_no_rows_are_those_of_torch() -> None:
    x, weight = torch.randn(5, 3), torch.randn(3, 4)
    assert row_product(x[:0], weight, None, True).shape == (0, 4)
    doubles = row_product(x.double(), weight.double(), None, True)
    assert torch.equal(doubles, x.double() @ weight.double())


@pytest.mark.parametrize("body", [SILU, MLP])
@pytest.mark.parametrize("edges", [1, 3, 15, 700])
def test_sums_over_all_edges_find_every_extremum(body: str, edges: int) -> None:
    """Every row has one edge, whose value is its maximum."""
    for seed in range(20):
        torch.manual_seed(seed)
        x = torch.randn(edges, 5)
        const = [torch.randn(5)] if body == SILU else [torch.randn(5, 5), torch.randn(5)]
        rowptr, col = torch.arange(edges + 1), torch.randperm(edges).to(torch.int32)
        top, hits = torch.empty(edges, 5), torch.empty(5)
        run_blocks(Plan(body, (Part("rows", ("max",)),), 512), rowptr, col, [], [x], [], const, [top])
        value = "t1" if body == SILU else "t2"
        text = body.replace(f"return {value}", HITS.format(value, SUM))
        operands = {"i0": top, "j0": x, **{f"c{number}": value for number, value in enumerate(const)}}
        plan = Plan(text, (Part("all"),), 300, measure_body(text, operands)[1])
        run_blocks(plan, rowptr, col, [top], [x], [], const, [hits])
        assert hits.tolist() == [edges] * 5


class Products(MessagePassing):
    """Two layers on every edge, and the largest of their values."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="max")
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, width)
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Reduce the messages."""
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        """Multiply the features of an edge and its source."""
        return self.second(nn.functional.silu(self.first(edge_attr) + x_j) * self.factor)


def gradients(call: Any, model: nn.Module, args: tuple[Tensor, ...]) -> list[Tensor]:
    out = call(*args)
    total = (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out)).sum()
    return list(torch.autograd.grad(total, [args[0], *model.parameters()]))


@pytest.mark.filterwarnings("ignore:The usage of `scatter")
@pytest.mark.parametrize(("width", "nodes", "edges"), [(5, 3, 11), (7, 4, 3001), (16, 50, 301)])
def test_no_gradient_of_a_maximum_of_products_is_lost(width: int, nodes: int, edges: int) -> None:
    model = Products(width)
    x, edge_attr = torch.randn(nodes, width, requires_grad=True), torch.randn(edges, 4)
    edge_index = torch.randint(0, nodes, (2, edges))
    exact = copy.deepcopy(model).double()
    wanted = gradients(exact, exact, (x.double(), edge_index, edge_attr.double()))
    compiled = gnnc.compile(model, precision="fp32", backend="cpu")
    for got, want in zip(gradients(compiled, model, (x, edge_index, edge_attr)), wanted, strict=True):
        assert (got - want).norm() <= 1e-4 * want.norm()
