"""Comparisons, selections and functions of absolute size get the values of eager, in every precision."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shared_captures import shared_captures
from slow import slow_after, slow_but
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter
from torch_geometric.utils._scatter import scatter_argmax

import gnnc
from gnnc.cost.model import Rates
from gnnc.ir.exact_reads import EXACT

NODES, EDGES, WIDTH = 60, 400, 64


@functools.cache
def graph() -> tuple[Tensor, Tensor]:
    """Return the arguments of every call: the same tensors, so that a trace is shared."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NODES, WIDTH, generator=generator), torch.randint(
        NODES, (2, EDGES), generator=generator
    )


class Winners(nn.Module):
    """Mask of the messages that are the largest of their node, column by column, by some comparison."""

    def __init__(self, compare: Callable[[Tensor, Tensor], Tensor], reduce: str = "max") -> None:
        super().__init__()
        self.lin, self.compare, self.reduce = nn.Linear(WIDTH, WIDTH), compare, reduce

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        message = self.lin(x)[src]
        largest = scatter(message, dst, dim=0, dim_size=x.shape[0], reduce=self.reduce)
        return self.compare(message, largest[dst]).float()


class CountedWinners(Winners):
    """The number of largest messages of each node: the comparison is within the body of an aggregation."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return scatter(
            super().forward(x, edge_index), edge_index[1], dim=0, dim_size=x.shape[0], reduce="sum"
        )


class TieAveraged(MessagePassing):
    """The mean of the sources that win, by a comparison in ``message``."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.lin(x)
        largest = scatter(h[edge_index[0]], edge_index[1], dim=0, dim_size=x.shape[0], reduce="max")
        return self.propagate(edge_index, h=h, largest=largest, value=self.out(x))

    def message(self, h_j: Tensor, largest_i: Tensor, value_j: Tensor) -> Tensor:  # pyright: ignore
        return value_j * (h_j >= largest_i)


class Argmax(nn.Module):
    """The edge with the highest score of each node, as PyG finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        return scatter_argmax(self.score(x).view(-1)[src], dst, dim_size=x.shape[0])


class ByScore(nn.Module):
    """Rows that are selected by a score."""

    def __init__(self, select: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.score, self.lin, self.select = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH), select

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = scatter(x[edge_index[0]], edge_index[1], dim=0, dim_size=x.shape[0], reduce="sum").relu()
        return self.lin(x)[self.select(self.score(h).squeeze(-1))]


class CarriedIds(nn.Module):
    """Ids of nodes in a column of features, which are read as integers behind an aggregation."""

    def __init__(self, reduce: str, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.reduce, self.read = nn.Linear(WIDTH, WIDTH), reduce, read

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        ids = torch.arange(x.shape[0], dtype=torch.float32).view(-1, 1) * 1001
        table = torch.cat([ids, x], 1)[edge_index[0]]
        found = scatter(table, edge_index[1], dim=0, dim_size=x.shape[0], reduce=self.reduce)
        return self.lin(x)[self.read(found[:, 0]) % x.shape[0]]


class OfTimes(nn.Module):
    """A function of times of up to 60 000 seconds through a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], scale: float) -> None:
        super().__init__()
        self.lin, self.out, self.function, self.scale = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            function,
            scale,
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.function(self.lin(x * self.scale))
        return scatter(self.out(h)[edge_index[0]], edge_index[1], dim=0, dim_size=x.shape[0], reduce="sum")


