"""What forward does besides returning a result: it works, or is refused by name and leaves nothing behind."""

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, global_mean_pool

import gnnc
from gnnc.capture.export import capture

NODES, WIDTH = 9, 4
X, EDGES, BATCH = torch.randn(NODES, WIDTH), torch.randint(NODES, (2, 20)), torch.zeros(NODES).long()


class Net(nn.Module):
    """Runs a function of its own in forward.

    Attributes:
        values: whether values decide a size, so that Dynamo traces.
    """

    def __init__(self, effect: Callable[[Any, Tensor], Any] = lambda *_: None, values: bool = False) -> None:
        super().__init__()
        self.conv, self.inner = GCNConv(WIDTH, WIDTH), nn.Identity()
        self.effect, self.values = effect, values
        self.calls, self.table, self.log = 0, {"inner": {}}, []
        self.last: Tensor | None = None
        self.register_buffer("count", torch.zeros(()))
        self.eval()

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        h = self.inner(self.conv(x, edge_index))
        self.effect(self, h)
        return global_mean_pool(h, batch) if self.values else h.relu()


def count(net: Net, h: Tensor) -> None:
    net.calls += 1


def keep(net: Net, h: Tensor) -> None:
    net.last = h


def append(net: Net, h: Tensor) -> None:
    net.log.append(h)


def store(net: Net, h: Tensor) -> None:
    net.table["inner"]["h"] = h


def replace(net: Net, h: Tensor) -> None:
    net.count = net.count + 1


SET = {
    count: r"self\.calls",
    keep: r"self\.last",
    append: r"self\.log\[0\]",
    store: r"self\.table\['inner'\]\['h'\]",
    replace: r"self\.count",
}


@pytest.mark.first(1)
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("effect", SET, ids=lambda effect: effect.__name__)
@torch.no_grad()
def test_attributes_that_forward_sets_are_refused(effect: Callable[..., None], values: bool) -> None:
    net = Net(effect, values)
    with pytest.raises(gnnc.CaptureError, match=rf"\[Net\] forward sets {SET[effect]}, .*: return the value"):
        gnnc.compile(net, "fp32")(X, EDGES, BATCH)
    assert (net.calls, net.last, net.table, net.log) == (0, None, {"inner": {}}, [])
    assert net.count == 0


class Stats:
    """Object of a user's class, as an attribute of a model."""

    def __init__(self, net: Any = None) -> None:
        self.calls, self.last, self.net = 0, None, net


class Log(Stats):
    """The same with a list."""

    def __init__(self, net: Any = None) -> None:
        super().__init__(net)
        self.values: list[Any] = []


def count_in_object(net: Net, h: Tensor) -> None:
    net.stats.calls += 1


def keep_in_object(net: Net, h: Tensor) -> None:
    net.stats.last = h


@pytest.mark.first(2)
@pytest.mark.parametrize("make", [Stats, Log, lambda: Stats(nn.Identity()), lambda: [Stats()]])
@pytest.mark.parametrize(("effect", "name"), [(count_in_object, "calls"), (keep_in_object, "last")])
@torch.no_grad()
def test_objects_that_forward_writes_into_are_refused(
    effect: Callable[..., None], name: str, make: Callable[[], Any]
) -> None:
    net = Net(lambda net, h: effect(net if isinstance(net.stats, Stats) else Stub(net.stats[0]), h))
    net.stats = made = make()
    stats = made if isinstance(made, Stats) else made[0]
    with pytest.raises(gnnc.CaptureError, match=rf"forward sets self\.stats.*\.{name}, "):
        gnnc.compile(net, "fp32")(X, EDGES, BATCH)
    assert (stats.calls, stats.last) == (0, None)


class Rows(list):
    """A list of a class of the user's."""


