"""Hooks: modules' and PyG layers' own run in compiled calls; hooks on all modules are refused by name."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch_geometric.nn import (
    GraphConv,
    GraphSAGE,
    MessagePassing,
    SAGEConv,
    global_mean_pool,
    to_hetero_with_bases,
)

import gnnc
from gnnc.capture.hooks import MESSAGE_HOOKS

NODES, WIDTH = 30, 8
X, EDGES = torch.randn(NODES, WIDTH), torch.randint(NODES, (2, 120))
ADJACENCY = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(120), (NODES, NODES)).coalesce()
BOUNDS = {"fp32": 1e-5, "int8": 0.02}


class Attention(MessagePassing):
    """Layer with messages of its own and an update of edges, so that it runs every step but the fused one."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin, self.att = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.lin(x)
        a = self.edge_updater(edge_index, x=h)
        return self.propagate(edge_index, x=h, a=a)

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.att(torch.cat([x_i, x_j], -1)).sigmoid()

    def message(self, x_j: Tensor, a: Tensor) -> Tensor:
        return x_j * a


class Pooled(nn.Module):
    """Model whose values decide a size, so that Dynamo traces it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Attention()

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return global_mean_pool(self.conv(x, edge_index), batch)


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


HOOKS: dict[str, Callable[..., Any]] = {
    "message_forward": lambda _, arguments, out: out * 1.5 + arguments[0]["a"],
    "message_forward_pre": lambda _, arguments: ({**arguments[0], "x_j": arguments[0]["x_j"].relu()},),
    "propagate_forward": lambda _, __, out: out.relu() + 2,
    "propagate_forward_pre": lambda _, arguments: (arguments[0].flip(0), *arguments[1:]),
    "aggregate_forward": lambda _, __, out: out.sigmoid(),
    "aggregate_forward_pre": lambda _, arguments: {**arguments[0], "index": arguments[0]["index"].flip(0)},
    "edge_update_forward": lambda _, __, out: out * 3 - 1,
    "edge_update_forward_pre": lambda _, arguments: (
        *arguments[:2],
        {**arguments[2], "x_j": -arguments[2]["x_j"]},
    ),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", HOOKS)
@torch.no_grad()
def test_hooks_of_pyg_run_where_they_are_registered_after_compile(kind: str) -> None:
    model = Attention().eval()
    compiled, plain = gnnc.compile(model, "fp32", example_inputs=(X, EDGES)), model(X, EDGES)
    getattr(model, f"register_{kind}_hook")(HOOKS[kind])
    hooked = model(X, EDGES)
    assert error(hooked, plain) > 0.1
    assert error(compiled(X, EDGES), hooked) < 1e-5
    assert "propagate" not in vars(model) and "edge_updater" not in vars(model)


@torch.no_grad()
def test_all_hooks_of_pyg_run_together_until_they_are_removed() -> None:
    model = Attention().eval()
    plain = model(X, EDGES)
    handles = [getattr(model, f"register_{kind}_hook")(hook) for kind, hook in HOOKS.items()]
    compiled, hooked = gnnc.compile(model, "int8"), model(X, EDGES)
    assert error(hooked, plain) > 0.1
    assert error(compiled(X, EDGES), hooked) < 0.02
    for handle in handles:
        handle.remove()
    assert error(compiled(X, EDGES), plain) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOOKS)
@torch.no_grad()
def test_hooks_of_pyg_run_in_int8(kind: str) -> None:
    model = Attention().eval()
    getattr(model, f"register_{kind}_hook")(HOOKS[kind])
    assert error(gnnc.compile(model, "int8")(X, EDGES), model(X, EDGES)) < 0.02


@pytest.mark.first(1)
@pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@torch.no_grad()
def test_hooks_of_fused_aggregations_run(layout: torch.layout) -> None:
    model = GraphConv(WIDTH, WIDTH).eval()
    adjacency = ADJACENCY.to_sparse(layout=layout)
    compiled, plain = gnnc.compile(model, "fp32"), model(X, adjacency)
    model.register_message_and_aggregate_forward_pre_hook(
        lambda _, arguments: (arguments[0], {**arguments[1], "x": (arguments[1]["x"][0] * 2, None)})
    )
    model.register_message_and_aggregate_forward_hook(lambda _, __, out: out.sigmoid())
    assert error(compiled(X, adjacency), model(X, adjacency)) < 1e-5
    assert error(model(X, adjacency), plain) > 0.1


@torch.no_grad()
def test_hooks_run_in_order_where_values_decide_a_size() -> None:
    model, batch = Pooled().eval(), torch.arange(NODES) // 10
    model.conv.register_message_forward_hook(lambda _, __, out: out * 3)
    model.conv.register_message_forward_hook(lambda _, __, out: out + 1)
    compiled = gnnc.compile(model, "fp32")
    assert error(compiled(X, EDGES, batch), model(X, EDGES, batch)) < 1e-5


@torch.no_grad()
def test_a_hook_put_in_the_place_of_another_is_seen() -> None:
    model = Attention().eval()
    handle = model.register_propagate_forward_hook(lambda _, __, out: out + 1)
    compiled = gnnc.compile(model, "fp32")
    compiled(X, EDGES)
    model._propagate_forward_hooks[handle.id] = lambda _, __, out: out.relu()
    assert error(compiled(X, EDGES), model(X, EDGES)) < 1e-5


@torch.no_grad()
def test_hooks_of_pyg_that_only_look_are_refused() -> None:
    model, seen = Attention().eval(), []

    def look(_: nn.Module, __: Any, out: Tensor) -> None:
        seen.append(out)

    model.register_aggregate_forward_hook(look)
    with pytest.raises(gnnc.CaptureError, match=r"the hook .*look of self returns nothing.*remove"):
        gnnc.compile(model, "fp32")(X, EDGES)
    assert not seen


def test_every_table_of_hooks_of_pyg_is_known() -> None:
    own = {name for name in vars(Attention()) if name.endswith("_hooks")} - set(vars(nn.Identity()))
    assert own == set(MESSAGE_HOOKS)


@pytest.mark.parametrize("precision", ["int8", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layer", [GraphConv, pytest.param(SAGEConv, marks=pytest.mark.slow)])
@torch.no_grad()
def test_to_hetero_with_bases_weights_messages_by_edge_type(layer: Any, precision: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = layer((WIDTH, WIDTH), WIDTH)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index)

    kinds = [("p", "cites", "p"), ("p", "by", "a")]
    sizes = {"p": 20, "a": 15}
    model = to_hetero_with_bases(Net(), (list(sizes), kinds), num_bases=2, in_channels={"x": WIDTH}).eval()
    xs = {"p": torch.randn(20, WIDTH), "a": torch.randn(15, 6)}
    edges = {
        kind: torch.stack([torch.randint(20, (40,)), torch.randint(sizes[kind[2]], (40,))]) for kind in kinds
    }
    right, found = model(xs, edges), gnnc.compile(model, precision)(xs, edges)
    assert all(error(found[kind], right[kind]) < BOUNDS[precision] for kind in sizes)


def doubled_linears(module: nn.Module, _args: Any, result: Any) -> Any:
    return result * 2 if type(module).__name__ == "Linear" else None


def doubled_results(_module: nn.Module, _args: Any, result: Any) -> Any:
    return result * 2 if isinstance(result, Tensor) else None


def shifted_arguments(_module: nn.Module, args: Any) -> Any:
    return tuple(a + 1 if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def written_results(module: nn.Module, _args: Any, result: Any) -> None:
    if type(module).__name__ == "Linear":
        result.add_(1)


GLOBAL_HOOKS: dict[str, tuple[str, Callable[..., Any], dict[str, bool]]] = {
    "of one kind of module": ("register_module_forward_hook", doubled_linears, {}),
    "of every module": ("register_module_forward_hook", doubled_results, {}),
    "before": ("register_module_forward_pre_hook", shifted_arguments, {}),
    "that writes": ("register_module_forward_hook", written_results, {}),
    "always called": ("register_module_forward_hook", doubled_linears, {"always_call": True}),
}


@pytest.fixture(params=GLOBAL_HOOKS)
def hooked(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Return a function that registers a hook on all modules, which ends with the test."""
    register, hook, options = GLOBAL_HOOKS[request.param]
    handles = []

    def add() -> Any:
        handles.append(getattr(nn_module, register)(hook, **options))
        return handles[-1]

    yield add
    for handle in handles:
        handle.remove()