class TimeEncoder(nn.Module):
    """The cosine of a linear layer of times, as in temporal graph networks."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(1, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(x[:, :1] * 60000).cos()


class Residual(nn.Module):
    """A comparison of a sum of two terms, one of which would wait for the other in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        total = self.a(x) + scatter(
            self.b(x)[edge_index[0]], edge_index[1], dim=0, dim_size=x.shape[0], reduce="sum"
        )
        return (total > total.mean(0)).float()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "eq max": lambda: Winners(torch.eq),
    "ge max": lambda: Winners(torch.ge),
    "lt max": lambda: Winners(torch.lt),
    "ne min": lambda: Winners(torch.ne, "min"),
    "close": lambda: Winners(lambda m, largest: (m - largest).abs() < 1e-6),
    "sign": lambda: Winners(lambda m, mean: (m - mean).sign(), "mean"),
    "counted eq": lambda: CountedWinners(torch.eq),
    "ties in message": TieAveraged,
    "scatter_argmax": Argmax,
    "topk": lambda: ByScore(lambda score: score.topk(20).indices),
    "sort": lambda: ByScore(lambda score: score.sort(descending=True).indices[:10]),
    "argsort": lambda: ByScore(lambda score: score.argsort()),
    "argmax": lambda: ByScore(lambda score: score.argmax().view(1)),
    "nonzero": lambda: ByScore(lambda score: (score > score.median()).nonzero().view(-1)),
    "bucketize": lambda: ByScore(lambda score: torch.bucketize(score * 20, torch.arange(NODES - 1.0))),
    "ids max": lambda: CarriedIds("max", lambda found: found.long()),
    "ids sum": lambda: CarriedIds("sum", lambda found: found.int().long()),
    "ids rounded": lambda: CarriedIds("min", lambda found: found.round().long()),
    "cos": lambda: OfTimes(torch.cos, 60000),
    "sin": lambda: OfTimes(torch.sin, 60000),
    "exp": lambda: OfTimes(lambda h: (h.clamp(-80, 20)).exp(), 60),
    "floor": lambda: OfTimes(torch.floor, 3),
    "round": lambda: OfTimes(torch.round, 3),
    "remainder": lambda: OfTimes(lambda h: h % 24, 60000),
    "floor_divide": lambda: OfTimes(lambda h: torch.div(h, 3600, rounding_mode="floor"), 60000),
    "frac": lambda: OfTimes(torch.frac, 60000),
    "where": lambda: OfTimes(lambda h: torch.where(h > 0.5, 1.0, -1.0), 1),
    "bool": lambda: OfTimes(lambda h: h.trunc().bool().float(), 1),
    "time encoder": TimeEncoder,
    "residual": Residual,
}  # fmt: skip
CHOSEN = ("eq max", "ties in message", "topk", "ids sum", "cos", "residual")
"""Names of models, one for each kind of reader, for the searches that run a model often."""


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    """Trace each model once for all tests."""
    with shared_captures():
        yield
    model_of.cache_clear()


@functools.cache
def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def run(name: str, precision: str, **options: Any) -> tuple[Tensor, Tensor, gnnc.CompiledModel]:
    model, given = model_of(name), graph()
    compiled = gnnc.compile(model, precision, **options)
    with torch.no_grad():
        return compiled(*given), model(*given), compiled


def assert_exact(name: str, precision: str, **options: Any) -> gnnc.CompiledModel:
    actual, expected, compiled = run(name, precision, **options)
    assert (actual.float() - expected.float()).norm() <= 0.02 * expected.float().norm()
    return compiled


FAST = ["eq max", "ties in message", "topk", "ids sum", "cos"]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", slow_but(FAST, list(MODELS)))
def test_int8_results_are_those_of_eager(name: str) -> None:
    assert_exact(name, "int8", backend="cpu")


@pytest.mark.first(1)
@pytest.mark.parametrize("name", slow_but(["scatter_argmax", "ids max"], list(MODELS)))
def test_bf16_results_are_those_of_eager(name: str) -> None:
    assert_exact(name, "bf16", backend="cpu")


@pytest.mark.parametrize("name", slow_but(["close"], list(MODELS)))
@pytest.mark.parametrize("precision", slow_after(1, ["int8", "bf16"]))
def test_the_reference_backend(name: str, precision: str) -> None:
    assert_exact(name, precision, backend="reference")


@pytest.mark.parametrize("name", slow_but(["residual"], list(MODELS)))
def test_static_scales(name: str) -> None:
    assert_exact(name, "int8", backend="cpu", example_inputs=graph())


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_auto(name: str, rates: Rates) -> None:
    assert_exact(name, "auto", backend="cpu", example_inputs=graph(), error_budget=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_auto_without_examples(name: str, rates: Rates) -> None:
    assert_exact(name, "auto", backend="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("name", ["eq max", "ties in message", "cos"])
def test_programs_for_cuda_keep_marked_values_in_fp32(name: str, precision: str) -> None:
    torch.manual_seed(0)
    compiled = gnnc.compile(MODELS[name]().eval(), precision, backend="cuda-offline", example_inputs=graph())
    marked = [n for n in dict(compiled.stages)["quantize"].graph.nodes if EXACT in n.meta]
    assert marked and all(n.meta["val"].dtype is torch.float32 for n in marked)


def test_explain_names_the_reason() -> None:
    compiled = assert_exact("eq max", "int8", backend="cpu")
    said = compiled.explain().split("Stayed FP32")[1].split("Stayed ATen")[0]
    assert "lin gemm: its result feeds eq, a comparison, which reads no rounded values" in said
    assert "  exact" in str(compiled)