class Table(dict):
    """A dict of a class of the user's."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key.lower(), value)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("make", "effect"),
    [
        (Rows, lambda held, h: held.append(h)),
        (Table, lambda held, h: held.update(h=h)),
        (Table, lambda held, h: held.__setitem__("H", h)),
        (lambda: collections.Counter("a"), lambda held, h: held.update("a")),
        (lambda: {1}, lambda held, h: held.add(2)),
    ],
)
@torch.no_grad()
def test_containers_of_any_class_that_forward_writes_into_are_refused(
    make: Callable[[], Any], effect: Callable[..., None]
) -> None:
    net = Net(lambda net, h: effect(net.stats, h))
    net.stats = make()
    with pytest.raises(gnnc.CaptureError, match=r"forward sets self\.stats"):
        gnnc.compile(net, "fp32")(X, EDGES, BATCH)
    assert net.stats == make(), "a trace writes into its own copy"


class Stub:
    def __init__(self, stats: Stats) -> None:
        self.stats = stats


@pytest.mark.first(1)
@pytest.mark.parametrize("values", [False, True])
@torch.no_grad()
def test_a_buffer_may_be_written_into(values: bool) -> None:
    net = Net(lambda net, _: net.count.add_(1), values)
    compiled = gnnc.compile(net, "fp32")
    for _ in range(3):
        compiled(X, EDGES, BATCH)
    assert net.count == 3


@torch.no_grad()
def test_attributes_that_are_set_back_are_none_of_anyone() -> None:
    def scratch(net: Net, h: Tensor) -> None:
        net.last = h
        net.last = None

    compiled = gnnc.compile(net := Net(scratch), "fp32")
    torch.testing.assert_close(compiled(X, EDGES, BATCH), net(X, EDGES, BATCH))


class Named(GCNConv):
    """A layer of PyG's, cache and all, and something of the user's."""

    def __init__(self, keeps: bool) -> None:
        super().__init__(WIDTH, WIDTH, cached=True)
        self.keeps = keeps

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = super().forward(x, edge_index)
        if self.keeps:
            self.last = out
        return out


@torch.no_grad()
def test_layers_that_extend_those_of_pyg_may_fill_their_caches() -> None:
    layer = Named(keeps=False)
    compiled = gnnc.compile(layer, "fp32")
    result = compiled(X, EDGES)
    assert layer._cached_edge_index is None
    torch.testing.assert_close(result, layer(X, EDGES), rtol=1e-4, atol=1e-5)
    with pytest.raises(gnnc.CaptureError, match=r"forward sets self\.last,"):
        gnnc.compile(Named(keeps=True), "fp32")(X, EDGES)


# arguments


class WithLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, WIDTH)


class OnData(WithLayer):
    def forward(self, data: Any) -> Tensor:
        data.x = self.conv(data.x, data.edge_index)
        return data.x.relu()


class OnDict(WithLayer):
    def forward(self, tables: dict[str, Tensor], edge_index: Tensor) -> Tensor:
        tables["paper"] = self.conv(tables["paper"], edge_index)
        return tables["paper"].relu()


class OnObject(WithLayer):
    def forward(self, held: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        held.h = self.conv(x, edge_index)
        return held.h.relu()


class Held:
    pass


def graph() -> Data:
    return Data(x=X, edge_index=EDGES)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("kind", "arguments", "path"),
    [
        (OnData, lambda: (graph(),), "data['x']"),
        (OnData, lambda: (Batch.from_data_list([graph(), graph()]),), "data['x']"),
        (OnDict, lambda: ({"paper": X}, EDGES), "tables['paper']"),
    ],
)
@torch.no_grad()
def test_graphs_and_dicts_of_the_caller_stay_as_they_are(
    kind: type[nn.Module], arguments: Callable[[], tuple[Any, ...]], path: str
) -> None:
    compiled, given, before = gnnc.compile(net := kind(), "fp32"), arguments(), arguments()
    for _ in range(2):
        torch.testing.assert_close(compiled(*given), net(*arguments()))
    for key in ("x", "paper"):
        assert key not in given[0] or torch.equal(given[0][key], before[0][key])
    assert f"capture: forward sets {path}; compiled calls leave the caller's as it is" in compiled.explain()


@torch.no_grad()
def test_objects_that_forward_sets_are_refused() -> None:
    held = Held()
    with pytest.raises(gnnc.CaptureError, match=r"\[OnObject\] forward sets held\.h, .*= copy\.copy\("):
        gnnc.compile(OnObject(), "fp32")(held, X, EDGES)
    assert not vars(held)


# hooks


@pytest.mark.first(1)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("values", [False, True])
def test_hooks_that_only_look_are_refused(mode: Callable[[], Any], values: bool) -> None:
    net, seen = Net(values=values), {}

    def look(module: nn.Module, arguments: Any, result: Tensor) -> None:
        seen["h"] = result

    net.inner.register_forward_hook(look)
    with (
        mode(),
        pytest.raises(gnnc.CaptureError, match=r"the hook .*look of self\.inner returns nothing.*rem"),
    ):
        gnnc.compile(net, "fp32")(X, EDGES, BATCH)
    assert not seen and list(net.inner._forward_hooks.values()) == [look]


@pytest.mark.first(1)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("hook", [lambda _, __, h: h * 2, lambda _, __, h: (h.mul_(2), None)[1]])
def test_hooks_that_change_the_result_work(hook: Callable[..., Any], mode: Callable[[], Any]) -> None:
    net = Net()
    net.inner.register_forward_hook(hook)
    with mode():
        torch.testing.assert_close(gnnc.compile(net, "fp32")(X, EDGES, BATCH), net(X, EDGES, BATCH))


@torch.no_grad()
def test_pruned_layers_work() -> None:
    net = Net()
    prune.l1_unstructured(net.conv.lin, "weight", 0.5)
    compiled = gnnc.compile(net, "fp32")
    torch.testing.assert_close(compiled(X, EDGES, BATCH), net(X, EDGES, BATCH))


# results


@dataclasses.dataclass
class Result:
    h: Tensor


class Returns(nn.Module):
    def __init__(self, make: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.make = GCNConv(WIDTH, WIDTH), make

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.make(edge_index, self.conv(x, edge_index))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda _, h: Data(x=h), "a Data,"),
        (lambda _, h: Result(h), "a Result,"),
        (lambda _, h: {"all": [h, Result(h)]}, r"a Result in result\['all'\]\[1\],"),
    ],
)
def test_results_that_hide_tensors_are_refused(make: Callable[..., Any], text: str) -> None:
    with pytest.raises(
        gnnc.CaptureError, match=rf"\[Returns\] forward returns {text} .*: return its tensors"
    ):
        capture(Returns(make), (X, EDGES))


# transforms of functions


def row_norms(_: Any, h: Tensor) -> Tensor:
    return torch.vmap(lambda row: (row * row).sum() * h[0])(h)


def sums_into_a_tensor_of_its_own(edges: Tensor, h: Tensor) -> Tensor:
    return torch.vmap(lambda column: torch.zeros(NODES).index_add(0, edges[1], column[edges[0]]), 1, 1)(h)


def decides(_: Any, h: Tensor) -> Tensor:
    return torch.vmap(lambda row: row if row.sum() > 0 else -row)(h)


@torch.no_grad()
def test_vmap_works() -> None:
    net = Returns(row_norms).eval()
    torch.testing.assert_close(gnnc.compile(net, "fp32")(X, EDGES), net(X, EDGES), rtol=1e-4, atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize("transform", [sums_into_a_tensor_of_its_own, decides])
def test_vmap_that_cannot_be_traced_is_refused(transform: Callable[..., Any]) -> None:
    with pytest.raises(gnnc.CaptureError, match=r"\[Returns\].*vmap.*without torch\.vmap"):
        capture(Returns(transform), (X, EDGES))


class CountsInAView(nn.Module):
    """A count of calls that is written through a view of another shape, and read by nothing else."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.view = view
        self.register_buffer("counts", torch.zeros(2, 3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        self.view(self.counts).add_(1.0)
        return self.norm(x)


@pytest.mark.parametrize(
    "view", [lambda t: t.view(-1), lambda t: t.view(3, 2), lambda t: t.unsqueeze(0), lambda t: t.detach()]
)
def test_buffers_that_are_written_through_a_view(view: Callable[[Tensor], Tensor]) -> None:
    model = CountsInAView(view).train()
    expected, compiled = copy.deepcopy(model), gnnc.compile(model, "fp32")
    for rows in (5, 9):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), expected(x))
        torch.testing.assert_close(model.state_dict(), expected.state_dict())
