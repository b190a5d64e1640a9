"""Calls within transforms and traces of torch, and tensors that belong to one: refused by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.func import functional_call, functionalize, grad, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.masked import masked_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.nn import GraphConv, SAGEConv

import gnnc
from gnnc.torch_private import FakeTensorMode

NODES, WIDTH = 20, 8
X, EDGES = torch.randn(NODES, WIDTH), torch.randint(NODES, (2, 60))


class Net(nn.Module):
    """Layer, buffer and tensor in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(WIDTH, 4)
        self.register_buffer("scale", torch.ones(4))
        self.shift = torch.ones(4)
        self.requires_grad_(False).eval()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index) * self.scale + self.shift


@pytest.fixture(scope="module")
def compiled() -> gnnc.CompiledModel:
    return gnnc.compile(Net(), "fp32", example_inputs=(X, EDGES))


def within_fake_mode(model: nn.Module) -> None:
    with FakeTensorMode() as mode:
        model(mode.from_tensor(X), mode.from_tensor(EDGES))


TRANSFORMS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "vmap": (lambda m: vmap(lambda x: m(x, EDGES))(X[None]), r"torch\.func \(vmap\)"),
    "grad": (lambda m: grad(lambda x: m(x, EDGES).sum())(X), r"torch\.func \(grad\)"),
    "jvp": (lambda m: jvp(lambda x: m(x, EDGES), (X,), (X,)), r"torch\.func \(jvp\)"),
    "jacrev": (lambda m: jacrev(lambda x: m(x, EDGES))(X), r"torch\.func \(grad\)"),
    "functionalize": (lambda m: functionalize(m)(X, EDGES), r"torch\.func \(functionalize\)"),
    "jit.trace": (lambda m: torch.jit.trace(m, (X, EDGES)), r"torch\.jit\.trace"),
    "jit.script": (torch.jit.script, r"torch\.jit\.script"),
    "symbolic_trace": (torch.fx.symbolic_trace, r"torch\.fx\.symbolic_trace"),
    "make_fx": (lambda m: make_fx(m)(X, EDGES), "make_fx"),
    "export": (lambda m: torch.export.export(m, (X, EDGES), strict=False), r"torch\.export"),
    "fake mode": (within_fake_mode, "FakeTensorMode"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("no_grad", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_and_traces_are_refused(name: str, no_grad: bool, compiled: gnnc.CompiledModel) -> None:
    transform, match = TRANSFORMS[name]
    with (
        torch.set_grad_enabled(not no_grad),
        pytest.raises(gnnc.UnsupportedError, match=rf"\[Net\] .*{match}"),
    ):
        transform(compiled)
    torch.testing.assert_close(compiled(X, EDGES), compiled.model(X, EDGES))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("script", [torch.jit.script, lambda layer: torch.jit.trace(layer, X)])
def test_modules_of_torchscript_are_refused(script: Callable[[nn.Module], nn.Module]) -> None:
    scripted = script(nn.Linear(WIDTH, 4))
    with pytest.raises(gnnc.UnsupportedError, match=r"it was made by torch\.jit.*compile the original"):
        gnnc.compile(scripted)
    with pytest.raises(gnnc.UnsupportedError, match=r"its module '0' was made by torch\.jit"):
        gnnc.compile(nn.Sequential(scripted))


@pytest.mark.parametrize("path", [5, None, "", "no/such/folder/plan.json", "\0", "x" * 5000])
def test_plans_that_cannot_be_written_are_refused(path: Any, compiled: gnnc.CompiledModel) -> None:
    with pytest.raises(gnnc.InputError, match="save_plan (takes the path|cannot write to)"):
        compiled.save_plan(path)


def test_a_strict_export_says_why(compiled: gnnc.CompiledModel) -> None:
    with pytest.raises(Exception, match="a compiled model cannot be traced by"):
        torch.export.export(compiled, (X, EDGES), strict=True)


def test_a_model_around_a_compiled_one_runs_under_torch_compile(compiled: gnnc.CompiledModel) -> None:
    outer = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False)), backend="eager")
    torch.testing.assert_close(compiled(outer(X), EDGES), compiled.model(outer(X), EDGES))


def test_modes_that_watch_and_weights_that_are_replaced_work(compiled: gnnc.CompiledModel) -> None:
    with FlopCounterMode(display=False):
        torch.testing.assert_close(compiled(X, EDGES), compiled.model(X, EDGES))
    weights = {"conv.lin_l.weight": torch.randn(4, WIDTH)}
    right = functional_call(compiled.model, weights, (X, EDGES))
    torch.testing.assert_close(functional_call(compiled, weights, (X, EDGES)), right)


