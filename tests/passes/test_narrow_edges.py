"""Values of edges are stored in the 16 bits to which their readers round them, and results stay the same."""

from collections.abc import Iterator
from dataclasses import replace

import edge_layers
import pytest
import torch
from raised import nasty_graphs
from torch import Tensor, nn
from torch_geometric.utils import scatter
from traced import relative_error

import gnnc
from gnnc.ir.nodes import op_name
from gnnc.runtime import backend as backends
from gnnc.runtime.backend import get_backend

NODES, EDGES, WIDTH, FEATURES = 40, 300, edge_layers.WIDTH, edge_layers.FEATURES
GRAPHS = nasty_graphs()


@pytest.fixture(autouse=True)
def targets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the reference backend with products of 16 bits in bodies, once storing edges in FP32."""
    monkeypatch.setattr(backends, "_REGISTRY", dict(backends._REGISTRY))
    plain = get_backend("reference")
    precisions = frozenset({"fp32", "fp16", "bf16", "int8"})
    low = frozenset({"fp16", "bf16"})
    for name in ("wide", "narrow"):
        target = replace(
            plain.target, name=name, precisions=precisions, body_products=low, narrow_edges=name == "narrow"
        )
        backends.register_backend(name, lambda device, target=target: replace(plain, target=target))
    yield


class Moved(nn.Module):
    """Edge MLP whose value is summed and read by a second MLP, as in a layer of EGNN."""

    def __init__(self) -> None:
        super().__init__()
        self.message = edge_layers.mlp(2 * WIDTH + FEATURES, activation=nn.SiLU)
        self.move = edge_layers.mlp(WIDTH, 3, nn.SiLU)

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        src, dst = edge_index
        message = nn.functional.silu(self.message(torch.cat([x[dst], x[src], attr], 1)))
        moved = scatter(self.move(message), dst, 0, x.shape[0], "mean")
        return torch.cat([moved, scatter(message, dst, 0, x.shape[0], "sum")], 1)


class Scaled(Moved):
    """The same with a value of another size, which a body reads in FP32, too."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        src, dst = edge_index
        value = nn.functional.silu(self.message(torch.cat([x[dst], x[src], attr], 1))) * self.scale
        moved = scatter(self.move(value), dst, 0, x.shape[0], "mean")
        return torch.cat([moved, scatter((value / self.scale).tanh() * x[src], dst, 0, x.shape[0], "sum")], 1)