@pytest.mark.first(2)
@pytest.mark.parametrize("examples", [None, (X, EDGES)], ids=["no examples", "examples"])
@torch.no_grad()
def test_hooks_on_all_modules_run_once_for_each_module(hooked: Callable[[], Any], examples: Any) -> None:
    torch.manual_seed(0)
    model = GraphSAGE(WIDTH, WIDTH, 2).eval()
    without = model(X, EDGES)
    compiled = gnnc.compile(model, "fp32", example_inputs=examples)
    assert error(compiled(X, EDGES), without) < 1e-5
    handle = hooked()
    expected = model(X, EDGES)
    assert error(expected, without) > 0.01
    assert error(compiled(X, EDGES), expected) < 1e-5
    assert error(gnnc.compile(model, "fp32", example_inputs=examples)(X, EDGES), expected) < 1e-5
    handle.remove()
    assert error(compiled(X, EDGES), without) < 1e-5


@torch.no_grad()
def test_a_hook_on_all_modules_that_only_looks_is_refused() -> None:
    compiled = gnnc.compile(GraphConv(WIDTH, WIDTH).eval(), "fp32")
    handle = nn_module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(gnnc.CaptureError, match=r"the hook .*<lambda> on all modules returns nothing"):
            compiled(X, EDGES)
        assert nn_module._global_forward_hooks[handle.id].__name__ == "<lambda>"
    finally:
        handle.remove()
    compiled(X, EDGES)