def wrapped(transform: Callable[..., Any]) -> Tensor:
    """Return a tensor of a transform that has ended."""
    leaked: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        leaked.append(x)
        return x * 1

    transform(keep)(X[None])
    return leaked[0]


def fake() -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(X)


FOREIGN: dict[str, tuple[Callable[[], Tensor], str]] = {
    "fake": (fake, "FakeTensor"),
    "vmap": (lambda: wrapped(vmap), r"torch\.func transform"),
    "masked": (lambda: masked_tensor(X, X > 0), "MaskedTensor"),
    "zeros": (lambda: torch._efficientzerotensor((NODES, WIDTH)), "zeros without memory"),
    "nested": (lambda: torch.nested.nested_tensor([X, X]), "nested tensor"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("first", [False, True])
@torch.no_grad()
def test_tensors_without_values_of_their_own_are_refused(
    name: str, first: bool, compiled: gnnc.CompiledModel
) -> None:
    make, match = FOREIGN[name]
    model = gnnc.compile(Net(), "fp32") if first else compiled
    with pytest.raises(gnnc.UnsupportedError, match=rf"\[Net\] .*{match}.*pass a dense"):
        model(make(), EDGES)


def test_subclasses_that_are_dense_tensors_work(compiled: gnnc.CompiledModel) -> None:
    class Tagged(Tensor):
        pass

    right = compiled.model(X, EDGES)
    for x in (X.as_subclass(Tagged), nn.Parameter(X, requires_grad=False), nn.Buffer(X)):
        torch.testing.assert_close(compiled(x, EDGES).as_subclass(Tensor), right)


# gradients


def set_gradient(model: Net, place: str) -> None:
    tensor = model.conv.lin_l.weight if place == "weight" else getattr(model, place)
    tensor.requires_grad_(True)


def test_attributes_that_need_gradients_are_refused() -> None:
    model = Net()
    compiled = gnnc.compile(model, "fp32", example_inputs=(X, EDGES))
    compiled(X, EDGES)
    set_gradient(model, "shift")
    assert model(X, EDGES).requires_grad
    with pytest.raises(gnnc.UnsupportedError, match=r"requires a gradient.*nn\.Parameter"):
        compiled(X, EDGES)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))
    with pytest.raises(gnnc.GnncError):
        gnnc.compile(model, "fp32")(X, EDGES)


@dataclass
class Holder:
    value: Tensor


OF_ALL = torch.ones(4)


