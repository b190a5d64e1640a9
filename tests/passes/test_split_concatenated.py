"""Linear layers over scaled matrices side by side: they are split, or not, and mean the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gnnc
from gnnc.passes.base import Context, run_pass
from gnnc.passes.reorder import Reorder

WIDTH, OUT = 6, 5
ROWS = (1, 7, 40)


class Joined(nn.Module):
    """A linear layer over values side by side, made from x ``[N, 6]`` and two factors a row ``[N, 1]``."""

    def __init__(self, columns: int, join: Callable[..., Tensor], out: int = OUT) -> None:
        super().__init__()
        self.lin, self.join = nn.Linear(columns * WIDTH, out), join

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.lin(self.join(x, a, b))


def scaled(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = x.relu()
    return torch.cat([x, torch.cat([h, h * a, b * h], 1)], -1)


def towers(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Concatenation as in PNA, with a dimension of one tower between rows and columns."""
    h, a, b = x.relu()[:, None], a[:, None], b[:, None]
    joined = torch.cat([x.view(-1, 1, WIDTH), torch.cat([h, h * a, h * b], -1)], -1)
    return joined[:, 0]


def one_scaled(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([x, x.relu(), x.exp() * a], 1)


def plain(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([x, x.relu()], 1)


def by_column(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([x, x * torch.arange(WIDTH)], 1)


SPLIT = {"scaled": (4, scaled), "towers": (4, towers), "one scaled": (3, one_scaled)}
KEPT = {"plain": (2, plain), "by column": (2, by_column)}


def products_and_notes(model: nn.Module, *args: Tensor) -> tuple[list[tuple[int, ...]], list[str]]:
    """Return the shapes of the matrices that are multiplied after reorder, and what it notes."""
    compiled = gnnc.compile(model, "fp32", example_inputs=args)
    before = dict(compiled.stages)
    names = list(before)
    ctx = Context()
    after = run_pass(Reorder(), before[names[names.index("reorder") - 1]], ctx)
    nodes = after.graph.find_nodes(op="call_function", target=torch.ops.gnnc.gemm.default)
    return [int(n.args[0].meta["val"].shape[1]) for n in nodes], [note.text for note in ctx.notes]


@pytest.fixture
def values() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(9, WIDTH), torch.rand(9, 1), torch.randn(9, 1)


@pytest.mark.parametrize(
    ("name", "widths"), [("scaled", [6] * 4), ("towers", [6] * 4), ("one scaled", [12, 6])]
)
def test_scaled_parts_are_multiplied_by_themselves(name: str, widths: list[int], values) -> None:
    found, notes = products_and_notes(Joined(*SPLIT[name]).eval(), *values)
    assert sorted(found) == sorted(widths)
    assert any("parts of its input are multiplied by themselves" in note for note in notes)


@pytest.mark.parametrize("name", KEPT)
def test_others_stay_side_by_side(name: str, values) -> None:
    found, notes = products_and_notes(Joined(*KEPT[name]).eval(), *values)
    assert found == [2 * WIDTH] and not any("by themselves" in note for note in notes)


def test_narrow_parts_of_a_wide_layer_stay(values) -> None:
    found, _ = products_and_notes(Joined(*SPLIT["scaled"], out=2 * WIDTH + 1).eval(), *values)
    assert found == [4 * WIDTH]


def test_what_another_op_reads_stays(values) -> None:
    class Read(Joined):
        def forward(self, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            joined = self.join(x, a, b)
            return self.lin(joined), joined

    found, _ = products_and_notes(Read(*SPLIT["scaled"]).eval(), *values)
    assert found == [4 * WIDTH]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", [*SPLIT, *KEPT])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_results_are_those_of_eager(name: str, rows: int, precision: str) -> None:
    torch.manual_seed(rows)
    x, a, b = torch.randn(rows, WIDTH), torch.rand(rows, 1) * 3, torch.randn(rows, 1)
    model = Joined(*{**SPLIT, **KEPT}[name]).eval()
    with torch.no_grad():
        want = model.double()(x.double(), a.double(), b.double())
        got = gnnc.compile(model.float(), precision)(x, a, b)
    assert (got - want).norm() <= (1e-6 if precision == "fp32" else 0.03) * want.norm()


@pytest.mark.parametrize("name", SPLIT)
def test_gradients_are_those_of_eager(name: str, values) -> None:
    model = Joined(*SPLIT[name])
    x, a, b = (value.requires_grad_() for value in values)
    wanted = (x, a, b, *model.parameters()) if name != "one scaled" else (x, a, *model.parameters())
    tangent = torch.randn(9, OUT)
    got = torch.autograd.grad(gnnc.compile(model, "fp32")(x, a, b), wanted, tangent)
    want = torch.autograd.grad(model(x, a, b), wanted, tangent)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
