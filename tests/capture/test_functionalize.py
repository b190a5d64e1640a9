"""Programs without writes: which need no other trace, and that every one computes what the model does."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch_geometric.nn import GPSConv, SAGEConv
from torch_geometric.nn.attention import PerformerAttention
from traced import eager, relative_error, run, trace
from zoo import ZOO, prepared

import gnnc
from gnnc.capture.export import Captured, capture
from gnnc.errors import CaptureError


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[ExportedProgram]:
    """The programs that were traced again."""
    again: list[ExportedProgram] = []
    original = ExportedProgram.run_decompositions

    def counted(program: ExportedProgram, table: dict) -> ExportedProgram:
        again.append(program)
        return original(program, table)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    return again


def assert_functional(captured: Captured) -> None:
    for node in captured.graph_module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable


def assert_as_eager(function: Callable[[Tensor], object]) -> None:
    model = Lambda(function).eval()
    traced = trace(model, torch.randn(7, 3))
    assert_functional(traced.captured)
    for rows in (7, 2, 11):
        x = torch.randn(rows, 3)
        expected = eager(model, x)
        for graph in (traced.captured.graph_module, traced.normalized):
            results = run(graph, model, (x,), {})
            assert len(results) == len(expected)
            assert max(map(relative_error, results, expected)) < 1e-6


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["gcn", "gcn-edge-weight", "gat", "sage-mean", "gin", "batch-norm"])
def test_graph_networks_are_traced_once(name: str, traces: list[ExportedProgram]) -> None:
    args, kwargs = ZOO[name].arguments(20, 50, 0)
    assert_functional(capture(prepared(ZOO[name]), args, kwargs))
    assert not traces


def twice(x: Tensor) -> object:
    y = x + 1
    before = y * 1
    z = y.add_(1).mul_(3)
    after = y * 1
    y.sub_(x)
    return before, after, y, z, y.relu_()


def viewed_afterwards(x: Tensor) -> object:
    y = x.new_zeros(x.shape[0], 3).scatter_add_(0, torch.zeros_like(x, dtype=torch.long), x)
    return y.view(-1), y.t()


def constants(x: Tensor) -> object:
    y = x.clone()
    y[x > 0] = 0.5
    return y, x * torch.tensor([1.0, 2.0, 3.0])


def casts(x: Tensor) -> object:
    return (x > 0).float() * x.double().to(x.dtype), x.long(), x.to(x.device), (x > 0).to(x) * 2


def expanded(x: Tensor) -> object:
    return x[:, :1].expand_as(x), torch.zeros(3).expand_as(x) * x, nn.functional.dropout(x, training=False)


def views_of_known_sizes(x: Tensor) -> object:
    first, second = (x + 1).tensor_split(2, dim=1)
    left, middle, right, none = (x * 2).tensor_split(4, -1)
    wide = torch.cat([x, x], 1)
    return (
        first,
        second,
        left,
        middle,
        right,
        none,
        wide.unflatten(-1, (2, 3)),
        wide.unflatten(1, (-1, 2)).sum(2),
    )


def into_the_only_view(x: Tensor) -> object:
    heads = (x * 2).reshape(-1, 3, 1).permute(1, 0, 2)
    heads.masked_fill_(x.t()[..., None] > 0, 0.5)
    first = (x + 1)[:, 0]
    row = (x * 3).view(-1, 3).t()[1:].unsqueeze(0)
    return heads.sum(0), heads, first.mul_(2), row.add_(first)


def into_the_only_reader(x: Tensor) -> object:
    y = nn.functional.dropout((x + 1)[:, 0], training=False).mul_(2)
    z = nn.functional.dropout(x + 2, 0.0).mul_(2)
    return y, z


def into_a_view(x: Tensor) -> object:
    y = x + 1
    y[0].mul_(2)
    return y


def into_a_slice(x: Tensor) -> object:
    y = x + 1
    y[:, 0] = 1.0
    return y


def into_rows_of_rows(x: Tensor) -> object:
    out = torch.zeros(2, 3, x.shape[0])
    for i in range(2):
        for j in range(3):
            out[i][j] = x[:, j] * (i + 1)
    return out.relu(), out[1]


def roll_out(x: Tensor) -> object:
    out = x.new_zeros(4, *x.shape)
    out[0] = x
    for t in range(1, 4):
        out[t] = out[t - 1] * 2 + out[0]
    return out


def into_slices(x: Tensor) -> object:
    y = x + 1
    y[1:, ::2] += 3
    y[:, -1].mul_(y[:, 0])
    y[-1, 1:2].fill_(7.0)
    before = y.sum()
    y[0, 0] = x.mean()
    return y, before


def into_a_row_of_the_only_view(x: Tensor) -> object:
    column = (x + 1)[:, 0]
    column[0].fill_(7.0)
    whole = (x * 2).view(-1)
    whole[1] = 5.0
    return column, whole


def whole_and_rows_in_turn(x: Tensor) -> object:
    y = x + 1
    y.mul_(2)
    y[0] = 3.0
    y.add_(y[0] * 2)
    y[1].zero_()
    return y.t(), y


def into_rows_of_another_type(x: Tensor) -> object:
    count = torch.zeros(3, x.shape[0], dtype=torch.int64)
    count[1] = x[:, 0] * 3
    return count


PLAIN = [
    into_a_view,
    into_a_slice,
    into_rows_of_rows,
    roll_out,
    into_slices,
    into_a_row_of_the_only_view,
    whole_and_rows_in_turn,
    into_rows_of_another_type,
    into_the_only_reader,
    into_the_only_view,
    twice,
    viewed_afterwards,
    constants,
    casts,
    expanded,
    views_of_known_sizes,
]


@pytest.mark.parametrize("function", PLAIN, ids=lambda function: function.__name__)
def test_plain_writes(function: Callable[[Tensor], object], traces: list[ExportedProgram]) -> None:
    assert_as_eager(function)
    assert not traces


@pytest.mark.first(1)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("heads", [1, 4])
@torch.no_grad()
def test_performers_mask_a_view(heads: int, precision: str) -> None:
    model = PerformerAttention(16, heads, head_channels=8).eval()
    compiled = gnnc.compile(model, precision)
    for graphs, nodes in ((1, 4), (3, 7)):
        x, mask = torch.randn(graphs, nodes, 16), torch.rand(graphs, nodes) < 0.7
        assert relative_error(compiled(x, mask), model(x, mask)) < (1e-4 if precision == "fp32" else 0.05)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@torch.no_grad()
def test_a_graph_transformer_of_performers(precision: str) -> None:
    model = GPSConv(8, SAGEConv(8, 8), heads=2, attn_type="performer").eval()
    compiled = gnnc.compile(model, precision)
    for nodes in (12, 30):
        x, edge_index = torch.randn(nodes, 8), torch.randint(nodes, (2, 60))
        for batch in (None, torch.randint(3, (nodes,)).sort()[0]):
            error = relative_error(compiled(x, edge_index, batch), model(x, edge_index, batch))
            assert error < (1e-4 if precision == "fp32" else 0.05)


def into_a_dropout_that_is_off(x: Tensor) -> object:
    y = x + 1
    z = nn.functional.dropout(y, training=False)
    z.mul_(2)
    return y, z, y * 1


def into_a_dropout_of_no_rate(x: Tensor) -> object:
    y = x + 1
    z = nn.functional.dropout(y, 0.0)
    z.mul_(2)
    return z, y * 1


def into_a_view_of_a_dropout(x: Tensor) -> object:
    y = x + 1
    z = nn.functional.dropout(y, training=False)
    z.view(-1).mul_(2)
    return z, y * 1


def into_a_dropout_of_a_view(x: Tensor) -> object:
    y = x + 1
    nn.functional.dropout(y[0], training=False).mul_(2)
    return y * 1


def into_what_a_dropout_returned(x: Tensor) -> object:
    y = x + 1
    z = nn.functional.dropout(y, training=False)
    y.mul_(2)
    return z, y


def viewed_before(x: Tensor) -> object:
    y = x + 1
    flat, same = y.reshape(-1), y.t()
    y.mul_(2)
    return flat, same


def view_of_a_view(x: Tensor) -> object:
    y = x + 1
    row = y.t()[0]
    y.mul_(2)
    return row


def seen_by_a_composite(x: Tensor) -> object:
    y, z = x + 1, x + 2
    seen, same = torch.einsum("ij->ji", y), z.type_as(x)
    y.mul_(2)
    z.mul_(2)
    return seen, same


def into_one_of_two_views(x: Tensor) -> object:
    y = x + 1
    left, right = y.t(), y.view(-1)
    left.mul_(2)
    return left, right


def into_a_view_that_is_viewed(x: Tensor) -> object:
    y = (x + 1).t()
    row = y[0]
    y.mul_(2)
    return row, y


def into_the_view_of_what_is_read(x: Tensor) -> object:
    y = x + 1
    y.t().mul_(2)
    return y * 1


def one_of_several(x: Tensor) -> object:
    y = x + 1
    left, right = y.split(1, 1)[:2]
    left.mul_(2)
    return y, right


def several_at_once(x: Tensor) -> object:
    y, z = x + 1, x + 2
    torch._foreach_add_([y, z], 1)  # pyright: ignore[reportPrivateImportUsage]
    return y, z


def into_an_operand(x: Tensor) -> object:
    y = x + 1
    return torch.add(x, 2, out=y), y


def keeps_its_type(x: Tensor) -> object:
    count = torch.zeros(x.shape, dtype=torch.int32)
    count.add_((x > 0).long())
    return count


def with_gradients(x: Tensor) -> object:
    with torch.enable_grad():
        y = x * 2
    return y.detach() + 1


def row_that_is_read_afterwards(x: Tensor) -> object:
    y = x + 1
    row, column = y[0], y[:, 1]
    y[0] = 5.0
    column.mul_(2)
    return row, y


def row_that_was_taken_before(x: Tensor) -> object:
    y = x + 1
    row = y[0]
    y.mul_(2)
    row.add_(1)
    return y


def result_of_a_write_into_a_row(x: Tensor) -> object:
    y = x + 1
    row = y[0].mul_(2)
    y.add_(1)
    return row, y


def row_of_the_only_view_read_afterwards(x: Tensor) -> object:
    column = (x + 1)[:, 0]
    first = column[:1]
    column[0] = 4.0
    return first, column


OTHER = [
    row_that_is_read_afterwards,
    row_that_was_taken_before,
    result_of_a_write_into_a_row,
    row_of_the_only_view_read_afterwards,
    into_one_of_two_views,
    into_a_view_that_is_viewed,
    into_the_view_of_what_is_read,
    into_a_dropout_that_is_off,
    into_a_dropout_of_no_rate,
    into_a_view_of_a_dropout,
    into_a_dropout_of_a_view,
    into_what_a_dropout_returned,
    viewed_before,
    view_of_a_view,
    one_of_several,
    several_at_once,
    into_an_operand,
    keeps_its_type,
    with_gradients,
]


@pytest.mark.first(1)
@pytest.mark.parametrize("function", OTHER, ids=lambda function: function.__name__)
def test_what_needs_another_trace(
    function: Callable[[Tensor], object], traces: list[ExportedProgram]
) -> None:
    assert_as_eager(function)
    assert traces


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum, transposed": lambda y: torch.einsum("ij->ji", y),
    "einsum, the same": lambda y: torch.einsum("ij", y),
    "einsum, diagonal": lambda y: torch.einsum("ii->i", y[:3]),
    "einsum of two": lambda y: torch.einsum("ij,kj->ik", y, y),
    "meshgrid": lambda y: torch.meshgrid(y[:, 0], y[0], indexing="ij")[0],
    "broadcast_tensors": lambda y: torch.broadcast_tensors(y, y[:1])[0],
    "reshape": lambda y: y.reshape(-1),
    "reshape of a transposed": lambda y: y.t().reshape(-1),
    "contiguous": lambda y: y.contiguous(),
    "contiguous of a transposed": lambda y: y.t().contiguous(),
    "to": lambda y: y.to(torch.float32),
    "to a copy": lambda y: y.to(torch.float32, copy=True),
    "float": lambda y: y.float(),
    "type_as": lambda y: y.type_as(y),
    "cpu": lambda y: y.cpu(),
    "flatten": lambda y: y.flatten(),
    "ravel": lambda y: y.t().ravel(),
    "expand_as": lambda y: y.expand_as(y),
    "broadcast_to": lambda y: y.broadcast_to(y.shape),
    "movedim": lambda y: y.movedim(0, 1),
    "swapaxes": lambda y: y.swapaxes(0, 1),
    "adjoint": lambda y: y.adjoint(),
    "chunk": lambda y: y.chunk(3, 1)[0],
    "unbind": lambda y: y.unbind(1)[0],
    "tensor_split": lambda y: y.tensor_split((1, 2), 1)[1],
    "unflatten": lambda y: y.unflatten(1, (3, 1)),
    "diag": lambda y: y[:3].diag(),
    "real": lambda y: y.real,
    "view_as_real": lambda y: torch.view_as_real(torch.complex(y, y)),
    "resolve_conj": lambda y: y.resolve_conj(),
    "positive": lambda y: +y,
    "atleast_3d": lambda y: torch.atleast_3d(y),
    "asarray": lambda y: torch.asarray(y),
    "as_strided": lambda y: y.as_strided((3,), (1,)),
    "squeeze": lambda y: y[None].squeeze(),
    "sum_to_size": lambda y: y.sum_to_size(y.shape),
    "feature dropout that is off": lambda y: nn.functional.dropout1d(y, training=False),
    "alpha dropout that is off": lambda y: nn.functional.alpha_dropout(y, training=False),
    "pad of nothing": lambda y: nn.functional.pad(y, (0, 0)),
    "matmul": lambda y: y @ torch.eye(3),
    "cat of one": lambda y: torch.cat([y]),
    "index": lambda y: y[1:, ::2],
    "list index": lambda y: y[[0, 1]],
    "vmap": lambda y: torch.vmap(lambda row: row)(y),
    "matrix_power": lambda y: torch.linalg.matrix_power(y[:3], 1),
}
OVERLAPPING = ("meshgrid",)
"""Views of which torch refuses a write, since elements share memory."""
WRITES: dict[str, Callable[[Tensor], object]] = {
    "all": lambda y: y.mul_(2),
    "a row": lambda y: y[0].fill_(5.0),
}


@pytest.mark.first(6)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_writes_to_what_may_be_a_view(view: str, write: str) -> None:
    def function(x: Tensor) -> object:
        y, other = x + 1, x + 2
        z, written = VIEWS[view](y), VIEWS[view](other)
        WRITES[write](y)
        if view not in OVERLAPPING:
            WRITES[write](written)
        return y * 1, z * 1, y, z, other, written

    model = Lambda(function).eval()
    captured = capture(model, (torch.randn(7, 3),))
    assert_functional(captured)
    for rows in (7, 4, 11):
        x = torch.randn(rows, 3)
        results = run(captured.graph_module, model, (x,), {})
        assert max(map(relative_error, results, eager(model, x))) < 1e-6


@pytest.mark.first(1)
def test_views_of_which_no_schema_tells(traces: list[ExportedProgram]) -> None:
    assert_as_eager(seen_by_a_composite)
    assert traces


def into_the_argument(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, training=False).mul_(2)


def into_a_view_of_the_argument(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, training=False).view(-1).mul_(2)


@pytest.mark.parametrize("function", [into_the_argument, into_a_view_of_the_argument])
def test_a_dropout_that_is_off_is_the_argument(function: Callable[[Tensor], object]) -> None:
    with pytest.raises(CaptureError, match="writes into its argument 'x' in place"):
        capture(Lambda(function).eval(), (torch.randn(7, 3),))


def test_autocast_is_below_the_first_trace(traces: list[ExportedProgram]) -> None:
    model, x = nn.Linear(3, 2).eval(), torch.randn(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(model, (x,))
        expected = eager(model, x)
    assert traces
    results = run(captured.graph_module, model, (x,), {})
    assert results[0].dtype == torch.bfloat16 and torch.equal(results[0], expected[0])


def test_dropout_and_batch_norm_in_train_mode(traces: list[ExportedProgram]) -> None:
    captured = capture(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).train(), (torch.randn(5, 3),))
    assert not traces and captured.mutations == ("0.running_mean", "0.running_var", "0.num_batches_tracked")
    assert_functional(captured)


class Norms(nn.Module):
    """A batch norm, some of whose results are written into, and a count of its calls."""

    def __init__(self, norm: nn.Module, calls: int) -> None:
        super().__init__()
        self.norm, self.calls, self.drop = norm, calls, nn.Dropout(0.0)
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.drop(self.norm(x)).relu_().add_(1.0)
            self.total.add_(1.0)
        return x * self.total


NORMS = {
    "one": (lambda: nn.BatchNorm1d(3), 1, False),
    "shared": (lambda: nn.BatchNorm1d(3, momentum=0.3), 2, False),
    "no weights": (lambda: nn.BatchNorm1d(3, affine=False), 1, False),
    "no statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), 1, True),
    "average of all calls": (lambda: nn.BatchNorm1d(3, momentum=None), 1, False),
    "of a frozen model": (lambda: nn.BatchNorm1d(3).requires_grad_(False), 2, False),
}


@pytest.mark.parametrize("name", NORMS)
def test_statistics_are_those_of_eager(name: str, traces: list[ExportedProgram]) -> None:
    make, calls, again = NORMS[name]
    model = Norms(make(), calls).train()
    expected, compiled = copy.deepcopy(model), gnnc.compile(model, "fp32")
    for rows in (5, 9, 4):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), expected(x))
        torch.testing.assert_close(model.state_dict(), expected.state_dict())
    assert bool(traces) == again


class Watched(nn.Module):
    """A batch norm whose statistics are views of one tensor, or are changed beside it."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.norm, self.tied = nn.BatchNorm1d(3), tied
        if tied:
            both = torch.ones(2, 3)
            self.norm.running_mean, self.norm.running_var = both[0], both[1]

    def forward(self, x: Tensor) -> Tensor:
        if not self.tied:
            self.norm.running_mean.mul_(0.5)
        return self.norm(x) + self.norm.running_mean


@pytest.mark.parametrize("tied", [False, True])
def test_statistics_that_others_write(tied: bool, traces: list[ExportedProgram]) -> None:
    model = Watched(tied).train()
    expected, compiled = copy.deepcopy(model), gnnc.compile(model, "fp32")
    for rows in (5, 9):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), expected(x))
        torch.testing.assert_close(model.state_dict(), expected.state_dict())
    assert traces or tied


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_attention_that_drops_out_is_traced_again(rate: float, traces: list[ExportedProgram]) -> None:
    def attend(x: Tensor) -> object:
        q = nn.functional.dropout(x, 0.5)[None]
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=rate)

    capture(Lambda(attend).train(), (torch.randn(7, 3),))
    assert bool(traces) == (rate > 0)