class Holding(nn.Module):
    """Layer whose result is scaled by tensors that are held in every way but as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(WIDTH, 4).requires_grad_(False)
        self.table, self.nested = {"k": torch.ones(4)}, [({"k": torch.ones(4)},)]
        self.space, self.record = SimpleNamespace(k=torch.ones(4)), Holder(torch.ones(4))
        self.scaled = partial(torch.mul, torch.ones(4))
        self.eval()

    def held(self) -> list[Tensor]:
        return [self.table["k"], self.nested[0][0]["k"], self.space.k, self.record.value, OF_ALL]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.scaled(self.conv(x, edge_index))
        for tensor in self.held():
            h = h * tensor
        return h


def test_tensors_held_in_any_way_that_need_gradients_are_refused() -> None:
    model = Holding()
    compiled = gnnc.compile(model, "fp32", example_inputs=(X, EDGES))
    for tensor in (*model.held(), model.scaled.args[0]):
        torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))
        tensor.requires_grad_(True)
        with pytest.raises(gnnc.UnsupportedError, match="requires a gradient"):
            compiled(X, EDGES)
        tensor.requires_grad_(False)


class OfContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GraphConv(WIDTH, 4).requires_grad_(False)

    def forward(self, xs: dict[str, list[Tensor]], edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.conv(xs["x"][0], edge_index, edge_weight)


def test_arguments_get_their_gradients_wherever_they_are() -> None:
    model, weight = OfContainers().eval(), torch.rand(60)
    compiled = gnnc.compile(model, "fp32")
    compiled({"x": [X]}, EDGES, weight)
    for wanted in ([X.clone()], [weight.clone()]):
        found = []
        for call in (model, compiled):
            leaf = wanted[0].clone().requires_grad_(True)
            x, w = (leaf, weight) if leaf.dim() == 2 else (X, leaf)
            call({"x": [x]}, EDGES, edge_weight=w).square().sum().backward()
            found.append(leaf.grad)
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.first(1)
@pytest.mark.parametrize("place", ["x", "scale", "shift", "weight"])
@torch.no_grad()
def test_tangents_of_forward_mode_are_refused(place: str) -> None:
    model = Net()
    compiled = gnnc.compile(model, "fp32", example_inputs=(X, EDGES))
    right = compiled(X, EDGES)
    with forward_ad.dual_level():
        torch.testing.assert_close(compiled(X, EDGES), right)
        x = forward_ad.make_dual(X, X) if place == "x" else X
        if place == "scale":
            model.scale = forward_ad.make_dual(model.scale, model.scale)
        elif place == "shift":
            model.shift = forward_ad.make_dual(model.shift, model.shift)
        elif place == "weight":
            weight = model.conv.lin_l.weight
            dual = forward_ad.make_dual(weight, torch.ones_like(weight))
            del model.conv.lin_l._parameters["weight"]
            model.conv.lin_l._parameters["weight"] = dual
        with pytest.raises(gnnc.UnsupportedError, match="has a tangent of forward-mode"):
            compiled(x, EDGES)


# inside forward


class Inside(nn.Module):
    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.step = GraphConv(WIDTH, 4), step
        self.requires_grad_(False).eval()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.step(self.conv(x, edge_index))


def autograd_grad(h: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = h.detach().requires_grad_(True)
        return torch.autograd.grad(leaf.pow(2).sum(), leaf)[0]


def cond(h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, lambda a: a * 2, lambda a: a - 1, (h,))


def while_loop(h: Tensor) -> Tensor:
    start = (torch.zeros((), dtype=torch.long), h)
    return torch.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a * 2), start)[1]


@pytest.mark.parametrize("step", [cond, pytest.param(while_loop, marks=pytest.mark.slow)])
@torch.no_grad()
def test_control_flow_of_torch_inside_forward_is_refused(step: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        gnnc.CaptureError, match=rf"\[Inside\].*torch's {step.__name__}.*Way out: .*torch\.where"
    ):
        gnnc.compile(Inside(step), "fp32")(X, EDGES)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "step",
    [
        autograd_grad,
        lambda h: vmap(lambda a: a.sum() * 2)(h),
        lambda h: jvp(torch.sin, (h,), (torch.ones_like(h),))[1],
        pytest.param(lambda h: torch.func.grad(lambda a: a.pow(2).sum())(h), marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_derivatives_inside_forward_are_right_or_refused_in_words_of_gnnc(
    step: Callable[[Tensor], Tensor],
) -> None:
    model = Inside(step)
    right = model(X, EDGES)
    try:
        found = gnnc.compile(model, "fp32")(X, EDGES)
    except gnnc.CaptureError as error:
        assert "Way out" in str(error) and "issue" not in str(error)
    else:
        torch.testing.assert_close(found, right)


@pytest.mark.first(2)
@pytest.mark.parametrize("dtype", [torch.double, torch.half, torch.bfloat16])
@pytest.mark.parametrize("examples", [False, True])
@torch.no_grad()
def test_models_of_other_dtypes_are_refused(dtype: torch.dtype, examples: bool) -> None:
    model, x = Net().to(dtype), X.to(dtype)
    with pytest.raises(
        gnnc.InputError, match=r"x has dtype .*pass x\.float\(\) \(and keep .* model\.float\(\)"
    ):
        gnnc.compile(model, "int8", example_inputs=(x, EDGES) if examples else None)(x, EDGES)
    with pytest.raises(
        gnnc.UnsupportedError, match=r"'conv\.lin_l\.weight' is .*convert the model with \.float"
    ):
        gnnc.compile(model, "int8")(X, EDGES)


@pytest.mark.parametrize("kind", [DistributedDataParallel, FullyShardedDataParallel])
@pytest.mark.parametrize("path", ["", "inner"])
def test_modules_that_exchange_gradients_are_refused(kind: type[nn.Module], path: str) -> None:
    """Wrappers that are made without a process group have the type that is refused."""
    wrapped = kind.__new__(kind)
    nn.Module.__init__(wrapped)
    model = wrapped
    if path:
        model = nn.Module()
        model.add_module(path, wrapped)
    with pytest.raises(gnnc.UnsupportedError, match=rf"{kind.__name__}\(gnnc\.compile\(model\)\)"):
        gnnc.compile(model, "fp32")