@torch.no_grad()
def test_hooks_on_all_modules_beside_one_on_the_compiled_model_are_refused() -> None:
    compiled = gnnc.compile(GraphConv(WIDTH, WIDTH).eval(), "fp32")
    own = compiled.register_forward_hook(doubled_results)
    handle = nn_module.register_module_forward_hook(doubled_results)
    try:
        with pytest.raises(gnnc.UnsupportedError, match=r"\[GraphConv\] hooks on all modules"):
            compiled(X, EDGES)
    finally:
        handle.remove()
    twice = compiled(X, EDGES)
    own.remove()
    assert torch.equal(twice, 2 * compiled(X, EDGES))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "register",
    [
        "register_module_buffer_registration_hook",
        "register_module_module_registration_hook",
        "register_module_parameter_registration_hook",
    ],
)
@torch.no_grad()
def test_registration_hooks_on_all_modules_are_refused_in_a_capture_alone(register: str) -> None:
    model = GraphConv(WIDTH, WIDTH).eval()
    compiled = gnnc.compile(model, "fp32")
    handle = getattr(nn_module, register)(lambda *_: None)
    try:
        with pytest.raises(gnnc.UnsupportedError, match="hook on the registration of all modules"):
            compiled(X, EDGES)
        handle.remove()
        compiled(X, EDGES)
        handle = getattr(nn_module, register)(lambda *_: None)
        assert error(compiled(X, EDGES), model(X, EDGES)) < 1e-5
    finally:
        handle.remove()


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["hook", "pre_hook"])
@torch.no_grad()
def test_backward_hooks_on_all_modules_change_nothing(kind: str) -> None:
    model = GraphConv(WIDTH, WIDTH).eval()
    handle = getattr(nn_module, f"register_module_full_backward_{kind}")(lambda *_: None)
    try:
        assert error(gnnc.compile(model, "fp32")(X, EDGES), model(X, EDGES)) < 1e-5
    finally:
        handle.remove()
