"""Aggregations as the model itself, by index or pointer, and recurrent layers over any number of steps."""

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from slow import slow_after
from torch import Tensor, nn
from torch_2_11 import NOT_IN_2_11
from training_steps import Step, compare

import gnnc

WIDTH, GROUPS = 8, 5
AGGREGATIONS: dict[str, Callable[[], nn.Module]] = {
    "sum": pyg.SumAggregation,
    "softmax": lambda: pyg.SoftmaxAggregation(learn=True),
    "multi": lambda: pyg.MultiAggregation(["mean", "max", "std"]),
    "attention": lambda: pyg.AttentionalAggregation(nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 4)),
    "mean": pyg.MeanAggregation,
    "max": pyg.MaxAggregation,
    "min": pyg.MinAggregation,
    "mul": pyg.MulAggregation,
    "var": pyg.VarAggregation,
    "median": pyg.MedianAggregation,
    "powermean": lambda: pyg.PowerMeanAggregation(learn=True),
    "deep sets": lambda: pyg.DeepSetsAggregation(nn.Linear(WIDTH, 4), nn.Linear(4, 4)),
    "set2set": lambda: pyg.Set2Set(WIDTH, 2),
    "variance preserving": pyg.VariancePreservingAggregation,
}


def groups(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features and an ascending index; a group is empty."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(GROUPS - 1, (rows,), generator=generator).sort().values
    return torch.randn(rows, WIDTH, generator=generator), index + (index > 1).long()


def assert_equal(compiled: gnnc.CompiledModel, *args: Tensor, **kwargs: object) -> None:
    expected = compiled.model(*args, **kwargs)
    torch.testing.assert_close(compiled(*args, **kwargs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("name", slow_after(4, AGGREGATIONS))
def test_an_aggregation_is_the_model(name, request):
    if name in ("median", "set2set"):
        request.applymarker(NOT_IN_2_11)
    torch.manual_seed(0)
    compiled = gnnc.compile(AGGREGATIONS[name]().eval(), "fp32", check_finite="off")
    for rows in (20, 31):
        x, index = groups(rows, rows)
        assert_equal(compiled, x, index, dim_size=GROUPS)
        assert_equal(compiled, x, index)
        pointer = torch.cat([torch.zeros(1).long(), index.bincount(minlength=GROUPS).cumsum(0)])
        try:
            compiled.model(x, ptr=pointer)
        except NotImplementedError:
            continue
        assert_equal(compiled, x, ptr=pointer)


SEQUENCES = {
    "mlp": lambda: (pyg.MLPAggregation(WIDTH, 4, 12, num_layers=1), {}),
    "lstm": lambda: (pyg.LSTMAggregation(WIDTH, 4), {"max_num_elements": 12}),
    "gru": lambda: (pyg.GRUAggregation(WIDTH, 4), {"max_num_elements": 12}),
}


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("name", slow_after(2, SEQUENCES))
def test_sequences_of_neighbors(name):
    torch.manual_seed(0)
    aggregation, sizes = SEQUENCES[name]()
    compiled = gnnc.compile(aggregation.eval(), "fp32")
    for rows in (20, 31):
        x, index = groups(rows, rows)
        assert_equal(compiled, x, index, dim_size=GROUPS, **sizes)
    assert len(compiled._dispatch.captures) == 1
    order = torch.randperm(index.numel())
    mixed = index[order].argsort(stable=True)
    expected = compiled.model(x[order][mixed], index, dim_size=GROUPS, **sizes)
    got = compiled(x[order], index[order], dim_size=GROUPS, **sizes)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", slow_after(1, [pyg.LSTMAggregation, pyg.GRUAggregation]))
def test_sizes_of_sequences_are_read_from_the_index(kind):
    torch.manual_seed(0)
    compiled = gnnc.compile(kind(WIDTH, 4).eval(), "fp32")
    for rows in (20, 31):
        assert_equal(compiled, *groups(rows, rows))
    assert len(compiled._dispatch.captures) == 1


class Temporal(nn.Module):
    """A recurrent layer over time, then a convolution over the graph."""

    def __init__(self, kind: str, options: dict) -> None:
        super().__init__()
        self.recurrent = getattr(nn, kind)(6, 4, **options)
        width = 4 * (2 if options.get("bidirectional") else 1)
        self.conv, self.first = pyg.GCNConv(width, 3), bool(options.get("batch_first"))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """x: [steps, nodes, 6]."""
        sequence = x.transpose(0, 1) if self.first else x
        rows = self.recurrent(sequence)[0]
        return self.conv(rows[:, -1] if self.first else rows[-1], edge_index)


OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True, "bias": False},
    "two directions": {"bidirectional": True, "num_layers": 2},
    "relu": {"nonlinearity": "relu"},
}
LAYERS = [("LSTM", "two directions"), ("GRU", "batch first"), ("RNN", "relu")]
LAYERS += [("LSTM", "batch first"), ("LSTM", "plain"), ("GRU", "two directions"), ("GRU", "plain")]


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("case", slow_after(3, LAYERS))
def test_any_number_of_steps_is_one_program(case):
    torch.manual_seed(0)
    kind, options = case
    compiled = gnnc.compile(Temporal(kind, OPTIONS[options]).eval(), "fp32")
    for steps in (7, 3, 12):
        assert_equal(compiled, torch.randn(steps, 20, 6), torch.randint(20, (2, 60)))
    assert len(compiled._dispatch.captures) == 1


@pytest.mark.parametrize("case", slow_after(3, LAYERS))
def test_recurrent_layers_of_any_number_of_steps_train(case):
    torch.manual_seed(0)
    kind, options = case
    model = Temporal(kind, OPTIONS[options])
    compiled = gnnc.compile(model, "fp32")
    for steps in (7, 3, 12):
        x = torch.randn(steps, 20, 6)
        compare(model, compiled, loss_of(x, torch.randint(20, (2, 60))))


@pytest.mark.parametrize("kind", slow_after(1, [pyg.GRUAggregation, pyg.LSTMAggregation]))
def test_aggregations_over_sequences_train(kind):
    torch.manual_seed(0)
    model = kind(WIDTH, 4)
    compiled = gnnc.compile(model, "fp32")
    for rows in (20, 31):
        x, index = groups(rows, rows)
        compare(model, compiled, loss_of(x, index, dim_size=GROUPS))


def loss_of(x: Tensor, index: Tensor, **sizes: int) -> Step:
    """Step of training that returns the gradient of x."""

    def step(call: Callable[..., Tensor], owner: nn.Module) -> Tensor | None:
        given = x.clone().requires_grad_()
        call(given, index, **sizes).square().sum().backward()
        return given.grad

    return step


NUMBERS: dict[str, Callable[[], nn.Module]] = {
    "lcm": lambda: pyg.LCMAggregation(WIDTH, 4),
    "patches": lambda: pyg.PatchTransformerAggregation(WIDTH, 4, 2, 4, 1, heads=1),
}


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_neighbors_that_python_computes_with_has_a_program_each(name):
    torch.manual_seed(0)
    compiled = gnnc.compile(NUMBERS[name]().eval(), "fp32")
    for sizes in ([2, 3, 1], [1, 1, 3, 2], [4, 1]):
        index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        assert_equal(compiled, torch.randn(sum(sizes), WIDTH), index)