class Multiplied(Moved):
    """The same with products alone as readers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = edge_layers.mlp(WIDTH, WIDTH, nn.SiLU)

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        src, dst = edge_index
        message = nn.functional.silu(self.message(torch.cat([x[dst], x[src], attr], 1)))
        moved = scatter(self.move(message), dst, 0, x.shape[0], "mean")
        return torch.cat([moved, scatter(self.weight(message), dst, 0, x.shape[0], "max")], 1)


class Returned(Moved):
    """The same, with the value of the edges as a result."""

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> tuple[Tensor, Tensor]:
        src, dst = edge_index
        message = nn.functional.silu(self.message(torch.cat([x[dst], x[src], attr], 1)))
        return scatter(self.move(message), dst, 0, x.shape[0], "sum"), message


class Compared(Moved):
    """The same, with a comparison of the value."""

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        src, dst = edge_index
        message = nn.functional.silu(self.message(torch.cat([x[dst], x[src], attr], 1)))
        most = scatter(message, dst, 0, x.shape[0], "max")
        largest = (message == most[dst]).float() @ self.move[0].weight
        return scatter(self.move(message) + largest[:, :3], dst, 0, x.shape[0], "sum")


def inputs(edge_index: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(nodes, WIDTH), edge_index, torch.randn(edge_index.shape[1], FEATURES)


def run(
    model: nn.Module, precision: str, backend: str, given: tuple[Tensor, ...]
) -> tuple[gnnc.CompiledModel, tuple[Tensor, ...]]:
    """Return the compiled model, and its results or, of one that trains, the gradients of its parameters."""
    compiled = gnnc.compile(model, precision=precision, backend=backend)
    found = compiled(*given)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if weights:
        return compiled, torch.autograd.grad(found.square().sum(), weights)
    return compiled, found if isinstance(found, tuple) else (found,)


def dtypes(compiled: gnnc.CompiledModel) -> list[torch.dtype]:
    """Return the dtypes in which the last forward program stores values of edges with several columns."""
    forward = dict(compiled._dispatch.last.parts.per_call())["forward"]
    stored = [node.meta["val"] for node in forward.graph.nodes if op_name(node) == "edge_map"]
    return [value.dtype for value in stored if value.shape[-1] == WIDTH]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_value_that_all_readers_round_has_the_same_bits(precision: str, name: str) -> None:
    torch.manual_seed(0)
    model, (nodes, edge_index) = Moved().requires_grad_(False), GRAPHS[name]
    given = inputs(edge_index, nodes)
    compiled, found = run(model, precision, "narrow", given)
    plain, same = run(model, precision, "wide", given)
    assert dtypes(compiled) == [torch.float16 if precision == "fp16" else torch.bfloat16]
    assert dtypes(plain) == [torch.float32]
    assert "products or sums read it so" in compiled.explain()
    assert torch.equal(found[0], same[0])


def test_products_of_an_int8_model_read_the_same_fp16() -> None:
    torch.manual_seed(0)
    made, given = Multiplied().requires_grad_(False), inputs(torch.randint(NODES, (2, EDGES)), NODES)
    compiled, (found,) = run(made, "int8", "narrow", given)
    _, (same,) = run(made, "int8", "wide", given)
    assert dtypes(compiled) == [torch.float16]
    assert torch.equal(found, same)


@pytest.mark.parametrize("model", [Moved, edge_layers.MeshGraphNet])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_residual_and_a_sum_read_the_rounded_values_of_bf16(precision: str, model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    made = model().requires_grad_(False)
    given = inputs(torch.randint(NODES, (2, EDGES)), NODES)
    compiled, (found,) = run(made, precision, "narrow", given)
    _, (plain,) = run(made, precision, "wide", given)
    want = made(*given)
    assert dtypes(compiled) == [torch.bfloat16]
    assert relative_error(found, want) < 1.2 * relative_error(plain, want) + 1e-3


@pytest.mark.parametrize(("precision", "stored"), [("fp16", torch.float32), ("int8", torch.bfloat16)])
@pytest.mark.parametrize("scale", [1e-9, 1e7])
def test_readers_of_fp32_keep_its_range(scale: float, precision: str, stored: torch.dtype) -> None:
    torch.manual_seed(0)
    made, given = Scaled(scale).requires_grad_(False), inputs(torch.randint(NODES, (2, EDGES)), NODES)
    compiled, (found,) = run(made, precision, "narrow", given)
    assert dtypes(compiled) == [stored]
    assert relative_error(found[:, 3:], made(*given)[:, 3:]) < 2e-2


@pytest.mark.parametrize("model", [Moved, edge_layers.MeshGraphNet])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
def test_gradients_are_as_near_to_eager_as_before(precision: str, model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    made, given = model(), inputs(torch.randint(NODES, (2, EDGES)), NODES)
    compiled, found = run(made, precision, "narrow", given)
    _, plain = run(made, precision, "wide", given)
    assert precision == "fp16" or torch.bfloat16 in dtypes(compiled)
    wanted = torch.autograd.grad(made(*given).square().sum(), list(made.parameters()))
    for got, same, want in zip(found, plain, wanted, strict=True):
        assert relative_error(got, want) < 1.2 * relative_error(same, want) + 1e-2


def test_a_value_that_nothing_rounds_stays() -> None:
    torch.manual_seed(0)
    model, given = Moved().requires_grad_(False), inputs(torch.randint(NODES, (2, EDGES)), NODES)
    assert dtypes(run(model, "fp32", "narrow", given)[0]) == [torch.float32]


@pytest.mark.parametrize("model", [Returned, Compared])
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_value_of_which_a_reader_needs_all_bits_stays(precision: str, model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    made, given = model().requires_grad_(False), inputs(torch.randint(NODES, (2, EDGES)), NODES)
    compiled, found = run(made, precision, "narrow", given)
    _, same = run(made, precision, "wide", given)
    assert set(dtypes(compiled)) == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))
