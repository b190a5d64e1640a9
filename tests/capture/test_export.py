"""Capture: which calls trace, what stays symbolic, what is left untouched, and what is refused."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv, global_mean_pool
from traced import eager, relative_error, run

from gnnc.capture.arguments import flatten_call
from gnnc.capture.export import Captured, capture
from gnnc.capture.stand_ins import candidates
from gnnc.errors import CaptureError, InputError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = GCNConv(7, 16), nn.BatchNorm1d(16), GCNConv(16, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        x = self.norm(self.conv1(x, edge_index, edge_weight)).relu()
        return self.conv2(nn.functional.dropout(x, training=self.training), edge_index, edge_weight)


def graph(nodes: int, edges: int, features: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(nodes, features), torch.randint(nodes, (2, edges))


def sources(captured: Captured) -> dict[str, str]:
    nodes = captured.graph_module.graph.find_nodes(op="placeholder")
    return {node.meta["source"].name: node.meta["source"].kind for node in nodes}


def assert_equal(captured: Captured, model: nn.Module, *args, **kwargs) -> None:
    results = run(captured.graph_module, model, args, kwargs)
    expected = eager(model, *args, **kwargs)
    assert len(results) == len(expected)
    assert max(map(relative_error, results, expected)) < 1e-6


@pytest.mark.first(1)
@pytest.mark.parametrize("first", [(7, 7), (1, 0), (1, 1), (7, 2), (2, 7), (16, 40)])
def test_sizes_stay_symbolic_whatever_the_first_call_has(first):
    model = Net().eval()
    captured = capture(model, graph(*first))
    for nodes, edges in [(7, 7), (1, 0), (7, 0), (1, 1), (50, 170)]:
        call = graph(nodes, edges)
        assert captured.guards.failure(call) is None
        assert_equal(captured, model, *call)


def test_lifted_and_functional():
    captured = capture(Net().eval(), graph(9, 20))
    found = sources(captured)
    assert found["conv1.lin.weight"] == "parameter"
    assert found["norm.running_mean"] == "buffer"
    assert found["x"] == found["edge_index"] == "input"
    assert "norm.num_batches_tracked" not in found
    for node in captured.graph_module.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output")
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable


def test_every_node_knows_its_layer():
    nodes = capture(Net().eval(), graph(9, 20)).graph_module.graph.nodes
    layers = {str(node.target): node.meta["layer"] for node in nodes if node.op == "call_function"}
    assert layers["aten.linear.default"] == "conv2.lin"
    assert layers["aten.batch_norm.default"] == "norm"
    assert layers["aten.relu.default"] == ""


def test_keywords_and_defaults_are_one_call():
    model = Net().eval()
    x, edge_index = graph(9, 20)
    calls = [
        flatten_call(model, (x, edge_index), {}),
        flatten_call(model, (x,), {"edge_index": edge_index}),
        flatten_call(model, (), {"edge_index": edge_index, "x": x, "edge_weight": None}),
    ]
    assert len({hash(str(call.key)) for call in calls}) == 1
    assert all(call.key == calls[0].key and call.names == ("x", "edge_index") for call in calls)


def test_another_constant_is_another_call():
    model = Pool(None)
    x, batch = torch.randn(6, 7), torch.zeros(6).long()
    keys = [flatten_call(model, (x, batch, size), {}).key for size in (-2, True, None)]
    assert keys[0] != keys[1] != keys[2]


def test_nested_arguments_have_readable_names():
    class Nested(nn.Module):
        def forward(self, x: tuple[Tensor, Tensor], more: dict[str, Tensor]) -> Tensor:
            return x[0] + x[1] + more["y"]

    x = torch.randn(4, 3)
    call = flatten_call(Nested(), ((x, x), {"y": x}), {})
    assert call.names == ("x[0]", "x[1]", "more['y']")


def test_bipartite_sizes_are_told_apart():
    model = SAGEConv((7, 7), 5)
    args = ((torch.randn(6, 7), torch.randn(6, 7)), torch.randint(6, (2, 6)))
    captured = capture(model, args)
    other = ((torch.randn(9, 7), torch.randn(4, 7)), torch.randint(4, (2, 11)))
    flat = flatten_call(model, other, {}).tensors
    assert captured.guards.failure(flat) is None
    assert_equal(captured, model, *other)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, e: (x.double(), e), "expected x: float32"),
        (lambda x, e: (x[:, :5], e), r"got shape \(9, 5\)"),
        (lambda x, e: (x, e[0]), r"expected edge_index: int64\[2, "),
    ],
)
def test_guards_name_what_differs(change: Callable[..., tuple[Tensor, Tensor]], message: str):
    args = graph(9, 20)
    captured = capture(Net().eval(), args)
    failure = captured.guards.failure(change(*args))
    assert failure is not None
    assert re.search(message, failure)


def test_sizes_that_must_agree():
    model = Pool(4)
    captured = capture(model, (torch.randn(6, 7), torch.zeros(6).long()))
    failure = captured.guards.failure((torch.randn(6, 7), torch.zeros(5).long()))
    assert failure == "batch dim 0 is 5, but x dim 0 is 6"


class Pool(nn.Module):
    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor, batch: Tensor, size: int | None = None) -> Tensor:
        return global_mean_pool(x, batch, size or self.size)


def test_pooling_without_size_needs_the_strict_tracer():
    model = Pool(None)
    captured = capture(model, (torch.randn(6, 7), torch.tensor([0, 0, 1, 1, 2, 2])))
    assert_equal(captured, model, torch.randn(5, 7), torch.tensor([0, 1, 1, 3, 3]))


def test_batch_norm_in_train_mode_returns_its_statistics():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
    captured = capture(model, (torch.randn(6, 3),))
    assert captured.mutations == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(8, 3)
    out, mean, var, batches = run(captured.graph_module, model, (x,), {})
    assert torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])
    assert relative_error(out, eager(model, x)[0]) < 1e-6
    assert torch.allclose(mean, model[1].running_mean) and torch.allclose(var, model[1].running_var)
    assert batches == model[1].num_batches_tracked


def test_the_model_is_left_alone():
    model = Net().train()
    model.conv1.cached = True
    model.conv1._cached_edge_index = kept = (torch.zeros(2, 1).long(), torch.ones(1))
    model.conv1.lin.weight.grad = grad = torch.ones_like(model.conv1.lin.weight)
    state = copy.deepcopy(model.state_dict())
    args = graph(9, 20)
    seed = torch.random.get_rng_state()
    capture(model, args)
    assert torch.equal(torch.random.get_rng_state(), seed)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.conv1.cached and model.conv1._cached_edge_index is kept
    assert model.conv1.lin.weight.grad is grad and model.training


def test_a_layer_with_a_cache_serves_other_graphs():
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(7, 4, cached=True)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index)

    model = Cached()
    first, second = graph(9, 20), graph(5, 8)
    eager(model, *first)
    captured = capture(model, first)
    model.conv.cached, model.conv._cached_edge_index = False, None
    assert_equal(captured, model, *second)


def test_a_table_of_fixed_length_fixes_the_nodes():
    class Transductive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, 7))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table

    captured = capture(Transductive(), (torch.randn(6, 7),))
    assert captured.guards.failure((torch.randn(6, 7),)) is None
    assert "expected x: float32[6, 7]" in str(captured.guards.failure((torch.randn(5, 7),)))


# torch.sparse adjacencies


def adjacency(nodes: int, edges: int, layout: str) -> Tensor:
    ends, size = torch.randint(nodes, (2, edges)), (nodes, nodes)
    coo = torch.sparse_coo_tensor(ends, torch.rand(edges), size, check_invariants=True)
    return getattr(coo.coalesce(), f"to_sparse_{layout}")()


class Product(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.product = nn.Linear(7, 5), product

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        return self.product(adj, self.lin(x))


PRODUCTS = {
    "matmul operator": lambda adj, x: adj @ x,
    "torch.mm": torch.mm,
    "torch.matmul": torch.matmul,
    "torch.sparse.mm": torch.sparse.mm,
    "torch.spmm": torch.spmm,
    "transposed": lambda adj, x: adj.t() @ x,
    "twice": lambda adj, x: adj @ (adj @ x),
    "addmm": lambda adj, x: torch.sparse.addmm(x, adj, x, beta=0.5, alpha=2.0),
    "vector": lambda adj, x: torch.mv(adj, x[:, 0]),
    "scaled": lambda adj, x: (adj * 2.0) @ x,
}


@pytest.mark.first(3)
@pytest.mark.parametrize("product", PRODUCTS)
def test_sparse_products(product: str):
    model = Product(PRODUCTS[product])
    captured = capture(model, (torch.randn(6, 7), adjacency(6, 14, "csr")))
    assert captured.call.names == ("x", "adj.crow", "adj.col", "adj.values", "adj.columns")
    assert_equal(captured, model, torch.randn(11, 7), adjacency(11, 30, "csr"))


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_sparse_layouts(layout: str):
    model = Product(torch.sparse.mm)
    captured = capture(model, (torch.randn(6, 7), adjacency(6, 14, layout)))
    assert_equal(captured, model, torch.randn(11, 7), adjacency(11, 30, layout))


@pytest.mark.parametrize("reduce", ["mean", "amax", "amin"])
def test_sparse_reductions(reduce: str):
    model = Product(lambda adj, x: torch.sparse.mm(adj, x, reduce))
    captured = capture(model, (torch.randn(6, 7), adjacency(6, 14, "csr")))
    assert_equal(captured, model, torch.randn(11, 7), adjacency(11, 30, "csr"))


def test_sparse_built_inside_the_model():
    class Built(nn.Module):
        def forward(self, x: Tensor, crow: Tensor, col: Tensor) -> Tensor:
            size, ones = (x.shape[0], x.shape[0]), torch.ones(col.shape[0])
            return torch.sparse_csr_tensor(crow, col, ones, size=size, check_invariants=True) @ x

    adj = adjacency(6, 14, "csr")
    captured = capture(Built(), (torch.randn(6, 7), adj.crow_indices(), adj.col_indices()))
    other = adjacency(11, 30, "csr")
    assert_equal(captured, Built(), torch.randn(11, 7), other.crow_indices(), other.col_indices())


def test_sparse_layers_of_pyg():
    model = SAGEConv(7, 4)
    captured = capture(model, (torch.randn(6, 7), adjacency(6, 14, "csr")))
    assert_equal(captured, model, torch.randn(11, 7), adjacency(11, 30, "csr"))


def test_the_parts_of_a_matrix_keep_their_identity():
    model, adj, x = Product(torch.mm), adjacency(6, 14, "csr"), torch.randn(6, 7)
    first, second = (flatten_call(model, (x, adj), {}).tensors for _ in range(2))
    assert all(a is b for a, b in zip(first, second, strict=True))


# refusals


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while x.sum() > 0:  # this line
            x = x - 1
        return -x


class Rotates(nn.Module):
    def forward(self, adj: Tensor) -> Tensor:
        return adj.cos()  # this line


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


def test_refusal_names_the_line_and_the_way_out():
    with pytest.raises(CaptureError, match=r"Branches.*test_export\.py:\d+ in forward.*this line") as error:
        capture(Branches(), (torch.randn(3, 2),))
    assert "Way out: the model decides by the values of a tensor" in str(error.value)
    assert error.value.__cause__ is not None


def test_refusal_of_sparse_uses():
    with pytest.raises(CaptureError, match="cos of a torch.sparse tensor.*pass edge_index"):
        capture(Rotates(), (adjacency(6, 14, "csr"),))


def test_refusal_of_writes_into_arguments():
    with pytest.raises(CaptureError, match=r"writes into its argument 'x'.*x\.clone\(\)"):
        capture(Writes(), (torch.randn(3, 2),))


class Holds(nn.Module):
    """Two layers that ``held`` holds in some way."""

    def __init__(self, held: Callable[[list[nn.Module]], Any]) -> None:
        super().__init__()
        self.held = held([GCNConv(7, 5), GCNConv(5, 2)])
        self.shift: Tensor | float = 0.0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.held["layers"] if isinstance(self.held, dict) else self.held:
            x = layer(x, edge_index)
        return x + self.shift


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("held", "path"),
    [
        (list, "held[0].lin.weight"),
        (tuple, "held[0].lin.weight"),
        (lambda layers: {"layers": layers}, "held['layers'][0].lin.weight"),
    ],
)
def test_refusal_of_weights_that_are_not_registered(held: Any, path: str):
    with pytest.raises(CaptureError, match=rf"{re.escape(path)}.* that parameters\(\) does not list"):
        capture(Holds(held), graph(5, 9))


def test_refusal_of_a_tensor_that_needs_gradients_and_is_no_parameter():
    model = Holds(nn.ModuleList)
    model.shift = torch.ones(2, requires_grad=True)
    with pytest.raises(CaptureError, match="'shift' is a weight .*: keep .* as nn.Parameter"):
        capture(model, graph(5, 9))


def test_lists_may_hold_registered_layers_and_layers_that_are_not_called():
    model = Holds(nn.ModuleList)
    vars(model).update(layers=list(model.held), teacher=[GCNConv(7, 2)], names=["a"])
    assert set(sources(capture(model, graph(5, 9))).values()) == {"parameter", "input"}


def test_refusal_of_missing_arguments():
    with pytest.raises(InputError, match="missing a required argument: 'edge_index'"):
        capture(Net(), (torch.randn(3, 7),))


def test_a_failed_capture_leaves_the_model_alone(capfd: pytest.CaptureFixture[str]):
    model = Branches()
    with pytest.raises(CaptureError):
        capture(model, (torch.randn(3, 2),))
    assert capfd.readouterr().err == ""
    assert torch.equal(eager(model, torch.ones(3, 2))[0], torch.zeros(3, 2))


def test_readings_of_sizes_start_with_roles():
    model = Net()
    args = (torch.randn(7, 7), torch.randint(7, (2, 7)), torch.rand(7))
    first, *_ = candidates(flatten_call(model, args, {}))
    nodes, (two, edges), (weights,) = (tensor.shape for tensor in first.tensors)
    assert nodes[1] == 7 and two == 2
    assert nodes[0] != edges == weights
    assert first.dynamic == ((0,), (1,), (0,))
