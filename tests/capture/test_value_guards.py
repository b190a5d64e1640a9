"""Models that ask about values of tensors: one program for each answer, and none is stale."""

import math
from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_2_11 import NOT_IN_2_11

import gnnc

WIDTH = 8
Effect = Callable[["Net", Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Runs a function of two layers, ``x``, the graph and a mask."""

    def __init__(self, effect: Effect) -> None:
        super().__init__()
        self.first, self.last, self.effect = pyg.GCNConv(WIDTH, 16), pyg.GCNConv(WIDTH, 16), effect

    def forward(self, x, edge_index, mask):
        return self.effect(self, x, edge_index, mask)


def any_of_mask(net: Net, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
    return net.first(x, edge_index) if mask.any() else net.last(x, edge_index) * 2


def empty_selection(net: Net, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
    chosen = x[mask]
    if chosen.numel() == 0:
        return net.last(x, edge_index) * 2
    return net.first(x - chosen.mean(0), edge_index)


def two_questions(net: Net, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum().item()
    if count > 10:
        return net.first(x, edge_index) / count
    return net.last(x, edge_index) * (2 if x.sum() > 0 else 3)


def writes(net: Net, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
    return net.first(x + 1, edge_index) if int(mask.sum()) % 2 else net.first(x - 1, edge_index)


def before_a_write(net: Net, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
    """Ask, then write into a part of a tensor: the graph is traced a second time."""
    out = net.first(x, edge_index) if mask.any() else net.last(x, edge_index) * 2
    out[:, 1:3] = 0
    return out


def close(net: Net, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
    shifted = x + mask.sum()
    return net.first(x, edge_index) if torch.allclose(x, shifted, atol=1e-3) else net.last(x, edge_index)


def close_by_method(net: Net, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
    return net.first(x, edge_index) if x.allclose(x + mask.sum(), rtol=0) else net.last(x, edge_index)


def equal_by_name(net: Net, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
    same = torch.equal(input=x, other=x + mask.sum())
    return net.first(x, edge_index) if same else net.last(x, edge_index)


EFFECTS: dict[str, Effect] = {
    "tensors that are close": close,
    "tensors that are close, by method": close_by_method,
    "tensors that are equal, by name": equal_by_name,
    "before a write": before_a_write,
    "any of a mask": any_of_mask,
    "an empty selection": empty_selection,
    "two questions": two_questions,
    "a count that is odd": writes,
}


def arguments(nodes: int, chosen: int, sign: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    x = torch.rand(nodes, WIDTH, generator=generator) * sign
    return x, torch.randint(nodes, (2, 4 * nodes), generator=generator), torch.arange(nodes) < chosen


@pytest.mark.first(2)
@pytest.mark.parametrize("name", EFFECTS)
@torch.no_grad()
def test_each_answer_has_its_program(name: str, request: pytest.FixtureRequest):
    if name == "two questions":
        request.applymarker(NOT_IN_2_11)
    torch.manual_seed(0)
    model = Net(EFFECTS[name]).eval()
    compiled = gnnc.compile(model, "fp32")
    calls = [arguments(20, 15), arguments(20, 0), arguments(31, 5), arguments(31, 5, -1.0), arguments(20, 14)]
    for inputs in (*calls, *calls):
        torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    assert len(compiled.explain().rpartition("Captures")[2].strip().splitlines()) <= 3
    assert "asks about values at test_value_guards.py" in compiled.explain()


@pytest.mark.slow
@torch.no_grad()
def test_values_that_never_repeat_are_refused_by_name():
    def effect(net: Net, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
        for number in range(20):
            if int(mask.sum()) == number:
                return net.first(x, edge_index) * number
        return x

    compiled = gnnc.compile(Net(effect).eval(), "fp32", backend="reference")
    with pytest.raises(gnnc.UnsupportedError, match=r"test_value_guards\.py:\d+.*none of 8 programs"):
        for chosen in range(12):
            compiled(*arguments(20, chosen))


@torch.no_grad()
def test_a_loop_that_ends_by_a_value_is_refused_by_name():
    def effect(net: Net, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
        while x.norm() > 1:
            x = x / 2
        return net.first(x, edge_index)

    with pytest.raises(gnnc.CaptureError, match="decides by the values of a tensor"):
        gnnc.compile(Net(effect).eval(), "fp32")(*arguments(20, 3))


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("k", [5, 3, 9])
def test_a_program_that_fails_for_a_wrong_guess_is_captured_again(k: int) -> None:
    """A guess of more rows than ``k`` skips a padding, without which the view of the rows fails."""
    model = pyg.SortAggregation(k)
    compiled = gnnc.compile(model, "fp32")
    for counts in ([4, 6], [2, 8], [1, 3, 3, 3]):
        index = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        x = torch.randn(len(index), 4)
        assert torch.equal(compiled(x, index), model(x, index))


class MeanOfEach(nn.Module):
    """A loop over the graphs of a batch, whose number is a value."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        """Return [graphs, 4]."""
        return torch.stack([self.lin(x[batch == i]).mean(0) for i in range(int(batch.max()) + 1)])


class FirstRows(nn.Module):
    """A forward that reads counts as a list."""

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        """Return a row for each graph."""
        return torch.cat([x[:1] * count for count in torch.bincount(batch).tolist()])


class Halved(nn.Module):
    """A loop that halves a count until it is 1."""

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        """Return [nodes, 4]."""
        count = int(batch.max()) + 1
        while count > 1:
            x, count = x * 2, count // 2
        return x


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("kind", [MeanOfEach, FirstRows, Halved])
def test_loops_over_values_are_captured_for_each_value(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    compiled = gnnc.compile(model, "fp32")
    for counts in ([2, 2, 3], [4, 1, 2], [3, 4], [1, 2, 2]):
        batch = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        x = torch.randn(len(batch), 4)
        torch.testing.assert_close(compiled(x, batch), model(x, batch))


class OneOrNone(nn.Module):
    """A number that is 0 or 1 decides, in a way that is given."""

    def __init__(self, way: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        """Return [nodes, F]."""
        number = count.item()
        torch._check(number >= 0)
        torch._check(number <= 1)
        return self.way(x, int(number))


@pytest.mark.parametrize(
    "way",
    [
        lambda x, n: x + 10 if n == 1 else x - 10,
        lambda x, n: x + 10 if n > 0 else x - 10,
        lambda x, n: sum((x for _ in range(n)), x),
    ],
    ids=["equals", "above", "loop"],
)
@torch.no_grad()
def test_a_number_that_is_at_most_one_is_no_bool(way: Callable[[Tensor, int], Tensor]):
    model, x = OneOrNone(way), torch.randn(4, 3)
    compiled = gnnc.compile(model, "fp32")
    for count in map(torch.tensor, (1, 0, 1, 0)):
        assert torch.equal(compiled(x, count), model(x, count))


class Looks(nn.Module):
    """A table that is read where ids fit it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return [nodes, 3]."""
        return x + self.table(ids) if ids.max() < 4 else x


class AsInt(nn.Module):
    """The int of a bool decides."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return [nodes, 3]."""
        return x + 1 if int((ids > 5).any()) else x - 1


@pytest.mark.parametrize("make", [Looks, AsInt])
@torch.no_grad()
def test_ids_that_do_not_fit_the_first_answer_have_their_program(make: Callable[[], nn.Module]):
    model, x = make(), torch.randn(4, 3)
    compiled = gnnc.compile(model, "fp32")
    for last in (3, 9, 3):
        ids = torch.tensor([0, 1, 2, last])
        torch.testing.assert_close(compiled(x, ids), model(x, ids))


class Scaled(nn.Module):
    """A product with a number that is made of the sum of the rows."""

    def __init__(self, number: Callable[[float], float]) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number(x.sum().item())


@pytest.mark.parametrize("number", [round, lambda v: int(v * 10), lambda v: v // 1, math.ceil])
def test_an_int_of_a_float_that_a_tensor_holds_is_refused_by_name(number: Callable[[float], float]) -> None:
    with pytest.raises(gnnc.CaptureError, match="an int .* of a float that it reads from a tensor"):
        gnnc.compile(Scaled(number), "fp32")(torch.randn(4, 3))


@pytest.mark.parametrize("number", [abs, lambda v: v * 2 - 1])
def test_floats_that_a_tensor_holds_are_numbers_of_each_call(number: Callable[[float], float]) -> None:
    model = Scaled(number)
    compiled = gnnc.compile(model, "fp32")
    for value in (1.5, -3.25):
        x = torch.full((4, 3), value)
        torch.testing.assert_close(compiled(x), model(x))
